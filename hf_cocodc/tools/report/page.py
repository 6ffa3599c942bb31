"""The report of runs as one HTML page. It has no script, and loads nothing: what journals say is shown as text."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

from ... import __version__
from . import charts, pictures, timeline
from .journals import unreadable
from .members import sentence
from .runs import RunRecord
from .spending import longest_waits, spent
from .summary import summarise

_MOST_TEXT = 300
_MOST_WAITS = 12
_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2rem auto; max-width: 1080px;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.25rem; margin: 2.4rem 0 .4rem; border-bottom: 1px solid #ddd; }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .2rem; } p { margin: .3rem 0 .6rem; max-width: 52rem; } p.about { color: #555; }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-size: 13.5px; } caption { text-align: left; color: #555; }
th, td { padding: .22rem .8rem .22rem 0; text-align: right; border-bottom: 1px solid #eee; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 1px solid #888; font-weight: 600; }
tbody th { font-weight: 400; }
.wide { overflow-x: auto; } svg { width: 100%; height: auto; } summary { cursor: pointer; }
ul.problems { color: #a33b00; } footer { margin-top: 3rem; color: #777; font-size: 13px; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(runs: Sequence[RunRecord], window: tuple[float, float] | None = None) -> str:
    """The report of runs.

    Args:
        window: seconds from and to which transfers are drawn; by default the parts that are worth a look.

    Raises:
        InputError: matplotlib is not installed.
    """
    title = ", ".join(run.name for run in runs)
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="about">{_text("; ".join(_headline(run) for run in runs))}</p>',
        *_problems(runs),
        _overview(runs),
        "<h2>Loss</h2>",
        _about(
            "Training loss of each region, and the held-out loss of the evaluated weights. Tokens are those of all regions; "
            "bytes are what one region had sent."
        ),
        _drawn(pictures.losses(runs), "losses against inner steps, tokens, bytes and time"),
    ]
    for run in runs:
        parts += _of_run(run, window, f": {run.name}" if len(runs) > 1 else "")
    parts += _settings(runs)
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    parts.append(f"<footer>hf-cocodc {_text(__version__)}, {now}. Made from the journals alone.</footer>")
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}: report</title>\n<style>{_CSS}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _text(value: object) -> str:
    """What is shown of a text from a journal: printable characters only, cut if it is long, and never HTML."""
    plain = "".join(each if each.isprintable() else " " for each in str(value)[: 4 * _MOST_TEXT])
    return escape(plain if len(plain) <= _MOST_TEXT else f"{plain[:_MOST_TEXT]}...")


def _about(words: str) -> str:
    return f'<p class="about">{escape(words)}</p>'


def _drawn(svg: str, label: str) -> str:
    named = svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
    return f'<div class="wide">{named}</div>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first cell of each row names it."""
    found = []
    for name, *values in rows:
        cells = "".join(f"<td>{_text(value)}</td>" for value in values)
        found.append(f'<tr><th scope="row">{_text(name)}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{_text(each)}</th>' for each in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(found)}</tbody></table></div>'


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
    """What could not be read, and what is not here."""
    said = [sentence for run in runs for sentence in unreadable(run.journals)]
    said += [f"{path}: no line can be read" for run in runs for path in run.empty]
    for run in runs:
        missing = sorted(set(run.attendance) - set(run.regions))
        if missing:
            said.append(f"{run.name}: no journal of region {', '.join(map(str, missing[:20]))} is here")
        for journal in run.outside:
            why = journal.events[-1].get("message", "it may be on its way")
            said.append(f"{run.name}: region {journal.region} has not come in, and does not count: {why}")
    for run in runs:
        for journal in run.journals:
            last = journal.events[-1]
            if last["kind"] == "error":
                said.append(
                    f"{run.name}, region {journal.region} ended at step {last['step']}: {last.get('message', '')}"
                )
    if not said:
        return []
    return [f'<ul class="problems">{"".join(f"<li>{_text(each)}</li>" for each in said)}</ul>']


def _overview(runs: Sequence[RunRecord]) -> str:
    """The figures of the summary, side by side."""
    found = [summarise(run).rows() for run in runs]
    names = list(dict.fromkeys(name for rows in found for name, _ in rows))
    cells = [[name, *("; ".join(v for n, v in rows if n == name) for rows in found)] for name in names]
    return _table(["", *(run.name for run in runs)], cells)


