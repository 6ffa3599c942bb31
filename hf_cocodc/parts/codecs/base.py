"""From outer gradients to bytes, and back to their mean over the regions.

A `Codec` describes one transfer as a conversation: a generator that yields a `Message` (values, and the coder that turns them
into bytes) and receives its mean over the regions. It may then yield a second message that depends on the first mean; most
codecs need only one. Links drive the conversation in the background. Wrappers such as error feedback pass it through with
`yield from`.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..fragments import Fragment
from ..tensors.pieces import UNSHARED

CodecState = dict[str, Any]
"""The state of a codec for one fragment (a residual, a warm start): named tensors and numbers, saved in checkpoints."""


class Coder(Protocol):
    """Turns fp32 values into bytes and back, with the same result on every machine.

    The payload of a part depends only on that part: encoding and decoding can work part by part into one buffer (`out`).

    Attributes:
        block: number of neighboring values that are encoded together. A message is cut only at multiples of `block`.
        gather: optional; True if the mean of decoded values loses too much in a second encoding, see `swaps_whole`.
    """

    block: int

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Bytes (1-D uint8) of the 1-D fp32 `values`.

        Written to `out` (1-D uint8 of length `num_bytes(values.numel())`) if given; else the result may be a view of `values`.
        """
        ...

    def decode(self, payload: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """The `numel` fp32 values that `payload` encodes.

        Written to `out` (1-D fp32 of length `numel`) if given; else the result may be a view of `payload`.
        """
        ...

    def num_bytes(self, numel: int) -> int:
        """Exact number of bytes for `numel` values."""
        ...


class Message(NamedTuple):
    """A request for the mean of `values` (1-D fp32) over the regions; `coder` turns them into bytes."""

    values: Tensor
    coder: Coder


class Reply(NamedTuple):
    """Answer to a `Message`: the mean, equal in all regions, and a function that decodes this region's own bytes."""

    mean: Tensor
    own: Callable[[], Tensor]


class Result(NamedTuple):
    """Result of a conversation: mean outer gradient, a function for this region's decoded share, next codec state."""

    mean: Tensor
    own: Callable[[], Tensor]
    state: CodecState


Conversation = Generator[Message, Reply, Result]


class Codec(Protocol):
    """Finds the mean of an outer gradient over the regions."""

    def init(self, fragment: Fragment) -> CodecState:
        """The state before the first transfer of `fragment`."""
        ...

    def converse(self, outer_grad: Tensor, fragment: Fragment, state: CodecState) -> Conversation:
        """The conversation for one transfer of the flat fp32 `outer_grad`. Must not write to `outer_grad`."""
        ...

    def wire_bytes(self, fragment: Fragment, region: int, num_regions: int) -> int:
        """Exact number of payload bytes that `region` sends in one transfer of `fragment`."""
        ...


def copies(codec: object) -> int:
    """Flat tensors that a conversation takes beside outer gradient, mean and state: the codecs' attributes `copies`, or 0."""
    inner = getattr(codec, "codec", None)
    return getattr(codec, "copies", 0) + (0 if inner is None else copies(inner))


def unshared(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split 1-D tensors of equal length into parts so small that torch does not use its other threads for them."""
    # they are busy with training: to wait for them after each operation takes many times longer than to do their share here
    size = max(len(tensors[0]), 1) if torch.get_num_threads() == 1 else UNSHARED
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def shards(numel: int, block: int, num_regions: int) -> list[slice]:
    """Split `numel` values into one shard per region, at multiples of `block`, as evenly as possible.

    >>> shards(10, block=4, num_regions=2)
    [slice(0, 4, None), slice(4, 10, None)]
    """
    blocks = -(-numel // block)
    cuts = [min(numel, blocks * region // num_regions * block) for region in range(num_regions + 1)]
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def swaps_whole(coder: Coder, num_regions: int) -> bool:
    """Whether every region sends its whole payload to every other one; else each region averages one shard for all.

    Two regions always do. With more, only a coder with `gather = True` does: its payload is so small that M - 1 copies are
    cheap, and its mean would lose too much in a second encoding.
    """
    return num_regions <= 2 or getattr(coder, "gather", False)


def message_bytes(coder: Coder, numel: int, region: int, num_regions: int) -> int:
    """Number of bytes that `region` sends for one message in the exchange that `mean_of` describes."""
    if swaps_whole(coder, num_regions):
        return (num_regions - 1) * coder.num_bytes(numel)
    lengths = [part.stop - part.start for part in shards(numel, coder.block, num_regions)]
    scattered = sum(coder.num_bytes(length) for length in lengths) - coder.num_bytes(lengths[region])
    return scattered + (num_regions - 1) * coder.num_bytes(lengths[region])


def weighted_mean(
    payloads: Sequence[Tensor],
    weights: Sequence[float],
    coder: Coder,
    numel: int,
    out: Tensor | None = None,
    divisor: float | None = None,
) -> Tensor:
    """Mean of decoded payloads, summed in fp32 in the order of the regions, and thus with equal bits everywhere.

    A payload with weight 0 is not read. If all weights are 0, so is the mean. `divisor` is by default the sum of the weights.
    """
    total = torch.empty(numel, dtype=torch.float32) if out is None else out
    present = [(payload, weight) for payload, weight in zip(payloads, weights, strict=True) if weight]
    if not present:
        return total.zero_()
    (first, weight), *others = present
    coder.decode(first, numel, out=total)
    for (part,) in unshared(total):
        part.mul_(weight)
    for payload, weight in others:
        for part, other in unshared(total, coder.decode(payload, numel)):
            part.add_(other if weight == 1 else other * weight)
    for (part,) in unshared(total):
        part.div_(sum(weights) if divisor is None else divisor)
    return total


def mean_of(
    messages: Sequence[Message], weights: Sequence[float], divisor: float | None = None
) -> list[Reply]:
    """Replies to one message from each region. Every link must do exactly this arithmetic.

    If regions swap whole payloads (`swaps_whole`), values are rounded only once. Otherwise the regions scatter: region j
    receives shard j of all regions, averages it in fp32, encodes the mean again and sends it to all. All regions decode these
    bytes, region j included. A region then sends at most 2 (M-1)/M of a payload.
    """
    coder, numel, num_regions = messages[0].coder, messages[0].values.numel(), len(messages)
    if swaps_whole(coder, num_regions):
        payloads = [coder.encode(message.values) for message in messages]
        mean = weighted_mean(payloads, weights, coder, numel, divisor=divisor)
        return [Reply(mean.clone(), partial(coder.decode, payload, numel)) for payload in payloads]
    cut = shards(numel, coder.block, num_regions)
    scattered = [[coder.encode(message.values[part]) for part in cut] for message in messages]
    mean = torch.empty(numel, dtype=torch.float32)
    for owner, part in enumerate(cut):
        length = part.stop - part.start
        payloads = [each[owner] for each in scattered]
        reduced = weighted_mean(payloads, weights, coder, length, divisor=divisor)
        mean[part] = coder.decode(coder.encode(reduced), length)
    return [Reply(mean.clone(), partial(decode_shards, payloads, coder, cut)) for payloads in scattered]


def decode_shards(payloads: Sequence[Tensor], coder: Coder, cut: Sequence[slice]) -> Tensor:
    """Decode a whole message from the payloads of its shards."""
    return torch.cat([coder.decode(p, part.stop - part.start) for p, part in zip(payloads, cut, strict=True)])


class Plain:
    """A codec that sends the whole outer gradient in one message through a coder."""

    def __init__(self, coder: Coder) -> None:
        self.coder = coder

    def init(self, fragment: Fragment) -> CodecState:
        return {}

    def converse(self, outer_grad: Tensor, fragment: Fragment, state: CodecState) -> Conversation:
        reply = yield Message(outer_grad, self.coder)
        return Result(reply.mean, reply.own, state)

    def wire_bytes(self, fragment: Fragment, region: int, num_regions: int) -> int:
        return message_bytes(self.coder, fragment.numel, region, num_regions)
