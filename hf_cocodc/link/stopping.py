"""All regions stop at one inner step, on which they agree through the coordinator.

A request to stop also travels with the next transfer, but that may be a whole round away, and launchers kill after some
seconds. So a region that must stop asks the coordinator, which asks every region for a promise: an inner step that it does not
pass before it has the answer. The answer is the largest of all promises: no region has passed it, and every region knows it in
time. If a promise is missing for too long, the answer is not to stop. Several regions may ask one after the other, and be
answered more than once: the first decision to stop counts.

A coordinator that hangs must not stop training: a promise binds for a limited time. A decision that comes later is ignored,
with a warning. Other regions may have heard of it in time: they stop and leave, and this region ends with RegionLostError at
its next transfer. All go on from the newest checkpoint that every region has.

The ranks of a region know the same at the same step: at the end of each they begin to find the largest of a few numbers, and
look at those of the step before, which have arrived by then. So a leader with other ranks promises one step more: at that step
all ranks hold until it tells them the answer.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from .group import Largest, RegionGroup

logger = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""Seconds for which a promise binds: the coordinator waits half as long for all promises."""
_END_S = 1.0


class StopAgreement:
    """One rank's part in the agreement. `group` is None in a region of one rank.

    Args:
        request: on the leader, asks the coordinator to stop all regions, for a reason; None in a run of one region.
        decides: whether regions agree in this way on a step to stop at; else only ranks tell each other what they are asked for.

    Attributes:
        is_done: whether this rank's training is complete; after `passes`, whether that of any rank is.
        asked: why this region must stop; empty if it need not, or if only another rank of it knows.
        reasons: by region, why it has asked to stop; known after a decision to stop.
    """

    def __init__(
        self, group: RegionGroup | None, request: Callable[[str], None] | None, decides: bool = True
    ) -> None:
        self._group, self._request, self.decides = group, request, decides
        self._changed = threading.Condition()
        self._flags: Largest | None = None
        self._has_started = False
        self._begin(0)

    def _begin(self, passed: int) -> None:
        self.asked, self.is_done = "", False
        self.reasons: Mapping[int, str] = {}
        self._passed = passed
        self._has_requested = self._is_known = False
        self._hold = 0  # this region has promised not to pass this step; 0 if it has not
        self._until = 0.0  # then the promise binds no longer
        self._answer: tuple[int, Mapping[int, str]] = (0, {})
        self._stop_at = 0  # the answer, once all ranks have it
        self._held = 0  # where the ranks have held

    def start(self, inner_step: int) -> None:
        """Take part from now on; training has made `inner_step` steps. A collective call of the region's ranks."""
        with self._changed:
            self._passed = inner_step
        self._has_started = True
        self._tell_ranks(inner_step)

    def ask(self, reason: str) -> None:
        """Ask all regions to stop. May be called by a signal's handler: it takes no lock."""
        self.asked = self.asked or reason

    def poll(self) -> None:
        """On the leader, in any thread, now and then: pass on a request, also while training waits for a transfer."""
        if self.asked and self._request is not None and self.decides:
            with self._changed:
                is_first, self._has_requested = not self._has_requested, True
            if is_first:
                self._request(self.asked)

    def ask_again(self) -> None:
        """On the leader: what it has asked may never have been heard. The coordinator was away."""
        with self._changed:
            self._has_requested = bool(self._answer[0])

    def promise(self) -> int:
        """On the leader, in the client's thread: the inner step that this region does not pass before it has the answer."""
        with self._changed:
            if self._answer[0]:
                return self._answer[0]
            self._hold = self._passed + (1 if self._group is None else 2)
            self._until = time.monotonic() + PATIENCE_S
            return self._hold

    def answer(self, step: int, whys: Mapping[int, str]) -> None:
        """On the leader, in the client's thread: all stop at `step`, for these reasons; or, if it is 0, do not."""
        with self._changed:
            if self._answer[0]:
                return
            if step and (not self._hold or step < self._hold):
                logger.warning(
                    "regions stop at step %d, but this region has heard of it too late: it trains on, until a transfer tells it "
                    "to stop or the others have left. The coordinator (regions.coordinator) has not answered for a while; check "
                    "its machine.",
                    step,
                )
            elif step:
                self._answer = step, dict(whys)
            elif self._hold:
                self._give_up()
            self._changed.notify_all()

    def passes(self, inner_step: int) -> bool:
        """Call at the end of an inner step: whether training may go on to the next one; if not, all regions stop here.

        Waits for the answer if this region has promised not to pass this step without it. A collective call of its ranks.
        Raises LinkError if another rank has died.
        """
        self.poll()
        if self._group is not None:
            self._hear_ranks(self._group, inner_step)
        with self._changed:  # until the step counts as passed: the next promise must not name it
            if self._group is None:
                self._stop_at, self.reasons = self._answer_at(inner_step)
            if 0 < self._stop_at <= inner_step:  # less: all have promised before they knew where they begin
                return False
            self._passed = inner_step
        self._tell_ranks(inner_step)
        return True

    def forget(self, inner_step: int) -> None:
        """Training goes on from another step in all regions: forget requests and decisions. Does nothing before `start`."""
        if self._has_started:
            self._told()
            with self._changed:
                self._begin(inner_step)
            self._tell_ranks(inner_step)

    def close(self) -> None:
        """Take no part any more."""
        flags, self._flags = self._flags, None
        if flags is not None:
            flags.abandon(_END_S)  # all ranks have begun it, unless one has failed

    def _answer_at(self, inner_step: int) -> tuple[int, Mapping[int, str]]:
        """The answer as far as it counts at this step; waits for it if the region has promised that. Under the lock."""
        while self._hold and inner_step >= self._hold and not self._answer[0]:
            rest_s = self._until - time.monotonic()
            if rest_s > 0:
                self._changed.wait(rest_s)
            else:
                self._give_up()
        return self._answer

    def _give_up(self) -> None:
        self._hold = 0
        logger.warning(
            "regions could not agree through the coordinator on a step to stop at: the request to stop travels with the next "
            "transfer."
        )

    def _tell_ranks(self, inner_step: int) -> None:
        """Tell all ranks whether this one was asked to stop, and, on the leader, the step to hold at."""
        if self._group is not None:
            with self._changed:
                asks = self._group.rank + 1 if self.asked and not self._is_known else 0
                numbers = asks, self._hold, int(self.is_done)
            self._flags = self._group.begin_largest(numbers, f"the end of step {inner_step}")

    def _told(self) -> tuple[int, int, bool]:
        """What all ranks have told at the end of the step before: a rank that was asked, from 1, the step to hold at, and whether
        the training of any is complete.
        """
        flags, self._flags = self._flags, None
        asker, hold, done = (0, 0, 0) if flags is None else flags.wait()
        return asker, hold, bool(done)

    def _hear_ranks(self, group: RegionGroup, inner_step: int) -> None:
        """Do what all ranks know: take over a request, and wait together for the answer."""
        asker, hold, done = self._told()
        self.is_done = self.is_done or done
        if asker and not self._is_known:
            self._is_known = True
            self.asked = group.say(asker - 1, self.asked, "why the region must stop")
            self.poll()
            if group.rank == 0 and self._request is None and self.decides:
                self.answer(self.promise(), {0: self.asked})
        if not hold or inner_step < hold or hold == self._held:
            return
        self._held = hold

        def find() -> tuple[int, Mapping[int, str]]:
            with self._changed:
                return self._answer_at(inner_step)

        group.lead(find, "the step to stop at", lambda agreed: [agreed[0], list(agreed[1].items())])
        step, reasons = group.heard
        self._stop_at, self.reasons = step, dict(reasons)
