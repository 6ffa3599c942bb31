"""What `hf-cocodc train` shows of a run while it trains."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.cli.display import Display
from hf_cocodc.status import ENV_STATUS, LEFT, say, tell


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Run:
    """A display of two regions, and what the regions say."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(time, "time", self.clock)
        self.monkeypatch = monkeypatch
        self.statuses = [folder / f"{region}.json" for region in (0, 1)]
        self.display = Display([0, 1], self.statuses, 100, clock=self.clock)

    def tell(self, region: int, doing: str = "", **facts: Any) -> None:
        self.monkeypatch.setenv(ENV_STATUS, str(self.statuses[region]))
        tell(doing, **facts)

    def say(self, region: int, line: str, **about: Any) -> None:
        self.monkeypatch.setenv(ENV_STATUS, str(self.statuses[region]))
        say(line, **about)

    def train(self, region: int, step: int, **facts: Any) -> None:
        """A region has trained 10 s on each of its steps, with 1.5 times its own batch, and has just made the last one."""
        times = {
            "steps_made": step,
            "batches_made": 1.5 * step,
            "trained_s": 10.0 * step,
            "blocked_s": 0.5 * step,
        }
        whole = {"max_steps": 100, "tokens_per_step": 250, "awaits": None, **times, **facts}
        self.tell(region, "training", step=step, stepped_at=self.clock(), **whole)

    def change(self, epoch: int, members: list[int], by: tuple[int, ...] = (0, 1), **about: Any) -> None:
        """The members change, and regions say so."""
        for region in by:
            self.tell(region, epoch=epoch, members=members)
            self.say(region, f"from here on {members}", once=f"epoch {epoch}", hint="HINT", **about)

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
        run.tell(region, "getting a base")
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
        "step 1/100  loss region 0: -, region 1: -  75 tokens/s  ETA 16:30  utilization 95 %"
    )
    for region in (0, 1):
        run.train(region, 7, loss=2.5 + region)
    run.after(1)
    assert capsys.readouterr().out == "", "a tenth of the run has not passed, nor a minute"
    run.after(59)
    line = capsys.readouterr().out
    assert line.startswith("step 7/100  loss region 0: 2.500, region 1: 3.500  75 tokens/s  ETA 15:30")


def test_a_script_shows_progress_without_tokens_and_a_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a plain loop does not say is left out."""
    monkeypatch.setenv(ENV_STATUS, str(tmp_path / "status.json"))
    display = Display([0], [tmp_path / "status.json"])
    now = time.time()
    tell(
        "training",
        step=7,
        steps_made=7,
        batches_made=7.0,
        trained_s=70.0,
        blocked_s=7.0,
        stepped_at=now,
        loss=2.5,
        max_steps=0,
    )
    display.update()
    assert capsys.readouterr().out == "step 7  loss region 0: 2.500  utilization 90 %\n"


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


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (34, "step 7/100  loss 2.500, 3.500"),
        (45, "3.500  75 tokens/s"),
        (120, "utilization 95 %  #"),
        (0, "ETA 15:30"),
    ],
)
def test_a_terminal_shows_whole_words(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: int, shown: str
) -> None:
    """The bar goes first, then what stands behind the losses, each as a whole; also where the terminal has no size."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    display = Display([0, 1], run.statuses, 100, clock=run.clock)
    for region in (0, 1):
        run.train(region, 7, loss=2.5 + region)
    display.update()
    last = terminal.getvalue().rpartition("\r")[2]
    assert shown in last
    assert len(last) < (columns or 80)
    whole = "step 7/100  loss 2.500, 3.500  75 tokens/s  ETA 15:30  utilization 95 %"
    assert whole.startswith(last.rstrip("#. "))
    display.close()


