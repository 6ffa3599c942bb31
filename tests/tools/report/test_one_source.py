"""Summary, JSON, page and journals of a run say the same, whatever became of it."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hf_cocodc.cli.ending import report
from hf_cocodc.cli.main import main
from hf_cocodc.tools.report import charts as pictures
from hf_cocodc.tools.report.runs import load
from hf_cocodc.tools.report.summary import summarize
from tests.processes.coming_worker import events, trainer
from tests.processes.test_coming_and_going import TIMEOUT_S, Run
from tests.tools.report.made import a_resumed_run, a_run, an_elastic_run, write
from tests.training.test_simulation import RECIPE, STEPS, TIMES, TINY

PLACES = ("global model", "journal", "report")
STEP_TOKENS = 4 * 128


class Kind(NamedTuple):
    """How a run is made, and some of its figures, as they follow from that."""

    make: Callable[[Path], list[Path]]
    figures: dict[str, Any]


def fixed(folder: Path) -> list[Path]:
    return a_run(folder, regions=3, skew_s=0.0)


def stopped_early(folder: Path) -> list[Path]:
    """All regions finish at step 35, because one of them has no more data."""
    paths = a_run(folder, until=35, skew_s=0.0)
    for path in paths:
        events = lines_of(path)
        last = events[-1]["time_s"]
        events.append({"kind": "finish", "time_s": last, "step": 35, "blocked_s": 0.5, "bytes_sent": 2000})
        write(path.parent.parent, events)
    return paths


def diverged(folder: Path) -> list[Path]:
    """Its last transfer is void, and nobody can draw its losses."""
    paths = a_run(folder, skew_s=0.0)
    for path in paths:
        events = lines_of(path)
        last = max(place for place, event in enumerate(events) if event["kind"] == "land")
        events[last] |= {"kind": "void", "outer_grad_norm": None}
        for event in events:
            event |= {"eval_loss": 460.0, "eval_perplexity": 1e200} if event["kind"] == "evaluate" else {}
        write(path.parent.parent, events)
    return paths


def dealt(folder: Path) -> list[Path]:
    """Two regions of four samples share eight of them from step 20 on, and nine from step 60 on; region 1 heard it late."""
    paths = a_run(folder, skew_s=0.0)
    for region, path in enumerate(paths):
        events = lines_of(path)
        for step, samples, why in ((20, (6, 2), "speeds are known"), (60, (5, 4), "speeds have changed"))[
            region:
        ]:
            place = next(at for at, event in enumerate(events) if event["step"] > step)
            facts = {"samples": dict(enumerate(samples)), "speeds": {0: 12.0, 1: 4.5}, "why": why}
            events.insert(place, {"kind": "deal", "time_s": events[place]["time_s"], "step": step, **facts})
        write(path.parent.parent, events)
    return paths


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tokens(*steps: int) -> int:
    return STEP_TOKENS * sum(steps)


ALL, TWO = {0: [(0, 60)], 1: [(0, 60)], 2: [(0, 60)]}, {0: [(0, 60)], 1: [(0, 60)]}
ELASTIC = {"inner_steps": 60, "outer_steps": [6], "bytes_sent": 5600, "blocked_s": 0.6, "training_s": 30.0}
KINDS = {
    "fixed": Kind(fixed, {"inner_steps": 80, "tokens": tokens(80, 80, 80), "num_void": 0}),
    "elastic": Kind(lambda folder: an_elastic_run(folder, ALL), {**ELASTIC, "tokens": tokens(60, 60, 60)}),
    "a loss": Kind(
        lambda folder: an_elastic_run(folder, {**TWO, 2: [(0, 30)]}),
        {**ELASTIC, "tokens": tokens(60, 60, 30)},
    ),
    "a leave": Kind(
        lambda folder: an_elastic_run(folder, {**TWO, 2: [(0, 40)]}, trained_to={2: 14}),
        {**ELASTIC, "tokens": tokens(60, 60, 14)},
    ),
    "a join": Kind(
        lambda folder: an_elastic_run(folder, {**TWO, 2: [(40, 60)]}),
        {**ELASTIC, "tokens": tokens(60, 60, 20)},
    ),
    "a loss and a return": Kind(
        lambda folder: an_elastic_run(folder, {**TWO, 2: [(0, 20), (40, 60)]}),
        {**ELASTIC, "tokens": tokens(60, 60, 40)},
    ),
    "a failed late joiner": Kind(
        lambda folder: an_elastic_run(folder, TWO, fails=(2, 40, 500.0)),
        {**ELASTIC, "tokens": tokens(60, 60)},
    ),
    "resumed": Kind(
        lambda folder: a_resumed_run(folder, 2, 2),
        {"inner_steps": 80, "tokens": tokens(80, 80), "bytes_sent": 800},
    ),
    "resumed with more regions": Kind(
        lambda folder: a_resumed_run(folder, 2, 3), {"tokens": tokens(80, 80, 40), "num_regions": 3}
    ),
    "resumed with fewer regions": Kind(
        lambda folder: a_resumed_run(folder, 2, 1)[:1], {"tokens": tokens(80, 40), "num_regions": 1}
    ),
    "stopped early": Kind(stopped_early, {"inner_steps": 35, "tokens": tokens(35, 35), "bytes_sent": 2000}),
    "dealt": Kind(
        dealt,
        {
            "tokens": 128 * (8 * 60 + 9 * 20),
            "dealt": "9 samples in an inner step, region 0: 5, region 1: 4, from step 60 on (speeds have changed); 2 deals",
        },
    ),
    "diverged": Kind(diverged, {"num_void": 1, "perplexity_after": 1e200}),
}


class Overview(HTMLParser):
    """The rows of the first table of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._is_over = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr" and not self._is_over:
            self.rows.append([])
        elif tag in ("td", "th") and not self._is_over:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_over = self._is_over or tag == "table"

    def handle_data(self, data: str) -> None:
        if not self._is_over and self.rows and self.rows[-1] and data.strip():
            self.rows[-1][-1] += data


