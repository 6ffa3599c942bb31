"""Who takes part in an elastic run, as the training thread of one member sees it.

A region comes in, or leaves, after the landing of a transfer whose trailers say so in all regions: from the next inner step on.
All members land the same transfers at the same steps, and thus change their rosters alike. Losses are another matter: they
concern the calls in hand (`ops`), and take effect at once.
"""

import threading
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ..meeting.presence import Member
from .trailer import Ending, Trailer


class RollCall(NamedTuple):
    """What regions tell each other while they wait for more regions.

    Attributes:
        admits: the ticket of a newcomer that may come in; 0 if there is none.
        leaves: whether the region leaves now.
    """

    admits: int
    leaves: bool


class Change(NamedTuple):
    """A member came in ("join") or left ("left")."""

    kind: str
    member: Member


class Roster:
    """The members, and the newcomers that this member has heard of.

    Args:
        members: who takes part now.
        changes: members that have come in or left so far, in this run.
        limit: number of members at most; None for no limit.

    Attributes:
        members: who takes part in calls from now on, in ascending order. Lost members may still be among them.
        changes: members that have come in or left so far.
    """

    def __init__(self, members: Iterable[Member], changes: int = 0, limit: int | None = None) -> None:
        self.members = tuple(sorted(members))
        self.changes = changes
        self._limit = limit
        self._newcomers: dict[int, Member] = {}
        self._away: set[int] = set()
        self._paired: set[int] = set()
        self._ready: set[int] = set()
        self._entering: set[int] = set()
        self._leaving: set[int] = set()
        self._lock = threading.Lock()

    def has(self, member: Member) -> bool:
        """Whether it takes part, as far as this member knows."""
        return member in self.members

    def refuses(self, region: int, lost: Collection[int]) -> str | None:
        """Why a newcomer with this region id cannot come in now; None if it can."""
        present = [member for member in self.members if member.ticket not in lost]
        with self._lock:
            waiting = {m.region for ticket, m in self._newcomers.items() if ticket not in self._away}
        if region in {member.region for member in present} | waiting:
            return f"region {region} takes part already. If that process has died, try again in a moment"
        if self._limit is not None and len(present) + len(waiting) >= self._limit:
            return f"{len(present)} regions take part, and {len(waiting)} wait to come in: regions.max={self._limit}"
        return None

    def came(self, member: Member) -> None:
        """A process has connected its presence; if it is no member, it is a newcomer."""
        with self._lock:
            if member not in self.members:
                self._newcomers[member.ticket] = member

    def paired(self, member: Member) -> None:
        """The connections for transfers with a newcomer are there."""
        with self._lock:
            self._paired.add(member.ticket)

    def ready(self, member: Member) -> None:
        """A newcomer is less than one interval behind."""
        with self._lock:
            self._ready.add(member.ticket)

    def gone(self, member: Member) -> None:
        """A newcomer is lost before it came in."""
        with self._lock:
            self._ready.discard(member.ticket)
            self._away.add(
                member.ticket
            )  # others may not have noticed, and trailers on their way may admit it

    def admits(self, lost: Collection[int]) -> int:
        """The smallest ticket of a newcomer that may come in; 0 if there is none."""
        with self._lock:
            able = self._ready & self._paired & self._newcomers.keys()
        present = sum(member.ticket not in lost for member in self.members)
        if not able or (self._limit is not None and present >= self._limit):
            return 0
        return min(able)

    def landed(self, regions: Sequence[int], trailers: Sequence[Trailer], changes: int) -> None:
        """Note what the trailers of a transfer say; `changes`: those before it was sent.

        If the members have changed since, not all of them have had a say.
        """
        if changes != self.changes:
            return
        said = [RollCall(trailer.admits, trailer.ending is Ending.LEAVING) for trailer in trailers]
        self.called(regions, said)

    def is_leaving(self, region: int) -> bool:
        """Whether a region leaves when the members change next."""
        return region in self._leaving

    def called(self, regions: Sequence[int], said: Sequence[RollCall]) -> None:
        """Note the ticket that all members admit, if they admit the same one; and the regions that leave."""
        self._leaving |= {region for region, each in zip(regions, said, strict=True) if each.leaves}
        tickets = {each.admits for each in said}
        if len(tickets) == 1:
            ticket = tickets.pop()
            with self._lock:
                if ticket in self._newcomers:
                    self._entering.add(ticket)

    def apply(self, lost: Collection[int]) -> list[Change]:
        """Change the members by what was noted."""
        with self._lock:
            left = [member for member in self.members if member.region in self._leaving]
            came = [self._newcomers.pop(ticket) for ticket in sorted(self._entering)]
            self._entering, self._leaving = set(), set()
            stay = [each for each in self.members if each not in left and each.ticket not in lost]
            self.members = tuple(sorted(stay + came))
            self.changes += len(left) + len(came)
        return [Change("left", member) for member in left] + [Change("join", member) for member in came]
