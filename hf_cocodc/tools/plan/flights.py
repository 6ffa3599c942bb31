"""TCP connections that share a link: windows, slow start, losses, the rate limit. What is under way goes flight by flight."""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...net.connection import DUE_BYTES
from ...net.pairs import MAX_CONNECTIONS, connections_for
from .course import Cargo, Carried

OVERHEAD_S = 1e-3
"""Seconds of a transfer that no byte causes: threads that wake up, the trailer."""
LIMIT = 0.9
"""Most of the link's rate that a region should send: with more, packets wait in the buffer before the link, or are dropped."""
TRIALS = 8
"""Trainings that are played for settings that are reported, if packets get lost; their mean counts."""

MSS, MTU = 1448, 1500
"""Payload bytes of a full TCP segment with time stamps, and bytes of its packet."""
FIRST_WINDOW = 10 * MSS
"""Bytes in flight of a connection that is new, or was idle (RFC 6928)."""
LEAST_VARIANCE_S = 0.2
"""Linux halves the window of a connection each time that it was idle for its retransmission time-out: a round trip, and at least
this time. A new connection has two round trips in its place, and comes down to it with its round trips (RFC 6298)."""
DECREASE = 0.3
"""Share of its window by which a connection shrinks after a loss (cubic)."""
CUBIC = 0.4
"""Segments per cubic second by which cubic's window grows from where the last loss was (RFC 9438, 4.1)."""
FRIENDLY = 0.53
"""Segments by which cubic's window grows in a round trip behind slow start, like Reno's (RFC 9438, 4.3)."""
SLICES = 4
"""Parts of a round trip in which a connection's sends are followed."""
BURST_S = 1e-3
"""Linux sends at once what goes in this time."""
FOLLOWED, FLIGHTS = 64, 256
"""Pieces of a message, and flights of its connections, that are followed one by one; later ones take the mean time."""


@dataclass(frozen=True)
class LinkFigures:
    """A link between regions.

    Attributes:
        rate: bits per second that a region can send to all others together, including headers.
        loss: probability that a packet is lost.
    """

    rtt_s: float
    rate: float
    loss: float = 0.0
    congestion: str = "cubic"

    @property
    def goodput(self) -> float:
        """Payload bytes per second at the full rate."""
        return self.rate / 8 * MSS / MTU

    @property
    def window_of_loss(self) -> float:
        """Mean bytes that one connection has in flight because of losses.

        Reno's is Mathis' bound, MSS sqrt(3 / 2p); cubic's is larger on long links (RFC 9438, 5.2). BBR ignores few losses.
        """
        if not self.loss or self.congestion.startswith("bbr"):
            return math.inf
        reno = math.sqrt(1.5 / self.loss)
        cubic = 1.054 * (self.rtt_s / self.loss) ** 0.75 if self.congestion == "cubic" else 0.0
        return MSS * max(reno, cubic, 1.0)

    @property
    def restarts(self) -> bool:
        """Whether a connection that was idle begins again with a small window."""
        return not self.congestion.startswith("bbr")


class Codes(NamedTuple):
    """What the ends of a transfer do for one fragment, in seconds of the link's thread.

    Attributes:
        messages: number in the codec's conversation, one after the other.
        scatters: whether a message travels to the region that averages it, and its mean back.
        encode_s: to encode all that this region sends.
        decode_s: to decode all that it receives, and to find the mean.
        piece_bytes: size of a piece; pieces are encoded while others travel.
    """

    messages: int = 1
    scatters: bool = False
    encode_s: float = 0.0
    decode_s: float = 0.0
    piece_bytes: int = 1 << 20


