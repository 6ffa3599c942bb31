"""The report of runs as one HTML page. It has no script and loads nothing: what journals say is shown as text."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ... import __version__
from . import charts, timeline
from .charts import Picture
from .runs import RunRecord
from .spending import longest_waits, spent, union
from .summary import summarize
from .waits import Activity

_MOST_TEXT = 300
_MOST_WAITS = 12
_MOST_SETTINGS = 400
_MOST_DEALS = 20
_NOT_DEALT = "With `regions.balance: auto` the regions share the global batch by their speeds."
_DEALT = "Smaller micro-batches, and more of them (`gradient_accumulation_steps`), can be dealt more evenly."
_MUCH = 0.1
"""A share of a region's time from which on something is worth a word of advice."""


@dataclass(frozen=True)
class Table:
    """The first cell of each row names it. `kind` is "numbers", which do not wrap, or "words", which do."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    kind: str = "numbers"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a section: what it has is shown in this order. `folded`: the table is hidden behind these words."""

    title: str = ""
    about: str = ""
    charts: Sequence[Picture] = ()
    wide: Picture | None = None
    table: Table | None = None
    folded: str = ""


def page(runs: Sequence[RunRecord], window: tuple[float, float] | None = None) -> str:
    """The report of runs, side by side. Raises InputError if matplotlib is not installed.

    `window` is the seconds from and to which transfers are drawn; by default the parts that are worth a look.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"said": _said, "prose": _prose}
    template = environment.from_string(Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8"))
    sections = [("Loss", _losses(runs))]
    for run in runs:
        suffix = f": {run.name}" if len(runs) > 1 else ""
        sections += [(title + suffix, blocks) for title, blocks in _of_run(run, window)]
    sections.append(("Settings and versions", _settings(runs)))
    return template.render(
        title=_said(", ".join(run.name for run in runs)),
        headline="; ".join(_headline(run) for run in runs),
        problems=_problems(runs),
        dark=charts.IN_THE_DARK,
        advice=[words for run in runs for words in _advice(run, f"{run.name}: " if len(runs) > 1 else "")],
        overview=_overview(runs),
        sections=sections,
        version=__version__,
        now=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _said(value: object) -> str:
    """A text from a journal as it is shown: printable characters only, cut if it is long."""
    plain = "".join(each if each.isprintable() else " " for each in str(value)[: 4 * _MOST_TEXT])
    return plain if len(plain) <= _MOST_TEXT else f"{plain[:_MOST_TEXT]}..."


def _prose(value: object) -> Any:
    """A sentence as HTML: what stands between backticks is code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(_said(value)))))


def _advice(run: RunRecord, name: str) -> list[str]:
    """What would make the run faster, if anything would by much."""
    if not run.has_times:
        return []
    there = [max(_seconds(story.there), 1e-9) for story in run.stories]
    advice = []
    for what, seconds in spent(run):
        share, region = max(
            (s / t, story.region) for s, t, story in zip(seconds, there, run.stories, strict=True)
        )
        if share < _MUCH:
            continue
        if what == Activity.FOR_THE_LINK.value:
            advice.append(
                f"{name}region {region} waited for the link for {100 * share:.0f} % of its time. `hf-cocodc plan` finds settings "
                "that hide transfers behind training: more `overlap_steps`, a larger `sync_interval`, or a codec."
            )
        elif what.startswith("waiting for region"):
            late = what.removeprefix("waiting for ")
            advice.append(
                f"{name}region {region} waited for {late} for {100 * share:.0f} % of its time. "
                + (_since_the_last_deal(run, region, int(late.split()[-1])) if run.deals else _NOT_DEALT)
            )
        elif what == Activity.HANDLING.value:
            advice.append(
                f"{name}sends and landings took {100 * share:.0f} % of the time of region {region}. A larger `sync_interval` "
                "makes them rarer."
            )
    whole = _seconds(span for story in run.stories for span in story.there)
    for own, story in zip(there, run.stories, strict=True):
        if (share := 1 - own / max(whole, own)) >= _MUCH:
            advice.append(
                f"{name}region {story.region} was not there for {100 * share:.0f} % of the time of the run."
            )
    return advice


