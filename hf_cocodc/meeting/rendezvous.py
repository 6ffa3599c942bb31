"""Regions meet at the start of a run: they find each other at a store that other runs use too, and compare their hellos."""

import contextlib
import json
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import torch.distributed as dist

from ..errors import HandshakeError, LinkError, MeetingError, RegionLostError
from .board import Board, Sighting
from .handshake import compare, compare_two, differences
from .sealed import address_of, within
from .store import peek
from .values import foreign, number_of, read_json, text_of

logger = logging.getLogger(__name__)

POLL_S = 0.05
_LONGEST = 100
NAME_THEM = "give each run a name of its own (regions.run, --run or HF_COCODC_RUN, equal in its regions)"


@dataclass(frozen=True)
class Roster:
    """The regions of this run: a name that no other run on the store has, and the hellos in the order of regions."""

    run: str
    hellos: list[dict[str, Any]]


def rendezvous(
    store: dist.Store,
    run: str,
    region: int,
    num_regions: int,
    hello: dict[str, Any],
    timeout_s: float,
    wait_for: Callable[[list[int]], None] = lambda absent: None,
    look: Callable[[], None] = lambda: None,
) -> Roster:
    """Meet every other region of a run and exchange hellos.

    A store outlives runs and serves several at once. Each process takes a ticket and signs the store's board for as long as
    it waits. It holds its region's place in the run: a place can change hands only if its holder no longer signs. Region 0
    writes a roster of the tickets in all places, and waits until every other region acknowledges the roster; so a process
    that no longer exists is never met.

    Regions of a run that are on the board at the same time are compared at once, even if others are still missing.
    Both functions are called all the time: `wait_for` with the regions that have not come yet; `look` may raise, which ends the
    meeting in good order.

    Returns:
        The roster: a name unique to this run, and the hellos of all regions.

    Raises:
        HandshakeError: two regions differ, or another process is the same region of the same run.
        MeetingError: the store fails, or holds what no region of ours has written.
        RegionLostError: a region did not arrive within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    try:
        meeting = _Meeting(store, run, region, num_regions, hello)
        try:
            while time.monotonic() < deadline:
                roster = meeting.proceed()
                if roster is not None:
                    return roster
                wait_for(meeting.absent())
                look()
                time.sleep(POLL_S)
            raise meeting.missing(timeout_s)
        except BaseException:
            meeting.fail()
            raise
    except LinkError:
        raise
    except RuntimeError as error:
        raise MeetingError(
            f"the store at {address_of(store)} failed while region {region} of run {run!r} waited for the other regions "
            f"({str(error).splitlines()[0][:200]}). Nothing was trained. Start the store again, then all regions."
        ) from error


class _Meeting:
    def __init__(
        self, store: dist.Store, run: str, region: int, num_regions: int, hello: dict[str, Any]
    ) -> None:
        self._run, self._region, self._num_regions, self._hello = run, region, num_regions, hello
        self._where = address_of(store)
        self._store = within(f"hf_cocodc/run/{quote(run, safe='')}", store)
        self._board = Board(store, run, region, num_regions, hello)
        self._holds_place = False
        self._differs_from = 0
        """Ticket of the process with which this one cannot train."""
        self._called: list[int] = []
        """Tickets in the newest roster that this process, as region 0, has written."""
        self._roster: Roster | None = None
        """The newest roster that this process is in."""

    def proceed(self) -> Roster | None:
        """One look at the store; returns the roster once all regions have met."""
        self._board.sign()
        if not self._hold_place():
            return None
        roster = self._call() if self._region == 0 else self._answer()
        if roster is not None:
            self._end()
        else:
            for sighting in self._board.look_around(POLL_S):
                self._consider(sighting)
        return roster

    def fail(self) -> None:
        """Leave without having met."""
        self._board.leave(self._differs_from)
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(self._place(self._region), str(self._board.ticket), "")

    def absent(self) -> list[int]:
        """The regions that have not come; all others, if all have been seen."""
        others = [r for r in range(self._num_regions) if r != self._region]
        here = {s.entry.region for s in self._board.seen.values() if s.entry.run == self._run and not s.stale}
        return [r for r in others if r not in here] or others

    def missing(self, timeout_s: float) -> RegionLostError:
        """The error for regions that have not come."""
        absent = self.absent()
        names = " and ".join(f"region {r}" for r in absent)
        elsewhere = [
            s for s in self._board.seen.values() if s.entry.run != self._run and s.alive and not s.stale
        ]
        return RegionLostError(
            absent[0],
            f"{names} did not arrive within {timeout_s:g} s (regions.start_timeout_s). Region {self._region} of "
            f"{self._num_regions} of run {self._run!r} is waiting at the store {self._where}. Start every missing region with "
            "the same recipe and store, or raise regions.start_timeout_s."
            + "".join(f" {self._tell_apart(sighting)}" for sighting in elsewhere),
        )

    def _hold_place(self) -> bool:
        """Take this region's place in the run, unless another process holds it.

        Raises:
            HandshakeError: another process that is alive holds it.
        """
        own, place = str(self._board.ticket), self._place(self._region)
        holder = text_of(self._store.compare_set(place, "", own), place)
        if holder == own:
            self._holds_place = True
            return True
        other = self._board.look(number_of(holder.encode(), place))
        if other is None or other.entry.left or other.stale:
            self._store.compare_set(
                place, holder, own
            )  # the next look at the store tells whether it succeeded
            if other is not None:
                self._board.remove(other.ticket)
        elif other.alive or self._holds_place:
            raise HandshakeError(
                f"another process is region {self._region} of run {self._run!r} too: it waits at the store {self._where}, on "
                f"host {other.entry.host}. Give each region its own number (HF_COCODC_REGION, --region). If these are two runs "
                f"on one store, {NAME_THEM}."
            )
        return False

    def _call(self) -> Roster | None:
        """Region 0: write a roster of all places, until all others have acknowledged it."""
        holders = [peek(self._store, self._place(region)) for region in range(self._num_regions)]
        if b"" in holders:
            return None
        tickets = [number_of(holder, self._place(region)) for region, holder in enumerate(holders)]
        if len(set(tickets)) < len(tickets):
            raise MeetingError(
                f"two regions of run {self._run!r} have got the same ticket at the store {self._where}: it has lost its count. "
                "It was started again, or somebody deletes what lies there. Start all regions again."
            )
        if tickets != self._called:
            hellos = [self._board.hello_of(ticket) for ticket in tickets]
            self._roster = Roster(f"run-{uuid.uuid4().hex[:12]}", [hello for hello in hellos if hello])
            if len(self._roster.hellos) < len(tickets):  # a place has just changed hands
                return None
            self._called = tickets
            content = {"run": self._roster.run, "tickets": tickets, "hellos": self._roster.hellos}
            self._store.set("roster", json.dumps(content))
        assert self._roster is not None
        acknowledged = [f"{self._roster.run}/ack/{r}" for r in range(1, self._num_regions)]
        if acknowledged and not self._store.check(acknowledged):
            return None
        compare(self._roster.hellos)
        self._store.set(f"{self._roster.run}/go", "1")
        return self._roster

    def _answer(self) -> Roster | None:
        """Other regions: acknowledge a roster with this process in it, until region 0 has heard it from all."""
        text = peek(self._store, "roster")
        if not text:
            return None
        run, tickets, hellos = _roster_in(text)
        has_us = len(tickets) == self._num_regions and tickets[self._region] == self._board.ticket
        if has_us and (self._roster is None or self._roster.run != run):
            self._roster = Roster(run, hellos)
            self._store.set(f"{run}/ack/{self._region}", "1")
            compare(hellos)
        if self._roster is not None and self._store.check([f"{self._roster.run}/go"]):
            return self._roster
        return None

    def _consider(self, sighting: Sighting) -> None:
        """Compare this region with another of its run; tell the log of another run that waits for what this one has.

        Raises:
            HandshakeError: the two regions differ.
        """
        entry = sighting.entry
        if not sighting.alive or sighting.compared:  # it may no longer exist: it must not end this region
            return
        if entry.run == self._run and entry.region == self._region:
            sighting.compared = True
            logger.warning(
                "another process, on host %s, says that it is region %d of run %r too. It ends with an error; this one goes on "
                "waiting.",
                *(entry.host, self._region, self._run),
            )
        elif entry.run == self._run:
            theirs = self._board.hello_of(sighting.ticket)
            if theirs is None:
                return
            sighting.compared, self._differs_from = True, sighting.ticket
            counts = {"regions.count": self._num_regions}, {"regions.count": entry.count}
            first, second = (
                (self._region, {**counts[0], **self._hello}),
                (entry.region, {**counts[1], **theirs}),
            )
            compare_two(
                *min(first, second, key=lambda each: each[0]), *max(first, second, key=lambda each: each[0])
            )
            self._differs_from = 0
        elif entry.count == self._num_regions and not entry.left:
            sighting.compared = True
            logger.warning("%s", self._tell_apart(sighting))

    def _tell_apart(self, sighting: Sighting) -> str:
        """What another run at this store has other than this one."""
        entry = sighting.entry
        found = differences(self._hello, self._board.hello_of(sighting.ticket) or {})
        shown = "; ".join(f"{field} ({mine} here, {theirs} there)" for field, mine, theirs, _ in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        waits = "waited until a moment ago" if entry.left else "waits"
        return (
            f"Region {entry.region} of {entry.count} of run {entry.run!r} {waits} at this store too, on host {entry.host}; this "
            f"is run {self._run!r}. It differs in {shown or 'nothing else'}{more}. If both belong to one run, give them the same "
            "name: set regions.run (--run, HF_COCODC_RUN) in every region."
        )

    def _end(self) -> None:
        """All have met: make room for the next run of this name."""
        self._store.compare_set(self._place(self._region), str(self._board.ticket), "")
        self._board.remove(self._board.ticket)

    @staticmethod
    def _place(region: int) -> str:
        return f"place/{region}"


def _roster_in(text: bytes) -> tuple[str, list[int], list[dict[str, Any]]]:
    """Name, tickets and hellos of a roster. Raises MeetingError if no region of ours has written it."""
    content = read_json(text, "roster")
    given = content if isinstance(content, dict) else {}
    run, tickets, hellos = given.get("run"), given.get("tickets"), given.get("hellos")
    if not isinstance(tickets, list) or not isinstance(hellos, list) or len(tickets) != len(hellos):
        raise foreign("roster", text)
    if not isinstance(run, str) or len(run) > _LONGEST:
        raise foreign("roster", text)
    if any(type(each) is not int for each in tickets) or any(not isinstance(each, dict) for each in hellos):
        raise foreign("roster", text)
    return run, tickets, hellos
