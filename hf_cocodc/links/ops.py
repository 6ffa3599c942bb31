"""The calls of an elastic link: in order, among the members that are there, and again if one of them is lost meanwhile.

A call completes when all its members hold its result: each tells the others "have". If a member is lost before that, the
survivors agree on the calls that stand (`meeting/changes.py`). All later ones are void: they are made again, from their
start and without the lost members. A call therefore either counts in all regions or in none.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..errors import LeftBehind, LinkError, RegionLostError
from ..meeting.heard import whole
from ..meeting.presence import Member, Presence
from ..threads import NativeThread, at_rest
from .calls import Call
from .op import Make, Op
from .view import View
from .wire import TAGS, Wire

_OPS, _LOSSES = 1 << 20, 16
"""Numbers of calls, and of losses, after which tags begin again: long before that, their operations have ended."""
_MOST_HAVES = 1000
"""Attempts of which others say that they hold the result, at most."""


class Ops:
    """Makes the calls of one member of a run, in order, in a thread of its own.

    A thread that hangs in a call that has become void is left alone, and another one takes its place.

    Args:
        me: this member.
        wire: connections to the other members.
        presence: tells the other members.
        lose: begins the agreement on the loss of members; called as lose(member, why), from any thread.
        retried: called as retried(op) when a call is to begin again.

    Attributes:
        first: number of the first call that this member takes part in.
        last: number of the last one, if this member leaves; None before.
        submitted: number of the last call that was made.
        done: number of the last call that has completed.
        losses: losses so far.
        lost: tickets of all members that were lost.
    """

    def __init__(
        self,
        me: Member,
        wire: Wire,
        presence: Presence,
        lose: Callable[[Member, str], None],
        retried: Callable[[Op], None],
    ) -> None:
        self._me, self._wire, self._presence = me, wire, presence
        self._lose, self._retried = lose, retried
        self.first = 1
        self.last: int | None = None
        self.submitted = self.done = self.losses = 0
        self.lost: frozenset[int] = frozenset()
        self._ops: list[Op] = []
        self._haves: dict[tuple[int, int], set[int]] = {}
        self._attempt: tuple[View, Call] | None = None
        self._frozen = self._closing = False
        self._failure: BaseException | None = None
        self._generation = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        presence.on("have", self._hear)

    def submit(
        self,
        what: str,
        members: Sequence[Member],
        changes: int,
        call: Make,
        finish: Callable[[Op, Any], Any],
    ) -> Op:
        """Make a call; returns at once."""
        with self._changed:
            self.submitted += 1
            op = Op(self.submitted, what, tuple(members), changes, call, finish)
            if self._failure is not None:
                op.fail(self._failure)
                return op
            if self._closing:
                op.fail(LinkError(f"the link is closed: {what} cannot travel."))
                return op
            self._ops.append(op)
            if self._thread is None:
                self._begin_to_work()
            self._changed.notify_all()
            return op

    def begin_after(self, submitted: int) -> None:
        """Take part from the call after this one on."""
        with self._changed:
            self.submitted = self.done = submitted
            self.first = submitted + 1

    def awaited_s(self) -> float | None:
        """Seconds for which the training thread has waited; None if it does not wait."""
        with self._changed:
            times = [op.awaited_at for op in self._ops if op.awaited_at is not None]
        return time.monotonic() - min(times) if times else None

    def freeze(self) -> tuple[int, bool]:
        """Complete nothing more until a decision. Returns the last call that has completed, and whether the next has a result."""
        self._presence.arrived()  # the time until the decision makes nobody late
        with self._changed:
            self._freeze()
            return self.done, bool(self._ops) and self._ops[0].has

    def decided(self, number: int, done: int, lost: Collection[int]) -> bool:
        """Go on without the members of these tickets, by decision `number`; calls up to `done` stand.

        Returns False if this member cannot go on: the others hold a result that it does not hold.
        """
        with self._changed:
            self._freeze()
            self.lost |= frozenset(lost)
            self.losses = number + 1
            self._haves = {key: told for key, told in self._haves.items() if key[1] >= self.losses}
            for op in self._ops:
                if op.number > done:
                    if op.parties:
                        self._void(op)
                elif op.has:
                    op.stands = True
                elif op.number >= self.first:
                    return False
            self._thaw()
            return True

    def thaw(self) -> None:
        """Complete calls again: this member has frozen for a decision that it knew already, from the log that it follows."""
        with self._changed:
            self._thaw()

    def fail(self, error: BaseException, generation: int | None = None) -> None:
        """End all calls, also later ones, with this error. `generation`: of the thread whose error it is."""
        with self._changed:
            if generation not in (None, self._generation):
                return  # the thread was left alone: its call is void
            if self._failure is None:
                self._failure = error
            self._freeze()
            ops, self._ops = self._ops, []
            self._generation += 1
            self._thread = None
            self._changed.notify_all()
        for op in ops:
            op.fail(error)

    def close(self, timeout_s: float) -> bool:
        """Wait for the calls that were made, then end. Returns whether all have completed."""
        until = time.monotonic() + timeout_s
        with self._changed:
            self._closing, self.last = True, self.submitted
            self._changed.notify_all()
            ended = self._changed.wait_for(lambda: not self._ops, max(until - time.monotonic(), 0))
            thread = self._thread
        if thread is not None and ended:
            thread.join(max(until - time.monotonic(), 0))
        if not ended:
            self.fail(LinkError("the link is closed."))
        return ended

    def _thaw(self) -> None:
        self._frozen = False
        if self._thread is None and self._ops:
            self._begin_to_work()
        self._changed.notify_all()

    def _begin_to_work(self) -> None:
        self._thread = NativeThread(self._work, "hf_cocodc-link", (self._generation,))
        self._thread.start()

    def _work(self, generation: int) -> None:
        while (op := self._next(generation)) is not None:
            try:
                attempt = self._begin(op, generation)
                if attempt is not None and self._hold(op, attempt, attempt[1].run(), generation):
                    self._complete(op, generation)
            except RegionLostError as error:
                self._miss(op, error, generation)
            except BaseException as error:  # every error must reach the training thread
                self.fail(error, generation)

    def _next(self, generation: int) -> Op | None:
        """The next call to be made; None if this thread is to end."""
        with self._changed:
            while generation == self._generation:
                if self._ops and not self._frozen:
                    return self._ops[0]
                if self._closing and not self._ops:
                    return None
                with at_rest():
                    self._changed.wait()
            return None

    def _begin(self, op: Op, generation: int) -> tuple[View, Call] | None:
        """Begin an attempt. None: a member is not there any more."""
        with self._changed:
            if generation != self._generation or self._frozen:
                return None
            op.parties = tuple(sorted(member for member in op.members if member.ticket not in self.lost))
            op.losses = self.losses
            regions = tuple(member.region for member in op.parties)
            gone = [m for m in op.parties if m != self._me and m not in self._presence.members]
            if not gone:
                base_tag = (op.number % _OPS) * _LOSSES * TAGS + (op.losses % _LOSSES) * TAGS
                view = self._wire.view(regions, base_tag, label=b"%d/%d" % (op.number, op.losses))
                assert op.call is not None
                self._attempt = view, op.call(view, regions)
                return self._attempt
            self._frozen = True
        for member in gone:
            self._lose(member, "it has gone")
        return None

    def _miss(self, op: Op, error: RegionLostError, generation: int) -> None:
        """A call failed because of another region: nothing goes on before all agree on what follows."""
        with self._changed:
            if generation != self._generation:
                return
            self._freeze()
            missed = [member for member in op.parties if member.region == error.region]
        for member in missed:
            self._lose(member, str(error))

    def _hold(self, op: Op, attempt: tuple[View, Call], found: Any, generation: int) -> bool:
        """Keep a result until it counts. Returns whether it may count: its attempt was not void."""
        with self._changed:
            if generation != self._generation or self._attempt is not attempt:
                return False
            self._attempt = None
            op.has, op.found, op.bytes_sent = True, found, attempt[1].bytes_sent
            self._haves.setdefault((op.number, op.losses), set()).add(self._me.ticket)
            told = op.parties, op.number, op.losses
        for member in told[0]:
            if member != self._me:
                self._presence.tell(member, "have", op=told[1], losses=told[2])
        return True

    def _complete(self, op: Op, generation: int) -> None:
        """Wait until a result counts, and end the call; or until it is void."""
        with self._changed:
            self._changed.wait_for(
                lambda: generation != self._generation or not op.has or self._may_complete(op)
            )
            if generation != self._generation or not op.has:
                return
            self.done = self._presence.done = op.number
            self._ops.pop(0)
            self._haves = {key: told for key, told in self._haves.items() if key[0] > self.done}
            self._changed.notify_all()
        try:
            op.end()
        except BaseException as error:
            op.fail(error)
            raise

    def _may_complete(self, op: Op) -> bool:
        if self._frozen:
            return False
        told = self._haves.get((op.number, op.losses), set())
        return op.stands or all(member.ticket in told for member in op.parties)

    def _hear(self, member: Member, content: dict[str, Any]) -> None:
        key = whole(content.get("op")), whole(content.get("losses"))
        with self._changed:
            if key[0] > self.done and key[1] >= self.losses:
                self._haves.setdefault(key, set()).add(member.ticket)
                if len(self._haves) > _MOST_HAVES:  # a newcomer hears some calls ahead, never so many
                    del self._haves[max(self._haves)]
                self._changed.notify_all()

    def _freeze(self) -> None:
        """Complete nothing, and leave the thread alone that is in an attempt: it may hang."""
        self._frozen = True
        if self._attempt is not None:
            view, call = self._attempt
            self._attempt = None
            view.revoke()
            self._ops[0].void_bytes += call.bytes_sent
            self._generation += 1
            self._thread = None

    def _void(self, op: Op) -> None:
        """Make a call again, from its start."""
        if op.has:
            op.void_bytes += op.bytes_sent
        op.has = op.stands = False
        op.found = None
        self._retried(op)


def left_behind(region: int, why: str = "it was late, or they could not reach it") -> LeftBehind:
    """The error of all calls of a member without which the others have gone on."""
    return LeftBehind(
        f"the other regions have gone on without region {region}: {why}. It may come back (hf-cocodc train --join)."
    )
