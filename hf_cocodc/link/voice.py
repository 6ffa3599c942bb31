"""The ranks of a region whose shards differ (FSDP2) have one voice at the coordinator: a pure function.

Each rank exchanges its shards with the same rank of every other region (its lane), and has a `rules.Part` of its own. Only the
leader (rank 0) is connected to the coordinator. It tells all ranks what the coordinator says, and what it tells the coordinator
holds for all of them:

- A region holds a result when all its ranks do. A rank says so once all regions hold it in its lane. When all ranks have said it,
  the leader tells them, and they complete the call. So if any rank completes a call, all ranks of all regions hold its result.
- A region reports when all its ranks have. Where one of them misses a region, the leader asks the others. Until the decision no
  rank is told to complete a call.
- A region is connected to a newcomer when all its ranks are.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from ..coordinator.messages import (
    Ask,
    Beat,
    ControlMessage,
    Decided,
    Note,
    Paired,
    Report,
    Stop,
    Text,
    Whole,
)
from ..net.members import Member

LEADER = 0


class Holds(ControlMessage, frozen=True, kw_only=True):
    """A rank holds the result of an attempt, and knows that all regions do in its lane. Within a region only.

    `alone`: the leaders of all regions make this call, and no other rank.
    """

    number: Whole
    losses: Whole
    alone: bool = False


class AllHold(ControlMessage, frozen=True, kw_only=True):
    """All ranks of all parties hold the result of an attempt: it is complete. Within a region only."""

    number: Whole
    losses: Whole


class RankEnded(ControlMessage, frozen=True, kw_only=True):
    """Another rank has ended without a word, or in an error. Within a region only."""

    why: Text


@dataclass(frozen=True, kw_only=True)
class Voice:
    """What the leader knows of its ranks.

    Attributes:
        losses: decisions on losses so far.
        reports: of ranks, for the decision that is sought; no rank completes a call while there is one.
        holds: which ranks have said `Holds` of an attempt (number, losses).
        paired: which ranks are connected to a process.
    """

    num_ranks: int
    losses: int = 0
    reports: Mapping[int, Report] = field(default_factory=dict)
    holds: Mapping[tuple[int, int], frozenset[int]] = field(default_factory=dict)
    paired: Mapping[Member, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class ToRank:
    """Let a rank hear a message; all ranks if it is None."""

    rank: int | None
    message: Any


@dataclass(frozen=True)
class ToCoordinator:
    message: Any


Effect = ToRank | ToCoordinator


def heard(voice: Voice, message: Any) -> tuple[Voice, tuple[Effect, ...]]:
    """The coordinator has said something."""
    match message:
        case Decided(decision=decision) if decision.number >= voice.losses:
            voice = replace(
                voice,
                losses=decision.number + 1,
                reports={},
                holds={
                    attempt: ranks for attempt, ranks in voice.holds.items() if attempt[1] > decision.number
                },
            )
    return voice, (ToRank(None, message),)


def said(voice: Voice, rank: int, message: Any) -> tuple[Voice, tuple[Effect, ...]]:
    """A rank has said something to the coordinator, or to its region."""
    match message:
        case Report():
            return _reported(voice, rank, message)
        case Holds():
            return _held(voice, rank, message)
        case Paired(member=member):
            ranks = voice.paired.get(member, frozenset()) | {rank}
            voice = replace(voice, paired={**voice.paired, member: ranks})
            return voice, (ToCoordinator(message),) if len(ranks) == voice.num_ranks else ()
        case RankEnded():
            return voice, (ToRank(None, message),)
        case Note() | Stop():
            return voice, (ToCoordinator(message),)
        case _:
            return voice, (ToCoordinator(message),) if rank == LEADER else ()


def _reported(voice: Voice, rank: int, report: Report) -> tuple[Voice, tuple[Effect, ...]]:
    if report.number < voice.losses:  # there is a decision
        return voice, ()
    if report.number > voice.losses:  # a newcomer has heard of it from the log
        voice = replace(voice, losses=report.number, reports={})
    is_first = not voice.reports
    voice = replace(voice, reports={**voice.reports, rank: report})
    if len(voice.reports) == voice.num_ranks:
        return voice, (ToCoordinator(of_all_ranks(voice.reports)),)
    return voice, (ToRank(None, Ask(number=report.number)),) if is_first else ()


def _held(voice: Voice, rank: int, message: Holds) -> tuple[Voice, tuple[Effect, ...]]:
    attempt = message.number, message.losses
    if message.losses < voice.losses:
        return voice, ()
    ranks = voice.holds.get(attempt, frozenset()) | {rank}
    if voice.reports or (len(ranks) < voice.num_ranks and not message.alone):
        return replace(voice, holds={**voice.holds, attempt: ranks}), ()
    holds = {each: of for each, of in voice.holds.items() if each != attempt}
    return replace(voice, holds=holds), (ToRank(None, AllHold(number=message.number, losses=message.losses)),)


def of_all_ranks(reports: Mapping[int, Report]) -> Report:
    """The report of a region. What one rank has completed, all hold. It holds the next result if all ranks do.

    >>> me = Member(0, 1)
    >>> one = Report(number=0, member=me, first=1, done=4, has=False)
    >>> merged = of_all_ranks({0: one, 1: structs.replace(one, done=3, has=True)})
    >>> merged.done, merged.has
    (4, False)
    """
    done = max(report.done for report in reports.values())
    lost: dict[Member, str] = {}
    for rank, report in sorted(reports.items()):
        for member, why in zip(report.lost, report.whys, strict=True):
            lost.setdefault(member, why if rank == LEADER else f"{why} (rank {rank})")
    lasts = [report.last for report in reports.values()]
    leader = reports[LEADER]
    return structs.replace(
        leader,
        # a rank that has made its last call may be ahead of the others, which make the same ones
        last=None if None in lasts else max(last for last in lasts if last is not None),
        first=min(report.first for report in reports.values()),
        done=done,
        has=all(report.has and report.done == done for report in reports.values()),
        lost=tuple(sorted(lost)),
        whys=tuple(lost[each] for each in sorted(lost)),
    )


def beat_of_all_ranks(beats: Mapping[int, Beat]) -> Beat:
    """The heartbeat of a region: of its leader, and of the rank that has waited longest for another region."""
    leader = beats[LEADER]
    waits = [beat for beat in beats.values() if beat.awaits is not None]
    if not waits:
        return leader
    slowest = functools.reduce(lambda one, other: other if other.waited_s > one.waited_s else one, waits)
    return structs.replace(
        leader, op=slowest.op, awaits=slowest.awaits, waited_s=slowest.waited_s, idle_s=slowest.idle_s
    )
