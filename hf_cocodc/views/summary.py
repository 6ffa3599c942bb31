"""The summary of a run, read from its journals."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..run.journal import read
from ..run.unread import merged
from .members import changes, sentence


@dataclass(frozen=True)
class Summary:
    """Figures of a finished run; outer steps by fragment; bytes and seconds are the largest of all regions.

    `bytes_sent` is most often region 0's, which also sends the first parameters; see `engine.account.Totals`.

    `timing` says what the seconds are: "measured", "simulated", or "none".
    `best_step` is the inner step of the global weights that the run ended with, if they are its best and not its last.
    `sat_out` has a sentence about each region that was not finite at times.
    `unread` names the data that nobody read because its region was away.
    `members` says how many regions took part from which inner step on; empty for a run that would end with a lost region.
    """

    num_regions: int
    inner_steps: int
    outer_steps: tuple[int, ...]
    perplexity_before: float | None
    perplexity_after: float | None
    evaluated: str
    best_step: int | None
    blocked_s: float
    training_s: float
    timing: str
    bytes_sent: int
    data_parallel_bytes: int
    method: str
    sat_out: Sequence[str]
    members: str = ""
    unread: Sequence[str] = ()

    def blocked(self) -> str:
        """How long training waited for the link, in words."""
        if self.timing == "none":
            return "unknown (time was not simulated)"
        unit = "s" if self.timing == "measured" else "s of simulated time"
        return f"{self.blocked_s:.2f} s of {self.training_s:.1f} {unit}"

    def lines(self, model: Path, journals: Sequence[Path]) -> list[str]:
        """The summary as lines of text."""
        rows = []
        if self.perplexity_after is not None:
            before = "" if self.perplexity_before is None else f"{self.perplexity_before:.2f} before, "
            best = "" if self.best_step is None else f", the best: of step {self.best_step}"
            rows.append(
                f"held-out perplexity   {before}{self.perplexity_after:.3f} after ({self.evaluated} weights{best})"
            )
        rows += [
            f"method                {self.method}",
            f"inner steps           {self.inner_steps}"
            + ("" if self.members else f" in each of {self.num_regions} region(s)"),
            *([f"regions               {self.members}"] if self.members else []),
            f"outer steps           {self._outer_steps()}",
            f"blocked on the link   {self.blocked()}",
        ]
        if self.num_regions > 1:
            ratio = self.data_parallel_bytes / max(self.bytes_sent, 1)
            rows.append(
                f"sent by a region      {_bytes(self.bytes_sent)}; data-parallel training would have sent "
                f"{_bytes(self.data_parallel_bytes)} ({ratio:.0f} times as much)"
            )
        rows += [f"not finite            {words}" for words in self.sat_out]
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
    runs = [read(journal) for journal in journals]
    found = changes(runs)
    if found:
        runs = [run for run in runs if has_finished(run)]
    # the one that has seen most changes was there longest
    longest = max(runs, key=lambda run: sum(event["kind"] == "epoch" for event in run))
    start = runs[0][0]
    finishes = [next(event for event in reversed(run) if event["kind"] == "finish") for run in runs]
    evaluations = [event for event in runs[0] if event.get("eval_perplexity") is not None]
    perplexities = {event["step"]: event["eval_perplexity"] for event in evaluations}
    end = max(index for index, event in enumerate(runs[0]) if event["kind"] == "finish")
    best = next((event["step"] for event in runs[0][end:] if event["kind"] == "best"), None)
    after = evaluations[-1]["eval_perplexity"] if evaluations and evaluations[-1]["step"] else None
    inner_steps = finishes[0]["step"]
    num_regions = start["num_regions"]
    landed = [event["fragment"] for event in runs[0] if event["kind"] == "land"]
    return Summary(
        num_regions=num_regions,
        inner_steps=inner_steps,
        outer_steps=tuple(landed.count(fragment) for fragment in range(start["num_fragments"])),
        perplexity_before=perplexities.get(0),
        perplexity_after=after if best is None else perplexities.get(best),
        evaluated=evaluations[-1].get("weights", "global") if evaluations else "global",
        blocked_s=max(finish["blocked_s"] for finish in finishes),
        training_s=max(finish["time_s"] for finish in finishes),
        best_step=best,
        timing=start.get("timing", "measured"),
        bytes_sent=max(finish["bytes_sent"] for finish in finishes),
        data_parallel_bytes=data_parallel_bytes(start["num_params"], inner_steps, num_regions),
        method=describe(start["outer"]),
        sat_out=[words for run in runs for words in _sat_out(run)],
        members=sentence(found) if found else "",
        unread=[each.words for each in merged(longest)],
    )


def has_finished(run: Sequence[dict[str, Any]]) -> bool:
    """Whether a journal's region has come to the end of its run."""
    return any(event["kind"] == "finish" for event in run)


def _sat_out(run: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence about a region that was not finite at times; none about any other."""
    count = sum(event["kind"] == "sit_out" for event in run)
    anew = [str(event["step"]) for event in run if event["kind"] == "begin_anew"]
    after = f", and began anew after step {', '.join(anew)}" if anew else ""
    return [f"region {run[0]['region']} sat {count} transfers out{after}"] if count else []


def data_parallel_bytes(num_params: int, steps: int, num_regions: int) -> int:
    """Bytes that a region would have sent with an fp32 gradient all-reduce over all regions at every step."""
    return 2 * (num_regions - 1) * 4 * num_params * steps // num_regions


def describe(outer: dict[str, Any]) -> str:
    """A method and its settings, in one line."""
    return f"{outer['method']}: " + ", ".join(
        f"{name}={value}" for name, value in outer.items() if name not in ("method", "digest_interval")
    )


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
