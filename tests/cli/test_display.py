"""What `hf-cocodc train` shows of a run while it trains."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.cli.display import Display
from hf_cocodc.run.journal import Journal
from hf_cocodc.status import ENV_STATUS, LEFT, tell

START: dict[str, Any] = {"num_regions": 2, "num_fragments": 1, "outer": {"method": "diloco"}}


def test_a_new_run_does_not_show_the_journal_of_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lines stay in the file."""
    path = tmp_path / "journal.jsonl"
    Journal(path).write("log", step=90, loss=1.0)
    display = Display([0], [path], 100)
    display.update()
    assert display.step == 0
    assert not display.has_trained
    journal = Journal(path)
    journal.write("start", step=0, region=0, **START)
    journal.write("log", step=20, loss=2.0)
    display.update()
    assert display.step == 20
    assert display.has_trained
    assert "loss region 0: 1.000" not in capsys.readouterr().out


def test_a_region_that_goes_on_shows_the_step_of_its_journal_and_no_old_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write("log", step=40, loss=9.5)
    display = Display([2], [path], 100, joins=True)
    display.update()
    assert display.step == 40
    journal.write("log", step=60, loss=1.25)
    display.update()
    said = capsys.readouterr().out
    assert "step 60/100" in said and "9.5" not in said


def test_a_damaged_line_of_a_journal_is_not_shown(tmp_path: Path) -> None:
    """A machine that lost its power may leave one: with --resume or --join, the command would end, and its regions with it."""
    path = tmp_path / "journal.jsonl"
    Journal(path).write("log", step=40, loss=9.5)
    with path.open("ab") as file:
        file.write(b'{"kind": "lo\0\xff\n[]\n{"step": 50}\n{"kind": "log", "time_s": 1, "step": 60}\n')
    display = Display([0], [path], 100, resumed=True)
    display.update()
    assert display.step == 60


def test_a_resumed_run_shows_what_follows_its_resume_and_nothing_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if all of it is in the new file at once. The members that it begins with are known when one is lost."""
    path, now = tmp_path / "journal.jsonl", time.time()
    path.write_text("")
    display = Display([0], [path], 100, resumed=True, clock=lambda: now)
    path.rename(tmp_path / "earlier.jsonl")
    journal = Journal(path)
    facts: dict[str, Any] = {"region": 0, "num_regions": 2, "num_fragments": 1, "outer": {"method": "diloco"}}
    journal.write("start", step=0, at=now - 100, **facts)
    journal.write("epoch", step=0, epoch=0, losses=0, members=[0, 2], why="")
    journal.write("evaluate", step=40, eval_loss=9.5)
    journal.write("resume", step=40, at=now + 1, **facts)
    journal.write("epoch", step=40, epoch=0, losses=0, members=[0, 1], why="")
    display.update()
    assert capsys.readouterr().out == "resumed from step 40\n"
    journal.write("epoch", step=50, epoch=1, losses=1, members=[0], why="region 1 is lost: why")
    display.update()
    assert "start its command again" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "epoch", "time_s": 1, "step": 9, "epoch": 9, "members": [0], "why": ""}',
        '{"kind": "epoch", "time_s": 1, "step": 9, "epoch": 9, "members": [0], "why": "", "losses": null}',
        '{"kind": "note", "time_s": 1, "step": 9}',
        '{"kind": "evaluate", "time_s": 1, "step": 9, "eval_loss": 1.0, "eval_accuracy": "x"}',
    ],
)
def test_a_line_that_lacks_something_ends_no_command(run: Run, line: str) -> None:
    run.journals[0].write(
        "start", step=0, region=0, num_regions=2, num_fragments=1, outer={"method": "diloco"}
    )
    path = run.journals[0].path
    assert path is not None
    path.write_text(path.read_text() + line + "\n")
    run.after(1)


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A display of two regions, and what the regions write."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(time, "time", self.clock)
        self.monkeypatch = monkeypatch
        self.statuses = [folder / f"{region}.json" for region in (0, 1)]
        self.journals = [Journal(folder / f"{region}.jsonl") for region in (0, 1)]
        paths = [journal.path for journal in self.journals if journal.path is not None]
        self.display = Display([0, 1], paths, 100, statuses=self.statuses, clock=self.clock)

    def tell(self, region: int, doing: str, **facts: Any) -> None:
        self.monkeypatch.setattr("hf_cocodc.status._news", [])
        self.monkeypatch.setenv(ENV_STATUS, str(self.statuses[region]))
        tell(doing, **facts)

    def train(self, region: int, step: int, awaits: int | None = None) -> None:
        """A region has trained 10 s on each of its steps, and has just made the last one."""
        facts = {"max_steps": 100, "steps_made": step, "trained_s": 10.0 * step, "blocked_s": 0.5 * step}
        self.tell(
            region,
            "training",
            step=step,
            tokens_per_step=250,
            stepped_at=self.clock(),
            awaits=awaits,
            **facts,
        )

    def after(self, seconds: float) -> None:
        self.clock.now += seconds
        self.display.update()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_a_start_has_phases(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is shown once, while the last region is in it."""
    capsys.readouterr()
    for region, doing, shown in (
        (0, "loading the model", ""),
        (1, "loading the model", "[3/5] loading the model\n"),
        (1, "packing the held-out text", ""),
        (0, "loading the text", "[4/5] packing the text\n"),
        (0, "meeting the other regions", ""),
        (0, "waiting for region 1", ""),
        (1, "meeting the other regions", "[5/5] waiting to train\n"),
    ):
        run.tell(region, doing)
        run.after(1)
        assert capsys.readouterr().out == shown
    run.train(0, 1)
    run.after(1)
    for region in (0, 1):
        run.tell(region, "getting a base")  # a word without a step
    run.after(1)
    assert capsys.readouterr().out == ""


