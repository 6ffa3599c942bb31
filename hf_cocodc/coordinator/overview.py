"""A run as `hf-cocodc status` shows it."""

from collections.abc import Mapping
from typing import Any

from .messages import Member
from .rules import Run, Seat

_UNHEARD_S = 2.0
"""A process that has sent nothing for so long is compared as it was."""


def overview(
    state: Run, now: float, gone: Mapping[Member, Seat], ways: Mapping[Member, Mapping[int, str]]
) -> dict[str, Any]:
    """A run as JSON can express it.

    Args:
        gone: members without a connection, as they were heard of last.
        ways: by which way each process is connected to each region.
    """
    seats = {member: seat for member, seat in gone.items() if member in state.members}
    seats.update({seat.member: seat for seat in state.seats.values()})
    newest = max((seat for seat in seats.values()), key=lambda seat: seat.beat.landed_at, default=None)
    has_landed = newest is not None and newest.beat.landed_at >= 0
    connected = {seat.member for seat in state.seats.values()}
    return {
        "run": state.run,
        "name": state.name,
        "phase": phase(state),
        "epoch": state.losses + state.applied,
        "losses": state.losses,
        "members": [
            _member(member, seats.get(member), member in connected, seats, state, now)
            for member in state.members
        ],
        "newcomers": [
            {"region": member.region, "ticket": member.ticket, "address": state.hosts.get(member, "")}
            for member in sorted(state.newcomers)
            if member not in state.members
        ],
        "ways": {
            f"{member.region}-{other}": way
            for member in state.members
            for other, way in sorted(ways.get(member, {}).items())
            if member.region < other and other in {each.region for each in state.members}
        },
        "waiting": sorted(hello.region for hello in state.hellos.values()),
        "elastic": state.terms.elastic,
        "count": state.terms.count,
        "least": state.terms.least,
        "most": state.terms.most,
        "max_steps": max((seat.beat.max_steps for seat in seats.values()), default=0) or None,
        "landed_at": newest.beat.landed_at if newest and has_landed else None,
        "landed_s": newest.beat.landed_s + now - newest.beat_at if newest and has_landed else 0.0,
        "ended": state.ended
        and {"how": state.ended.how, "step": state.ended.step, "place": state.ended.place},
    }


def phase(state: Run) -> str:
    """What a run does: "gathering" its regions, "trains", "recovering", "silent" (no member is connected) or "ended"."""
    if state.ended is not None and not state.hellos:
        return "ended"
    if not state.trains:
        return "gathering"
    if state.alone_since is not None:
        return "silent"
    return "recovering" if state.recovers else "trains"


def _member(
    member: Member,
    seat: Seat | None,
    is_connected: bool,
    seats: Mapping[Member, Seat],
    state: Run,
    now: float,
) -> dict[str, Any]:
    doing = "" if seat is None else seat.beat.doing
    if not is_connected:
        doing = "is not connected to the coordinator"
    return {
        "region": member.region,
        "ticket": member.ticket,
        "address": state.hosts.get(member, ""),
        "step": 0 if seat is None else seat.beat.step,
        "behind": 0 if seat is None else _behind(seat, seats, now),
        "moved_s": 0.0 if seat is None else now - seat.moved_at,
        "awaits": None if seat is None else seat.beat.awaits,
        "doing": doing,
        "heard_s": None if seat is None else now - seat.heard_at,
    }


def _behind(seat: Seat, seats: Mapping[Member, Seat], now: float) -> int:
    """Inner steps that a member is behind, as far as that is certain: others may have said theirs a moment later."""
    is_heard = now - seat.beat_at <= _UNHEARD_S
    ahead = [each.beat.step for each in seats.values() if not is_heard or each.beat_at <= seat.beat_at]
    return max((step - seat.beat.step for step in ahead), default=0)
