"""All regions agree on the inner step at which they stop, through the store.

A request to stop also travels with the next transfer, but that may be a whole round away, and launchers kill after some
seconds. Therefore a rank that must stop writes a request into the store. Every rank looks for requests, several times per
second. If there is one, it promises a step: it has not passed this step, and it waits there until a decision is known. The
decision is the largest of all promises: no rank has passed it, and every rank knows it in time. It is made once, by
`compare_set`. If a promise is missing for too long, the decision is not to stop, and the request travels with a transfer.

Leaders agree through the store of the run. Ranks of a region agree with their leader through the region's own store: they
tell it why they must stop, promise when it asks them to, and do what it has decided. The leader listens to them even if the
store of the run has failed. A region without others tries again if a promise was missing: no transfer would help it.

A store that hangs must not stop training. Only threads of the agreement call a store. They promise after the store has
answered, and a promise binds for a limited time: twice `PATIENCE_S` on leaders, three times on other ranks, which hear of
the decision a little later. Then training goes on, and a decision to stop that comes later is ignored, with a warning.
Other regions may have heard of it in time, if the store has hung just then: they stop and leave, and this region ends with
RegionLostError at its next transfer. All go on from the newest checkpoint that every region has.
"""

import contextlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..threads import NativeThread
from .promises import NO, decision_in, decision_of, promise_in, reason_in
from .region_store import RegionStore
from .sealed import within
from .store import peek
from .values import Reader, number_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.2
PATIENCE_S = 10.0
"""Seconds to wait for all promises."""


class Circle(NamedTuple):
    """Members that agree through one store: the leaders of all regions, or the ranks of one region.

    Attributes:
        store: with a prefix that only this circle uses, on a connection that only this agreement uses.
        member: this one, from 0.
        num_members: number of members.
    """

    store: dist.Store
    member: int
    num_members: int


class StopAgreement:
    """One rank's part in the agreement.

    Args:
        regions: the circle of the regions; None on ranks that are not the leader, and in a run of one region.
        inside: the store of this region's ranks; None in a region of one rank.
    """

    def __init__(self, regions: Circle | None, inside: RegionStore | None) -> None:
        self._regions, self._ranks = regions, None
        self._inside = inside  # on the leader, the store lives as long as it is referenced
        if inside is not None:
            self._ranks = Circle(within("stop", inside.connect()), inside.rank, inside.num_ranks)
        self._num_forgotten = 0
        self._search = _Search(regions, self._ranks)

    @property
    def asked(self) -> str:
        """Why this region must stop; empty if it need not, or if only another rank of it knows."""
        return self._search.asked

    @property
    def reasons(self) -> list[str]:
        """For each region, why it asked to stop; empty if it did not. Known after a decision to stop."""
        return self._search.decision["reasons"]

    def start(self, inner_step: int) -> None:
        """Take part from now on; training has made `inner_step` steps."""
        self._search.start(inner_step)

    def ask(self, reason: str) -> None:
        """Ask all regions to stop. May be called by a signal's handler: it takes no lock."""
        self._search.asked = self._search.asked or reason

    def passes(self, inner_step: int) -> bool:
        """Call at the end of an inner step: whether training may go on to the next one; if not, all regions stop here.

        Waits for the decision if this rank has promised not to pass this step without it.
        """
        return self._search.passes(inner_step)

    def forget(self, inner_step: int) -> None:
        """Training goes on from another step, on all ranks of all regions: requests and decisions no longer count.

        Does nothing before `start`.
        """
        if self._search.has_started:
            self._search.end()
            self._num_forgotten += 1
            found = [
                circle and circle._replace(store=within(f"again{self._num_forgotten}", circle.store))
                for circle in (self._regions, self._ranks)
            ]
            self._search = _Search(*found)
            self._search.start(inner_step)

    def close(self) -> None:
        """Take no part any more. Other ranks that wait for this one give up after `PATIENCE_S`."""
        self._search.end()
        self._search.join(1.0)  # with a limit: the store's machine may be unreachable


