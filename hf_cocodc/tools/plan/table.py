"""The plan as a table, and in words."""

import dataclasses
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from ...auto import warnings_of
from ...net.storage import price
from ...resolve import settings
from ...settings import OuterConfig
from ..bench.report import BenchReport, Row
from .choice import foremost, written_out
from .course import Course
from .forecast import Forecast, Subject
from .money import NONE, Cost, Prices, cost
from .storages import StorageFigures, gap_s
from .transfers import LATE, MARGIN, MSS, MTU

_WIDTH = 100
ROWS = 10
"""Rows of a shortened table, with that of data-parallel training."""
_NOTES = (
    "method, codec, H, P: outer.method, outer.codec, outer.sync_interval, outer.num_fragments. stale: most inner steps between a "
    "send and its landing. needs: inner steps of overlap in which the slowest transfer would hide.",
    "used: share of the time in which a region makes inner steps. wait s/h: seconds an hour in which it waits for the link. "
    "The utilization that a run reports is the same, but evaluation and saving count as used there. "
    "GB/h: payload that a region sends. Sends, landings, codec: as on a GPU; with training.use_cpu as on a core.",
    "time: of training.max_steps inner steps, with waiting, sends and landings (with --json in seconds). Evaluation, saving, and "
    "the round that closes the run are not in it.",
    "DDP: data-parallel training over the same link at its best, with fp32 gradients that travel during the backward pass.",
    "dev MB, host MB: memory of the outer state and of transfers, beside the training's own (one rank a region).",
)

DILOCO_EXPONENT = 0.0116
"""Of M in the joint fit of the loss, 19.226 N^-0.0985 M^0.0116 (2503.09799): DiLoCo with H = 30, N from 35M to 2.4B."""
MOST_REGIONS = 8
ADVISED_OVERLAP, TRIED_OVERLAP = 5, 10
"""Overlap of Streaming DiLoCo in inner steps: what the paper advises, and what costs less than 0.2 % (2501.18512)."""


_STEPS = 1000
"""Inner steps of which the price is shown where a recipe does not say how many there are."""


def report(
    subject: Subject,
    forecasts: Sequence[Forecast],
    failing: Sequence[str],
    target: float,
    prices: Prices = NONE,
) -> BenchReport:
    """The table of a plan: settings for each method and codec, and data-parallel training."""
    parallel = subject.data_parallel()
    rows = [
        {
            "method": each.shown["method"],
            "codec": each.shown["codec"],
            "H": each.shown["sync_interval"],
            "P": each.shown.get("num_fragments", 1),
            "stale": each.course.staleness,
            "needs": each.course.needs,
            **_figures(each.course, subject, prices),
            "vs DDP": each.course.utilization / parallel.utilization,
            "dev MB": each.device_bytes / 1e6,
            "host MB": each.host_bytes / 1e6,
        }
        for each in forecasts
    ]
    row: Row = dict.fromkeys(rows[0] if rows else ("method", "codec", "H", "P", "stale", "needs"))
    row |= {"method": "DDP", "codec": "fp32"}
    row |= _figures(parallel, subject, prices) | {"vs DDP": 1.0}
    rows.append(row)
    notes = [*_NOTES, *_notes_on(prices)]
    if failing:
        notes.append(f"Not with any settings that were tried: {', '.join(failing)}.")
    setting = {
        "parameters": subject.num_params,
        "regions": subject.regions,
        "link": subject.carrier,
        **subject.link.setting(),
        "step_s": subject.step_s,
        "steps": subject.steps,
        "target": target,
    }
    formats: dict[str, str | Callable[[Any], str]] = {
        "used": ".1%",
        "wait s/h": ".0f",
        "GB/h": ".3g",
        "dev MB": ".0f",
        "host MB": ".0f",
        "time": duration,
        **dict.fromkeys(("net $", "$", "net $/1k", "$/1k"), dollars),
    }
    return BenchReport("plan", setting, rows, wrapped(notes), formats)


def short(whole: BenchReport, forecasts: Sequence[Forecast], recipe: OuterConfig) -> BenchReport:
    """The same report with the rows that matter most."""
    shown = foremost(forecasts, recipe, ROWS - 1)
    left_out = len(forecasts) - len(shown)
    if not left_out:
        return whole
    rows = [row for row, each in zip(whole.rows, forecasts, strict=False) if each in shown]
    note = f"{left_out} more combinations of a method and a codec reach the target: --all shows them, --json has them."
    return dataclasses.replace(whole, rows=[*rows, whole.rows[-1]], notes=[*whole.notes, *wrapped([note])])