def test_a_line_every_minute_says_what_regions_do_before_they_train(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with its time; and for whom a region waits."""
    capsys.readouterr()
    run.tell(0, "packing the text")
    run.after(59)
    assert capsys.readouterr().out == ""
    run.tell(1, "waiting for region 0")
    run.after(1)
    assert (
        capsys.readouterr().out
        == "region 0: packing the text for 01:00  region 1: waiting for region 0 for 00:01\n"
    )
    run.after(59)
    assert capsys.readouterr().out == ""
    run.after(1)
    assert "region 0: packing the text for 02:00" in capsys.readouterr().out


def test_a_line_has_step_loss_rate_time_to_the_end_and_utilization(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the first step on, before the first loss is logged; and each minute, however slow the run is."""
    capsys.readouterr()
    for region in (0, 1):
        run.train(region, 1)
    run.after(60)
    line = capsys.readouterr().out
    assert line.startswith(
        "step 1/100  loss region 0: -, region 1: -  50 tokens/s  ETA 16:30  utilization 95 %"
    )
    for region, journal in enumerate(run.journals):
        run.train(region, 7)
        journal.write("log", step=5, loss=2.5 + region)
    run.after(1)
    assert capsys.readouterr().out == "", "a tenth of the run has not passed, nor a minute"
    run.after(59)
    line = capsys.readouterr().out
    assert line.startswith("step 7/100  loss region 0: 2.500, region 1: 3.500  50 tokens/s  ETA 15:30")


def test_a_region_that_waits_for_another_is_named(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """After a while: not for every wait."""
    run.train(0, 20, awaits=1)
    run.train(1, 12)
    run.after(29)
    run.train(1, 14)
    capsys.readouterr()
    run.after(31)
    line = capsys.readouterr().out
    assert line.startswith("step 14/100")
    assert "region 0: waiting for region 1 for 01:00" in line
    assert "region 1: at this step for 00:31" in line


def test_a_narrow_terminal_keeps_the_losses(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar goes first, then what stands behind the losses."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for columns, shown in ((34, "step 7/100  loss 2.500, 3.500"), (120, "utilization 95 %  ")):
        monkeypatch.setenv("COLUMNS", str(columns))
        paths = [journal.path for journal in run.journals if journal.path is not None]
        display = Display([0, 1], paths, 100, statuses=run.statuses, clock=run.clock)
        for region, journal in enumerate(run.journals):
            run.train(region, 7)
            journal.write("log", step=5, loss=2.5 + region)
        display.update()
        last = terminal.getvalue().rpartition("\r")[2]
        assert shown in last
        assert len(last.rstrip()) < columns
        display.close()


def test_a_line_names_the_last_landing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Once if the regions shown are equally far, otherwise that of each; one that changed nothing is one too."""
    for region in (0, 1):
        run.journals[region].write("land", step=20, fragment=0, sent_at=10)
        run.train(region, 21)
    run.after(60)
    assert "utilization 95 %  last landing at step 20  " in capsys.readouterr().out
    run.journals[1].write("void", step=40, fragment=0, sent_at=30)
    run.after(60)
    assert "last landing at step 20, 40" in capsys.readouterr().out
    run.display.lose(0, "region 0 is lost")
    run.after(60)
    assert "last landing at step 40" in capsys.readouterr().out


def test_a_lost_region_holds_nothing_up(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The line goes on with the others; each change of the members is said once, whoever has written it."""
    for region in (0, 1):
        run.journals[region].write("start", step=0, region=region, **START)
        run.journals[region].write("epoch", step=0, epoch=0, losses=0, members=[0, 1], why="")
        run.journals[region].write("log", step=10, loss=3.0)
        run.train(region, 10)
    run.after(61)
    assert "loss region 0: 3.000, region 1: 3.000" in capsys.readouterr().out
    run.display.lose(0, "region 0 is lost")
    run.journals[1].write("epoch", step=12, epoch=1, losses=0, members=[1], why="region 0 lost")
    run.train(1, 40)
    run.after(61)
    said = capsys.readouterr().out
    assert "region 0 is lost\n" in said
    assert "step 12: from here on only region 1 (region 0 lost)" in said
    assert "step 40/100  loss region 1: 3.000" in said
    assert run.display.step == 40
    for journal in run.journals:
        journal.write("epoch", step=50, epoch=2, losses=0, members=[0, 1], why="region 0 joined")
    run.journals[1].write("evaluate", step=50, eval_loss=1.5)
    run.journals[0].write("evaluate", step=50, eval_loss=9.5)
    run.after(1)
    said = capsys.readouterr().out
    assert said.count("from here on 2 regions: 0, 1 (region 0 joined)") == 1
    assert "held out, global weights: loss 1.500" in said
    assert "9.5" not in said


def test_a_region_that_is_lost_elsewhere_has_a_way_back(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own command brings it back, which is not known here; of one that leaves or was started here, that is not said."""
    hint = "start its command again"
    for epoch, losses, members, is_said in (
        (0, 0, [0, 1, 2, 3], False),
        (1, 1, [0, 1, 3], True),
        (2, 1, [0, 1], False),
        (3, 2, [0], False),
    ):
        run.journals[0].write("epoch", step=epoch, epoch=epoch, losses=losses, members=members, why="why")
        run.after(1)
        assert (hint in capsys.readouterr().out) == is_said, epoch


def test_a_region_that_has_left_holds_nothing_up(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last step and its last word are shown no longer."""
    for region in (0, 1):
        run.journals[region].write("start", step=0, region=region, **START)
        run.journals[region].write("epoch", step=0, epoch=0, losses=0, members=[0, 1], why="")
        run.train(region, 10)
    run.tell(0, LEFT)
    run.journals[1].write(
        "epoch", step=12, epoch=1, losses=0, members=[1], why="region 0 has left in good order"
    )
    run.train(1, 40)
    run.after(61)
    said = capsys.readouterr().out
    assert "step 40/100" in said
    assert LEFT not in said
    assert run.display.step == 40


def test_a_region_that_has_only_just_begun_to_train_is_shown(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has told nothing of its steps yet."""
    run.tell(0, "training")
    run.tell(1, "joining: catching up, step 5 of 9")
    run.after(61)
    assert capsys.readouterr().out.endswith("region 1: joining: catching up, step 5 of 9 for 01:01\n")


def test_a_region_that_joins_says_how_it_comes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step once, although another word has replaced it; and it has not resumed anything."""
    monkeypatch.setenv(ENV_STATUS, str(tmp_path / "status.json"))
    monkeypatch.setattr("hf_cocodc.status._news", [])
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.path is not None
    display = Display([3], [journal.path], 100, joins=True, statuses=[tmp_path / "status.json"])
    tell("joining the run", news="joins run 'mine', which trains at step 40")
    tell("getting a base", news="gets a base of step 41 from region 0")
    display.update()
    journal.write("resume", step=41, region=3, **START)
    display.update()
    tell("training", news="is in the run, from step 44 on")
    tell("training", step=44)
    display.update()
    display.update()
    assert capsys.readouterr().out.splitlines() == [
        "region 3 joins run 'mine', which trains at step 40",
        "region 3 gets a base of step 41 from region 0",
        "region 3 is in the run, from step 44 on",
    ]
