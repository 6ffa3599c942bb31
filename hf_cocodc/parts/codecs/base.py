"""From outer gradients to bytes, and back to their mean over the regions.

A `Codec` describes one transfer as a conversation: a generator that yields a `Message` (values, and the coder that turns them
into bytes) and receives its mean over the regions. It may then yield a second message that depends on the first mean; most
codecs need only one. Links drive the conversation in the background. Wrappers such as error feedback pass it through with
`yield from`.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..fragments import Fragment
from ..tensors.memory import HOST

SLICE = 1 << 22
"""Most values that are encoded at once: what this takes beside the message stays small."""

CodecState = dict[str, Any]
"""The state of a codec for one fragment (a residual, a warm start): named tensors and numbers, saved in checkpoints."""


class Coder(Protocol):
    """Turns fp32 values into bytes and back, with the same result on every machine, on the device that holds them.

    The payload of a part depends only on that part.

    Attributes:
        block: number of neighboring values that are encoded together. A message is cut only at multiples of `block`.
        gather: optional; True if the mean of decoded values loses too much in a second encoding, see `swaps_whole`.
    """

    block: int

    def encode(self, values: Tensor) -> Tensor:
        """Bytes (1-D uint8 of length `num_bytes(values.numel())`) of the 1-D fp32 `values`; perhaps a view of them."""
        ...

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """The `numel` fp32 values that `payload` encodes; perhaps a view of it."""
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


def slices(coder: Coder, numel: int, num_regions: int) -> list[list[slice]]:
    """For each region, the slices of a message that it averages, in order; each is encoded alone. All regions cut alike.

    >>> from types import SimpleNamespace
    >>> slices(SimpleNamespace(block=4), numel=10, num_regions=3)
    [[slice(0, 4, None)], [slice(4, 8, None)], [slice(8, 10, None)]]
    """
    unit = (
        2 * coder.block
    )  # an even number of blocks fills whole bytes, whatever the coder: cutting adds no byte
    length = max(SLICE // unit, 1) * unit

    def cut(part: slice) -> list[slice]:
        starts = range(part.start, part.stop, length)
        return [slice(start, min(start + length, part.stop)) for start in starts]

    if swaps_whole(coder, num_regions):
        return [cut(slice(0, numel))] * num_regions
    return [cut(part) for part in shards(numel, coder.block, num_regions)]


def weighted_mean(
    payloads: Sequence[Tensor],
    weights: Sequence[float],
    coder: Coder,
    numel: int,
    divisor: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Mean of decoded payloads, summed in fp32 in the order of the regions, and thus with equal bits everywhere.

    A payload with weight 0 is not read. If all weights are 0, so is the mean. `divisor` is by default the sum of the weights.
    """
    mean = torch.empty(numel, dtype=torch.float32, device=payloads[0].device) if out is None else out
    present = [(payload, weight) for payload, weight in zip(payloads, weights, strict=True) if weight]
    if not present:
        return mean.zero_()
    (first, weight), *others = present
    values = coder.decode(first, numel)
    if weight != 1:
        values = torch.mul(values, weight, out=mean)
    for payload, weight in others:
        more = coder.decode(payload, numel)
        values = torch.add(values, more if weight == 1 else more * weight, out=mean)
    return torch.div(values, exactly(sum(weights) if divisor is None else divisor, mean), out=mean)


def exactly(number: float, beside: Tensor) -> Tensor:
    """A divisor for a tensor: by a Python number CUDA does not divide, it multiplies by the inverse, which rounds twice."""
    return beside.new_full((1,), number)


def mean_of(
    messages: Sequence[Message], weights: Sequence[float], divisor: float | None = None
) -> list[Reply]:
    """Replies to one message from each region. Every link must do exactly this arithmetic.

    If regions swap whole payloads (`swaps_whole`), values are rounded only once. Otherwise the regions scatter: region j
    receives shard j of all regions, averages it in fp32, encodes the mean again and sends it to all. All regions decode these
    bytes, region j included. A region then sends at most 2 (M-1)/M of a payload.
    """
    coder, values, num_regions = messages[0].coder, messages[0].values, len(messages)
    is_whole, cut = swaps_whole(coder, num_regions), slices(coder, values.numel(), num_regions)
    parts = cut[0] if is_whole else [part for each in cut for part in each]
    mean = torch.empty_like(values)
    own: list[list[Tensor]] = [[] for _ in messages]
    for part in parts:
        payloads = [coder.encode(message.values[part]) for message in messages]
        for kept, payload in zip(own, payloads, strict=True):
            kept.append(payload)
        reduced = weighted_mean(payloads, weights, coder, part.stop - part.start, divisor, out=mean[part])
        if not is_whole:
            reduced.copy_(coder.decode(coder.encode(reduced), part.stop - part.start))
    return [Reply(mean.clone(), partial(decode_slices, kept, coder, parts)) for kept in own]


def decode_slices(payloads: Sequence[Tensor], coder: Coder, parts: Sequence[slice]) -> Tensor:
    """Decode a whole message from the payloads of its slices, in order."""
    if not parts:
        return torch.empty(0, dtype=torch.float32, device=HOST)
    return torch.cat(
        [coder.decode(p, part.stop - part.start) for p, part in zip(payloads, parts, strict=True)]
    )


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