class _Search:
    """The search for one decision to stop, from `start` until it is found or `end` is called.

    Attributes:
        asked: see `StopAgreement`.
        decision: what counts for this rank: a step to stop at and each region's reason; the step is 0 if there is none.
    """

    def __init__(self, regions: Circle | None, ranks: Circle | None) -> None:
        self.asked = ""
        self.decision = NO
        self._regions, self._ranks = regions, ranks
        self._follows = ranks is not None and ranks.member > 0
        self._passed = 0
        self._promised: int | None = None
        self._until = 0.0  # the promise binds no longer
        self._attempt = 0  # the leader's attempts to agree with its ranks
        self._reader = Reader()
        self._changed = threading.Condition()
        self._ended = threading.Event()
        calls = [self._work, *([self._listen] if ranks is not None and not self._follows else [])]
        self._threads = [NativeThread(call, "hf_cocodc-stopping") for call in calls]
        self.has_started = False

    def start(self, inner_step: int) -> None:
        self.has_started = True
        self._passed = inner_step
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ended.set()

    def join(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        for thread in self._threads if self.has_started else []:
            thread.join(max(until - time.monotonic(), 0.0))

    def passes(self, inner_step: int) -> bool:
        """See `StopAgreement`."""
        with self._changed:
            while self._promised is not None and inner_step >= self._promised and not self.decision["step"]:
                rest_s = self._until - time.monotonic()
                if rest_s > 0:
                    self._changed.wait(rest_s)
                else:
                    self._settle(NO)
            if self.decision["step"] == inner_step:
                return False
            self._passed = inner_step
            return True

    def _work(self) -> None:
        with contextlib.suppress(RuntimeError):  # a store has ended
            if self._follows:
                self._follow()
            else:
                self._lead()
                while self._regions is None and not self.decision["step"] and not self._ended.is_set():
                    self._lead()
        self._settle(NO)

    def _listen(self) -> None:
        """On the leader: learn that another rank of the region must stop."""
        assert self._ranks is not None
        with contextlib.suppress(RuntimeError):
            while not (why := self._read(reason_in, self._ranks, "asked")):
                if self._ended.wait(POLL_S):
                    return
            self.asked = self.asked or why

    def _lead(self) -> None:
        """On the leader: wait for a request, and find the decision of all."""
        while not self.asked and not self._is_asked():
            if self._ended.wait(POLL_S):
                return
        if self._regions is not None:
            self._regions.store.set("asked", "1")
            self._regions.store.check(["asked"])  # `set` returns before the store has answered
        deadline, attempt = time.monotonic() + PATIENCE_S, self._attempt
        own = self._promise(2 * PATIENCE_S)
        told: list[dict[str, Any]] | None = [own]
        if self._ranks is not None:
            self._ranks.store.set(f"{attempt}/begin", "1")
            _tell(self._ranks, f"{attempt}/promise", own)
            told = self._told(self._ranks, f"{attempt}/promise", deadline)
        if told is not None:
            self.asked = self.asked or next((each["reason"] for each in told if each["reason"]), "")
            own = {"step": max(each["step"] for each in told), "reason": self.asked}
            told = [own]
        if self._regions is None:
            self._settle(decision_of(told))
            return
        if told is not None:
            _tell(self._regions, "promise", own)
            told = self._told(self._regions, "promise", deadline)
        found = self._regions.store.compare_set("decision", "", json.dumps(decision_of(told)))
        decision = self._reader.read(decision_in, found, "decision") or NO
        fits = decision["step"] >= own["step"] and len(decision["reasons"]) == self._regions.num_members
        self._settle(decision if fits else NO)

    def _is_asked(self) -> bool:
        """Whether another region has asked all to stop."""
        return self._regions is not None and bool(self._read(number_of, self._regions, "asked"))

    def _follow(self) -> None:
        """On the other ranks: promise when the leader asks for it, and do what it has decided; until it decides to stop."""
        assert self._ranks is not None
        for attempt in itertools.count():
            if not self._hears(f"{attempt}/begin", POLL_S):
                return
            _tell(self._ranks, f"{attempt}/promise", self._promise(3 * PATIENCE_S))
            decision = None
            while decision is None:
                if not self._hears(f"{attempt}/decision", POLL_S / 4):
                    return
                decision = self._read(decision_in, self._ranks, f"{attempt}/decision")
                if decision is None and self._ended.wait(POLL_S):
                    return
            self._settle(decision)
            if self.decision["step"]:
                return

    def _hears(self, key: str, poll_s: float) -> bool:
        """Wait until the leader has written `key`, and tell it meanwhile if this rank must stop; False at the end."""
        assert self._ranks is not None
        while not self._ranks.store.check([key]):
            if self.asked:
                self._ranks.store.set("asked", self.asked)
            if self._ended.wait(poll_s):
                return False
        return True

    def _promise(self, binds_s: float) -> dict[str, Any]:
        with self._changed:
            self._promised = self._passed + 1
            self._until = time.monotonic() + binds_s
            return {"step": self._promised, "reason": self.asked}

    def _settle(self, decision: dict[str, Any]) -> None:
        """Take a decision, or give up if it is not to stop; only once for each promise. The leader passes it on."""
        with self._changed:
            if self.decision["step"]:
                return
            if decision["step"] and (self._promised is None or time.monotonic() > self._until):
                logger.warning(
                    "regions stop at step %d, but this rank has heard of it too late: it trains on, until a transfer tells it to "
                    "stop or the others have left. The store (regions.store) has not answered for a while; check its machine.",
                    decision["step"],
                )
                decision = NO
            if self._promised is None:
                return
            if decision["step"]:
                self.decision = decision
            else:
                self._promised = None
                if not self._ended.is_set():
                    logger.warning(
                        "regions could not agree through the store on a step to stop at: the request to stop travels with the "
                        "next transfer."
                    )
            if self._ranks is not None and not self._follows:
                with contextlib.suppress(RuntimeError):
                    self._ranks.store.set(f"{self._attempt}/decision", json.dumps(decision))
                self._attempt += 1
            self._changed.notify_all()

    def _told(self, circle: Circle, name: str, deadline: float) -> list[dict[str, Any]] | None:
        """What all members have told under this name; None if one is missing at the deadline, or the answer was late."""
        keys = [f"{name}/{member}" for member in range(circle.num_members)]
        while True:
            if circle.store.check(keys):
                found = [self._read(promise_in, circle, key) for key in keys]
                told = [each for each in found if each is not None]
                if len(told) == len(keys):
                    return None if time.monotonic() > deadline else told
            if time.monotonic() > deadline or self._ended.wait(POLL_S / 4):
                return None

    def _read(self, parse: Callable[[bytes, str], T], circle: Circle, key: str) -> T | None:
        """What a member has written; None if nothing is there, or what no member writes."""
        return self._reader.read(parse, peek(circle.store, key), key)


def _tell(circle: Circle, name: str, what: dict[str, Any]) -> None:
    circle.store.set(f"{name}/{circle.member}", json.dumps(what))
