"""The summary of a run, read from its journals."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..run.unread import merged
from .events import figure
from .journals import read_journal
from .members import attended, changes, num_regions, periods, sentence, spans
from .tokens import tokens_at


@dataclass(frozen=True)
class Summary:
    """Figures of a finished run; outer steps by fragment; bytes and seconds are the largest of all regions.

    `bytes_sent` is most often region 0's, which also sends the first parameters; see `engine.account.Totals`.

    `total_s` is the time from the moment at which the regions have met to the last event, evaluations included.
    `tokens` are those of all regions together; None if the journals do not say how many an inner step has.
    `timing` says what the seconds are: "measured", "simulated", or "none".
    `best_step` is the inner step of the global weights that the run ended with, if they are its best and not its last.
    `not_counted` has a sentence about each region that did not count at times: not finite, or far larger than ordinary.
    `num_void` counts the transfers whose mean could not be believed: not finite, or far larger than all that went into it.
    `unread` names the data that nobody read because its region was away.
    `num_regions` began the run; where a run would end with a lost region, it was started or resumed with so many last.
    `members` says how many regions took part from which inner step on; empty if there can have been no change.
    `data_parallel_bytes` are those of `data_parallel_bytes`; 0 for one region, or if the number of parameters is unknown.
    """

    num_regions: int
    inner_steps: int
    outer_steps: tuple[int, ...]
    perplexity_before: float | None
    perplexity_after: float | None
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
    unread: Sequence[str] = ()

    def blocked(self) -> str:
        """How long training waited for the link, in words."""
        if self.timing == "none":
            return "unknown (time was not simulated)"
        return f"{self.blocked_s:.2f} s of {self.training_s:.1f} {self._unit}"

    @property
    def _unit(self) -> str:
        return "s" if self.timing == "measured" else "s of simulated time"

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all regions in a second of training, as long as it took; None if unknown."""
        known = self.tokens is not None and self.timing != "none" and self.training_s > 0
        return self.tokens / self.training_s if known and self.tokens is not None else None

    def _amounts(self) -> list[str]:
        """Tokens and total time, as far as they are known."""
        rate = "" if self.tokens_per_s is None else f", {self.tokens_per_s:,.0f} a second"
        rows = [] if self.tokens is None else [f"tokens                {self.tokens:,} of all regions{rate}"]
        return rows + [f"total time            {self.total_s:.1f} {self._unit}"] * (self.timing != "none")

    def lines(self, model: Path, journals: Sequence[Path]) -> list[str]:
        """The summary as lines of text."""
        rows = []
        if self.perplexity_after is not None:
            before = "" if self.perplexity_before is None else f"{_plain(self.perplexity_before, 2)} before, "
            best = "" if self.best_step is None else f", the best: of step {self.best_step}"
            rows.append(
                f"held-out perplexity   {before}{_plain(self.perplexity_after, 3)} after ({self.evaluated} weights{best})"
            )
        if self.accuracy_after is not None:
            before = "" if self.accuracy_before is None else f"{100 * self.accuracy_before:.1f} % before, "
            rows.append(f"held-out accuracy     {before}{100 * self.accuracy_after:.1f} % after")
        rows += [
            f"method                {self.method}",
            f"inner steps           {self.inner_steps}"
            + ("" if self.members else f" in each of {self.num_regions} region(s)"),
            *([f"regions               {self.members}"] if self.members else []),
            f"outer steps           {self._outer_steps()}",
            *self._amounts(),
            f"blocked on the link   {self.blocked()}",
        ]
        if self.data_parallel_bytes:
            ratio = self.data_parallel_bytes / max(self.bytes_sent, 1)
            rows.append(
                f"sent by a region      {amount(self.bytes_sent)}; data-parallel training would have sent "
                f"{amount(self.data_parallel_bytes)} ({ratio:.0f} times as much)"
            )
        rows += [f"not counted           {words}" for words in self.not_counted]
        if self.num_void:
            count = sum(self.outer_steps) + self.num_void
            rows.append(
                f"void                  {self.num_void} of {count} transfers changed nothing (see the log)"
            )
        rows += [f"read by nobody        {words}" for words in self.unread]
        rows.append(f"global model          {model}")
        rows += [f"journal               {journal}" for journal in journals]
        return rows

    def _outer_steps(self) -> str:
        total, least, most = sum(self.outer_steps), min(self.outer_steps), max(self.outer_steps)
        if len(self.outer_steps) == 1:
            return str(total)
        times = str(most) if least == most else f"{least} to {most}"
        return f"{total}, each of one of {len(self.outer_steps)} fragments (of each {times})"


