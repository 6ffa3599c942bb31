"""What a process knows of its run, and what follows from that without an event: the state of `rules`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from msgspec import structs

from ..coordinator.messages import (
    NO_GENERATION,
    Back,
    Beat,
    Change,
    Generation,
    Lanes,
    Terms,
    Welcome,
)
from ..net.members import Member


class Standing(Enum):
    """What a process is to the run."""

    MEMBER = "member"
    """It takes part."""
    JOINING = "joining"
    """It has no base yet: its calls reach no other region."""
    FOLLOWING = "following"
    """It lands what the members land, from the log of one of them."""
    OUT = "out"
    """The others have gone on without it, or the run has ended in an error."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of the training loop; `number` is its place in their order.

    Attributes:
        members: who took part when it was made, when `changes` counted.
        losses: decisions on losses before the present attempt, in which `parties` take part.
        has: whether this member holds its result.
        stands: whether the result counts by a decision.
    """

    number: int
    what: str
    members: tuple[Member, ...]
    changes: int
    losses: int = 0
    parties: tuple[Member, ...] = ()
    begun: bool = False
    has: bool = False
    stands: bool = False


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process's part in a run.

    Attributes:
        run: the id of the run; `generation`: of the newest coordinator that it has heeded; `token`: see `Welcome`.
        answers: whether the coordinator is there, and decides; `undecided`: why one that is there does not.
        roster: who takes part in calls that are made now; lost members may still be among them.
        changes: changes that count now; `announced` has those that it knows and that do not count yet, without gaps.
        due: changes up to this number count from the next step on.
        losses: decisions on losses; `lost` has the tickets of all members that were lost.
        calls: those that have not completed, in order.
        first, last: numbers of the first and the last call that it takes part in; `last` is None until it leaves.
        submitted, done: numbers of the last call that was made, and of the last that has completed.
        frozen: whether no call may complete before a decision.
        missed: members that this process misses, with the reason; `late`: those that are only late.
        lanes: how to reach all processes that it knows; `gone` has those that have left before they came in.
        paired: by region, the process to which this one is connected.
        meeting: processes to which it connects now; `unpaired`: why that has failed the last time.
        closed: processes that have closed their connections to the coordinator, and when; `cut`: those whose connections were
            reset, or on which nothing came through, and when.
        notes: by region, its last word about why it leaves.
    """

    me: Member
    terms: Terms
    standing: Standing
    run: str = ""
    generation: Generation = NO_GENERATION
    token: str = ""
    answers: bool = True
    undecided: str = ""
    roster: tuple[Member, ...] = ()
    changes: int = 0
    announced: tuple[Change, ...] = ()
    due: int = 0
    losses: int = 0
    lost: frozenset[int] = frozenset()
    calls: tuple[Call, ...] = ()
    first: int = 1
    last: int | None = None
    submitted: int = 0
    done: int = 0
    frozen: bool = False
    missed: Mapping[Member, str] = field(default_factory=dict)
    late: frozenset[Member] = frozenset()
    lanes: Mapping[Member, Lanes] = field(default_factory=dict)
    gone: frozenset[Member] = frozenset()
    paired: Mapping[int, Member] = field(default_factory=dict)
    meeting: frozenset[Member] = frozenset()
    unpaired: Mapping[Member, str] = field(default_factory=dict)
    closed: Mapping[Member, float] = field(default_factory=dict)
    cut: Mapping[Member, float] = field(default_factory=dict)
    notes: Mapping[int, str] = field(default_factory=dict)

    @property
    def members(self) -> tuple[Member, ...]:
        """Who takes part now, as far as this process knows; itself in any case."""
        return tuple(sorted({self.me, *self.without_lost(self.roster)}))

    @property
    def knows(self) -> int:
        """The number of the newest change that this process knows."""
        return self.changes + len(self.announced)

    @property
    def is_leaving(self) -> bool:
        """Whether this process takes part in no call from the next step on."""
        return self.standing is Standing.MEMBER and any(
            each.kind == "leave" and each.member == self.me and each.number <= self.due
            for each in self.announced
        )

    @property
    def in_hand(self) -> Call | None:
        """The call of the attempt in hand."""
        first = self.calls[0] if self.calls else None
        return first if first is not None and first.begun and not self.frozen else None

    def without_lost(self, members: Iterable[Member]) -> tuple[Member, ...]:
        return tuple(sorted(each for each in members if each.ticket not in self.lost))

    def is_there(self, member: Member) -> bool:
        """Whether a process takes part or is to come in, as far as this one knows."""
        return member in self.lanes and member not in self.gone and member.ticket not in self.lost

    def wants(self, other: Member) -> bool:
        """Whether a connection to a process is wanted: either end may have begun again meanwhile."""
        newest = max((each for each in self.lanes if each.region == other.region), default=None)
        return other != self.me and other == newest and self.is_there(other)

    def is_paired(self, other: Member) -> bool:
        return self.paired.get(other.region) == other


def enter(welcome: Welcome, terms: Terms) -> Part:
    """The part of a process that has met the others, or that joins. It is to connect to all in `meeting`."""
    members = tuple(place.member for place in welcome.members)
    lanes = {welcome.me: (), **dict((*welcome.members, *welcome.others))}
    return Part(
        me=welcome.me,
        terms=terms,
        standing=Standing.JOINING if welcome.joins else Standing.MEMBER,
        run=welcome.run,
        generation=welcome.generation,
        token=welcome.token,
        roster=() if welcome.joins else members,
        losses=welcome.losses,
        lanes=lanes,
        meeting=frozenset(lanes) - {welcome.me},
    )


def back(part: Part) -> Back:
    """What a process says to a coordinator that it calls again."""
    return Back(
        run=part.run,
        member=part.me,
        token=part.token,
        generation=part.generation,
        losses=part.losses,
        changes=part.knows,
    )


def beat(part: Part, said: Beat) -> Beat:
    """A heartbeat, from what the process itself says of its waits and its training."""
    call = part.in_hand
    return structs.replace(
        said,
        op=0 if call is None else call.number,
        awaits=None if call is None else said.awaits,
        changes=part.changes,
        losses=part.losses,
        members=part.without_lost(part.roster) if part.standing is Standing.MEMBER else (),
    )
