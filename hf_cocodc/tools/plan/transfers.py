"""How long a transfer takes over TCP connections that share a link: a closed form of round trips, slow start and bytes."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...net.pairs import MAX_CONNECTIONS, connections_for
from .course import Cargo, Carried

OVERHEAD_S = 1e-3
"""Seconds of a transfer that no byte causes: threads that wake up, the trailer."""
LIMIT = 0.9
"""Most of the link's rate that a region should send: with more, packets wait in the buffer before the link, or are dropped."""
LATE, MARGIN = 1.15, 1.3
"""How much longer a transfer takes while training goes on than by itself: as a rule, and at most. Both are fitted to measurements
(docs/evidence/planner.md): kernels pace by their windows, and regions do not send at the same moment. Settings are chosen with
`MARGIN`, and forecast with `LATE`."""

MSS, MTU = 1448, 1500
"""Payload bytes of a full TCP segment with time stamps, and bytes of its packet."""
FIRST_WINDOW = 10 * MSS
"""Bytes in flight of a connection that is new, or was idle (RFC 6928)."""
LEAST_VARIANCE_S = 0.2
"""Linux halves the window of a connection each time that it was idle for its retransmission time-out: a round trip, and at least
this time."""


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

    def setting(self) -> dict[str, Any]:
        """The figures as a plan shows them."""
        return {
            "rtt_ms": 1e3 * self.rtt_s,
            "rate_mbit": self.rate / 1e6,
            "loss": self.loss,
            "congestion": self.congestion,
        }

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
    """A line over TCP connections, as a link's thread uses them: one transfer after the other.

    A region sends at most `limit` payload bytes per second; `codes` is by the bytes of a fragment's transfer. All connections
    together have one window: bytes that may be in flight.
    """

    def __init__(
        self, link: LinkFigures, connections: int, others: int, limit: float, codes: dict[int, Codes]
    ) -> None:
        self._link, self._codes, self._others = link, codes, others
        count = connections * others
        self._first = self._window = float(count * FIRST_WINDOW)
        self._rate = min(limit, link.goodput)
        if link.rtt_s:
            self._rate = min(self._rate, count * link.window_of_loss / link.rtt_s)
        self._full = self._rate * link.rtt_s  # the window at which the rate is reached
        self._free_s = self._rested_since = 0.0

    def carry(self, part: Cargo, sent_s: float) -> Carried:
        codes = self._codes[part.num_bytes]
        begin = max(sent_s, self._free_s)
        ends = begin + OVERHEAD_S
        for _ in range(codes.messages):
            ends += self._message_s(part.num_bytes / codes.messages, codes, ends)
        self._free_s = ends
        return Carried(ends, ends - begin)

    def rest(self) -> None:
        """Begin anew at second 0, with the windows as they are."""
        self._free_s = self._rested_since = 0.0

    def _message_s(self, num_bytes: float, codes: Codes, begin: float) -> float:
        """Seconds from the first piece that is encoded to the last that is decoded; pieces are encoded while others travel."""
        trips = 2 if codes.scatters else 1
        pieces = max(math.ceil(num_bytes / trips / codes.piece_bytes), self._others)
        encode_s, decode_s = codes.encode_s / codes.messages, codes.decode_s / codes.messages
        sent_s = self._sent_s(num_bytes, begin)
        # what comes is acknowledged half a round trip after the last byte has left
        self._rested_since = begin + sent_s + self._link.rtt_s / 2
        travel_s = sent_s + trips * self._link.rtt_s / 2
        return max(travel_s + (encode_s + decode_s) / pieces, encode_s + decode_s)

    def _sent_s(self, num_bytes: float, begin: float) -> float:
        """Seconds in which so many bytes leave: the window doubles with each round trip until the rate is reached."""
        rtt_s = self._link.rtt_s
        if not rtt_s:
            return num_bytes / self._rate
        window = self._window
        if self._link.restarts:
            halvings = max(begin - self._rested_since, 0.0) / (rtt_s + LEAST_VARIANCE_S) // 1
            window = max(window / 2 ** min(halvings, 60.0), self._first)
        # Linux takes a window for too small as long as half of it was in use
        self._window = max(min(window + num_bytes, 2 * self._full), self._first)
        slow_bytes = max(self._full - window, 0.0)
        if num_bytes <= slow_bytes:
            return math.log2(1 + num_bytes / window) * rtt_s
        return math.log2(max(self._full / window, 1.0)) * rtt_s + (num_bytes - slow_bytes) / self._rate


def wanted_connections(link: LinkFigures, limit: float) -> int:
    """Connections that send `limit` payload bytes per second in spite of losses; at least as many as a region would choose."""
    by_itself = connections_for(link.rtt_s, limit)
    for_loss = math.ceil(limit * link.rtt_s / link.window_of_loss)
    return min(max(by_itself, for_loss), MAX_CONNECTIONS)