def _figures(course: Course, subject: Subject, prices: Prices) -> dict[str, Any]:
    """The columns that data-parallel training has, too; those of money if there are prices."""
    columns: dict[str, Any] = {
        "used": course.utilization,
        "wait s/h": 3600 * course.blocked,
        "GB/h": 3600 * course.bytes_per_s / 1e9,
        "time": None if subject.steps is None else _seconds(course, subject),
    }
    if prices.are_given:
        price, unit = _cost(course, subject, prices), "/1k" if subject.steps is None else ""
        columns |= {} if None in price else {f"net ${unit}": price.traffic}
        columns[f"${unit}"] = price.total
    return columns


def _seconds(course: Course, subject: Subject) -> float:
    """Of all inner steps, or of `_STEPS`."""
    return (subject.steps or _STEPS) * subject.step_s / course.utilization


def _cost(course: Course, subject: Subject, prices: Prices) -> Cost:
    """Of all inner steps, or of `_STEPS`. Clouds count packets with their headers."""
    seconds = _seconds(course, subject)
    return cost(subject.regions * seconds * course.bytes_per_s * MTU / MSS / 1e9, seconds, prices)


def _notes_on(prices: Prices) -> list[str]:
    if not prices.are_given:
        return []
    parts = []
    if prices.usd_per_gb is not None:
        parts.append(f"what leaves all regions, with headers, at ${prices.usd_per_gb:.4g} a GB")
    if prices.usd_per_gpu_hour is not None:
        parts.append(f"{prices.gpus} GPUs at ${prices.usd_per_gpu_hour:.4g} an hour each")
    notes = [f"$: US dollars of the run ($/1k: of {_STEPS:,} inner steps): {'; '.join(parts)}."]
    return [*notes, f"{prices.source[0].upper()}{prices.source[1:]}."] if prices.source else notes


def dollars(amount: float) -> str:
    """
    >>> dollars(0.123), dollars(2.5), dollars(1234.5)
    ('0.12', '2.5', '1,234')
    """
    if amount < 1:
        return f"{amount:.2g}"
    return f"{amount:.2f}".rstrip("0").rstrip(".") if amount < 10 else f"{amount:,.0f}"


def in_words(
    subject: Subject, chosen: Forecast | None, method: str, target: float, prices: Prices = NONE
) -> list[str]:
    """What to do: the settings of the recipe's method, and what they are expected to cost."""
    if chosen is None:
        return wrapped(
            [
                f"With method {method} no settings use {target:.0%} of the time. Take another method of the table "
                "(--set outer.method=...), more steps, a faster link, or a lower --target."
            ]
        )
    course = chosen.course
    interval = int(settings(subject.recipe.outer)["sync_interval"])
    lines = [
        f"settings: {in_script(chosen)}",
        *_link_in_words(subject, chosen.config),
        f"forecast: {course.utilization:.1%} of the time is used; waiting takes {course.blocked:.1%}, sends and landings "
        f"{1 - course.utilization - course.blocked:.1%}. A transfer lands {_steps(course.staleness)} after its send."
        + ("" if subject.steps is None else f" The run takes {duration(_seconds(course, subject))}."),
        *_money_in_words(chosen, subject, prices),
        *_margin_in_words(chosen, subject),
        *(f"warning: {each}" for each in warnings_of(chosen.config, subject.steps)),
        *loss(method, subject.regions, course.staleness, chosen.shown["sync_interval"], interval),
    ]
    return wrapped(lines)


def _link_in_words(subject: Subject, config: OuterConfig) -> list[str]:
    """What carries payloads, and the settings that suit it."""
    if isinstance(subject.link, StorageFigures):
        look_s = gap_s(math.inf, subject.link.read_s, subject.link.is_near)
        return [
            f"link: a storage. After a pause, a region finds within {look_s:.2g} s what another one has written.",
            _requests_in_words(subject, config),
        ]
    if not subject.is_group:
        limit = f"regions: RegionConfig(connections={subject.connections}, rate_limit={subject.limit * 8 / 1e6:.4g})"
        return [f"link: tcp ({subject.why}).", limit]
    encrypted = " With a secret it would be tcp." if subject.recipe.regions.link == "auto" else ""
    return [
        f"link: {subject.carrier} ({subject.why}), forecast as one connection to each other region that fills the given rate. It "
        f"does not encrypt, and follows neither regions.connections nor regions.rate_limit: set neither.{encrypted}"
    ]


