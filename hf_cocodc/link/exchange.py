"""One message of a conversation on the wire, cut into pieces, so that encoding, sending and decoding overlap.

Every pair of regions talks directly. A ring (gloo's all-reduce) takes 2 (M-1) round trips, and the order of its sums
depends on the ring. A direct exchange takes two round trips at most. It sums in the order of the regions: its bits equal
those of every other link (`codecs.base.mean_of`). And it knows which region does not answer.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from ..errors import RegionLostError, short
from ..net.view import LARGEST, UnderWay, View
from ..parts.codecs.base import Coder, Message, Reply, shards, swaps_whole, weighted_mean
from ..parts.tensors.memory import Pool

SMALLEST = 1 << 13
"""Limits for the bytes of a piece: small enough to keep all connections busy, large enough to be worth an operation."""


class Exchange:
    """This region's side of `codecs.base.mean_of`: `begin` starts all that needs no answer, `end` finds the mean."""

    def __init__(self, view: View, message: Message, buffers: Pool, what: str) -> None:
        self._view, self._buffers, self._what = view, buffers, what
        self._values, self._coder = message.values, message.coder
        numel, count = self._values.numel(), view.num_regions
        self._whole = swaps_whole(self._coder, count)
        cut = [slice(0, numel)] * count if self._whole else shards(numel, self._coder.block, count)
        self._pieces = [list(pieces(part, self._coder, view.connections)) for part in cut]
        """For each region, the pieces that it averages from the payloads of all regions."""
        self._own: dict[int, list[Tensor]] = {}
        self._sent: list[UnderWay] = []
        self.bytes_sent = 0

    def begin(self) -> None:
        """Start all receives, then encode and send piece by piece: one piece travels while the next one is encoded."""
        view, region = self._view, self._view.region
        scatter, gather = view.tag(), view.tag()
        self._gather_tag = gather
        self._inbox = {other: self._expect(other, region, scatter) for other in view.others}
        if not self._whole:
            self._means = {other: self._expect(other, other, gather) for other in view.others}
        if self._whole:
            self._own[region] = []
            for index, piece in enumerate(self._pieces[region]):
                payload = self._coder.encode(self._values[piece])
                self._own[region].append(payload)
                for other in view.others:
                    self._send(other, payload, scatter, index)
            return
        self._own = {owner: [] for owner in range(view.num_regions)}
        for index, row in enumerate(zip_longest(*self._pieces)):  # one piece to each region in turn
            for owner, piece in enumerate(row):
                if piece is not None:
                    payload = self._coder.encode(self._values[piece])
                    self._own[owner].append(payload)
                    if owner != region:
                        self._send(owner, payload, scatter, index)

    def end(self, shares: Sequence[float], divisor: float | None = None) -> Reply:
        """The mean, with weight `shares[r]` for region r: see `weighted_mean`. Handles the pieces in the order of the sends."""
        view, region, coder = self._view, self._view.region, self._coder
        mean = self._buffers.take(self._values.numel())
        for index, piece in enumerate(self._pieces[region]):
            received = {other: self._take(self._inbox[other][index]) for other in view.others}
            payloads = [received.get(r, self._own[region][index]) for r in range(view.num_regions)]
            numel = piece.stop - piece.start
            try:
                part = weighted_mean(payloads, shares, coder, numel, mean[piece], divisor)
            except Exception:
                for other in (other for other in view.others if shares[other]):  # whose payload is it?
                    self._decode(other, received[other], numel)
                raise
            for payload in received.values():
                self._buffers.give(payload)
            if not self._whole:
                reduced = coder.encode(part)
                for other in view.others:
                    self._send(other, reduced, self._gather_tag, index)
                # the owner, too, uses the rounded mean, as all other regions do
                coder.decode(reduced, numel, out=part)
        for other in () if self._whole else view.others:
            for piece, expected in zip(self._pieces[other], self._means[other], strict=True):
                payload = self._take(expected)
                self._decode(other, payload, piece.stop - piece.start, mean[piece])
                self._buffers.give(payload)
        view.wait(self._sent, self._what)
        return Reply(mean, self._decode_own)

    def _expect(self, other: int, owner: int, tag: int) -> list[tuple[Tensor, UnderWay]]:
        """Start to receive the payloads that `other` sends for the pieces that `owner` averages."""
        expected = []
        for index, piece in enumerate(self._pieces[owner]):
            buffer = self._buffers.take(self._coder.num_bytes(piece.stop - piece.start), torch.uint8)
            expected.append((buffer, self._view.receive(other, buffer, tag, index, self._what)))
        return expected

    def _take(self, expected: tuple[Tensor, UnderWay]) -> Tensor:
        buffer, pending = expected
        self._view.wait([pending], self._what)
        return buffer

    def _decode(self, other: int, payload: Tensor, numel: int, out: Tensor | None = None) -> None:
        """Decode the payload of another region. Raises RegionLostError if it is none of the codec's."""
        try:
            self._coder.decode(payload, numel, out=out)
        except Exception as error:
            region = self._view.regions[other]
            raise RegionLostError(
                region,
                f"what region {region} sent for {self._what} is no payload of the codec ({short(error, 200)}): it is damaged, or "
                "the region has another version. Look at its last output, and start it again.",
            ) from error

    def _send(self, other: int, payload: Tensor, tag: int, index: int) -> None:
        self._sent.append(self._view.send(other, payload, tag, index, self._what))
        self.bytes_sent += payload.numel()

    def _decode_own(self) -> Tensor:
        """The values that this region's own payloads encode."""
        values = torch.empty(self._values.numel(), dtype=torch.float32)
        for owner, payloads in self._own.items():
            for piece, payload in zip(self._pieces[owner], payloads, strict=True):
                self._coder.decode(payload, piece.stop - piece.start, out=values[piece])
        return values


def pieces(part: slice, coder: Coder, connections: int) -> Iterator[slice]:
    """Cut a part of a message into pieces that load all connections equally. All regions cut alike; cutting adds no byte."""
    unit = 2 * coder.block  # an even number of blocks fills whole bytes, whatever the coder
    numel = part.stop - part.start
    units = -(-numel // unit)
    count = min(num_pieces(coder.num_bytes(numel), connections, coder.num_bytes(unit)), units)
    for number in range(count):
        first, last = (units * each // count * unit for each in (number, number + 1))
        yield slice(part.start + first, min(part.start + last, part.stop))


def num_pieces(num_bytes: int, connections: int, unit: int = 0) -> int:
    """The number of pieces of `num_bytes` bytes, which are cut at multiples of `unit` bytes: as many on each connection."""
    rounds = -(-num_bytes // (connections * max(LARGEST - unit, 1)))
    return min(connections * rounds, max(num_bytes // SMALLEST, 1))