def test_a_terminal_shows_the_phases_and_wraps_lines_between_words(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But no command, which is to be copied."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    display = Display([0, 1], run.statuses, 100, clock=run.clock)
    for region in (0, 1):
        run.tell(region, "loading the model")
    display.update()
    display.lose(1, f"region 1 is lost, which is told in a sentence of many words\n    {'command ' * 9}")
    lines = terminal.getvalue().replace("\r", "\n").splitlines()
    assert "[3/5] loading the model" in lines
    assert "region 1 is lost, which is told in a" in lines and "sentence of many words" in lines
    assert f"    {'command ' * 9}" in lines


def test_a_line_names_the_last_landing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Once if the regions shown are equally far, otherwise that of each."""
    for region in (0, 1):
        run.train(region, 21, landed=20)
    run.after(60)
    assert "utilization 95 %  last landing at step 20  " in capsys.readouterr().out
    run.train(1, 41, landed=40)
    run.after(60)
    assert "last landing at step 20, 40" in capsys.readouterr().out
    run.display.lose(0, "region 0 is lost")
    run.after(60)
    assert "last landing at step 40" in capsys.readouterr().out


def test_what_a_lost_region_said_last_is_shown_no_more(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Another command may have brought it back: then it is a member, and this command hears nothing of it."""
    for region in (0, 1):
        run.train(region, 10, loss=3.0)
    run.change(0, [0, 1])
    run.display.lose(1, "region 1 is lost")
    run.change(1, [0], by=(0,), lost=[1])
    run.change(2, [0, 1], by=(0,))
    for step in (40, 70):
        run.train(0, step)
        run.after(61)
    said = capsys.readouterr().out
    assert "step 70/100" in said
    assert "region 1: at this step" not in said and "region 1: training" not in said


def test_a_lost_region_holds_nothing_up(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The line goes on with the others; each change of the members is said once, whoever says it."""
    for region in (0, 1):
        run.train(region, 10, loss=3.0)
    run.change(0, [0, 1])
    run.after(61)
    assert "loss region 0: 3.000, region 1: 3.000" in capsys.readouterr().out
    run.display.lose(0, "region 0 is lost")
    run.change(1, [1], by=(1,), lost=[0])
    run.train(1, 40)
    run.after(61)
    said = capsys.readouterr().out
    assert "region 0 is lost\n" in said
    assert "from here on [1]" in said
    assert "HINT" not in said
    assert "step 40/100  loss region 1: 3.000" in said
    assert run.display.step == 40
    run.change(2, [0, 1])
    run.say(1, "held out: 1.500", by_one=True)
    run.say(0, "held out: 9.5", by_one=True)
    run.after(1)
    said = capsys.readouterr().out
    assert said.count("from here on [0, 1]") == 1
    assert "1.500" in said
    assert "9.5" not in said


def test_a_region_that_is_lost_elsewhere_has_a_way_back(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own command brings it back, which is not known here; of one that was started here, that is not said."""
    run.change(1, [0, 1, 3], lost=[2])
    run.after(1)
    assert capsys.readouterr().out.count("HINT") == 1
    run.change(2, [0, 3], lost=[1])
    run.after(1)
    assert "HINT" not in capsys.readouterr().out


def test_a_region_that_has_left_holds_nothing_up(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last step and its last word are shown no longer."""
    for region in (0, 1):
        run.train(region, 10)
    run.tell(0, LEFT)
    run.train(1, 40)
    run.after(61)
    said = capsys.readouterr().out
    assert "step 40/100" in said
    assert LEFT not in said
    assert run.display.step == 40


def test_a_stopped_region_shows_its_last_step(run: Run) -> None:
    """Its error does not hide how far it came."""
    for region in (0, 1):
        run.train(region, 56)
        run.tell(region, "has ended with an error", error="stopped", exit_code=3)
    run.display.update()
    assert run.display.step == 56


def test_a_region_that_has_only_just_begun_to_train_is_shown(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has told nothing of its steps yet."""
    run.tell(0, "training")
    run.tell(1, "joining: catching up, step 5 of 9")
    run.after(61)
    assert capsys.readouterr().out.endswith("region 1: joining: catching up, step 5 of 9 for 01:01\n")


def test_every_line_is_shown_once(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Although regions say others after it, and although several say the same."""
    capsys.readouterr()
    run.say(1, "region 1 joins")
    run.say(1, "region 1 gets a base")
    run.after(1)
    run.say(1, "region 1 is in")
    for region in (0, 1):
        run.say(region, "the mean is void", once="the mean is void")
    run.after(1)
    run.after(1)
    assert capsys.readouterr().out.splitlines() == [
        "region 1 joins",
        "region 1 gets a base",
        "the mean is void",
        "region 1 is in",
    ]
