"""Runs: the journals of their regions on one axis of time, from which every figure and picture of a run is made."""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from ...errors import InputError, short
from ...run.journal import BEGINNINGS
from .deals import DealRecord, deals, samples_in
from .journals import NAME, Event, Events, RegionJournal, figure, find, read_journal
from .members import MemberChange, attended, changes, num_regions, own_absences, spans
from .waits import Story, arrival_of, blame, sections, story_of

Spans = Mapping[int, Sequence[tuple[int, int]]]
"""By region, the inner steps from which and to which it did something."""


def trained(attendance: Spans, events: Iterable[Mapping[str, Any]]) -> Spans:
    """The `attendance` of a run without the inner steps in which a region only kept step with the others, as landings tell."""
    landings = [event for event in events if event["kind"] in ("land", "void")]
    idle: dict[tuple[int, int], int] = {}
    for event in landings:
        for region, since in event.get("coasted", {}).items():
            idle[int(region), since] = max(idle.get((int(region), since), 0), event["sent_at"])
    active = dict(attendance)
    for (region, since), last in idle.items():
        trains_again = any(
            event["sent_at"] > last
            and region in event.get("members", ())
            and str(region) not in event.get("coasted", {})
            for event in landings
        )
        until = last if trains_again else sys.maxsize
        active[region] = _without(active.get(region, ()), since, until)
    return active


def _without(spans: Sequence[tuple[int, int]], since: int, until: int) -> list[tuple[int, int]]:
    """
    >>> _without([(0, 4), (6, 9)], 2, 7)
    [(0, 2), (7, 9)]
    """
    parts = [part for a, b in spans for part in ((a, min(b, since)), (max(a, min(b, until)), b))]
    return [(a, b) for a, b in parts if a < b]


def tokens_at(
    step: int,
    starts: Mapping[int, Mapping[str, Any]],
    trained: Spans,
    dealt: Sequence[DealRecord] = (),
) -> int | None:
    """Tokens on which all regions together had trained at an inner step; None if no journal says how many a step has.

    `starts` has the start of each region's journal; a region without one is taken to have as many tokens as another. `dealt`: how
    the global batch was.
    """
    batches = {region: _batch(start) for region, start in starts.items()}
    usual = next((batch for batch in batches.values() if batch), None)
    if usual is None:
        return None
    total = 0
    for region, parts in trained.items():
        own, length = batches.get(region) or usual
        total += length * sum(
            samples_in(region, since, max(min(step, until), since), own, dealt) for since, until in parts
        )
    return total


def _batch(start: Mapping[str, Any]) -> tuple[int, int] | None:
    """Samples of a region in an inner step by its own settings, and tokens of each; None if unknown."""
    training: Mapping[str, Any] = start.get("training", {})
    batch, length = (training.get(name) for name in ("batch", "data.block_size"))
    known = all(type(each) is int and 0 < each < 2**31 for each in (batch, length))
    return (batch, length) if known else None  # type: ignore[return-value]


