"""What a process needs to take part in an elastic run, and what it is to the run."""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from ..meeting.presence import Member, Presence
from ..meeting.verdict import Decision, Report
from .wire import Wire

AUTO_GRACE_S = 5.0
"""With grace "auto", a member may be late for so many seconds after training has begun to wait for it."""

Events = deque[tuple[str, dict[str, Any]]]
"""What happened, for the journal: pairs of a kind and facts."""


class State(Enum):
    """What a process is to the run."""

    MEMBER = "member"
    """It takes part."""
    JOINING = "joining"
    """It has no base yet: its calls reach no other region."""
    FOLLOWING = "following"
    """It lands what the members land, from the log of one of them."""
    OUT = "out"
    """The others have gone on without it."""


class Agreement(Protocol):
    """Agrees with the other members on losses (`meeting.changes.Changes`)."""

    def begin(self, lost: Mapping[Member, str]) -> None: ...

    def expect(self, number: int) -> None: ...

    def close(self) -> None: ...


Agree = Callable[[Callable[[], Report], Callable[[Decision], None]], Agreement]
"""Makes it, from two functions that it calls in a thread of its own: one freezes this member, one takes a decision."""


class Reach(NamedTuple):
    """How a process of a region reaches the others.

    Attributes:
        me: the process.
        wire: connections for transfers, to all members; a newcomer has none yet.
        presence: connections for signs of life, to all members.
        agree: makes what agrees on losses.
        members: who takes part from the start, this process too; None for a newcomer.
    """

    me: Member
    wire: Wire
    presence: Presence
    agree: Agree
    members: Collection[Member] | None = None


class Terms(NamedTuple):
    """What holds for all members of a run.

    Attributes:
        store: returns a client of the store, for the connections to newcomers.
        prefix: unique to the run; keys of these connections begin with it.
        limit: number of members at most; None for no limit.
        grace_s: seconds that a member may be late for a transfer before the others go on without it; "auto": until training
            has waited for it for `AUTO_GRACE_S` seconds, so that all that the overlap hides is free; None for no limit.
    """

    store: Callable[[], dist.Store]
    prefix: str
    limit: int | None = None
    grace_s: float | str | None = None
