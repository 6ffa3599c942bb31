"""The tables of a study, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import Any, NamedTuple

from hf_cocodc.errors import InputError

from .conduct import Found
from .lines import Result
from .probe import MERGES
from .spec import Changes, Study
from .statistics import Interval, interval, paired, steps_to, tail_loss

SHORT = {"outer.outer_lr": "lr", "outer.outer_momentum": "mu", "training.learning_rate": "inner lr"}
"""Names of settings in tables."""


class Row(NamedTuple):
    """An arm in the comparison of a cell. None where there is nothing to compare.

    Attributes:
        arm: its name.
        chosen: the best of its sweep.
        diverged: seeds in which its loss did not stay finite; they count nowhere else.
        loss: tail loss.
        to_reference: tail loss, less the reference's.
        to_parallel: tail loss, less that of data-parallel training.
        finished: loss of the finished model.
        steps: inner steps to the common loss.
        steps_ratio: steps to the common loss / those of the reference - 1.
        missed: seeds in which it did not reach the common loss.
        megabytes: that region 0 has sent.
        trained: share of all inner steps that were trained.
        simulated_s: time of the run, if it was simulated.
    """

    arm: str
    chosen: Changes
    diverged: int
    loss: Interval | None
    to_reference: Interval | None
    to_parallel: Interval | None
    finished: Interval | None
    steps: Interval | None
    steps_ratio: Interval | None
    missed: int
    megabytes: float
    trained: float
    simulated_s: float | None


def check_pairs(study: Study, found: Found) -> None:
    """Refuse to compare runs of a seed that did not begin alike. Raises InputError."""
    for cell in study.cells:
        for seed in study.seeds:
            starts = {
                arm: (result["weights"], tuple(result["batches"]))
                for arm in study.arms
                if (result := found.compare.get((cell, arm), {}).get(seed)) is not None
            }
            if len(set(starts.values())) > 1:
                raise InputError(
                    f"study {study.name}: arms of seed {seed} differ in first weights or batches: {starts}."
                )


def parallel_of(study: Study) -> str | None:
    """The arm of data-parallel training, if there is one."""
    return next((name for name, given in study.arms.items() if given.get("study.data_parallel")), None)


def common_loss(study: Study, found: Found, cell: str) -> float | None:
    """The loss that all arms of a cell are to reach: the mean of an arm's tail losses, by default of the worst one."""
    losses = {}
    for arm in study.arms:
        tails = [tail_loss(result["curve"]) for result in found.compare.get((cell, arm), {}).values()]
        if tails and all(map(math.isfinite, tails)):
            losses[arm] = mean(tails)
    return losses.get(study.common_loss) if study.common_loss else max(losses.values(), default=None)


def rows_of(study: Study, found: Found, cell: str) -> list[Row]:
    """The comparison of a cell: a row for each arm that has results."""
    goal, parallel = common_loss(study, found, cell), parallel_of(study)
    sound = {
        arm: {
            seed: result
            for seed, result in found.compare.get((cell, arm), {}).items()
            if math.isfinite(tail_loss(result["curve"])) and result["curve"][-1][1] is not None
        }
        for arm in study.arms
    }

    def against(
        arm: str, other: str | None, value: Callable[[Result], float | None], ratio: bool = False
    ) -> Interval | None:
        if other is None or other == arm:
            return None
        pairs = [
            (mine, theirs)
            for seed, result in sound[arm].items()
            if seed in sound[other]
            if (mine := value(result)) is not None and (theirs := value(sound[other][seed])) is not None
        ]
        if not pairs:
            return None
        if ratio:
            return interval([mine / theirs - 1 for mine, theirs in pairs], study.confidence)
        ours, others = zip(*pairs, strict=True)
        return paired(ours, others, study.confidence)

    def alone(arm: str, value: Callable[[Result], float | None]) -> Interval | None:
        values = [each for result in sound[arm].values() if (each := value(result)) is not None]
        return interval(values, study.confidence) if values else None

    def tail(result: Result) -> float:
        return tail_loss(result["curve"])

    def arrives(result: Result) -> float | None:
        return None if goal is None else steps_to(result["curve"], goal)

    def steps(result: Result) -> float | None:
        """Of a run that never arrives, all of its steps: it needs more. Without such runs the slower arm would look fast."""
        return None if goal is None else arrives(result) or float(result["curve"][-1][0])

    rows = []
    for arm in study.arms:
        results = found.compare.get((cell, arm), {})
        if results:
            missed = sum(arrives(result) is None for result in results.values())
            is_reached = missed < len(results)
            rows.append(
                Row(
                    arm,
                    found.best[cell, arm],
                    len(results) - len(sound[arm]),
                    alone(arm, tail),
                    against(arm, study.reference, tail),
                    against(arm, parallel, tail),
                    alone(arm, lambda result: result["curve"][-1][1]),
                    alone(arm, steps) if is_reached else None,
                    against(arm, study.reference, steps, ratio=True) if is_reached else None,
                    missed,
                    mean(result["bytes"] for result in results.values()) / 1e6,
                    mean(result["trained"] for result in results.values()),
                    mean(times) if (times := _times(results.values())) else None,
                )
            )
    return rows


def _times(results: Iterable[Result]) -> list[float]:
    return [each["simulated_s"] for each in results if "simulated_s" in each]