def rows_of(printed: str) -> dict[str, str]:
    """What a command has printed as a summary. Several lines of one name are one row."""
    found: dict[str, str] = {}
    for line in printed.splitlines():
        name, value = line[:22].strip(), line[22:]
        if name not in PLACES and not line.startswith("["):
            found[name] = f"{found[name]}; {value}" if name in found else value
    return found


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds, and have no figures."""
    for name in ("losses", "of_run"):
        monkeypatch.setattr(pictures, name, lambda *args: [])
    for name in ("strips", "transfers"):
        monkeypatch.setattr(pictures, name, lambda *args: pictures.Picture("<svg></svg>", ""))


def on_the_page(folder: Path, page: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The first table of the report of a run."""
    assert main(["report", str(folder), "-o", str(page)]) == 0
    capsys.readouterr()
    return dict(Overview(page.read_text(encoding="utf-8")).rows)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", KINDS)
def test_all_that_is_said_of_a_run_is_the_same(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command that has trained it, in JSON, and on the page; and true, by what is known of the run."""
    folder = tmp_path / "run"
    paths = KINDS[name].make(folder)
    figures = json.loads(json.dumps(report([path.parent.parent for path in paths], folder)))
    said = rows_of(capsys.readouterr().out)
    assert said == on_the_page(folder, tmp_path / "page.html", capsys)
    [run] = load([folder])
    assert figures == json.loads(json.dumps(dataclasses.asdict(summarize(run))))
    for field, value in KINDS[name].figures.items():
        assert figures[field] == (value if isinstance(value, str) else pytest.approx(value)), field
    landed = {
        (event["fragment"], event["sent_at"])
        for path in paths
        for event in lines_of(path)
        if event["kind"] == "land"
    }
    assert sum(figures["outer_steps"]) == len(landed)
    assert said["training blocked"].startswith(
        f"{figures['blocked_s']:.2f} s of {figures['training_s']:.1f} s"
    )
    assert said["tokens"].startswith(f"{figures['tokens']:,} of all regions")


@pytest.mark.usefixtures("no_pictures")
def test_a_region_that_did_not_come_in_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its seconds, bytes and steps are no part of the run."""
    an_elastic_run(tmp_path / "run", TWO, fails=(2, 40, 500.0))
    [run] = load([tmp_path / "run"])
    assert (run.regions, [journal.region for journal in run.outside]) == ([0, 1], [2])
    assert run.end == pytest.approx(30.0)
    on_the_page(tmp_path / "run", tmp_path / "page.html", capsys)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "region 2 has not come in, and does not count: the run has ended" in text


@pytest.mark.usefixtures("no_pictures")
def test_a_region_that_another_command_has_started_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It joined, and its folder lies beside those of the command; that of another run does not."""
    paths = an_elastic_run(tmp_path / "run", {**TWO, 2: [(40, 60)]})
    a_run(tmp_path / "other", regions=4)[3].parent.parent.rename(tmp_path / "run" / "region-3")
    report([path.parent.parent for path in paths[:2]], tmp_path / "run")
    said = rows_of(capsys.readouterr().out)
    report([path.parent.parent for path in paths], tmp_path / "run")
    assert said == rows_of(capsys.readouterr().out)


@pytest.mark.usefixtures("no_pictures")
def test_a_simulation_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In seconds that are simulated."""
    text, run = tmp_path / "text", tmp_path / "run"
    text.mkdir()
    (text / "train.txt").write_text(Path(threading.__file__).read_text()[:9000])
    sets = [*TINY, f"data.path={text}", f"training.output_dir={run}"]
    arguments = [RECIPE, *TIMES, *(part for each in sets for part in ("--set", each))]
    assert main(["simulate", *arguments, "--json", str(tmp_path / "summary.json")]) == 0
    printed = capsys.readouterr().out
    said = rows_of(printed[printed.index("method  ") :])
    figures = json.loads((tmp_path / "summary.json").read_text())
    assert said == on_the_page(run / "simulated", tmp_path / "page.html", capsys)
    assert (figures["inner_steps"], figures["tokens"] % (2 * STEPS * 32)) == (STEPS, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_real_regions_that_come_and_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Region 2 is killed and comes back, then region 1 leaves."""
    run = Run(tmp_path, 3, trainer, 200, 0.1, "streaming", 1)
    run.wait_for_step(2, 9)
    run.kill(2)
    run.wait_until_members([0, 1], 0)
    run.start(2)
    run.wait_for_join(2)
    run.ask_to_leave(1)
    run.processes[1].join(TIMEOUT_S)
    run.results(0, 2)
    out = tmp_path / "out"
    figures = json.loads(json.dumps(report([out / f"region-{region}" for region in range(3)], out)))
    said = rows_of(capsys.readouterr().out)
    assert said == on_the_page(out, tmp_path / "page.html", capsys)
    [ended, *_] = events(tmp_path, 0, "finish")
    assert (figures["inner_steps"], figures["bytes_sent"]) == (200, ended["bytes_sent"])
    assert figures["blocked_s"] >= ended["blocked_s"]
    assert (
        "region 2 lost" in said["regions"]
        and "region 2 back" in said["regions"]
        and "region 1 left" in said["regions"]
    )