@dataclass
class RunRecord:
    """One run.

    Attributes:
        name: for headings and legends.
        journals: one per region, by number, without what is `outside`; `stories` are in the same order.
        shifts: for each section of each journal, what to add to its times for the common axis (`offsets`).
        has_times: whether a clock ran: measured, or simulated.
        found: who took part from which inner step on (`members.changes`); empty if regions neither came nor left.
        outside: journals of processes that were to join the run and have not come in; not part of the run.
        empty: journals without a readable start.
    """

    name: str
    journals: list[RegionJournal]
    stories: list[Story]
    shifts: list[list[float]]
    has_times: bool
    found: list[MemberChange]
    outside: list[RegionJournal] = field(default_factory=list)
    empty: list[Path] = field(default_factory=list)

    @property
    def start(self) -> dict[str, Any]:
        return self.journals[0].start

    @property
    def method(self) -> str:
        return short(self.start["outer"]["method"], 60)

    @property
    def regions(self) -> list[int]:
        """Numbers of the regions whose journals are here."""
        return [journal.region for journal in self.journals]

    @cached_property
    def end(self) -> float:
        """The last moment that a journal records."""
        return max((story.end for story in self.stories), default=0.0)

    @cached_property
    def step(self) -> int:
        """The last inner step that a region has reached."""
        return max(event["step"] for journal in self.journals for event in journal.events)

    @property
    def has_finished(self) -> bool:
        """Whether a region has reached the end of the run."""
        return any(journal.has_finished for journal in self.journals)

    @cached_property
    def attendance(self) -> dict[int, list[tuple[int, int]]]:
        """From which inner steps to which each region took part."""
        return spans(attended(self._events, self.found), self.step)

    @cached_property
    def num_regions(self) -> int:
        """See `members.num_regions`."""
        return num_regions(self._events, self.found)

    @property
    def _events(self) -> list[Events]:
        return [journal.events for journal in self.journals]

    @cached_property
    def trained(self) -> Spans:
        """From which inner steps to which each region trained."""
        active = dict(trained(self.attendance, (event for events in self._events for event in events)))
        for journal in self.journals:
            for left_at, back_at in own_absences(journal.events):  # the others notice it later
                active[journal.region] = _without(active.get(journal.region, ()), left_at, back_at)
        return active

    @cached_property
    def deals(self) -> list[DealRecord]:
        """How the global batch was dealt, in order."""
        return deals(self._events)

    @property
    def unreadable(self) -> list[str]:
        """A sentence about each damaged line, and about each journal that cannot be read."""
        damaged = [sentence for journal in self.journals for sentence in journal.damaged]
        return damaged + [f"{short(path)}: no start of a run can be read" for path in self.empty]

    def tokens(self, step: int) -> int | None:
        """Tokens on which all regions together had trained at an inner step; None if unknown."""
        starts = {journal.region: journal.start for journal in self.journals}
        return tokens_at(step, starts, self.trained, self.deals)

    def times_of(self, kind: str) -> Iterator[float]:
        """When events of a kind happened, on the common axis."""
        for journal, shifts in zip(self.journals, self.shifts, strict=True):
            for section, shift in zip(sections(journal.events), shifts, strict=True):
                yield from (event["time_s"] + shift for event in section if event["kind"] == kind)


def load(folders: Sequence[Path]) -> list[RunRecord]:
    """The runs in some folders; regions of one run make one run, wherever they lie.

    Raises:
        InputError: a folder has no journal that can be read, or a journal is named twice.
    """
    groups: list[tuple[str, list[RegionJournal], list[Path]]] = []
    seen: dict[Path, Path] = {}
    for folder in folders:
        empty: list[Path] = []
        own = None
        for path in find(folder):
            other = seen.setdefault(path.resolve(), folder)
            if other is not folder:
                raise InputError(f"{short(path)} is named twice: by {short(other)} and by {short(folder)}.")
            journal = read_journal(path)
            if journal is None:
                empty.append(path)
                continue
            own = next((each for each in groups if _is_of(journal, each[1])), None)
            if own is None:
                own = _name(folder), [], []
                groups.append(own)
            own[1].append(journal)
        if own is None:
            raise InputError(
                f"{short(empty[0])} has no start of a run that can be read. Name the folder of another run."
            )
        own[2].extend(empty)
    titles = [title for title, _, _ in groups]
    if len(set(titles)) < len(titles):
        titles = [f"{title} ({number})" for number, title in enumerate(titles, 1)]
    return [run_of(title, group[1], group[2]) for title, group in zip(titles, groups, strict=True)]


def _is_of(journal: RegionJournal, others: Sequence[RegionJournal]) -> bool:
    """Whether a journal is of another region of the same run."""
    is_same = bool(names_of([journal]) & names_of(others))
    return is_same and journal.region not in {each.region for each in others}


def read_run(name: str, paths: Sequence[Path], beside: Path | None = None) -> RunRecord:
    """The run of these journals, and of its other regions' in the folder `beside`. Raises InputError if no start can be read."""
    journals = [journal for path in paths if (journal := read_journal(path)) is not None]
    if not journals:
        raise InputError(f"{', '.join(map(short, paths))}: no start of a run can be read.")
    known = {path.resolve() for path in paths}
    for path in sorted(beside.glob(f"region-*/cocodc/{NAME}")) if beside is not None else ():
        if path.resolve() not in known:
            with contextlib.suppress(InputError):  # what cannot be read may be of another run
                other = read_journal(path)
                if other is not None and names_of([other]) & names_of(journals):
                    journals.append(other)
    return run_of(name, journals)


