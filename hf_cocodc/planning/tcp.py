"""The time of a transfer over TCP: round trips, slow start, losses, the rate; and the codec and the outer step at its ends."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..links.pairs import MAX_CONNECTIONS, connections_for
from .course import Carried, Part

MSS, MTU = 1448, 1500
"""Payload bytes of a full TCP segment with time stamps, and bytes of its packet."""
FIRST_WINDOW = 10 * MSS
"""Bytes in flight of a new connection, or of one that was idle (RFC 6928)."""
RTO_S = 0.2
"""Linux halves the window of an idle connection each round trip plus this time."""
DECREASE = 0.3
"""Share of its window by which a connection shrinks after a loss (cubic)."""
FRIENDLY = 0.53
"""Segments by which cubic's window grows in a round trip behind slow start, like Reno's (RFC 9438, 4.3)."""
HYSTART = 0.55
"""Share of the link's window at which cubic leaves slow start: when acknowledgements fill half of a round trip, and as much more
as comes before it notices. The one constant here that is fitted, to `tests.benchmarks.plan`."""
OVERHEAD_S = 1e-3
"""Seconds of a transfer for what belongs to no byte: threads that wake up, the trailer."""
LIMIT = 0.9
"""Share of the link's rate that a region should send at most. A region that sends more fills the buffer before the link; packets
then wait there, or are dropped."""
FOLLOWED = 64
"""Pieces of a message, and round trips of a piece, that are followed one by one; later ones take as long as in the mean."""
TRIALS = 8
"""Trainings that are played where packets get lost, for settings that are reported; the mean of them counts."""


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


class Codes(NamedTuple):
    """What the ends of a transfer do, for one fragment; seconds of the link's thread.

    Attributes:
        messages: messages of the codec's conversation, one after the other.
        scatters: whether a message travels to the region that averages it, and its mean back.
        encode_s: to encode all that this region sends.
        decode_s: to decode all that it receives, and to find the mean.
        piece_bytes: bytes of a piece: pieces are encoded while others travel.
        step_s: of the outer step, if the link's thread takes it.
    """

    messages: int = 1
    scatters: bool = False
    encode_s: float = 0.0
    decode_s: float = 0.0
    piece_bytes: int = 1 << 20
    step_s: float = 0.0


class TcpLine:
    """A line over TCP connections, as a link's thread uses them: one transfer after the other, piece by piece.

    Args:
        link: the link.
        connections: to each other region.
        others: number of other regions.
        limit: payload bytes per second that a region sends at most.
        codes: by the bytes of a fragment's transfer, what its ends do.
        seed: of the random numbers that decide which packets are lost.
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
        self._link, self._limit, self._codes = link, limit, codes
        self._others = others
        self._free_s = 0.0
        draw = random.Random(seed).random
        # a transfer ends when both directions have ended; without losses they are equal
        self._directions = [
            [_Connection(link, draw) for _ in range(connections * others)]
            for _ in range(2 if link.loss else 1)
        ]

    def carry(self, part: Part, sent_s: float) -> Carried:
        codes = self._codes[part.num_bytes]
        begin = max(sent_s, self._free_s)
        ends = begin + OVERHEAD_S
        for _ in range(codes.messages):
            ends += self._message_s(part.num_bytes / codes.messages, codes, ends)
        self._free_s = ends + codes.step_s
        return Carried(self._free_s, ends - begin, codes.step_s)

    def _message_s(self, num_bytes: float, codes: Codes, begin: float) -> float:
        """Seconds from the first piece that is encoded to the last that is decoded."""
        half_s = self._link.rtt_s / 2
        pieces = max(math.ceil(num_bytes / codes.piece_bytes), self._others)
        encode_s, decode_s = codes.encode_s / codes.messages, codes.decode_s / codes.messages
        # each piece waits until it is encoded, and until the limit allows it
        between_s = max(encode_s, num_bytes / self._limit) / pieces
        # a region sends nothing before the other one has asked for it: the request takes half a round trip
        first_s = max(encode_s / pieces, half_s)
        wire_s = max(
            self._wire_s(each, num_bytes, pieces, between_s, begin + first_s) for each in self._directions
        )
        arrived_s = first_s + wire_s + half_s
        if codes.scatters:
            arrived_s += half_s + num_bytes / pieces / self._link.goodput
        all_sent_s = encode_s / pieces + (pieces - 1) * between_s
        return max(arrived_s + decode_s / pieces, all_sent_s + decode_s)

    def _wire_s(
        self, connections: list["_Connection"], num_bytes: float, pieces: int, between_s: float, begin: float
    ) -> float:
        """Seconds until the last byte of a message has left, in one direction."""
        ends, size, followed = begin, num_bytes / pieces, min(pieces, FOLLOWED)
        for index in range(followed):
            connection = connections[index % len(connections)]
            ends = max(ends, connection.send(size, begin + index * between_s))
        each_s = max(
            between_s, size / self._link.goodput, size / connections[0].steady_rate / len(connections)
        )
        return max(ends - begin, followed * size / self._link.goodput) + (pieces - followed) * each_s