def _since_the_last_deal(run: RunRecord, region: int, late: int) -> str:
    """How much of its time a region has waited for a late one since the global batch was last dealt, and what helps."""
    step = run.deals[-1].step
    story = next(each for each in run.stories if each.region == region)
    after = [flight for flight in story.flights if (flight.landed_at or 0) > step and flight.last == late]
    begin = max(
        (f.landed for f in story.flights if f.landed is not None and (f.landed_at or 0) <= step), default=0.0
    )
    share = sum(flight.late_s for flight in after) / max(story.end - begin, 1e-9)
    words = f"Since the last deal of the global batch (step {step:,}), that was {100 * share:.0f} %."
    return words if share < _MUCH else f"{words} {_DEALT}"


def _seconds(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in union(spans))


def _headline(run: RunRecord) -> str:
    total = run.start.get("max_steps")
    steps = f"step {run.step:,}" + (f" of {total:,}" if total and not run.has_finished else "")
    state = "trains, or was killed"
    if run.has_finished:
        state = "finished"
    elif all(journal.has_ended for journal in run.journals):
        state = "ended before its last step"
    return f"{run.method}, {run.num_regions} region{'s' * (run.num_regions != 1)}, {steps}, {state}"


def _problems(runs: Sequence[RunRecord]) -> list[str]:
    """What could not be read, what is missing, and errors."""
    problems = [sentence for run in runs for sentence in run.unreadable]
    for run in runs:
        missing = sorted(set(run.attendance) - set(run.regions))
        if missing:
            problems.append(f"{run.name}: no journal of region {', '.join(map(str, missing[:20]))} is here")
        for journal in run.outside:
            why = journal.events[-1].get("message", "it may be on its way")
            problems.append(f"{run.name}: region {journal.region} has not come in, and does not count: {why}")
    for run in runs:
        for journal in run.journals:
            last = journal.events[-1]
            if last["kind"] == "error":
                where = f"{run.name}, region {journal.region} ended at step {last['step']}"
                problems.append(f"{where}: {last.get('message', '')}")
    return problems


def _overview(runs: Sequence[RunRecord]) -> Table:
    """The figures of the summary, side by side."""
    summaries = [summarize(run).rows() for run in runs]
    names = dict.fromkeys(name for rows in summaries for name, _ in rows)
    cells = [[name, *("; ".join(v for n, v in rows if n == name) for rows in summaries)] for name in names]
    return Table(["", *(run.name for run in runs)] if len(runs) > 1 else [], cells, "words")


def _losses(runs: Sequence[RunRecord]) -> list[Block]:
    about = (
        "Training loss of each region: middle values and, of one run, a pale band from the least to the largest ones; and the "
        "held-out loss of the evaluated weights. Tokens are those of all regions; bytes are what one region had sent."
    )
    pictures = charts.losses(runs)
    return [Block(about=about if pictures else "There are no losses yet.", charts=pictures)]


def _of_run(run: RunRecord, window: tuple[float, float] | None) -> Iterable[tuple[str, list[Block]]]:
    """The headings for one run, and what stands under them."""
    if run.has_times:
        yield from _of_times(run, window)
    bands = "Lines are middle values; pale bands go from the least to the largest value."
    wire = [charts.draw_transfer_times] if run.has_times else []
    yield (
        "Staleness and transfers",
        [Block(about=bands, charts=charts.of_run(run, charts.draw_staleness, *wire))],
    )
    of_steps = charts.draw_norms, charts.draw_cosines, charts.draw_learning_rates
    yield "Outer gradients and learning rate", [Block(charts=charts.of_run(run, *of_steps))]


def _of_times(run: RunRecord, window: tuple[float, float] | None) -> Iterable[tuple[str, list[Block]]]:
    """What only a clock can tell."""
    strips = (
        "Each strip is a region, from the start to now; its colors are the shares of the time. Journals of different machines "
        "are put on one clock by the ends of the transfers that they share."
    )
    shown = timeline.windows(run)
    if window is not None:
        shown = [timeline.Window(f"From {window[0]:g} s to {window[1]:g} s", *window)]
    blocks = [Block(about=strips, wide=charts.strips(run)), *_lost(run), *_deals(run)]
    transfers = (
        "The thick bar of a region is its training. Thin bars below it are its transfers, with the numbers of their fragments: "
        "from the send, until all regions are there, until the mean is here, to the landing."
    )
    blocks.append(
        Block(title="Transfers, one by one", about=transfers if shown else "No transfer has been sent yet.")
    )
    blocks += [Block(title=each.title, wide=charts.transfers(run, each)) for each in shown]
    yield "Who waited for whom", [*blocks, *_waits(run)]
    used = (
        "Utilization is the share of the time in which no send and no landing held a region. Evaluations and saves count as "
        "used; `hf-cocodc plan` counts inner steps alone."
    )
    kinds = charts.draw_utilization, charts.draw_bandwidth
    yield "Utilization and bandwidth", [Block(about=used, charts=charts.of_run(run, *kinds))]