def run_of(name: str, journals: Sequence[RegionJournal], empty: Sequence[Path] = ()) -> RunRecord:
    """The run of these journals."""
    both = [_apart(journal) for journal in sorted(journals, key=lambda journal: journal.region)]
    ordered = [inside for inside, _ in both if inside.events]
    outside = [rest for _, rest in both if rest.events]
    if not ordered:
        ordered, outside = outside, []
    has_times = not all(
        journal.start.get("timing") == "none" or journal.events[-1]["time_s"] == 0 for journal in ordered
    )
    shifts = offsets(ordered)
    stories = [story_of(each, own) for each, own in zip(ordered, shifts, strict=True)]
    blame(stories)
    history = changes([journal.events for journal in ordered])
    return RunRecord(name, ordered, stories, shifts, has_times, history, outside, list(empty))


def _apart(journal: RegionJournal) -> tuple[RegionJournal, RegionJournal]:
    """A journal as far as its region took part in the run, and the rest."""
    inside: Events = []
    outside: Events = []
    for section in sections(journal.events):
        # a process that joins takes part from its first `epoch` on; one that fails before may have tried for long
        came_in = not section[0].get("joins") or any(event["kind"] == "epoch" for event in section)
        (inside if came_in else outside).extend(map(dict, section))
    return replace(journal, events=inside), replace(journal, events=outside, damaged=[])


def _name(folder: Path) -> str:
    place = folder.resolve()
    if place.is_file():
        place = place.parent
    while place.name == "cocodc" or place.name.startswith("region-"):
        place = place.parent
    return short(place.name or "run", 40)


def names_of(journals: Sequence[RegionJournal]) -> set[str]:
    """The numbers of their run. Regions agree on a new one each time they meet, so a resumed run has several."""
    events = (event for journal in journals for event in journal.events if event["kind"] in BEGINNINGS)
    return {event["run"] for event in events}


_Arrivals = Mapping[tuple[int, int], float]


def offsets(journals: Sequence[RegionJournal]) -> list[list[float]]:
    """For each section of each journal, the seconds to add to its times; the earliest event is then at 0.

    A transfer ends in all regions within the time of one message, which is more exact than machines' clocks. Those place what
    has no transfer in common; without them (simulated time), all regions start at the same moment.
    """
    arrivals = [[_arrivals(section) for section in sections(journal.events)] for journal in journals]
    begun = [[section[0] for section in sections(journal.events)] for journal in journals]
    placed = [[(figure(each, "at") or each["time_s"]) - each["time_s"] for each in own] for own in begun]
    first = max(range(len(journals)), key=lambda place: sum(map(len, arrivals[place])))
    known: dict[tuple[int, int], float] = {}
    for times, shift in zip(arrivals[first], placed[first], strict=True):
        known |= {key: time + shift for key, time in times.items()}
    for place, own in enumerate(arrivals):
        if place == first:
            continue
        differences = [
            [known[key] - time - shift for key, time in times.items() if key in known]
            for times, shift in zip(own, placed[place], strict=True)
        ]
        together = [each for section in differences for each in section]
        usual = median(together) if together else 0.0
        placed[place] = [
            shift + (median(section) if section else usual)
            for shift, section in zip(placed[place], differences, strict=True)
        ]
    begin = min(
        first["time_s"] + shift
        for firsts, shifts in zip(begun, placed, strict=True)
        for first, shift in zip(firsts, shifts, strict=True)
    )
    return [[shift - begin for shift in shifts] for shifts in placed]


def _arrivals(section: Sequence[Event]) -> _Arrivals:
    """When the mean of each transfer was here, if the journal knows it exactly."""
    arrivals = {}
    for event in section:
        if event["kind"] in ("land", "void"):
            time = arrival_of(event)
            if time is not None:
                arrivals[event["fragment"], event["sent_at"]] = time
    return arrivals
