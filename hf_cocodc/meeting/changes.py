"""Members agree on who goes on after a loss: the procedure. What follows from their reports is in `verdict.py`.

Whoever misses a member freezes (completes no operation any more) and reports, to all members and to the store. Whoever hears a
report does so too. When all have reported whom nobody misses, or after some patience, the lowest of them writes the decision
into the store; if it does not, the next one does. The first decision that the store holds counts, for all.

The store is the witness of a partition: of two halves that do not hear each other, only one can write first. While the store
does not answer, training goes on and a loss waits for it. A store that came back empty has forgotten decisions. Then one counts
only if most members report; so half of them cannot go on while the others have decided without them.
"""

import contextlib
import json
import logging
import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import LinkError
from .orders import attempt
from .presence import Member, Presence
from .store import SteadyStore, StoreAwayError
from .values import Reader, read_json
from .verdict import Decision, Report, are_all_in, decision_from, report_from, settle, to_plain

logger = logging.getLogger(__name__)

POLL_S = 0.2
_SAY_S = 60.0
_TRIES = 10
_MORE = 5
"""Times the patience with a member that is there, and that nobody misses, but that has not reported yet: it is busy."""


class Changes:
    """One member's part in the agreement on losses. A thread of its own does all work.

    Args:
        store: shared by all members.
        run: unique to the run; keys at the store begin with it.
        me: this member.
        presence: connections to all other members.
        freeze: completes no operation any more, and returns the report of this member (`lost` is added); called again for
            the same number, it returns the same.
        decided: takes a decision; called once for each number, in their order, also without `freeze` before it.
        number: decisions that the run has had when this member came.
        patience_s: how long to wait for reports of members that may be lost, and for another to write the decision.
        wait_s: how long a loss waits for a store that is away. Then this member falls out.
    """

    def __init__(
        self,
        store: SteadyStore,
        run: str,
        me: Member,
        presence: Presence,
        freeze: Callable[[], Report],
        decided: Callable[[Decision], None],
        *,
        number: int = 0,
        patience_s: float = 2.0,
        wait_s: float = math.inf,
    ) -> None:
        self.number = number
        self.decisions: dict[int, Decision] = {}
        """All that this member knows."""
        self._store, self._run, self._me, self._presence = store, run, me, presence
        self._freeze, self._decided, self._patience_s, self._wait_s = freeze, decided, patience_s, wait_s
        self._born: bytes | None = None
        self._lost: dict[Member, str] = {}
        self._reports: dict[Member, Report] = {}
        self._ahead = number
        """Others say that they know so many decisions."""
        self._ahead_since = 0.0
        self._written: Report | None = None
        self._reader = Reader()
        self._since = self._said_at = 0.0
        self._ready_at: float | None = None
        self._closed = False
        self._inbox: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        presence.on("report", lambda member, said: self._inbox.put(lambda: self._hear(member, said)))
        presence.on("decision", lambda member, said: self._inbox.put(lambda: self._learn(said)))
        self._thread = threading.Thread(target=self._work, name="hf_cocodc-changes", daemon=True)
        self._thread.start()

    @property
    def is_settling(self) -> bool:
        """Whether a decision is being sought."""
        return bool(self._reports)

    def begin(self, lost: Mapping[Member, str]) -> None:
        """Members are lost, each for a reason in words. Returns at once."""
        self._inbox.put(lambda: self._miss(lost))

    def expect(self, number: int) -> None:
        """Others have made so many decisions: learn those that are missing. Returns at once."""
        self._inbox.put(lambda: self._expect(number))

    def close(self) -> None:
        """Take no part any more. Does not wait."""
        self._closed = True
        self._inbox.put(None)

    def refill(self) -> None:
        """Fill a store that came back empty with the decisions, and trust it once most members have. Call it now and then.

        The newest decision is put back also where somebody has deleted it alone: else another one could take its place.

        Raises:
            StoreAwayError: the store does not answer.
        """
        born = self._identity()
        if self.is_settling or self._closed:
            return
        known = sorted(self.decisions.items())
        for number, decision in known[-1:] if born == self._born else known:
            if self._written_at(number, decision) != decision:
                why = (
                    "its store came back empty, or what it wrote there was deleted, and other regions have decided there "
                    "without it who goes on."
                )
                self._inbox.put(partial(self._fall_out, why))
                return
        if born == self._born:
            return
        trusted = f"{self._run}/trusted/{born.decode(errors='replace')}"
        self._store.set(f"{trusted}/{self._me.ticket}", "1")
        everyone = {*self._presence.known, self._me}
        there = [member for member in everyone if self._store.peek(f"{trusted}/{member.ticket}")]
        if 2 * len(there) > len(everyone) and not self.is_settling:
            self._born = born

    def _work(self) -> None:
        attempt(self._look_at_the_store)
        while not self._closed:
            try:
                order = self._inbox.get(timeout=POLL_S if self._is_busy() else None)
            except queue.Empty:
                order = self._nothing
            if order is None:
                return
            attempt(order)
            if not self._closed and self._inbox.empty() and self._is_busy():
                attempt(self._proceed)

    def _miss(self, lost: Mapping[Member, str]) -> None:
        gone = {member for decision in self.decisions.values() for member in decision.lost}
        self._lost.update({member: why for member, why in lost.items() if member not in gone})

    def _expect(self, number: int) -> None:
        if self._ahead <= self.number < number:
            self._ahead_since = time.monotonic()
        self._ahead = max(self._ahead, number)

    def _doubt(self) -> None:
        """Others say that they know a decision that the store does not: believe it for a while only.

        All decisions are at the store before anyone knows them. One that came back empty has them again once they refill it.
        """
        is_late = time.monotonic() - self._ahead_since > self._patience_s
        if is_late and self._identity() == self._born:
            logger.warning(
                "region %d hears of decision %d on a loss, and nobody has made it: it goes on without.",
                *(self._me.region, self.number),
            )
            self._ahead = self.number

    def _nothing(self) -> None:
        """It is time to look again."""

    def _is_busy(self) -> bool:
        return bool(self._lost or self._reports or self._ahead > self.number)

    def _look_at_the_store(self) -> None:
        with contextlib.suppress(StoreAwayError):
            self._born = self._identity()

    def _identity(self) -> bytes:
        """What the store was called by the first member that found it empty."""
        return self._store.compare_set(f"{self._run}/store", "", uuid.uuid4().hex)

    def _hear(self, member: Member, said: dict[str, Any]) -> None:
        report = report_from(said.get("report"))
        if report.member != member:
            raise LinkError(f"{member} reports for {report.member}")
        if report.number < self.number:
            for number, decision in sorted(self.decisions.items()):
                if number >= report.number:
                    self._presence.tell(member, "decision", decision=to_plain(decision))
            return
        self._expect(report.number)
        if report.number == self.number:
            self._reports[member] = report

    def _learn(self, said: dict[str, Any]) -> None:
        decision = decision_from(said.get("decision"))
        self._expect(decision.number + 1)
        self._take(decision)

    def _proceed(self) -> None:
        """One step towards the next decision."""
        if self._ahead == self.number:
            self._report()
        try:
            known = self._decision_in(self._store.peek(self._key(self.number)), self.number)
            if known is not None:
                self._take(known)
            elif self._ahead == self.number:
                self._collect()
                if self._inbox.empty() and self._is_my_turn():  # a report may have come meanwhile
                    self._propose()
            else:
                self._doubt()
        except StoreAwayError as error:
            self._wait(f"{error} Who is lost is decided there: this waits until it is back.", "the store")

    def _report(self) -> None:
        """Freeze, and report to the members, whenever there is news."""
        told = self._freeze()
        connected = self._presence.members
        gone = {member for member in told.members if member != self._me and member not in connected}
        lost = tuple(sorted({*told.lost, *self._lost, *gone}))
        told = replace(told, number=self.number, lost=lost, sure=not set(lost) & set(connected))
        if not self._reports.get(self._me):
            self._since = time.monotonic()
        if self._reports.get(self._me) != told:
            self._reports[self._me] = told
            self._ready_at = None
            self._presence.tell_all("report", report=to_plain(told))

    def _collect(self) -> None:
        """Show the report at the store, and look for reports of members that this one does not hear."""
        mine = self._reports[self._me]
        if self._written != mine:
            self._store.set(f"{self._key(self.number)}/{self._me.ticket}", json.dumps(to_plain(mine)))
            self._written = mine
        unheard = {m for report in self._reports.values() for m in report.members} - set(
            self._presence.members
        )
        for member in sorted(unheard - {self._me}):
            key = f"{self._key(self.number)}/{member.ticket}"
            report = self._reader.read(_report_in, self._store.peek(key), key)
            if report is not None and (report.member, report.number) == (member, self.number):
                self._reports[member] = report

    def _is_my_turn(self) -> bool:
        """Whether to write the decision now. The lowest member that reports is first."""
        now, reports = time.monotonic(), self._reports.values()
        heard = all(m in self._reports for report in reports for m in report.members)
        at_once = heard or (are_all_in(reports) and all(report.sure for report in reports))
        busy = {m for report in reports for m in report.members} - self._reports.keys()
        busy &= set(self._presence.members) - {m for report in reports for m in report.lost}
        patience_s = self._patience_s * (_MORE if busy else 1)
        if self._ready_at is None and (at_once or now - self._since > patience_s):
            self._ready_at = now
        if self._ready_at is None or not any(report.members for report in reports):
            return False
        place = (
            settle(reports).members.index(self._me) if self._me in settle(reports).members else len(reports)
        )
        return now - self._ready_at >= place * self._patience_s

    def _propose(self) -> None:
        members = {member for report in self._reports.values() for member in report.members}
        if self._identity() != self._born and 2 * len(members & self._reports.keys()) <= len(members):
            self._wait(
                f"the store at {self._store.address} came back empty: to decide who is lost, most of the regions "
                f"{', '.join(str(member.region) for member in sorted(members))} must report, and "
                f"{len(members & self._reports.keys())} do.",
                "more reports",
            )
            return
        decision = settle(self._reports.values())
        self._take(self._written_at(self.number, decision))

    def _written_at(self, number: int, decision: Decision) -> Decision:
        """Write a decision, unless the store holds one; returns the one that counts. Raises StoreAwayError."""
        held = b""
        for _ in range(_TRIES):
            found = self._store.compare_set(self._key(number), held, json.dumps(to_plain(decision)))
            counts = self._decision_in(found, number)
            if counts is not None:
                return counts
            held = b"" if found == held else found
        raise StoreAwayError(f"somebody overwrites {self._key(number)!r} at the store all the time.")

    def _decision_in(self, found: bytes, number: int) -> Decision | None:
        decision = self._reader.read(_decision_in, found, self._key(number))
        return decision if decision is not None and decision.number == number else None

    def _take(self, decision: Decision) -> None:
        """A decision counts from now on. One that comes too early is found at the store when it is time."""
        if decision.number != self.number:
            return
        self.decisions[decision.number] = decision
        self._presence.tell_all("decision", decision=to_plain(decision))
        self._lost = {member: why for member, why in self._lost.items() if member in decision.members}
        self._reports.clear()
        self._written = self._ready_at = None
        self.number += 1
        self._expect(self.number)
        self._ahead_since = time.monotonic()
        if self._me in decision.lost:
            self._closed = True
        self._decided(decision)

    def _fall_out(self, why: str) -> None:
        """This member goes on no longer, by itself: nobody else is told so."""
        logger.error("region %d falls out of the run: %s", self._me.region, why)
        self._closed = True
        self._reports.clear()
        self._decided(Decision(number=self.number, members=(), lost=(self._me,), done=0))

    def _key(self, number: int) -> str:
        return f"{self._run}/change/{number}"

    def _wait(self, why: str, what: str) -> None:
        """No decision is possible now; for `regions.wait_s` at most, because training threads wait for it."""
        self._say(why)
        if self._reports and time.monotonic() - self._since > self._wait_s:
            self._fall_out(f"{why} A loss has waited for {what} for {self._wait_s:g} s (regions.wait_s).")

    def _say(self, what: str) -> None:
        if time.monotonic() - self._said_at > _SAY_S or not self._said_at:
            self._said_at = time.monotonic()
            logger.warning("region %d has missed %s. %s", self._me.region, self._whom(), what)

    def _whom(self) -> str:
        regions = sorted({member.region for report in self._reports.values() for member in report.lost})
        return " and ".join(f"region {region}" for region in regions) or "a decision of the others"


def _report_in(found: bytes, key: str) -> Report:
    return report_from(read_json(found, key))


def _decision_in(found: bytes, key: str) -> Decision:
    return decision_from(read_json(found, key))