def summarise(journals: Sequence[Path]) -> Summary:
    """Read the journals of all available regions, region 0's first. At least one of them has finished; a lost one has not."""
    there = [journal for journal in map(read_journal, journals) if journal is not None]
    everything = [journal.events for journal in there]
    found = changes(everything)
    ended = [journal for journal in there if journal.has_finished]
    runs = [journal.events for journal in ended]
    # the one that has seen most changes was there longest
    longest = max(runs, key=lambda run: sum(event["kind"] == "epoch" for event in run))
    start = ended[0].start
    finishes = [next(event for event in reversed(run) if event["kind"] == "finish") for run in runs]
    evaluations = [event for event in runs[0] if event.get("eval_perplexity") is not None]
    perplexities = {event["step"]: event["eval_perplexity"] for event in evaluations}
    accuracies = {event["step"]: figure(event, "eval_accuracy") for event in evaluations}
    end = max(index for index, event in enumerate(runs[0]) if event["kind"] == "finish")
    best = next((event["step"] for event in runs[0][end:] if event["kind"] == "best"), None)
    last = evaluations[-1]["step"] if evaluations and evaluations[-1]["step"] else None
    shown = last if best is None else best
    inner_steps = finishes[0]["step"]
    members = attended(everything, found)
    landed = [event["fragment"] for event in runs[0] if event["kind"] == "land"]
    return Summary(
        num_regions=num_regions(everything, found),
        inner_steps=inner_steps,
        outer_steps=tuple(landed.count(fragment) for fragment in range(start["num_fragments"])),
        perplexity_before=perplexities.get(0),
        perplexity_after=None if shown is None else perplexities.get(shown),
        accuracy_before=accuracies.get(0),
        accuracy_after=None if shown is None else accuracies.get(shown),
        evaluated=evaluations[-1].get("weights", "global") if evaluations else "global",
        blocked_s=max(figure(finish, "blocked_s") or 0.0 for finish in finishes),
        training_s=max(finish["time_s"] for finish in finishes),
        total_s=max(event["time_s"] for run in everything for event in run),
        tokens=tokens_at(
            inner_steps, {journal.region: journal.start for journal in there}, spans(members, inner_steps)
        ),
        best_step=best,
        timing=start.get("timing", "measured"),
        bytes_sent=max(finish.get("bytes_sent") or 0 for finish in finishes),
        data_parallel_bytes=sum(
            data_parallel_bytes(start.get("num_params") or 0, until - since, len(regions))
            for since, until, regions in periods(members, inner_steps)
        ),
        method=describe(start["outer"]),
        not_counted=[words for run in runs for words in _not_counted(run)],
        members=sentence(found) if found else "",
        num_void=sum(event["kind"] == "void" for event in runs[0]),
        unread=[each.words for each in merged(longest)],
    )


def _not_counted(run: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence about a region that did not count at times; none about any other."""
    region = str(run[0]["region"])
    sat_out = sum(event["kind"] == "sit_out" for event in run)
    fates = Counter(str(event["regions"].get(region)) for event in run if event["kind"] == "guard")
    said = [f"sat {sat_out} transfers out"] if sat_out else []
    said += [f"had {fates[each]} outer gradients {each}" for each in ("dropped", "clipped") if fates[each]]
    anew = [str(event["step"]) for event in run if event["kind"] == "begin_anew"]
    said += [f"began anew after step {', '.join(anew)}"] if anew else []
    return [f"region {region} {listed(said)}"] if said else []


def listed(parts: Sequence[str]) -> str:
    """Parts of a sentence, joined.

    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b, and c', 'a')
    """
    *first, last = parts
    return f"{', '.join(first)}, and {last}" if first else last


def data_parallel_bytes(num_params: int, steps: int, num_regions: int) -> int:
    """Bytes that a region would have sent with an fp32 gradient all-reduce over all regions at every step."""
    return 2 * (num_regions - 1) * 4 * num_params * steps // num_regions


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


def amount(count: float) -> str:
    """Bytes, with a unit.

    >>> amount(1234567)
    '1.235 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
