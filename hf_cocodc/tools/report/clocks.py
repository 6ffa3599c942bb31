"""Puts what several machines have written onto one axis of time: their clocks differ."""

from collections.abc import Mapping, Sequence
from statistics import median

from .events import Event, figure
from .journals import RegionJournal
from .story import arrival_of, sections

_Arrivals = Mapping[tuple[int, int], float]


def offsets(journals: Sequence[RegionJournal]) -> list[list[float]]:
    """For each section of each journal, the seconds to add to its times; the earliest event is then at 0.

    A transfer ends in all regions at about the same moment, within the time of one message: this is more exact than the clocks
    of machines. Those place what has no transfer in common; without them (older journals, simulated time), all regions start
    at the same moment, and nothing passes between two processes of a region.

    Args:
        journals: of one run.
    """
    arrivals = [[_arrivals(section) for section in sections(journal.events)] for journal in journals]
    dated = all(figure(event, "at") is not None for journal in journals for event in _beginnings(journal))
    placed = [[_by_date(s[0]) if dated else 0.0 for s in sections(j.events)] for j in journals]
    first = max(range(len(journals)), key=lambda place: sum(map(len, arrivals[place])))
    known: dict[tuple[int, int], float] = {}
    for found, shift in zip(arrivals[first], placed[first], strict=True):
        known |= {key: time + shift for key, time in found.items()}
    for place, own in enumerate(arrivals):
        if place == first:
            continue
        differences = [
            [known[key] - time - shift for key, time in found.items() if key in known]
            for found, shift in zip(own, placed[place], strict=True)
        ]
        together = [each for found in differences for each in found]
        usual = median(together) if together else 0.0
        placed[place] = [
            shift + (median(found) if found else usual)
            for shift, found in zip(placed[place], differences, strict=True)
        ]
    begin = min(
        section[0]["time_s"] + shift
        for journal, shifts in zip(journals, placed, strict=True)
        for section, shift in zip(sections(journal.events), shifts, strict=True)
    )
    return [[shift - begin for shift in shifts] for shifts in placed]


def _beginnings(journal: RegionJournal) -> list[Event]:
    return [section[0] for section in sections(journal.events)]


def _by_date(event: Event) -> float:
    return (figure(event, "at") or 0.0) - event["time_s"]


def _arrivals(section: Sequence[Event]) -> _Arrivals:
    """When the mean of each transfer was here, where the journal knows it exactly."""
    found = {}
    for event in section:
        if event["kind"] in ("land", "void"):
            time = arrival_of(event)
            if time is not None:
                found[event["fragment"], event["sent_at"]] = time
    return found
