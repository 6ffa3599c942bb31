"""How long a transfer takes through a storage: requests, looks for what the others have written, and bytes."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...coordinator import standby
from ...net.mailbox import FAR_S, LIFE_LOOK_S, NEAR_S, PERIOD_S, PIECE, PIECES
from .course import Cargo, Carried, Course
from .transfers import OVERHEAD_S, Codes

_SOCKETS = 2
"""Between two regions: for trailers and what they say about a transfer, and for payloads."""


@dataclass(frozen=True)
class StorageFigures:
    """A storage as a link between regions.

    Attributes:
        write_s, read_s, delete_s: seconds of a request with hardly any bytes.
        up, down: bits per second that a region writes, and reads.
        is_near: whether it is a folder, where regions look more often.
    """

    write_s: float
    read_s: float
    delete_s: float
    up: float
    down: float
    is_near: bool = False

    window_of_loss = math.inf

    @property
    def rtt_s(self) -> float:
        """Seconds of a message and its answer, where both are looked for all the time."""
        return 2 * (self.write_s + self.read_s)

    @property
    def rate(self) -> float:
        """Bits per second of what is written and read at the same time."""
        return min(self.up, self.down)

    @property
    def goodput(self) -> float:
        """Payload bytes per second at that rate."""
        return self.rate / 8

    def setting(self) -> dict[str, Any]:
        """The figures as a plan shows them."""
        requests = {"write_ms": self.write_s, "read_ms": self.read_s, "delete_ms": self.delete_s}
        rates = {"up_mbit": self.up / 1e6, "down_mbit": self.down / 1e6}
        return {**{name: 1e3 * seconds for name, seconds in requests.items()}, **rates}


class StorageLine:
    """A line through a storage (`net.mailbox`), as a link's thread uses it: one transfer after the other.

    A region writes at most `limit` bytes per second; `codes` is by the bytes of a fragment's transfer.
    """

    def __init__(self, link: StorageFigures, regions: int, limit: float, codes: Mapping[int, Codes]) -> None:
        self._link, self._limit, self._codes = link, limit, codes
        # a transfer waits for the last of all sockets, each of which is looked at now and then
        sockets = _SOCKETS * regions * (regions - 1)
        self._share = sockets / (sockets + 1)
        self._free_s = self._rested_since = 0.0

    def carry(self, part: Cargo, sent_s: float) -> Carried:
        codes = self._codes[part.num_bytes]
        begin = max(sent_s, self._free_s)
        ends = begin + OVERHEAD_S
        trips = codes.messages * (2 if codes.scatters else 1)
        for _ in range(trips):
            ends += self._trip_s(part.num_bytes / trips, ends)
        ends += codes.encode_s + codes.decode_s
        ends += self._trip_s(0, ends)  # each region says that it has the mean
        self._free_s = ends
        return Carried(ends, ends - begin)

    def rest(self) -> None:
        """Begin anew at second 0, after a rest as long as a first one."""
        self._free_s = self._rested_since = 0.0

    def _trip_s(self, num_bytes: float, begin: float) -> float:
        """Seconds from the first byte that is written to the last that is read by all."""
        link = self._link
        look_s = self._share * gap_s(begin - self._rested_since, link.read_s, link.is_near)
        # full objects go side by side; while some are written, earlier ones are read, and those before deleted
        turns = max(math.ceil(num_bytes / PIECE / PIECES), 1)
        write_s = turns * link.write_s + num_bytes / self._limit
        read_s = link.read_s + num_bytes / (link.down / 8) + (turns - 1) * max(link.read_s, link.delete_s)
        last = 1 / turns
        # a request is carried out halfway: the look that finds an object begins before the write of it ends
        half_s = (link.write_s + link.read_s) / 2
        took_s = look_s + max(write_s + last * read_s, last * write_s + read_s) - half_s
        self._rested_since = begin + took_s
        return took_s


def requests_an_hour(
    link: StorageFigures, regions: int, course: Course, trips: int, serves: bool
) -> Counter[str]:
    """The requests of a region, by kind; `serves`: of the one that serves as coordinator. A transfer has `trips`, see `Codes`."""
    others, read_s, period_s = regions - 1, link.read_s, PERIOD_S[not link.is_near]
    sends = course.sends_per_s
    objects = math.ceil(max(course.bytes_per_s / max(sends, 1e-9) / others / trips / PIECE, 1))
    calls = others if serves else 1  # whoever serves does not call itself through the storage
    # a coordinator gives half as many signs of life as it gets
    said_s, heard_s = (2 * period_s, period_s) if serves else (period_s, 2 * period_s)
    carried = others * sends * (trips * objects + 1)
    looks = calls * _looks_a_second(heard_s, read_s, link.is_near)
    looks += _SOCKETS * others * _looks_a_second(1 / sends if sends else math.inf, read_s, link.is_near)
    looks += others * sends * (trips * objects - 1)
    look_s = LIFE_LOOK_S[not link.is_near] + others * read_s
    reads = looks + others / look_s + _reads_beside_sockets(serves, read_s, link.is_near)
    a_second = {
        "write": calls / said_s + carried + 1 / period_s,
        "read": reads,
        "delete": calls / heard_s + carried,
    }
    return Counter({kind: round(3600 * count) for kind, count in a_second.items()})


def gap_s(rest_s: float, request_s: float, is_near: bool) -> float:
    """Seconds between two looks for an object, once nothing has come for `rest_s`; a look is a request of `request_s`."""
    return _looked(rest_s, request_s, is_near)[1]


def _looks_a_second(period_s: float, request_s: float, is_near: bool) -> float:
    """Looks a second for the objects of a socket, of which one comes in each `period_s`: another one is looked for at once."""
    looks, gap = _looked(max(period_s - request_s, 0.0), request_s, is_near)
    return (1 + looks) / max(period_s, (1 + looks) * request_s) if period_s < math.inf else 1 / gap


def _looked(rest_s: float, request_s: float, is_near: bool) -> tuple[float, float]:
    """How often a socket has looked for an object when nothing has come for `rest_s`, and the seconds until it does so again."""
    (wait_s, longest_s), looks = NEAR_S if is_near else FAR_S, 0
    while rest_s > wait_s + request_s and wait_s < longest_s:
        rest_s -= wait_s + request_s
        wait_s, looks = min(1.5 * wait_s, longest_s), looks + 1
    gap = wait_s + request_s
    return looks + (rest_s / gap if rest_s < math.inf else 0.0), gap


def _reads_beside_sockets(serves: bool, request_s: float, is_near: bool) -> float:
    """What whoever serves reads in a second, or whoever stands by, apart from their sockets."""
    if not serves:
        return 1 / (standby.LOOK_S + request_s)
    call_s = (standby.NEAR_S if is_near else standby.FAR_S) + request_s
    return 1 / call_s + 3 / standby.SURE_S