class TcpLine:
    """A line over TCP connections, as a link's thread uses them: one transfer after the other, piece by piece.

    A region sends at most `limit` payload bytes per second; `codes` is by the bytes of a fragment's transfer.
    """

    def __init__(
        self,
        link: LinkFigures,
        connections: int,
        others: int,
        limit: float,
        codes: dict[int, Codes],
        seed: int = 0,
    ) -> None:
        self._link, self._codes = link, codes
        self._others = others
        self._free_s = 0.0
        draw = random.Random(seed).random
        # a transfer ends when both directions have ended; without losses they are equal
        self._num_connections = connections * others
        places = link, self._num_connections, limit, draw
        self._directions = [Direction(*places) for _ in range(2 if link.loss else 1)]

    def carry(self, part: Cargo, sent_s: float) -> Carried:
        codes = self._codes[part.num_bytes]
        begin = max(sent_s, self._free_s)
        ends = begin + OVERHEAD_S
        for _ in range(codes.messages):
            ends += self._message_s(part.num_bytes / codes.messages, codes, ends)
        self._free_s = ends
        return Carried(ends, ends - begin)

    def _message_s(self, num_bytes: float, codes: Codes, begin: float) -> float:
        """Seconds from the first piece that is encoded to the last that is decoded."""
        half_s, trips = self._link.rtt_s / 2, 2 if codes.scatters else 1
        pieces = max(math.ceil(num_bytes / trips / codes.piece_bytes), self._others)
        size = num_bytes / trips / pieces
        encode_s, decode_s = codes.encode_s / codes.messages, codes.decode_s / codes.messages
        between_s, decode_piece_s = encode_s / trips / pieces, decode_s / trips / pieces
        first = begin + between_s
        sent = self._sent(size, pieces, first, between_s)
        if codes.scatters:
            # the mean of a piece travels back once the pieces of all regions have come; each connection has several in turn
            last = sent + half_s + decode_piece_s
            one_s = (sent - first) / math.ceil(pieces / self._num_connections)
            returns = max(min(first + one_s + half_s + decode_piece_s, last), sent)
            between_s = max((last - returns) / max(pieces - 1, 1), between_s)
            sent = self._sent(size, pieces, returns, between_s)
        return max(sent + half_s + decode_piece_s - begin, encode_s + decode_s)

    def _sent(self, size: float, pieces: int, begin: float, between_s: float) -> float:
        return max(each.send(size, pieces, begin, between_s) for each in self._directions)


def wanted_connections(link: LinkFigures, limit: float) -> int:
    """Connections that send `limit` payload bytes per second in spite of losses; at least as many as a region would choose."""
    by_itself = connections_for(link.rtt_s, limit)
    for_loss = math.ceil(limit * link.rtt_s / link.window_of_loss)
    return min(max(by_itself, for_loss), MAX_CONNECTIONS)


class _Flight(NamedTuple):
    """Bytes that a connection has under way: when they left it, and when the last one left the region."""

    num_bytes: float
    sent: float
    ends: float