class _Connection:
    """One TCP connection in one direction: its window, in round trips.

    Args:
        link: the link.
        draw: returns random numbers in [0, 1).

    Attributes:
        steady_rate: bytes per second of a long transfer.
    """

    def __init__(self, link: LinkFigures, draw: Callable[[], float]) -> None:
        self._link, self._draw = link, draw
        self._full = link.goodput * link.rtt_s
        self._window, self._ended = float(FIRST_WINDOW), 0.0
        self._threshold = HYSTART * self._full if link.congestion == "cubic" else math.inf
        aim = link.window_of_loss
        # with this growth in a round trip, growth and losses are in balance at the window `aim`
        self._growth = FRIENDLY * MSS if math.isinf(aim) else DECREASE * link.loss * aim**2 / MSS
        self.steady_rate = min(aim, self._full) / link.rtt_s if link.rtt_s else link.goodput

    def send(self, num_bytes: float, ready: float) -> float:
        """The time at which the last of so many bytes leaves that are ready at a time."""
        begin = max(ready, self._ended)
        self._rest(begin - self._ended)
        link, left, seconds = self._link, num_bytes, 0.0
        for _ in range(FOLLOWED):
            flow = min(self._window, self._full)
            if left <= self._window or (flow >= self._full and not link.loss):
                seconds += left / link.goodput + link.rtt_s * self._meets_loss(left)
                left = 0.0
                break
            left, seconds = left - flow, seconds + link.rtt_s
            if not self._meets_loss(flow):
                self._grow()
        if left:  # a long transfer: losses and growth are in balance
            seconds += left / self.steady_rate
        self._ended = begin + seconds
        return self._ended

    def _meets_loss(self, num_bytes: float) -> bool:
        """Whether one of the packets gets lost; the window then shrinks."""
        loss = self._link.loss
        lost = bool(loss) and self._draw() > (1 - loss) ** (num_bytes / MSS)
        if lost and not math.isinf(self._link.window_of_loss):
            self._grow()  # until the sender hears of it, a round trip later
            self._window = self._threshold = max((1 - DECREASE) * self._window, 2.0 * MSS)
        return lost

    def _grow(self) -> None:
        """A round trip in which the window was full."""
        slow = min(2 * self._window, self._threshold)
        grown = slow if self._window < self._threshold else self._window + self._growth
        self._window = min(grown, 2 * self._full)

    def _rest(self, idle_s: float) -> None:
        """The connection was idle for this time."""
        halvings = min(idle_s / (self._link.rtt_s + RTO_S), 60.0) // 1
        if halvings and self._link.restarts:
            self._threshold = max(self._threshold, 0.75 * self._window)
            self._window = max(self._window / 2**halvings, min(FIRST_WINDOW, self._window))


def wanted_connections(link: LinkFigures, limit: float) -> int:
    """Connections that fill the link in spite of losses, at least as many as a region chooses by itself.

    Args:
        link: the link.
        limit: payload bytes per second that a region sends at most.
    """
    by_itself = connections_for(link.rtt_s, limit)
    for_loss = math.ceil(limit * link.rtt_s / link.window_of_loss)
    return min(max(by_itself, for_loss), MAX_CONNECTIONS)