def _of_run(run: RunRecord, window: tuple[float, float] | None, suffix: str) -> list[str]:
    """Everything that is drawn for each run by itself."""
    clock = (
        " Journals of different machines are put on one clock by the ends of the transfers that they share."
    )
    parts = [
        f"<h2>Who waited for whom{_text(suffix)}</h2>",
        _about(
            "Each strip is a region, from the start to now; its colours are the shares of the time." + clock
        ),
        _drawn(pictures.strips(run), "shares of the time of each region"),
    ]
    if not run.in_steps:
        parts += _lost(run)
    if window is None:
        parts += _windows(run, timeline.windows(run))
    else:
        parts += _windows(run, [timeline.Window(f"From {window[0]:g} s to {window[1]:g} s", *window)])
    parts += _waits(run)
    parts += [
        f"<h2>Utilisation and bandwidth{_text(suffix)}</h2>",
        _about(
            "Utilisation is the share of the time in which a region did not wait. Evaluations, saves, sends and landings count "
            "as used; `hf-cocodc plan` counts inner steps alone."
        ),
        _drawn(
            pictures.pair(run, charts.draw_utilisation, charts.draw_bandwidth), "utilisation and bandwidth"
        ),
        f"<h2>Staleness and transfers{_text(suffix)}</h2>",
        _about("Lines are middle values; pale bands go from the least to the largest value."),
        _drawn(
            pictures.pair(run, charts.draw_staleness, charts.draw_transfer_times),
            "staleness, time on the wire",
        ),
        f"<h2>Norms of outer gradients{_text(suffix)}</h2>",
        _drawn(pictures.pair(run, charts.draw_norms), "norms of outer gradients"),
    ]
    if run.found[1:]:
        parts += [
            f"<h2>Regions that were there{_text(suffix)}</h2>",
            f"<p>{_text(sentence(run.found))}</p>",
            _drawn(pictures.attendance(run), "regions that took part"),
        ]
    return parts


def _lost(run: RunRecord) -> list[str]:
    heads = ["seconds (share of the run)", *(f"region {story.region}" for story in run.stories)]
    rows = [[name, *(_share(each, run.end) for each in seconds)] for name, seconds in spent(run)]
    said = (
        "A wait is for a late region as far as it would not have been, had that region sent the transfer when this one did. The "
        "rest is for the link."
    )
    return ["<h3>What the time went into</h3>", _about(said), _table(heads, rows)]


def _share(seconds: float, total: float) -> str:
    share = 100 * seconds / max(total, 1e-9)
    return f"{seconds:,.{seconds < 100:d}f} ({share:.{share < 10:d}f} %)" if seconds else "-"


def _windows(run: RunRecord, found: Sequence[timeline.Window]) -> list[str]:
    if not found:
        return [_about("No transfer has been sent yet.")]
    parts = [
        "<h3>Transfers, one by one</h3>",
        _about(
            "The thick bar of a region is its training. Thin bars below it are its transfers, with the numbers of their "
            "fragments: from the send, until all regions are there, until the mean is here, to the landing."
        ),
    ]
    for each in found:
        parts += [f"<h3>{_text(each.title)}</h3>", _drawn(pictures.transfers(run, each), each.title)]
    return parts


def _waits(run: RunRecord) -> list[str]:
    found = [] if run.in_steps else longest_waits(run, _MOST_WAITS)
    if not found:
        return []
    heads = [
        "the longest waits",
        "at (s)",
        "waited (s)",
        "for a late region (s)",
        "for the link (s)",
        "transfer",
    ]
    rows = []
    for region, begin, end, flight in found:
        late, whom = flight.late_s, "" if flight.last is None else f" (region {flight.last})"
        for_region = f"{late:.2f}{whom}" if late >= 0.005 else "-"
        what = f"fragment {flight.fragment} sent at step {flight.sent_at:,}"
        rows.append(
            [
                f"region {region}",
                f"{begin:,.1f}",
                f"{end - begin:.2f}",
                for_region,
                f"{end - begin - late:.2f}",
                what,
            ]
        )
    return [_table(heads, rows)]


def _settings(runs: Sequence[RunRecord]) -> list[str]:
    told: list[Mapping[str, Any]] = [_flat(run) for run in runs]
    names = list(dict.fromkeys(name for each in told for name in each))[:400]
    rows = [[name, *(str(each.get(name, "")) for each in told)] for name in names]
    heads = ["setting", *(run.name for run in runs)]
    parts = ["<h2>Settings and versions</h2>"]
    apart = [row for row in rows if len(set(row[1:])) > 1]
    if len(runs) > 1:
        parts.append(
            _table(heads, apart) if apart else _about("All runs have the same settings and versions.")
        )
    same = [row for row in rows if row not in apart]
    every = "All" if len(runs) == 1 else "The same in all runs"
    parts.append(
        f"<details><summary>{every}: {len(same)}, of the lowest region</summary>{_table(heads, same)}</details>"
    )
    return parts


def _flat(run: RunRecord) -> dict[str, Any]:
    start = run.start
    found = {f"outer.{name}": value for name, value in start["outer"].items()}
    found |= start.get("training", {})
    found |= {f"version of {name}": value for name, value in start.get("versions", {}).items()}
    return found | {"parameters": start.get("num_params", ""), "fragments": start["num_fragments"]}