def _lost(run: RunRecord) -> list[Block]:
    heads = ["seconds (share of the run)", *(f"region {story.region}" for story in run.stories)]
    rows = [[name, *(_share(each, run.end) for each in seconds)] for name, seconds in spent(run)]
    about = (
        "Had the other region sent at the same moment as this one, a wait might have been shorter: that difference counts as "
        "waiting for the region, and the rest as waiting for the link."
    )
    return [Block(title="What the time went into", about=about, table=Table(heads, rows))]


def _deals(run: RunRecord) -> list[Block]:
    """What each region got of the global batch, and why; nothing if it was never dealt."""
    if not run.deals:
        return []
    shown, left_out = run.deals[-_MOST_DEALS:], max(len(run.deals) - _MOST_DEALS, 0)
    regions = sorted({region for each in shown for region in each.samples})
    rows = []
    for each in shown:
        cells = [
            f"{each.samples[r]:,} ({each.speeds.get(r, 0):.3g}/s)" if r in each.samples else "-"
            for r in regions
        ]
        rows.append([f"from step {each.step:,} on", *cells, f"{sum(each.samples.values()):,}", each.why])
    about = (
        "Samples in an inner step, and in parentheses the samples per second that the region had made then"
        + (f". {left_out} earlier deals are left out." if left_out else ".")
    )
    heads = ["deal", *(f"region {region}" for region in regions), "all", "why"]
    return [Block(title="How the global batch was dealt", about=about, table=Table(heads, rows))]


def _share(seconds: float, total: float) -> str:
    share = 100 * seconds / max(total, 1e-9)
    return f"{seconds:,.{seconds < 100:d}f} ({share:.{share < 10:d}f} %)" if seconds else "-"


def _waits(run: RunRecord) -> list[Block]:
    longest = longest_waits(run, _MOST_WAITS)
    heads = [
        "the longest waits",
        "at (s)",
        "waited (s)",
        "for a late region (s)",
        "for the link (s)",
        "transfer",
    ]
    rows = []
    for region, begin, end, flight in longest:
        late, whom = flight.late_s, "" if flight.last is None else f" (region {flight.last})"
        for_region = f"{late:.2f}{whom}" if late >= 0.005 else "-"
        for_link = max(end - begin - late, 0.0)
        what = f"fragment {flight.fragment} sent at step {flight.sent_at:,}"
        waited = [f"{begin:,.1f}", f"{end - begin:.2f}", for_region, f"{for_link:.2f}"]
        rows.append([f"region {region}", *waited, what])
    return [Block(table=Table(heads, rows))] if rows else []


def _settings(runs: Sequence[RunRecord]) -> list[Block]:
    columns: list[Mapping[str, Any]] = [_flat(run) for run in runs]
    names = list(dict.fromkeys(name for each in columns for name in each))[:_MOST_SETTINGS]
    rows = [[name, *(str(each.get(name, "")) for each in columns)] for name in names]
    heads = ["setting", *(run.name for run in runs)]
    apart = [row for row in rows if len(set(row[1:])) > 1]
    blocks = []
    if apart:
        blocks.append(Block(table=Table(heads, apart, "words")))
    elif len(runs) > 1:
        blocks.append(Block(about="All runs have the same settings and versions."))
    same = [row for row in rows if row not in apart]
    every = "All" if len(runs) == 1 else "The same in all runs"
    blocks.append(
        Block(folded=f"{every}: {len(same)}, of the lowest region", table=Table(heads, same, "words"))
    )
    return blocks


def _flat(run: RunRecord) -> dict[str, Any]:
    start = run.start
    flat = {f"outer.{name}": value for name, value in start["outer"].items()}
    flat |= start.get("training", {})
    flat |= {f"version of {name}": value for name, value in start.get("versions", {}).items()}
    return flat | {"parameters": start.get("num_params", ""), "fragments": start["num_fragments"]}