def page(study: Study, found: Found, command: str) -> str:
    """All tables of a study.

    Raises:
        InputError: arms are not paired.
    """
    check_pairs(study, found)
    seeds = sorted({seed for results in found.compare.values() for seed in results})
    lines = [
        f"# {study.title}",
        "",
        f"`{command}`. Seeds {_listed(seeds)}; the sweep has {_listed(study.sweep_seeds)}. Intervals are Student's t at "
        f"{study.confidence:.0%}, of differences of the same seed; bold if zero lies outside. `../studies.md` has the columns.",
        "",
    ]
    for cell in study.cells:
        rows = rows_of(study, found, cell)
        if rows:
            lines += [f"## {cell}", ""] if cell else []
            lines += [*_comparison(study, rows, common_loss(study, found, cell)), ""]
    lines += _probes(study, found)
    lines += _sweep(study, found)
    lines += [f"- {note}" for note in study.notes]
    return "\n".join(lines).rstrip() + "\n"


def _listed(seeds: Iterable[int]) -> str:
    told = list(seeds)
    if len(told) > 2 and told == list(range(told[0], told[-1] + 1)):
        return f"{told[0]} to {told[-1]}"
    return ", ".join(map(str, told)) or "none"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def told(chosen: Changes) -> str:
    """A combination in a few words.

    >>> told({"outer.outer_lr": 0.7, "outer.outer_momentum": 0.9})
    'lr 0.7, mu 0.9'
    """
    return ", ".join(f"{SHORT.get(name, name)} {value:g}" for name, value in chosen.items()) or "-"


def shown(value: Interval | None, form: str, factor: float = 1.0) -> str:
    """An interval in a cell of a table; a difference is bold if zero lies outside."""
    if value is None:
        return "-"
    text = format(factor * value.mean, form)
    if value.half is not None:
        text += f" ± {format(factor * value.half, form.lstrip('+'))}"
    return f"**{text}**" if form.startswith("+") and value.decides else text


def _comparison(study: Study, rows: Sequence[Row], goal: float | None) -> list[str]:
    at = "a common loss" if goal is None else f"loss {goal:.3f}"
    parallel = ["less data-parallel"] if parallel_of(study) not in (None, study.reference) else []
    titles = ["arm", "chosen", "n", "loss", f"less {study.reference}", *parallel, "finished"]
    titles += [f"steps to {at}", f"against {study.reference}, %", "MB sent"]
    has_absences = any(row.trained < 1 for row in rows)
    has_times = any(row.simulated_s is not None for row in rows)
    cells = []
    for row in rows:
        count = str(row.loss.num if row.loss else 0)
        cells.append(
            [
                row.arm,
                told(row.chosen),
                f"{count}, {row.diverged} diverged" if row.diverged else count,
                shown(row.loss, ".4f"),
                shown(row.to_reference, "+.4f"),
                *([shown(row.to_parallel, "+.4f")] if parallel else []),
                shown(row.finished, ".4f"),
                "never"
                if row.steps is None and row.missed
                else (shown(row.steps, ".0f") + (f", {row.missed} never" if row.missed else "")),
                shown(row.steps_ratio, "+.1f", 100),
                f"{row.megabytes:.3g}",
                *([f"{row.trained:.1%}"] if has_absences else []),
                *(["-" if row.simulated_s is None else f"{row.simulated_s:.0f}"] if has_times else []),
            ]
        )
    titles += ["trained"] * has_absences + ["time (s)"] * has_times
    return _table(titles, cells)


def _probes(study: Study, found: Found) -> list[str]:
    """What the merge is to correct, and what it corrects (`Probe`)."""
    rows = []
    for (cell, arm), results in found.compare.items():
        probes = [result["probe"] for result in results.values() if result.get("probe")]
        for part in dict.fromkeys(part for each in probes for part in each):

            def over(name: str, form: str, part: str = part, probes: list[Any] = probes) -> str:
                return shown(
                    interval([each[part][name] for each in probes if part in each], study.confidence), form
                )

            errors = [f"{over(f'{name} error', '.3f')}" for name in MERGES]
            cosines = [
                f"{over(f'{name} cosine', '.3f')}" for name in MERGES if name not in ("replace", "mix 0.5")
            ]
            rows.append(
                [" ".join(filter(None, (cell, arm))), part, over("missing", ".3f"), *errors, *cosines]
            )
    if not rows:
        return []
    cosine_titles = [f"cosine, {name}" for name in MERGES if name not in ("replace", "mix 0.5")]
    titles = ["arm", "training", "missing", *(f"error, {name}" for name in MERGES), *cosine_titles]
    return ["## The merge against inner steps truly redone", "", *_table(titles, rows), ""]


def _sweep(study: Study, found: Found) -> list[str]:
    """All cells of the sweep: the mean tail loss over its seeds; the chosen one is bold."""
    lines: list[str] = []
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    edges = []
    for (cell, arm), tried in found.sweep.items():
        best = found.best.get((cell, arm))
        cells = []
        for chosen, results in tried:
            loss = mean(tail_loss(result["curve"]) for result in results)
            text = f"{loss:.3f}" if math.isfinite(loss) else "diverged"
            cells.append(f"**{text}**" if chosen == best else text)
        if best is not None:
            edges += [
                f"{' '.join(filter(None, (cell, arm)))} ({told({name: value})})"
                for name, value in best.items()
                if len({each[name] for each, _ in tried}) > 2
                and value in (min(each[name] for each, _ in tried), max(each[name] for each, _ in tried))
                and not (name.endswith("momentum") and value == 0)
            ]
        names = ", ".join(SHORT.get(name, name) for name in tried[0][0])
        titles = (names, *(", ".join(f"{value:g}" for value in chosen.values()) for chosen, _ in tried))
        groups.setdefault(titles, []).append([" ".join(filter(None, (cell, arm))), *cells])
    for titles, rows in groups.items():
        lines += [*_table(titles, rows), ""]
    if edges:
        lines += [
            f"Best at an edge of the grid, so that a better one may lie outside: {'; '.join(edges)}.",
            "",
        ]
    return ["## The sweep", "", *lines] if lines else []
