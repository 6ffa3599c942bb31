"""What crosses the link: values become bytes and come back as the regions' mean.

A `Codec` describes one transfer as a conversation: a generator that hands the link a `Message` (values and the coder
that turns them into bytes), gets back the mean of that message over the regions, and may go on with another message
that depends on it. Most codecs say one message. Links drive the conversation in the background; wrappers such as error
feedback pass it through with `yield from`.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...tensors.pieces import UNSHARED
from ..fragments import Fragment

State = dict[str, Any]
"""A codec's state for one fragment (a residual, a warm start): named tensors, saved in checkpoints."""


class Coder(Protocol):
    """Turns fp32 values into bytes and back, exactly alike on every machine.

    The payload of a part of a message stands for that part alone, so both directions can work on one part after
    another, into parts of one buffer (`out`).

    Attributes:
        block: number of neighbouring values encoded together; a message is only ever cut at multiples of it.
        gather: optional; True where the mean of decoded values does not fit the coder again: see `swaps_whole`.
    """

    block: int

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Bytes (1-D uint8) for the 1-D fp32 `values`.

        Written to `out` (1-D uint8 of `num_bytes(values.numel())`) where given; else they may be a view of `values`.
        """
        ...

    def decode(self, payload: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """The `numel` fp32 values that `payload` stands for.

        Written to `out` (1-D fp32 of `numel`) where given; else they may be a view of `payload`.
        """
        ...

    def num_bytes(self, numel: int) -> int:
        """Exact length of the bytes for `numel` values."""
        ...


class Message(NamedTuple):
    """Values (1-D fp32) whose mean over the regions is asked for, and how they become bytes."""

    values: Tensor
    coder: Coder


class Reply(NamedTuple):
    """Answer to a `Message`: the mean that all regions hold alike, and what this region's own bytes decode to."""

    mean: Tensor
    own: Callable[[], Tensor]


class Result(NamedTuple):
    """End of a conversation: mean outer gradient, this region's own decoded part of it, the codec's next state."""

    mean: Tensor
    own: Callable[[], Tensor]
    state: State


Conversation = Generator[Message, Reply, Result]


class Codec(Protocol):
    """How the mean of an outer gradient over the regions is found."""

    def init(self, fragment: Fragment) -> State:
        """State before the fragment's first transfer."""
        ...

    def converse(self, outer_grad: Tensor, fragment: Fragment, state: State) -> Conversation:
        """The conversation of one transfer of the flat fp32 `outer_grad`, which it must not write to."""
        ...

    def wire_bytes(self, fragment: Fragment, region: int, num_regions: int) -> int:
        """Payload bytes that `region` sends for one transfer of `fragment`, exactly."""
        ...


def unshared(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """1-D tensors of one length in parts so small that torch works on them in this thread, however many it has.

    The others are training: waiting for them after every step takes many times longer than doing their share.
    """
    size = max(len(tensors[0]), 1) if torch.get_num_threads() == 1 else UNSHARED
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def shards(numel: int, block: int, num_regions: int) -> list[slice]:
    """Cut `numel` values at multiples of `block` into one shard a region, as even as blocks allow."""
    blocks = -(-numel // block)
    cuts = [min(numel, blocks * region // num_regions * block) for region in range(num_regions + 1)]
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def swaps_whole(coder: Coder, num_regions: int) -> bool:
    """Whether every region sends its whole payload to every other, instead of having shards averaged by their owners.

    So it is between two regions. Between more, only a coder with `gather = True` asks for it: one whose payload is so
    small that M - 1 of them are cheap, and whose mean would lose too much in a second encoding.
    """
    return num_regions <= 2 or getattr(coder, "gather", False)


def message_bytes(coder: Coder, numel: int, region: int, num_regions: int) -> int:
    """Bytes that `region` sends for one message: see `mean_of` for who sends what to whom."""
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
) -> Tensor:
    """Mean of decoded payloads, summed in fp32 in the order of the regions, so that it is the same bits everywhere.

    A region of weight 0 sits out: its payload is not looked at. With no region left the mean is zero.
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
        part.div_(sum(weights))
    return total


def mean_of(messages: Sequence[Message], weights: Sequence[float]) -> list[Reply]:
    """The replies to one message of each region: the arithmetic that every link has to carry out.

    Two regions swap what they have, and so do more of them where the coder asks for it (`swaps_whole`); their mean is
    rounded only once. Otherwise more than two scatter: region j gets everybody's shard j, averages it in fp32,
    encodes the mean once more and sends it to all; everybody, the owner too, decodes those bytes. So a region then
    never sends more than 2 (M-1)/M of a payload.
    """
    coder, numel, num_regions = messages[0].coder, messages[0].values.numel(), len(messages)
    if swaps_whole(coder, num_regions):
        payloads = [coder.encode(message.values) for message in messages]
        mean = weighted_mean(payloads, weights, coder, numel)
        return [Reply(mean.clone(), partial(coder.decode, payload, numel)) for payload in payloads]
    cut = shards(numel, coder.block, num_regions)
    scattered = [[coder.encode(message.values[part]) for part in cut] for message in messages]
    mean = torch.empty(numel, dtype=torch.float32)
    for owner, part in enumerate(cut):
        length = part.stop - part.start
        reduced = weighted_mean([payloads[owner] for payloads in scattered], weights, coder, length)
        mean[part] = coder.decode(coder.encode(reduced), length)
    return [Reply(mean.clone(), partial(decode_shards, payloads, coder, cut)) for payloads in scattered]


def decode_shards(payloads: Sequence[Tensor], coder: Coder, cut: Sequence[slice]) -> Tensor:
    """The whole message from its shards' payloads."""
    return torch.cat([coder.decode(p, part.stop - part.start) for p, part in zip(payloads, cut, strict=True)])


class Plain:
    """The codec that sends the whole outer gradient in one message through a coder."""

    def __init__(self, coder: Coder) -> None:
        self.coder = coder

    def init(self, fragment: Fragment) -> State:
        return {}

    def converse(self, outer_grad: Tensor, fragment: Fragment, state: State) -> Conversation:
        reply = yield Message(outer_grad, self.coder)
        return Result(reply.mean, reply.own, state)

    def wire_bytes(self, fragment: Fragment, region: int, num_regions: int) -> int:
        return message_bytes(self.coder, fragment.numel, region, num_regions)