def _requests_in_words(subject: Subject, config: OuterConfig) -> str:
    """How many requests the storage gets, and what they cost where it has a list price."""
    asked = subject.requests(config)
    counts = [f"{sum(each.values()):,.0f}" for each in asked]
    words = (
        f"requests: {counts[0]} an hour from a region, {counts[1]} from the one that serves as coordinator"
    )
    costs = [found for each in asked if (found := price(subject.recipe.regions.coordinator or "", each))]
    prices = " and ".join(f"${dollars(cost)}" for cost, _ in costs)
    return f"{words}: {prices} an hour ({costs[0][1]})." if costs else f"{words}."


def _money_in_words(chosen: Forecast, subject: Subject, prices: Prices) -> list[str]:
    """What a run costs beside data-parallel training over the same link; nothing without prices."""
    if not prices.are_given:
        return []

    def words(course: Course) -> str:
        each = _cost(course, subject, prices)
        parts = [f"${dollars(each.traffic)} of traffic"] if each.traffic is not None else []
        parts += [f"${dollars(each.gpus)} of GPUs"] if each.gpus is not None else []
        return f"{' and '.join(parts)} in {duration(_seconds(course, subject))}"

    what = f"{chosen.shown['method']} {chosen.shown['codec']} over {subject.regions} regions"
    of = f", {_STEPS:,} inner steps" if subject.steps is None else ""
    return [f"cost: {what}{of}: {words(chosen.course)}. Data-parallel: {words(subject.data_parallel())}."]


def _margin_in_words(chosen: Forecast, subject: Subject) -> list[str]:
    """What a transfer takes, and what hides it; nothing where training waits for each."""
    course = chosen.course
    if not course.staleness:
        return []
    return [
        f"margin: the slowest transfer takes {course.slowest_s:.3g} s by itself, {LATE} times as long in the forecast, and "
        f"training goes on for {course.staleness * subject.step_s:.3g} s meanwhile. The target is reached also if transfers take "
        f"{MARGIN} times as long."
    ]


def in_script(forecast: Forecast) -> str:
    """Its settings as a script gives them: an argument for each that the recipe or the plan has chosen."""
    return f"OuterConfig({', '.join(f'{name}={value!r}' for name, value in written_out(forecast).items())})"


def _steps(count: int) -> str:
    return f"{count} inner step" if count == 1 else f"{count} inner steps"


def wrapped(lines: Sequence[str]) -> list[str]:
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


def loss(
    method: str, num_regions: int, overlap_steps: int, sync_interval: int, recipes_interval: int
) -> list[str]:
    """Sentences about the loss to expect of a method, beside one model copy with the same tokens.

    `recipes_interval` is H of the recipe that was planned, whose cost at best its author knows.

    >>> loss("co2", 2, 48, 48, 48)
    []
    """
    parts = []
    if method == "diloco" and 1 < num_regions <= MOST_REGIONS:
        counts = [each for each in (num_regions, 2 * num_regions) if each <= MOST_REGIONS]
        costs = [f"{each} regions are expected to cost {each**DILOCO_EXPONENT - 1:.1%}" for each in counts]
        parts.append(
            f"loss: {', '.join(costs)} beside one (scaling law of DiLoCo at H = 30 for at most {MOST_REGIONS}, 2503.09799)."
        )
    if sync_interval > recipes_interval:
        parts.append(
            f"loss: no source that we know tells what H = {sync_interval} costs beside the recipe's {recipes_interval}. Compare "
            "both in a short run."
        )
    if method == "streaming" and overlap_steps > 0:
        if overlap_steps <= ADVISED_OVERLAP:
            words = f"is within what the paper advises (at most {ADVISED_OVERLAP})"
        elif overlap_steps <= TRIED_OVERLAP:
            words = "is expected to cost less than 0.2 %"
        else:
            words = f"is more than the paper tried ({TRIED_OVERLAP} cost less than 0.2 %)"
        parts.append(
            f"loss: an overlap of {overlap_steps} inner step{'s' * (overlap_steps > 1)} {words} (2501.18512)."
        )
    return parts
