"""One message of a conversation on the wire, slice by slice: one slice travels while the next one is encoded.

Every pair of regions talks directly. A ring (gloo's all-reduce) takes 2 (M-1) round trips, and the order of its sums
depends on the ring. A direct exchange takes two round trips at most. It sums in the order of the regions: its bits equal
those of every other link (`codecs.base.mean_of`). And it knows which region does not answer.

Values stay on their device. Payloads, a codec's bytes, come to where they travel from: to the host, or nowhere (`Rows`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from ..errors import RegionLostError, short
from ..net.view import LARGEST, UnderWay, View
from ..parts.codecs.base import Message, Reply, decode_slices, slices, swaps_whole, weighted_mean
from ..parts.tensors.memory import HOST, Buffers, Home

SMALLEST = 1 << 13
"""Limits for the bytes of a frame: small enough to keep all connections busy, large enough to be worth an operation."""

Sizes = Sequence[Mapping[int, int]]
"""For each row of payloads, how many bytes come from the regions at these positions of a view."""
Lend = Callable[[int, torch.device], Tensor]
"""Lends memory for so many bytes on a device."""


class Rows:
    """The payloads that regions send each other in one phase of an exchange, in rows. `device`: where they lie that are sent, and
    that have come.
    """

    device = HOST

    def begin(self, index: int) -> None:
        """The payloads of a row follow, in all regions; also in one that sends none."""

    def send(self, index: int, payload: Tensor, others: Sequence[int]) -> None:
        """Send a payload to other regions. It must not change before `finish`."""
        raise NotImplementedError

    def end(self) -> None:
        """The row is whole."""

    def take(self, index: int, other: int) -> Tensor:
        """Wait for the payload that another region has sent in a row. Raises LinkError."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until all is sent."""
        raise NotImplementedError


RowsOf = Callable[[View, Sizes, Lend, str], Rows]


class WireRows(Rows):
    """Rows over the connections of a wire: payloads are cut into frames. Receives begin at once."""

    def __init__(self, view: View, sizes: Sizes, lend: Lend, what: str) -> None:
        self._view, self._what, self._tag = view, what, view.tag()
        self._sent: list[UnderWay] = []
        self._coming: dict[tuple[int, int], tuple[Tensor, list[UnderWay]]] = {}
        for index, row in enumerate(sizes):
            for other, size in row.items():
                buffer = lend(size, HOST)
                receives = [
                    view.receive(other, frame, self._tag, index + place, what)
                    for place, frame in frames(buffer, view.connections)
                ]
                self._coming[index, other] = buffer, receives

    def send(self, index: int, payload: Tensor, others: Sequence[int]) -> None:
        for place, frame in frames(payload, self._view.connections):
            for other in others:
                self._sent.append(self._view.send(other, frame, self._tag, index + place, self._what))

    def take(self, index: int, other: int) -> Tensor:
        buffer, receives = self._coming[index, other]
        self._view.wait(receives, self._what)
        return buffer

    def finish(self) -> None:
        self._view.wait(self._sent, self._what)


