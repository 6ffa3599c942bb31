"""The figures of a run. The summary of the command, its JSON and the page of a report all show these."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...run import figures
from .deals import sentence as deal_in_words
from .journals import Event, RegionJournal, figure
from .members import attended, losses, periods, sentence
from .runs import RunRecord
from .spending import totals, union

MANY = 8
"""Of more regions, not every line is shown."""


@dataclass(frozen=True)
class Summary:
    """Figures of a run, so far if it still trains; `bytes_sent` and `blocked_s` are the largest of all regions (see `totals`).

    `outer_steps` are by fragment; `tokens` are those of all regions together, None if unknown.
    `bytes_sent` includes the first parameters where regions began from different ones; see `engine.account.Totals`.
    `training_s` is the time that a region was in the run until its last inner step, `total_s` until the last event, evaluations
    included; what lies between a stop and a resume does not count. `timing` is "measured", "simulated" or "none".
    `best_step` is the inner step of the global weights that the run ended with, if they are its best and not its last.
    `not_counted` has a sentence about each region that did not count at times: not finite, or far larger than ordinary.
    `num_void` counts transfers whose mean could not be believed: not finite, or far larger than all that went into it.
    `members` puts the changes of `num_regions` (`members.num_regions`) into words; empty if there was none.
    `losses` counts regions that were lost, and came back; empty if none was.
    `dealt` says how the global batch was (`deals.sentence`); empty if it never was.
    `data_parallel_bytes` is 0 for one region, or if the number of parameters is unknown.
    """

    num_regions: int
    inner_steps: int
    outer_steps: tuple[int, ...]
    perplexity_before: float | None
    perplexity_after: float | None
    loss_before: float | None
    loss_after: float | None
    evaluated: str
    best_step: int | None
    accuracy_before: float | None
    accuracy_after: float | None
    tokens: int | None
    blocked_s: float
    training_s: float
    total_s: float
    timing: str
    bytes_sent: int
    data_parallel_bytes: int
    method: str
    not_counted: Sequence[str]
    members: str = ""
    num_void: int = 0
    losses: str = ""
    dealt: str = ""

    def blocked(self) -> str:
        """For how long sends and landings held training, in words."""
        if self.timing == "none":
            return "unknown (time was not simulated)"
        return figures.blocked(self.blocked_s, self.training_s, self._unit)

    @property
    def _unit(self) -> str:
        return "s" if self.timing == "measured" else "s of simulated time"

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all regions in a second of training, including waits; None if unknown."""
        known = self.tokens is not None and self.timing != "none" and self.training_s > 0
        return self.tokens / self.training_s if known and self.tokens is not None else None

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, in words, of what is known."""
        times = "" if self.tokens_per_s is None else f", {self.tokens_per_s:,.0f} a second"
        sent = figures.sent(self.bytes_sent, self.data_parallel_bytes)
        each = "" if self.members else f" in each of {self.num_regions} region(s)"
        least, most = min(self.outer_steps), max(self.outer_steps)
        times_each = str(most) if least == most else f"{least} to {most}"
        void = f"{self.num_void} of {sum(self.outer_steps) + self.num_void} transfers changed nothing (see the log)"
        rows = [
            *self._held_out(),
            ("method", self.method),
            ("inner steps", f"{self.inner_steps}{each}"),
            ("regions", self.members),
            ("losses", self.losses),
            ("global batch", self.dealt),
            ("outer steps", figures.outer_steps(sum(self.outer_steps), len(self.outer_steps), times_each)),
            ("tokens", "" if self.tokens is None else f"{self.tokens:,} of all regions{times}"),
            ("total time", "" if self.timing == "none" else f"{self.total_s:.1f} {self._unit}"),
            ("training blocked", self.blocked()),
            ("sent by a region", sent if self.data_parallel_bytes else ""),
            *(("not counted", words) for words in self.not_counted),
            ("void", void if self.num_void else ""),
        ]
        return [row for row in rows if row[1]]

    def _held_out(self) -> list[tuple[str, str]]:
        best = "" if self.best_step is None else f", the best: of step {self.best_step}"
        weights = f" ({self.evaluated} weights{best})"
        if self.perplexity_after is not None:
            before = "" if self.perplexity_before is None else f"{_plain(self.perplexity_before, 2)} before, "
            rows = [("held-out perplexity", f"{before}{_plain(self.perplexity_after, 3)} after{weights}")]
        elif self.loss_after is not None:
            before = "" if self.loss_before is None else f"{_plain(self.loss_before, 3)} before, "
            rows = [("held-out loss", f"{before}{_plain(self.loss_after, 3)} after{weights}")]
        else:
            rows = []
        if self.accuracy_after is not None:
            before = "" if self.accuracy_before is None else f"{100 * self.accuracy_before:.1f} % before, "
            rows.append(("held-out accuracy", f"{before}{100 * self.accuracy_after:.1f} % after"))
        return rows

    def lines(self, model: str, journals: Sequence[Path]) -> list[str]:
        """The summary as lines of text."""
        places = [("global model", model), *(("journal", str(journal)) for journal in journals)]
        if len(journals) > MANY:
            places[1:] = [
                ("journals", f"{journals[0]} and those of {len(journals) - 1} other regions beside it")
            ]
        return figures.lines([*self.rows(), *places])


def summarize(run: RunRecord) -> Summary:
    """The figures of a run."""
    events = [journal.events for journal in run.journals]
    ended = [journal for journal in run.journals if journal.has_finished]
    held_out = _held_out(ended + [journal for journal in run.journals if not journal.has_finished])
    best = next((event["step"] for journal in ended for event in _after_finish(journal, "best")), None)
    shown = held_out.get(max(held_out, default=0) if best is None else best, {})
    before = held_out.get(0, {})
    shown = {} if shown is before else shown
    landed, void = _transfers(events, "land"), _transfers(events, "void")
    reached = [totals(each)[-1] for each in events]
    members = attended(events, run.found)
    return Summary(
        num_regions=run.num_regions,
        inner_steps=run.step,
        outer_steps=tuple(landed[fragment] for fragment in range(run.start["num_fragments"])),
        perplexity_before=before.get("eval_perplexity"),
        perplexity_after=shown.get("eval_perplexity"),
        loss_before=before.get("eval_loss"),
        loss_after=shown.get("eval_loss"),
        accuracy_before=figure(before, "eval_accuracy"),
        accuracy_after=figure(shown, "eval_accuracy"),
        evaluated=shown.get("weights", "global"),
        blocked_s=max(each.blocked_s for each in reached),
        training_s=_there(run, max(run.times_of("finish"), default=run.end)),
        total_s=_there(run, run.end),
        tokens=run.tokens(run.step),
        best_step=best,
        timing=run.start.get("timing", "measured"),
        bytes_sent=round(max(each.bytes_sent for each in reached)),
        data_parallel_bytes=sum(
            figures.data_parallel_bytes(run.start.get("num_params") or 0, until - since, len(regions))
            for since, until, regions in periods(members, run.step)
        ),
        method=describe(run.start["outer"]),
        not_counted=[words for each in events for words in _not_counted(each)],
        members=sentence(run.found),
        num_void=void.total(),
        losses=losses(run.found),
        dealt=deal_in_words(run.deals),
    )


def _transfers(events: Sequence[Sequence[Event]], kind: str) -> Counter[int]:
    """How many transfers of each fragment ended with this event, in any region."""
    ended = {
        (event["fragment"], event["sent_at"]) for each in events for event in each if event["kind"] == kind
    }
    return Counter(fragment for fragment, _ in ended)


def _there(run: RunRecord, end: float) -> float:
    """Seconds before `end` in which a region was in the run; 0 if time stood still."""
    spans = union(span for story in run.stories for span in story.there)
    return 0.0 if not run.has_times else sum(max(min(until, end) - since, 0.0) for since, until in spans)


def _held_out(journals: Sequence[RegionJournal]) -> dict[int, Event]:
    """The last evaluation at each inner step, from the first of these journals that has one."""
    evaluations: dict[int, Event] = {}
    for journal in reversed(journals):
        evaluations |= {
            event["step"]: event
            for event in journal.events
            if event["kind"] == "evaluate"
            and (event.get("eval_loss") is not None or event.get("eval_perplexity") is not None)
        }
    return evaluations


def _after_finish(journal: RegionJournal, kind: str) -> list[Event]:
    end = max(place for place, event in enumerate(journal.events) if event["kind"] == "finish")
    return [event for event in journal.events[end:] if event["kind"] == kind]


def _not_counted(run: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence if this region did not count at times."""
    region = str(run[0]["region"])
    sat_out = sum(event["kind"] == "sit_out" for event in run)
    fates = Counter(str(event["regions"].get(region)) for event in run if event["kind"] == "guard")
    parts = [f"sat {sat_out} transfers out"] if sat_out else []
    parts += [f"had {fates[each]} outer gradients {each}" for each in ("dropped", "clipped") if fates[each]]
    parts += [f"made {fates['void']} means void"] if fates["void"] else []
    anew = [str(event["step"]) for event in run if event["kind"] == "begin_anew"]
    parts += [f"began anew after step {', '.join(anew)}"] if anew else []
    return [f"region {region} {listed(parts)}"] if parts else []


def listed(parts: Sequence[str]) -> str:
    """Parts of a sentence, joined.

    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b, and c', 'a')
    """
    *first, last = parts
    return f"{', '.join(first)}, and {last}" if first else last


def describe(outer: dict[str, Any]) -> str:
    """A method and its settings, in one line."""
    return f"{outer['method']}: " + ", ".join(
        f"{name}={value}"
        for name, value in outer.items()
        if name not in ("method", "digest_interval") and not name.startswith("part.")
    )


def _plain(figure: float, digits: int) -> str:
    """
    >>> _plain(50.25, 3), _plain(2.5e200, 3)
    ('50.250', '2.5e+200')
    """
    return f"{figure:.{digits}f}" if figure < 1e9 else f"{figure:.4g}"
