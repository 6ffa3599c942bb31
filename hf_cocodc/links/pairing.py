"""Connections for transfers between the members of an elastic run and the processes that come in."""

import logging
from collections.abc import Callable, Iterable
from functools import partial

from ..errors import LinkError
from ..meeting.presence import Member
from ..threads import NativeThread
from .pairs import side_by_side
from .terms import Reach, Terms

logger = logging.getLogger(__name__)

_AT_ONCE = 8
"""Members to which a newcomer connects at the same time."""


class Pairing:
    """Makes the connections of one process. A newcomer asks a member for them with the message "pair".

    Args:
        reach: how this process reaches the others.
        terms: of the run.
        paired: called with a newcomer that has asked, once the connections to it are there.
    """

    def __init__(self, reach: Reach, terms: Terms, paired: Callable[[Member], None]) -> None:
        self._me, self._wire, self._presence = reach.me, reach.wire, reach.presence
        self._terms, self._paired = terms, paired
        self._newest = {member.region: member for member in reach.members or ()}
        self._asking: set[Member] = set()
        self._is_over = False
        reach.presence.on("pair", lambda member, content: self._answer(member))

    def has(self, member: Member) -> bool:
        """Whether this process is connected to that one: not to an earlier process of its region."""
        return self._newest.get(member.region) == member and member.region in self._wire.regions

    def make(self, members: Iterable[Member]) -> None:
        """Connect to members; blocks. Raises LinkError if it does not succeed in time, or if one of them is lost."""
        wanted = [member for member in members if member != self._me and not self.has(member)]
        for member in wanted:
            self._presence.tell(member, "pair")

        def look() -> None:
            if gone := set(wanted).difference(self._presence.members):
                raise LinkError(f"region {min(gone).region} has gone.")

        side_by_side([partial(self._connect, member) for member in wanted], _AT_ONCE, look)

    def end(self) -> None:
        """This process leaves. Connections that are still being made are of no use."""
        self._is_over = True

    def _answer(self, member: Member) -> None:
        """A newcomer asks: it is connected, unless it is already, or is being connected."""
        if self.has(member) or member in self._asking:
            return
        self._asking.add(member)

        def connect() -> None:
            try:
                self._connect(member)
            except LinkError as error:  # a newcomer that cannot be reached must not disturb the run
                logger.warning("region %d cannot come in yet: %s", member.region, error)
            else:
                self._paired(member)
            finally:
                self._asking.discard(member)

        NativeThread(connect, "hf_cocodc-pair").start()

    def _connect(self, member: Member) -> None:
        self._wire.drop(member.region)  # an earlier process of that region, which has left
        low, high = sorted((self._me.ticket, member.ticket))
        key = f"{self._terms.prefix}/pair/{low}-{high}"
        self._wire.connect(member.region, key, self._terms.store(), partial(self._claim, member))

    def _claim(self, member: Member) -> bool:
        """Whether a connection is wanted: either end may have begun again meanwhile, and a thread of the first try still live."""
        newest = max((each for each in self._presence.members if each.region == member.region), default=None)
        if self._is_over or newest != member:
            return False
        self._newest[member.region] = member
        return True