class Direction:
    """The connections in one direction, which share the link; together they send at most `limit` payload bytes per second.

    The kernel spreads what each of them sends (`net.pacing`), so that they do not wait for each other in a buffer. What the
    window and the pace allow leaves as a flight.
    """

    def __init__(self, link: LinkFigures, count: int, limit: float, draw: Callable[[], float]) -> None:
        self._link, pace = link, min(limit, link.goodput) / count
        self._connections = [_TcpConnection(link, pace, draw) for _ in range(count)]
        self._free_s = 0.0
        window = min(link.window_of_loss, pace * link.rtt_s)
        self._steady = count * (window / link.rtt_s if link.rtt_s else pace)

    def send(self, size: float, pieces: int, begin: float, between_s: float) -> float:
        """When the last byte of a message has left whose pieces are ready one after the other."""
        connections = self._connections
        followed = min(pieces, max(FOLLOWED // len(connections), 1) * len(connections))
        order = itertools.count()  # of events at the same time
        events: list[tuple[float, int, int, _Flight | None]] = []
        for number in range(followed):
            index, ready = number % len(connections), begin + number * between_s
            connections[index].ready.append((ready, size))
            events.append((ready, next(order), index, None))
        heapq.heapify(events)
        wakes = [begin] * len(connections)
        ends, num_flights, at_pace, is_cut = begin, 0, 0, pieces > followed
        while events:
            now, _, index, flight = heapq.heappop(events)
            connection = connections[index]
            if flight is not None:
                connection.hear(flight, now)
            num_bytes = connection.next(now)
            if now >= wakes[index]:
                wakes[index] = connection.paced_until
                if wakes[index] > now:
                    heapq.heappush(events, (wakes[index], next(order), index, None))
            if num_bytes:
                self._free_s = max(self._free_s, now) + num_bytes / self._link.goodput
                sent = _Flight(num_bytes, now, self._free_s)
                ends = max(ends, sent.ends)
                heapq.heappush(events, (now + self._link.rtt_s, next(order), index, sent))
                num_flights += 1
                at_pace = at_pace + 1 if connection.sends_at_pace(num_bytes) else 0
            # a long transfer: losses and growth are in balance, or without losses nothing changes any more
            if num_flights == FLIGHTS or (not self._link.loss and at_pace == 2 * SLICES * len(connections)):
                is_cut = True
                ends += sum(each.forget() for each in connections) / self._steady
                break
        ends += (pieces - followed) * max(between_s, size / self._steady)
        for each in connections if is_cut else ():
            each.ended = ends
        self._free_s = max(self._free_s, ends)
        return ends


class _TcpConnection:
    """One TCP connection in one direction, flight by flight; it sends at most `pace` bytes per second."""

    def __init__(self, link: LinkFigures, pace: float, draw: Callable[[], float]) -> None:
        self._link, self._pace, self._draw = link, pace, draw
        self._slice = max(pace * max(link.rtt_s / SLICES, BURST_S), MSS)
        self.paced_until = 0.0  # when it may send again
        full = link.goodput * link.rtt_s
        self._most = max(2 * full, FIRST_WINDOW)
        self._window, self.ended = float(FIRST_WINDOW), 0.0  # ended: when its last byte left the region
        self._is_cubic = link.congestion == "cubic"
        self._threshold = math.inf
        self._decrease = DECREASE if self._is_cubic else 0.5
        self._crest = self._age_s = 0.0
        self._left = self._under_way = self._cut = 0.0
        self._variance_s = max(2 * link.rtt_s, LEAST_VARIANCE_S)
        self._heard_at = self._unacknowledged = 0.0
        self._until_loss = self._gap()
        self.ready: deque[tuple[float, float]] = (
            deque()
        )  # of pieces to send: when they are ready, and their bytes

    def next(self, now: float) -> float:
        """Bytes of the flight that leaves now."""
        while self.ready and self.ready[0][0] <= now:
            self._left += self.ready.popleft()[1]
        if now < self.paced_until:
            return 0.0
        if self._under_way < 1:
            self._rest(now - self.ended)
        num_bytes = min(max(self._window - self._under_way, 0.0), self._left, self._slice)
        if not num_bytes or num_bytes < min(MSS, self._left):  # a sender waits for room for a segment
            return 0.0
        self.paced_until = now + num_bytes / self._pace
        self._left, self._under_way = self._left - num_bytes, self._under_way + num_bytes
        return num_bytes

    def sends_at_pace(self, num_bytes: float) -> bool:
        """Whether a flight of so many bytes was as large as the pace allows, and the window has room for another one."""
        return num_bytes == self._slice and self._window - self._under_way >= self._slice

    def hear(self, flight: _Flight, now: float) -> None:
        """What the acknowledgements of a flight say."""
        lost = 0.0
        self._until_loss -= flight.num_bytes
        while self._until_loss <= 0:
            lost += min(MSS, flight.num_bytes)
            self._until_loss += self._gap()
        self._grow(flight)
        if flight.sent >= self._heard_at:  # once each round trip, as Linux does it
            self._heard_at = now
            self._variance_s -= (self._variance_s - LEAST_VARIANCE_S) / 4
        self._left, self.ended = self._left + min(lost, flight.num_bytes), flight.ends
        self._unacknowledged += flight.num_bytes
        if (
            self._unacknowledged >= DUE_BYTES
        ):  # the other region sends as much, and this one says that it has come
            self._unacknowledged = 0.0
            self.ended += self._link.rtt_s / 2
        self._under_way -= flight.num_bytes
        if lost and self._link.restarts and flight.sent >= self._cut:
            before, self._crest = self._crest, self._window
            if self._window < before:
                self._crest *= 1 - self._decrease / 2  # leaves room for others (RFC 9438, 4.7)
            self._window = self._threshold = max((1 - self._decrease) * self._window, 2.0 * MSS)
            self._age_s, self._cut = 0.0, now

    def _grow(self, flight: _Flight) -> None:
        if self._window < self._threshold:
            if 2 * self._under_way > self._window:
                self._window = min(self._window + flight.num_bytes, self._threshold, self._most)
        elif self._under_way > self._window - MSS:
            share = flight.num_bytes / self._window
            self._age_s += share * self._link.rtt_s
            grown = self._window + share * (FRIENDLY if self._is_cubic else 1.0) * MSS
            if self._is_cubic:
                crest = max(self._crest, self._threshold)
                turn_s = ((crest - self._threshold) / MSS / CUBIC) ** (1 / 3)
                wanted = crest + CUBIC * MSS * (self._age_s - turn_s) ** 3
                grown = max(grown, min(wanted, (1 + share / 2) * self._window))
            self._window = min(grown, self._most)

    def forget(self) -> float:
        """Bytes that were still to be sent, and are no longer followed."""
        left = self._left + sum(size for _, size in self.ready)
        self._left = self._under_way = 0.0
        self.ready.clear()
        return left

    def _rest(self, idle_s: float) -> None:
        """The connection was idle for this time."""
        halvings = min(idle_s / (self._link.rtt_s + self._variance_s), 60.0) // 1
        if halvings > 0 and self._link.restarts:
            self._threshold = max(self._threshold, 0.75 * self._window)
            self._window = max(self._window / 2**halvings, min(FIRST_WINDOW, self._window))

    def _gap(self) -> float:
        """Bytes until the next loss."""
        loss = self._link.loss
        return MSS * math.log(1 - self._draw()) / math.log1p(-loss) if loss else math.inf
