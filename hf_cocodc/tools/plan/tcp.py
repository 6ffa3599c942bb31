"""The time of a transfer over TCP: requests, pieces, the rate limit; and the codec and the outer step at its ends."""

import math
import random
from typing import NamedTuple

from ...links.pairs import MAX_CONNECTIONS, connections_for
from .course import Cargo, Carried
from .flights import Direction, LinkFigures

OVERHEAD_S = 1e-3
"""Seconds of a transfer for what belongs to no byte: threads that wake up, the trailer."""
LIMIT = 0.9
"""Share of the link's rate that a region should send at most. A region that sends more fills the buffer before the link; packets
then wait there, or are dropped."""
TRIALS = 8
"""Trainings that are played where packets get lost, for settings that are reported; the mean of them counts."""


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
        self._link, self._codes = link, codes
        self._others = others
        self._free_s = 0.0
        draw = random.Random(seed).random
        # a transfer ends when both directions have ended; without losses they are equal
        places = link, connections * others, limit, draw
        self._directions = [Direction(*places) for _ in range(2 if link.loss else 1)]

    def carry(self, part: Cargo, sent_s: float) -> Carried:
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
        between_s = encode_s / pieces
        # a region sends nothing before the other one has asked for it: the request takes half a round trip
        first_s = max(encode_s / pieces, half_s)
        first = begin + first_s
        wire_s = (
            max(each.send(num_bytes / pieces, pieces, first, between_s) for each in self._directions) - first
        )
        arrived_s = first_s + wire_s + half_s
        if codes.scatters:
            arrived_s += half_s + num_bytes / pieces / self._link.goodput
        all_sent_s = encode_s / pieces + (pieces - 1) * between_s
        return max(arrived_s + decode_s / pieces, all_sent_s + decode_s)


def wanted_connections(link: LinkFigures, limit: float) -> int:
    """Connections that fill the link in spite of losses, at least as many as a region chooses by itself.

    Args:
        link: the link.
        limit: payload bytes per second that a region sends at most.
    """
    by_itself = connections_for(link.rtt_s, limit)
    for_loss = math.ceil(limit * link.rtt_s / link.window_of_loss)
    return min(max(by_itself, for_loss), MAX_CONNECTIONS)
