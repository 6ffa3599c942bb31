"""The signs of life of another member, and what they mean: it is late, or it is lost."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .caller import Member
from .channel import Channel
from .heard import whole

LINGER_S = 0.5
"""Seconds that a patient member waits for what a member that has left has sent on other connections."""
_LONGEST_NOTE = 2000


class Seen(NamedTuple):
    """What is known of a region. Times are seconds ago.

    Attributes:
        heard_s: since anything came from it.
        inner_step: its last inner step that we know.
        moved_s: since `inner_step` changed.
        done: the last operation that it has completed.
        awaits: the region that it waits for; None if there is none.
        lost: how it was lost: "closed", "left", "silent", "stuck" or "late"; empty if it was not.
        doing: what it does besides training, in words; empty if nothing.
        behind: inner steps by which this member was ahead when the last sign came (negative: it was behind). 0 where that is no
            more than either makes between two signs: the sign was under way for a while.
    """

    heard_s: float
    inner_step: int
    moved_s: float
    done: int
    awaits: int | None
    lost: str
    doing: str = ""
    behind: int = 0


class Waits(NamedTuple):
    """What this member waits for, from which region, since when (by the clock of its presence)."""

    region: int
    what: str
    since: float


@dataclass
class Peer:
    """Another member, and the connection to it. Times are by the clock of presence.

    Attributes:
        word: its last word, "left" or "closed"; empty while it has said neither.
        ended_at: when the connection ended; None while it exists.
        lost, behind: see Seen.
        own_step: this member's inner step when the last sign came.
    """

    member: Member
    channel: Channel
    heard_at: float
    moved_at: float
    inner_step: int = 0
    done: int = 0
    awaits: int | None = None
    note: str | None = None
    word: str = ""
    ended_at: float | None = None
    lost: str = ""
    doing: str = ""
    behind: int = 0
    own_step: int = 0

    def seen(self, now: float) -> Seen:
        ages = now - self.heard_at, now - self.moved_at
        told = self.done, self.awaits, self.lost, self.doing, self.behind
        return Seen(ages[0], self.inner_step, ages[1], *told)

    def hear(self, kind: Any, content: dict[str, Any], now: float, own_step: int) -> None:
        """Learn from a message: a sign of life, a note or a last word. `own_step`: inner steps that this member has made."""
        self.heard_at = now
        if kind == "alive":
            with contextlib.suppress(ValueError):  # another version, or mad: it is alive
                self._learn(content, now, own_step)
        elif kind == "note":
            self.note = str(content.get("text"))[:_LONGEST_NOTE]
        elif kind in ("left", "closed"):
            self.word = kind

    def _learn(self, content: dict[str, Any], now: float, own_step: int) -> None:
        awaits = content.get("awaits")
        step, done = whole(content.get("step")), whole(content.get("done"))
        self.awaits = None if awaits is None else whole(awaits)
        passed = max(own_step - self.own_step, step - self.inner_step)
        self.behind = own_step - step if abs(own_step - step) > passed else 0
        self.own_step = own_step
        self.moved_at = now if step != self.inner_step else self.moved_at
        self.inner_step, self.done = step, done
        self.doing = str(content.get("doing", ""))[:200]


class Loss(NamedTuple):
    """How a member was lost (see Seen), and why, in words."""

    how: str
    why: str


@dataclass
class Patience:
    """When a member counts as lost.

    Attributes:
        timeout_s: seconds of silence, or of reading nothing.
        stuck_timeout_s: seconds without an inner step, while the member is waited for.
        only_awaited: count a member as lost only while it is waited for.
        grace: returns for how many seconds a member may be waited for; None for no limit.
    """

    timeout_s: float
    stuck_timeout_s: float
    only_awaited: bool
    grace: Callable[[], float | None] = lambda: None

    def loss_of(self, peer: Peer, waits: Waits | None, now: float) -> Loss | None:
        """How `peer` is lost at this time, if it is. `waits`: what this member waits for, from `peer` or another."""
        if waits is not None and waits.region != peer.member.region:
            waits = None
        if waits is None and self.only_awaited:
            return None
        since = -math.inf if waits is None else waits.since
        gone_s = None if peer.ended_at is None else now - peer.ended_at
        if gone_s is not None and peer.word != "closed" and gone_s >= LINGER_S * self.only_awaited:
            if peer.word == "left":
                return Loss("left", "it has left" + (f": {peer.note}" if peer.note else ""))
            return Loss("closed", "its process has died: it has closed its connection")
        silent_s = now - (max(peer.heard_at, since) if self.only_awaited else peer.heard_at)
        if silent_s > self.timeout_s and (peer.word != "closed" or waits is not None):
            return Loss(
                "silent",
                f"it has given no sign of life for {silent_s:.0f} s (regions.timeout_s={self.timeout_s:g}): its process hangs, "
                "or the network between the regions is down",
            )
        unsent_at = peer.channel.unsent_since
        if unsent_at is not None and time.monotonic() - unsent_at > self.timeout_s and not self.only_awaited:
            return Loss("silent", f"it has read nothing for {time.monotonic() - unsent_at:.0f} s")
        return None if waits is None else self._loss_of_awaited(peer, waits, now)

    def _loss_of_awaited(self, peer: Peer, waits: Waits, now: float) -> Loss | None:
        stuck_s = now - max(peer.moved_at, waits.since)
        if stuck_s > self.stuck_timeout_s:
            return Loss(
                "stuck",
                f"it is alive, but has been stuck at step {peer.inner_step} for {stuck_s:.0f} s "
                f"(regions.stuck_timeout_s={self.stuck_timeout_s:g})",
            )
        grace_s = self.grace()
        if grace_s is not None and now - waits.since > grace_s:
            return Loss("late", f"it is late by more than {grace_s:g} s (regions.grace_s)")
        return None
