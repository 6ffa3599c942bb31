"""The plan as a table, and in words."""

import dataclasses
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from ...auto import too_few_rounds
from ...resolve import lost_steps, settings
from ...settings import OuterConfig
from ..bench.report import BenchReport, Row
from ..report.summary import describe
from .choice import foremost
from .course import Course
from .forecast import Forecast, Subject
from .laws import cost
from .tcp import TRIALS

_WIDTH = 100
ROWS = 10
"""Rows of a table that is not shown whole, with that of data-parallel training."""
_NOTABLE = 0.03
"""Utilisation by which the worst trial must lie below the mean to be worth a line."""
_NOTES = (
    "method, codec, H, P: outer.method, outer.codec, outer.sync_interval, outer.num_fragments. stale: most inner steps between a "
    "send and its landing. needs: inner steps of overlap in which the slowest transfer would hide.",
    "used: share of the time in which a region makes inner steps. wait s/h: seconds an hour in which it waits for the link. "
    "The utilisation that a run reports counts as used all time in which it does not wait, sends and landings too. "
    "GB/h: payload that a region sends. Sends, landings, codec: as fast as this machine.",
    "time: of training.max_steps inner steps, with waiting, sends and landings (with --json in seconds). Evaluation, saving, and "
    "the round that closes the run are not in it.",
    "DDP: data-parallel training over the same link at its best, with fp32 gradients that travel during the backward pass.",
    "dev MB, host MB: memory of the outer state and of transfers, beside the training's own (one rank a region).",
)


def report(subject: Subject, found: Sequence[Forecast], failing: Sequence[str], target: float) -> BenchReport:
    """The table of a plan: the settings of each method and codec, and data-parallel training.

    Args:
        subject: what was planned.
        found: forecasts that reach the target.
        failing: "method codec" of those that do not.
        target: the utilisation.
    """
    link = subject.link
    steps = subject.recipe.training.get("max_steps", -1)
    parallel = subject.data_parallel()
    rows = [
        {
            "method": each.shown["method"],
            "codec": each.shown["codec"],
            "H": each.shown["sync_interval"],
            "P": each.shown.get("num_fragments", 1),
            "stale": each.course.staleness,
            "needs": each.course.needs,
            **_figures(each.course, steps, subject.step_s),
            "vs DDP": each.course.utilization / parallel.utilization,
            "dev MB": each.device_bytes / 1e6,
            "host MB": each.host_bytes / 1e6,
        }
        for each in found
    ]
    row: Row = dict.fromkeys(rows[0] if rows else ("method", "codec", "H", "P", "stale", "needs"))
    row |= {"method": "DDP", "codec": "fp32"}
    row |= {**_figures(parallel, steps, subject.step_s), "vs DDP": 1.0}
    rows.append(row)
    notes = list(_NOTES)
    if failing:
        notes.append(f"Not with any settings that were tried: {', '.join(failing)}.")
    setting = {
        "parameters": subject.num_params,
        "regions": subject.regions,
        "rtt_ms": 1e3 * link.rtt_s,
        "rate_mbit": link.rate / 1e6,
        "loss": link.loss,
        "congestion": link.congestion,
        "step_s": subject.step_s,
        "steps": steps if steps > 0 else None,
        "target": target,
    }
    formats: dict[str, str | Callable[[Any], str]] = {
        "used": ".1%",
        "wait s/h": ".0f",
        "GB/h": ".3g",
        "dev MB": ".0f",
        "host MB": ".0f",
        "time": duration,
    }
    return BenchReport("plan", setting, rows, _wrapped(notes), formats)


def short(whole: BenchReport, found: Sequence[Forecast], recipe: OuterConfig) -> BenchReport:
    """A report of `report` with the rows that matter most."""
    shown = foremost(found, recipe, ROWS - 1)
    left_out = len(found) - len(shown)
    if not left_out:
        return whole
    rows = [row for row, each in zip(whole.rows, found, strict=False) if each in shown]
    note = f"{left_out} more combinations of a method and a codec reach the target: --all shows them, --json has them."
    return dataclasses.replace(whole, rows=[*rows, whole.rows[-1]], notes=[*whole.notes, *_wrapped([note])])


def _figures(course: Course, steps: int, step_s: float) -> dict[str, Any]:
    seconds = steps * step_s / course.utilization if steps > 0 else None
    return {
        "used": course.utilization,
        "wait s/h": 3600 * course.blocked,
        "GB/h": 3600 * course.bytes_per_s / 1e9,
        "time": seconds,
    }


def in_words(subject: Subject, chosen: Forecast | None, method: str, target: float) -> list[str]:
    """What to do: the settings of the recipe's method, and what they are expected to cost."""
    if chosen is None:
        return _wrapped(
            [
                f"With method {method} no settings use {target:.0%} of the time. Take another method of the table "
                "(--set outer.method=...), more steps, a faster link, or a lower --target."
            ]
        )
    course = chosen.course
    interval = int(settings(subject.recipe.outer)["sync_interval"])  # type: ignore[call-overload]
    seconds = _figures(course, subject.recipe.training.get("max_steps", -1), subject.step_s)["time"]
    lines = [
        f"settings: {describe(chosen.shown)}",
        f"regions: connections={subject.connections}, rate_limit={subject.limit * 8 / 1e6:.4g}",
        f"forecast: {course.utilization:.1%} of the time is used; waiting takes {course.blocked:.1%}, sends and landings "
        f"{1 - course.utilization - course.blocked:.1%}. A transfer lands {_steps(course.staleness)} after its send."
        + ("" if seconds is None else f" The run takes {duration(seconds)}."),
        *_warnings(chosen, subject.recipe.training.get("max_steps")),
        *cost(method, subject.regions, course.staleness, chosen.shown["sync_interval"], interval),
    ]
    return _wrapped(lines)


def _warnings(chosen: Forecast, max_steps: int | None) -> list[str]:
    """What the mean does not show, and what the settings throw away."""
    warnings = lost_steps(chosen.config), too_few_rounds(chosen.config, max_steps)
    said = [f"warning: {each}" for each in warnings if each is not None]
    if chosen.course.utilization - chosen.worst > _NOTABLE:
        said.append(
            f"losses: which packets get lost is chance. The worst of {TRIALS} trials uses {chosen.worst:.1%} of the time."
        )
    return said


def _steps(count: int) -> str:
    return f"{count} inner step" if count == 1 else f"{count} inner steps"


def _wrapped(lines: Sequence[str]) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, _WIDTH, break_on_hyphens=False)]


def duration(seconds: float) -> str:
    """
    >>> duration(75.25), duration(4000)
    ('75.2 s', '1 h 06 min')
    """
    if seconds < 600:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
