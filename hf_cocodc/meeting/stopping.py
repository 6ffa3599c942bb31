"""All regions agree on the inner step at which they stop, through the store.

A request to stop also travels with the next transfer, but that may be a whole round away, and launchers kill after some
seconds. Therefore a rank that must stop writes a request into the store. Every rank looks for requests, several times per
second. If there is one, it promises a step: it has not passed this step, and it waits there until a decision is known. The
decision is the largest of all promises: no rank has passed it, and every rank knows it in time. It is made once, by
`compare_set`. If a promise is missing for too long, the decision is not to stop, and the request travels with a transfer.

Ranks of a region agree with their leader through the region's own store; leaders agree through the store of the run.
"""

import contextlib
import json
import logging
import threading
import time
from typing import Any, NamedTuple

import torch.distributed as dist

from .region_store import RegionStore

logger = logging.getLogger(__name__)

POLL_S = 0.2
PATIENCE_S = 10.0
"""Seconds to wait for all promises."""
_NO: dict[str, Any] = {"step": 0, "reasons": []}


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

    Attributes:
        asked: why this region must stop; empty if it need not.
    """

    def __init__(self, regions: Circle | None, inside: RegionStore | None) -> None:
        self.asked = ""
        self._regions, self._ranks = regions, None
        self._inside = inside  # on the leader, the store lives as long as it is referenced
        if inside is not None:
            self._ranks = Circle(dist.PrefixStore("stop", inside.connect()), inside.rank, inside.num_ranks)
        self._passed = 0
        self._promised: int | None = None
        self._decision: dict[str, Any] | None = None
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hf_cocodc-stopping", daemon=True)

    def start(self, inner_step: int) -> None:
        """Take part from now on; training has made `inner_step` steps."""
        self._passed = inner_step
        self._thread.start()

    def ask(self, reason: str) -> None:
        """Ask all regions to stop. May be called by a signal's handler: it takes no lock."""
        self.asked = self.asked or reason

    def passes(self, inner_step: int) -> bool:
        """Call at the end of an inner step: whether training may go on to the next one; if not, all regions stop here.

        Waits for the decision if this rank has promised not to pass this step without it.
        """
        with self._changed:
            if self.asked and self._promised is None:
                self._promised = inner_step
            while (
                self._promised is not None and inner_step >= self._promised and not self._knows_the_decision
            ):
                self._changed.wait()
            if self._decision is not None and self._decision["step"] == inner_step:
                return False
            self._passed = inner_step
            return True

    @property
    def reasons(self) -> list[str]:
        """For each region, why it asked to stop; empty if it did not. Known after a decision to stop."""
        return self._decision["reasons"] if self._decision is not None else []

    def forget(self) -> None:
        """Training goes on from another step: the decision no longer counts."""
        self._decide(_NO)

    def close(self) -> None:
        """Take no part any more. Other ranks that wait for this one give up after `PATIENCE_S`."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)  # with a limit: the store's machine may be unreachable

    @property
    def _knows_the_decision(self) -> bool:
        return self._decision is not None or self._ended.is_set()

    def _work(self) -> None:
        decision = _NO
        try:
            while not self._is_asked():
                if self._ended.wait(POLL_S):
                    return
            decision = self._agree(time.monotonic() + PATIENCE_S)
        except RuntimeError:  # the store has ended
            pass
        finally:
            if decision is _NO and self._promised is not None and not self._ended.is_set():
                logger.warning(
                    "regions could not agree through the store on a step to stop at: the request to stop travels with the next "
                    "transfer."
                )
            self._decide(decision)
            if self._ranks is not None and not self._ranks.member:
                with contextlib.suppress(RuntimeError):
                    self._ranks.store.set("decision", json.dumps(decision))

    def _decide(self, decision: dict[str, Any]) -> None:
        with self._changed:
            self._decision = decision
            self._changed.notify_all()

    def _is_asked(self) -> bool:
        return bool(self.asked) or any(circle.store.check(["asked"]) for circle in self._circles)

    @property
    def _circles(self) -> list[Circle]:
        return [circle for circle in (self._regions, self._ranks) if circle is not None]

    def _agree(self, deadline: float) -> dict[str, Any]:
        """Promise a step, and find the decision of all."""
        for circle in self._circles:
            circle.store.set("asked", "1")
        with self._changed:
            if self._promised is None:
                self._promised = self._passed + 1
            own = {"step": self._promised, "reason": self.asked}
        if self._ranks is not None and self._ranks.member:
            _promise(self._ranks, own)
            return self._hear_the_leader(self._ranks)
        told: list[dict[str, Any]] | None = [own]
        if self._ranks is not None:
            _promise(self._ranks, own)
            told = self._promises(self._ranks, deadline)
        if told is not None:
            # the leader says it with the next transfer, too
            self.asked = self.asked or next((each["reason"] for each in told if each["reason"]), "")
            own = {"step": max(each["step"] for each in told), "reason": self.asked}
            told = [own]
        if self._regions is None:
            return _decision_of(told)
        if told is not None:
            _promise(self._regions, own)
            told = self._promises(self._regions, deadline)
        found = self._regions.store.compare_set("decision", "", json.dumps(_decision_of(told)))
        return _read(found)

    def _promises(self, circle: Circle, deadline: float) -> list[dict[str, Any]] | None:
        """The promises of all members; None if one is missing after the deadline."""
        keys = [f"promise/{member}" for member in range(circle.num_members)]
        while not circle.store.check(keys):
            if time.monotonic() > deadline or self._ended.wait(POLL_S / 4):
                return None
        return [json.loads(circle.store.get(key)) for key in keys]

    def _hear_the_leader(self, ranks: Circle) -> dict[str, Any]:
        """The decision, which the leader passes on to the other ranks."""
        while not ranks.store.check(["decision"]):
            if self._ended.wait(POLL_S / 4):
                return _NO
        return _read(ranks.store.get("decision"))


def _promise(circle: Circle, promise: dict[str, Any]) -> None:
    circle.store.set(f"promise/{circle.member}", json.dumps(promise))


def _read(decision: bytes) -> dict[str, Any]:
    found = json.loads(decision)
    return found if found["step"] else _NO


def _decision_of(told: list[dict[str, Any]] | None) -> dict[str, Any]:
    """What all do after these promises; not to stop, if promises are missing."""
    if told is None:
        return _NO
    return {"step": max(each["step"] for each in told), "reasons": [each["reason"] for each in told]}
