"""TCP connections that share a link: windows, slow start, losses, the buffer. What they have under way goes flight by flight."""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

MSS, MTU = 1448, 1500
"""Payload bytes of a full TCP segment with time stamps, and bytes of its packet."""
FIRST_WINDOW = 10 * MSS
"""Bytes in flight of a new connection, or of one that was idle (RFC 6928)."""
RTO_S = 0.2
"""Linux halves the window of an idle connection each round trip plus this time."""
DECREASE = 0.3
"""Share of its window by which a connection shrinks after a loss (cubic)."""
CUBIC = 0.4
"""Segments per cubic second by which cubic's window grows from where the last loss was (RFC 9438, 4.1)."""
FRIENDLY = 0.53
"""Segments by which cubic's window grows in a round trip behind slow start, like Reno's (RFC 9438, 4.3)."""
HYSTART = 0.5
"""Share of the link's window at which cubic leaves slow start: acknowledgements then fill half of a round trip."""
HYSTART_LEAST = 18 * MSS
"""Bytes of a flight after which cubic knows whether the buffer fills, and then leaves slow start: nine acknowledgements."""
BUFFER_S = 0.05
"""Least seconds that the buffer before the link holds at its rate; else a round trip. As `emulation.wan` has it."""
FOLLOWED, FLIGHTS = 64, 192
"""Pieces of a message, and flights of its connections, that are followed one by one; later ones take as long as in the mean."""


