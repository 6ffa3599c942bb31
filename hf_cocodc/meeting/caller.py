"""A connection of presence that belongs to no member yet, or not any more, and what names a member."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .channel import Channel
from .heard import whole
from .proof import Proof


class Member(NamedTuple):
    """A process of a region that takes part.

    Attributes:
        region: the region's id.
        ticket: a number that no other process of this run has; 0 in a run whose members never change.
    """

    region: int
    ticket: int

    def calls(self, other: "Member") -> bool:
        """Whether this member calls the other one, and not the other this one."""
        return (self.ticket, self.region) > (other.ticket, other.region)


@dataclass
class Caller:
    """A connection of no member.

    Attributes:
        member: whom we call, or who has called us; None before it has greeted.
        stage: "connects" and "asks" if we call; "came", "waits" and "welcomed" if we are called; "leaves".
        until: it is closed then.
        greeting: what it has said, once it has.
        is_theirs: whether the other end has called.
        proof: of the conversation, once it has begun.
    """

    channel: Channel
    member: Member | None
    stage: str
    until: float
    greeting: dict[str, Any] = field(default_factory=dict)
    is_theirs: bool = False
    proof: Proof | None = None


def member_in(said: Any) -> Member | None:
    """The member that a message names, if it is one."""
    try:
        region, ticket = said
        return Member(whole(region), whole(ticket))
    except (TypeError, ValueError):
        return None