class Exchange:
    """This region's side of `codecs.base.mean_of`: `begin` starts all that needs no answer, `end` finds the mean.

    `home`: where the message's values rest, and on which device they are encoded. The mean rests there, too. `rows_of`: makes
    the way of the payloads.
    """

    def __init__(
        self,
        view: View,
        message: Message,
        home: Home,
        buffers: Buffers,
        what: str,
        rows_of: RowsOf = WireRows,
    ) -> None:
        self._view, self._home, self._buffers, self._what = view, home, buffers, what
        self._rows_of = rows_of
        self._values, self._coder = message.values, message.coder
        self._whole = swaps_whole(self._coder, view.num_regions)
        self._slices = slices(self._coder, self._values.numel(), view.num_regions)
        self._own: dict[int, list[Tensor]] = {}
        self._lent: list[Tensor] = []
        self.bytes_sent = 0

    def begin(self) -> None:
        """Start all receives, then encode and send."""
        region, others = self._view.region, self._view.others
        self._scattered = self._rows(dict.fromkeys(others, region))
        if not self._whole:
            self._gathered = self._rows({other: other for other in others})
        owners = [region] if self._whole else range(self._view.num_regions)
        self._own = {owner: [] for owner in owners}
        for index, row in enumerate(zip_longest(*(self._slices[owner] for owner in owners))):
            self._scattered.begin(index)
            for owner, part in zip(owners, row, strict=True):  # one slice to each region in turn
                if part is not None:
                    payload = self._encode(owner, part)
                    to = others if self._whole else [owner] if owner != region else []
                    self._send(self._scattered, index, payload, to)
            self._scattered.end()

    def end(self, shares: Sequence[float], divisor: float | None = None) -> Reply:
        """The mean, with weight `shares[r]` for region r: see `weighted_mean`. Handles the slices in the order of the sends."""
        view, region = self._view, self._view.region
        numel, at_rest = self._values.numel(), self._values.device == self._home.rest
        mean = self._home.take(numel) if at_rest else torch.empty_like(self._values)
        longest = max(map(len, self._slices))
        for index in range(len(self._slices[region]) if self._whole else longest):
            mine = self._slices[region][index : index + 1]
            reduced = [self._reduce(index, part, mean, shares, divisor) for part in mine]
            if self._whole:
                continue
            self._gathered.begin(index)
            for payload in reduced:
                self._send(self._gathered, index, payload, view.others)
            self._gathered.end()
        for other in () if self._whole else view.others:
            for index, part in enumerate(self._slices[other]):
                payload = self._home.visit(self._gathered.take(index, other))
                self._home.store(mean[part], self._decode(other, payload, part.stop - part.start))
        for rows in (self._scattered,) if self._whole else (self._scattered, self._gathered):
            rows.finish()
        self._home.finish_copies()  # the next message comes into this memory
        self._buffers.give(*self._lent)
        payloads = [payload for owned in self._own.values() for payload in owned]
        parts = [part for owner in self._own for part in self._slices[owner]]
        return Reply(mean, partial(decode_slices, payloads, self._coder, parts))

    def _reduce(
        self, index: int, part: slice, mean: Tensor, shares: Sequence[float], divisor: float | None
    ) -> Tensor:
        """Write the mean of a slice that this region averages; returns its payload."""
        view, region, coder = self._view, self._view.region, self._coder
        received = {other: self._home.visit(self._scattered.take(index, other)) for other in view.others}
        payloads = [received.get(r, self._own[region][index]) for r in range(view.num_regions)]
        numel, into = part.stop - part.start, _slice(mean, part)
        try:
            here = into if into.device == self._home.device else None
            reduced = weighted_mean(payloads, shares, coder, numel, divisor, out=here)
        except Exception:
            for other in (other for other in view.others if shares[other]):  # whose payload is it?
                self._decode(other, received[other], numel)
            raise
        payload = reduced
        if not self._whole:
            payload = coder.encode(reduced)
            # the owner, too, uses the rounded mean, as all other regions do
            reduced = coder.decode(payload, numel)
        self._home.store(into, reduced)
        return payload

    def _rows(self, owners: Mapping[int, int]) -> Rows:
        """What comes from other regions: by their positions, who averages the slices."""
        count = max(map(len, self._slices))
        sizes = [
            {
                other: self._coder.num_bytes(part.stop - part.start)
                for other, owner in owners.items()
                for part in self._slices[owner][index : index + 1]
            }
            for index in range(count)
        ]
        return self._rows_of(self._view, sizes, self._lend, self._what)

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

    def _send(self, rows: Rows, index: int, payload: Tensor, others: Sequence[int]) -> None:
        """Bring a payload to where it travels from, and start to send it."""
        if not others:
            return
        if payload.device != rows.device:
            payload = self._lend(payload.numel(), rows.device).copy_(payload, non_blocking=True)
            self._home.finish_copies()
        rows.send(index, payload, others)
        self.bytes_sent += payload.numel() * len(others)

    def _lend(self, num_bytes: int, device: torch.device) -> Tensor:
        if device != HOST:
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        buffer = self._buffers.take(num_bytes, torch.uint8)
        self._lent.append(buffer)
        return buffer


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