@dataclass(frozen=True)
class LinkFigures:
    """A link between regions.

    Attributes:
        rtt_s: seconds of a round trip.
        rate: bits per second that a region can send, to all others together, including headers.
        loss: probability that a packet is lost.
        congestion: TCP congestion control of the senders.
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
        """Bytes that one connection has in flight in the mean, because of losses.

        Reno's is Mathis' bound, MSS sqrt(3 / 2p); cubic's is larger on long links (RFC 9438, 5.2). BBR does not slow down for
        few losses.
        """
        if not self.loss or self.congestion.startswith("bbr"):
            return math.inf
        reno = math.sqrt(1.5 / self.loss)
        cubic = 1.054 * (self.rtt_s / self.loss) ** 0.75 if self.congestion == "cubic" else 0.0
        return MSS * max(reno, cubic, 1.0)

    @property
    def restarts(self) -> bool:
        """Whether a connection that was idle begins with a small window again."""
        return not self.congestion.startswith("bbr")


class _Flight(NamedTuple):
    """Bytes that a connection has under way.

    Attributes:
        num_bytes: of them.
        carried: bytes for which the buffer had room.
        sent: when they left the connection.
        waited_s: seconds that the first of them waited there, and its acknowledgement on its way back.
        begins: when it left the buffer.
        ends: when the last one did.
        is_heard: whether the sender knows what has arrived.
    """

    num_bytes: float
    carried: float
    sent: float
    waited_s: float
    begins: float
    ends: float
    is_heard: bool = False


class Direction:
    """The connections in one direction, and the buffer before the link, which they share.

    What a connection may have under way leaves it as a flight: at first as a burst, later as fast as acknowledgements come
    back. Flights wait in the buffer for each other. What finds no room there is dropped and sent again.

    Args:
        link: the link.
        count: number of connections.
        draw: returns random numbers in [0, 1).
    """

    def __init__(self, link: LinkFigures, count: int, draw: Callable[[], float]) -> None:
        self._link = link
        self._connections = [_Connection(link, draw) for _ in range(count)]
        self._buffer_s = max(link.rtt_s, BUFFER_S) if link.restarts else math.inf  # BBR leaves buffers empty
        self._free_s = 0.0
        self._arriving: list[tuple[float, float, float]] = []
        steady = (
            count * min(link.window_of_loss, link.goodput * link.rtt_s) / link.rtt_s
            if link.rtt_s
            else math.inf
        )
        self._steady = min(steady, link.goodput)

    def send(self, size: float, pieces: int, begin: float, between_s: float) -> float:
        """The time at which the last byte of a message has left, whose pieces are ready one after the other."""
        connections, half_s = self._connections, self._link.rtt_s / 2
        followed = min(pieces, FOLLOWED)
        events: list[tuple[float, int, _Flight | None]] = []
        for number in range(followed):
            index, ready = number % len(connections), begin + number * between_s
            connections[index].ready.append((ready, size))
            events.append((ready, index, None))
        heapq.heapify(events)
        ends, num_flights = begin, 0
        while events:
            now, index, flight = heapq.heappop(events)
            connection = connections[index]
            if (
                flight is not None and not flight.is_heard
            ):  # its acknowledgement, behind what travels the other way
                wait_s = self._waiting_s(now)
                heard = flight._replace(is_heard=True, waited_s=flight.waited_s + wait_s)
                heapq.heappush(events, (now + wait_s + half_s, index, heard))
                continue
            if flight is not None:
                connection.hear(flight, now)
            num_bytes = connection.next(now)
            if num_bytes:
                sent = self._carry(num_bytes, now, flight.carried if flight else 0.0)
                ends = max(ends, sent.ends)
                heapq.heappush(events, (sent.begins + half_s, index, sent))
                num_flights += 1
            if num_flights == FLIGHTS:  # a long transfer: losses and growth are in balance
                ends += sum(each.forget() for each in connections) / self._steady
                self._free_s = ends
                break
        return ends + (pieces - followed) * max(between_s, size / self._steady)

    def _carry(self, num_bytes: float, now: float, spread: float) -> "_Flight":
        """A flight that leaves now, at the pace at which `spread` bytes went before."""
        rate = self._link.goodput
        waiting_s, paced = self._waiting_s(now), min(spread, num_bytes)
        room = (self._buffer_s - waiting_s) * rate + paced
        carried = min(num_bytes, max(room, 0.0))
        if paced:
            self._arriving.append((now, now + paced / rate, carried))
        self._free_s = max(self._free_s, now) + carried / rate
        return _Flight(num_bytes, carried, now, waiting_s, now + waiting_s, self._free_s)

    def _waiting_s(self, now: float) -> float:
        """Seconds that a byte waits which comes now: for the bytes that are in the buffer, not for those that still come."""
        self._arriving = [each for each in self._arriving if each[1] > now]
        coming = sum(
            num_bytes * (until - now) / (until - begins) for begins, until, num_bytes in self._arriving
        )
        return max(self._free_s - now - coming / self._link.goodput, 0.0)


class _Connection:
    """One TCP connection in one direction: its window, flight by flight.

    Args:
        link: the link.
        draw: returns random numbers in [0, 1).

    Attributes:
        ready: pieces that are to be sent: when they are ready, and their bytes.
    """

    def __init__(self, link: LinkFigures, draw: Callable[[], float]) -> None:
        self._link, self._draw = link, draw
        full = link.goodput * link.rtt_s
        self._most = max(2 * full, FIRST_WINDOW)
        self._window, self._ended = float(FIRST_WINDOW), 0.0
        self._is_cubic = link.congestion == "cubic"
        self._threshold = HYSTART * full if self._is_cubic else math.inf
        self._decrease = DECREASE if self._is_cubic else 0.5
        self._crest = self._age_s = 0.0
        self._left = self._under_way = self._cut = 0.0
        self._until_loss = self._gap()
        self.ready: deque[tuple[float, float]] = deque()

    def next(self, now: float) -> float:
        """Bytes of the flight that leaves now."""
        while self.ready and self.ready[0][0] <= now:
            self._left += self.ready.popleft()[1]
        if not self._under_way:
            self._rest(now - self._ended)
        num_bytes = min(max(self._window - self._under_way, 0.0), self._left)
        if num_bytes < min(MSS, self._left):  # a sender waits for room for a segment
            return 0.0
        self._left, self._under_way = self._left - num_bytes, self._under_way + num_bytes
        return num_bytes

    def hear(self, flight: _Flight, now: float) -> None:
        """What the acknowledgements of a flight say."""
        lost = flight.num_bytes - flight.carried
        self._until_loss -= flight.carried
        while self._until_loss <= 0:
            lost += min(MSS, flight.num_bytes)
            self._until_loss += self._gap()
        self._grow(flight)
        self._left, self._ended = self._left + min(lost, flight.num_bytes), flight.ends
        self._under_way -= flight.num_bytes
        if lost and self._link.restarts and flight.sent >= self._cut:
            before, self._crest = self._crest, self._window
            if self._window < before:
                self._crest *= 1 - self._decrease / 2  # leaves room for others (RFC 9438, 4.7)
            self._window = self._threshold = max((1 - self._decrease) * self._window, 2.0 * MSS)
            self._age_s, self._cut = 0.0, now

    def _grow(self, flight: _Flight) -> None:
        if self._window < self._threshold:
            if self._is_cubic and flight.num_bytes >= HYSTART_LEAST and flight.waited_s >= self._noticed_s:
                self._threshold = self._window = self._window + HYSTART_LEAST
            elif 2 * self._under_way > self._window:
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

    @property
    def _noticed_s(self) -> float:
        """Seconds of waiting at which cubic leaves slow start."""
        return min(max(self._link.rtt_s / 8, 0.004), 0.016)

    def forget(self) -> float:
        """Bytes that were to be sent; they are followed no more."""
        left = self._left + sum(size for _, size in self.ready)
        self._left = self._under_way = 0.0
        self.ready.clear()
        return left

    def _rest(self, idle_s: float) -> None:
        """The connection was idle for this time."""
        halvings = min(idle_s / (self._link.rtt_s + RTO_S), 60.0) // 1
        if halvings > 0 and self._link.restarts:
            self._threshold = max(self._threshold, 0.75 * self._window)
            self._window = max(self._window / 2**halvings, min(FIRST_WINDOW, self._window))

    def _gap(self) -> float:
        """Bytes until the next loss."""
        loss = self._link.loss
        return MSS * math.log(1 - self._draw()) / math.log1p(-loss) if loss else math.inf
