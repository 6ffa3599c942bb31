"""One message of a conversation on the wire, slice by slice: one slice travels while the next one is encoded.

Every pair of regions talks directly. A ring (gloo's all-reduce) takes 2 (M-1) round trips, and the order of its sums
depends on the ring. A direct exchange takes two round trips at most. It sums in the order of the regions: its bits equal
those of every other link (`codecs.base.mean_of`). And it knows which region does not answer.

Values stay on their device: only payloads, a codec's bytes, come to the host, where they are sent frame by frame.
"""

from collections.abc import Sequence
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from ..errors import RegionLostError, short
from ..net.view import LARGEST, UnderWay, View
from ..parts.codecs.base import Message, Reply, decode_slices, slices, swaps_whole, weighted_mean
from ..parts.tensors.memory import Buffers, Home

SMALLEST = 1 << 13
"""Limits for the bytes of a frame: small enough to keep all connections busy, large enough to be worth an operation."""


class Inbound:
    """A payload that comes from another region: its bytes on the host, and the frames under way."""

    def __init__(self, buffer: Tensor, frames: list[UnderWay]) -> None:
        self.buffer, self.frames = buffer, frames


class Exchange:
    """This region's side of `codecs.base.mean_of`: `begin` starts all that needs no answer, `end` finds the mean.

    `home`: where the message's values rest, and on which device they are encoded. The mean rests there, too.
    """

    def __init__(self, view: View, message: Message, home: Home, buffers: Buffers, what: str) -> None:
        self._view, self._home, self._buffers, self._what = view, home, buffers, what
        self._values, self._coder = message.values, message.coder
        self._whole = swaps_whole(self._coder, view.num_regions)
        self._slices = slices(self._coder, self._values.numel(), view.num_regions)
        self._own: dict[int, list[Tensor]] = {}
        self._sent: list[UnderWay] = []
        self._lent: list[Tensor] = []
        self.bytes_sent = 0

    def begin(self) -> None:
        """Start all receives, then encode and send."""
        view, region = self._view, self._view.region
        scatter, self._gather_tag = view.tag(), view.tag()
        self._inbox = {other: self._expect(other, region, scatter) for other in view.others}
        if self._whole:
            self._own[region] = []
            for index, part in enumerate(self._slices[region]):
                self._send(self._encode(region, part), view.others, scatter, index)
            return
        self._means = {other: self._expect(other, other, self._gather_tag) for other in view.others}
        self._own = {owner: [] for owner in range(view.num_regions)}
        for index, row in enumerate(zip_longest(*self._slices)):  # one slice to each region in turn
            for owner, part in enumerate(row):
                if part is not None:
                    payload = self._encode(owner, part)
                    if owner != region:
                        self._send(payload, [owner], scatter, index)

    def end(self, shares: Sequence[float], divisor: float | None = None) -> Reply:
        """The mean, with weight `shares[r]` for region r: see `weighted_mean`. Handles the slices in the order of the sends."""
        view, region, coder = self._view, self._view.region, self._coder
        numel, at_rest = self._values.numel(), self._values.device == self._home.rest
        mean = self._home.take(numel) if at_rest else torch.empty_like(self._values)
        for index, part in enumerate(self._slices[region]):
            received = {other: self._take(self._inbox[other][index]) for other in view.others}
            payloads = [received.get(r, self._own[region][index]) for r in range(view.num_regions)]
            numel = part.stop - part.start
            into = _slice(mean, part)
            try:
                here = into if into.device == self._home.device else None
                reduced = weighted_mean(payloads, shares, coder, numel, divisor, out=here)
            except Exception:
                for other in (other for other in view.others if shares[other]):  # whose payload is it?
                    self._decode(other, received[other], numel)
                raise
            if not self._whole:
                payload = coder.encode(reduced)
                self._send(payload, view.others, self._gather_tag, index)
                # the owner, too, uses the rounded mean, as all other regions do
                reduced = coder.decode(payload, numel)
            self._home.store(into, reduced)
        for other in () if self._whole else view.others:
            for part, expected in zip(self._slices[other], self._means[other], strict=True):
                values = self._decode(other, self._take(expected), part.stop - part.start)
                self._home.store(mean[part], values)
        view.wait(self._sent, self._what)
        self._home.finish_copies()  # the next message comes into this memory
        self._buffers.give(*self._lent)
        return Reply(mean, self._decode_own)

    def _expect(self, other: int, owner: int, tag: int) -> list[Inbound]:
        """Start to receive the payloads that `other` sends for the slices that `owner` averages."""
        expected = []
        for index, part in enumerate(self._slices[owner]):
            buffer = self._take_buffer(self._coder.num_bytes(part.stop - part.start))
            parts = frames(buffer, self._view.connections)
            under_way = [
                self._view.receive(other, frame, tag, index + place, self._what) for place, frame in parts
            ]
            expected.append(Inbound(buffer, under_way))
        return expected

    def _take(self, expected: Inbound) -> Tensor:
        """A payload that has come, on the device."""
        self._view.wait(expected.frames, self._what)
        return self._home.visit(expected.buffer)

    def _encode(self, owner: int, part: slice) -> Tensor:
        """The payload of a slice, on the device; it is kept for `Reply.own`."""
        payload = self._coder.encode(self._home.visit(_slice(self._values, part)))
        self._own[owner].append(payload)
        return payload

    def _decode(self, other: int, payload: Tensor, numel: int) -> Tensor:
        """Decode the payload of another region. Raises RegionLostError if it is none of the codec's."""
        try:
            return self._coder.decode(payload, numel)
        except Exception as error:
            region = self._view.regions[other]
            raise RegionLostError(
                region,
                f"what region {region} sent for {self._what} is no payload of the codec ({short(error, 200)}): it is damaged, or "
                "the region has another version. Look at its last output, and start it again.",
            ) from error

    def _send(self, payload: Tensor, others: Sequence[int], tag: int, index: int) -> None:
        """Bring a payload to the host, and start to send it."""
        if payload.device.type != "cpu":
            payload = self._take_buffer(payload.numel()).copy_(payload, non_blocking=True)
            self._home.finish_copies()
        for place, frame in frames(payload, self._view.connections):
            for other in others:
                self._sent.append(self._view.send(other, frame, tag, index + place, self._what))
                self.bytes_sent += frame.numel()

    def _take_buffer(self, num_bytes: int) -> Tensor:
        buffer = self._buffers.take(num_bytes, torch.uint8)
        self._lent.append(buffer)
        return buffer

    def _decode_own(self) -> Tensor:
        """The values that this region's own payloads encode, on the device."""
        parts = [part for owner in self._own for part in self._slices[owner]]
        return decode_slices([each for owned in self._own.values() for each in owned], self._coder, parts)


def _slice(flat: Tensor, part: slice) -> Tensor:
    """A slice of a flat tensor; most messages have only one."""
    return flat if part.stop - part.start == flat.numel() else flat[part]


def frames(payload: Tensor, connections: int) -> list[tuple[int, Tensor]]:
    """Cut the bytes of a payload into frames that load all connections equally; each with its place. All regions cut alike."""
    size, count = payload.numel(), num_frames(payload.numel(), connections)
    edges = [size * place // count for place in range(count + 1)]
    sizes = [after - before for before, after in pairwise(edges)]
    return list(enumerate(payload.split_with_sizes(sizes)))


def num_frames(num_bytes: int, connections: int) -> int:
    """The number of frames of so many bytes: as many on each connection."""
    rounds = -(-num_bytes // (connections * LARGEST))
    return min(connections * rounds, max(num_bytes // SMALLEST, 1))
