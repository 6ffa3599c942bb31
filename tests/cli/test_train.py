"""How `hf-cocodc train` ends at a signal, and what it says of regions that end before the run. Processes stand for regions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.cli import supervising
from hf_cocodc.cli.main import main
from hf_cocodc.settings import RegionConfig
from hf_cocodc.status import LEFT
from hf_cocodc.training import launch


def a_region(folder: Path, region: int, **told: Any) -> launch.RegionProcess:
    """A region that has ended; like accelerate's, its launcher ends with exit code 1 whatever its ranks ended with."""
    status = folder / f"{region}.json"
    status.write_text(json.dumps({"doing": "training", "step": 3, **told}))
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    process.wait()
    with (folder / f"{region}.txt").open("wb") as log:
        pass
    return launch.RegionProcess(region, folder / f"region-{region}", process, log, 0, status)


def test_a_region_that_was_lost_hides_no_checkpoint_of_those_that_have_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rules = {"on_loss": "continue"}
    left = {"rules": rules, "members": [0, 1], "epoch": 1}
    stopped = [a_region(tmp_path, region, has_stopped=True, **left) for region in (0, 1)]
    lost = a_region(tmp_path, 2)
    steps = {"region-0": (20, 40), "region-1": (20, 40), "region-2": (10,)}
    monkeypatch.setattr(
        "hf_cocodc.snapshot.folders.usable", lambda region: dict.fromkeys(steps[region.name], region)
    )
    for name in steps:
        (tmp_path / name).mkdir()
    said = supervising.saved([*stopped, lost], 3)
    assert said.startswith("checkpoint-40 is complete in every region that was left")
    assert [each.has_stopped for each in (*stopped, lost)] == [True, True, False]


@pytest.mark.parametrize("rules", [{"on_loss": "continue"}, {"on_loss": "stop"}])
def test_a_command_of_one_region_says_what_that_has(
    rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another one, here or elsewhere, may be about to write its newest checkpoint, or has failed to: it is not looked at."""
    steps = {"region-0": (20, 40), "region-1": (20,)}
    monkeypatch.setattr(
        "hf_cocodc.snapshot.folders.usable", lambda region: dict.fromkeys(steps[region.name], region)
    )
    for name in steps:
        (tmp_path / name).mkdir()
    said = supervising.saved([a_region(tmp_path, 0, has_stopped=True, rules=rules)], 2)
    assert said.startswith(
        f"checkpoint-40 is complete in region 0 under {tmp_path}; the commands of the others"
    )
    assert "the newest checkpoint that all have" in said
    joined = a_region(tmp_path, 0, has_stopped=True, rules=rules, members=[0, 2], epoch=3)
    assert supervising.saved([joined], 1).startswith("checkpoint-40 is complete in region 0 under")
    both = [a_region(tmp_path, region, has_stopped=True, rules=rules) for region in (0, 1)]
    assert supervising.saved(both, 2).startswith("checkpoint-20 is complete in every region under")
    assert supervising.saved(both, 3).startswith("checkpoint-20 is complete in regions 0, 1 under")


def test_who_is_lost_before_training_leaves_nothing_to_save(tmp_path: Path) -> None:
    lost = a_region(tmp_path, 1)
    said = supervising.cannot_go_on(lost, 30.0, has_trained=False)
    assert (
        said.startswith("region 1 has ended (") and "cannot begin without it: they are ended in 30 s" in said
    )
    said = supervising.cannot_go_on(lost, 150.0, has_trained=True)
    assert "they save a checkpoint, and end. Without a step for 150 s, they are ended." in said


def test_a_region_says_that_it_has_left(tmp_path: Path) -> None:
    assert a_region(tmp_path, 0, doing=LEFT).has_left
    assert not a_region(tmp_path, 1).has_left


@pytest.mark.parametrize(
    ("settings", "regions", "said"),
    [
        ({}, [0, 1], "stopping: all regions agree on an inner step"),
        ({"min": 1}, [0, 1], "stopping: all regions agree on an inner step"),
        (
            {"min": 1, "when_one_ends": "continue"},
            [2],
            "leaving: region 2 sends what it has trained, and ends; other regions train on.",
        ),
        (
            {"min": 1, "when_one_ends": "continue"},
            [0, 1],
            "leaving: the regions of this command send what they have trained, and end; other regions train on.",
        ),
        ({"when_one_ends": "continue"}, [0, 1], "stopping: all regions agree on an inner step"),
    ],
)
def test_an_interrupt_says_who_stops(settings: dict[str, Any], regions: list[int], said: str) -> None:
    rules = RegionConfig(**settings)
    assert supervising.in_words(rules, regions, join=False).startswith(said)
    starts = supervising.in_words(rules, regions, join=False, is_in=False)
    assert starts.startswith("stopping: no region of this command trains yet. Each ends, or stops")
    waits = supervising.in_words(rules, regions, join=True, is_in=False)
    assert waits.endswith("is not in the run yet. The others train on.")


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of signals are afterwards what they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("when", ["load", "start", "watch"])
@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_the_exit_code_tells_which_signal_came(
    sent: signal.Signals,
    code: int,
    when: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """While libraries are loaded, while regions are started, and while the command waits for them: 128 and the number of the
    signal. It says that it was interrupted.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    region, watch = a_region(tmp_path, 0, error="stopped", exit_code=3, has_stopped=True), launch.watch

    def load_and_signal() -> None:
        if when == "load":
            os.kill(os.getpid(), sent)

    def start_and_signal(*args: Any, **kwargs: Any) -> list[launch.RegionProcess]:
        if when == "start":
            os.kill(os.getpid(), sent)
        return [region]

    def watch_and_signal(*args: Any) -> list[launch.RegionProcess]:
        monkeypatch.setattr(launch, "watch", watch)
        os.kill(os.getpid(), sent)
        return watch(*args)

    monkeypatch.setattr(supervising, "load_ahead", lambda: None)
    monkeypatch.setattr(supervising, "wait_until_loaded", load_and_signal)
    monkeypatch.setattr(launch, "start", start_and_signal)
    monkeypatch.setattr(launch, "watch", watch_and_signal)
    handler = signal.getsignal(sent)
    assert main(["train", "quickstart/diloco", "--set", f"training.output_dir={tmp_path}"]) == code
    assert signal.getsignal(sent) is handler, "what the process does next is interrupted as ever"
    said = capsys.readouterr().err
    assert (
        said == "interrupted\n"
        if when == "load"
        else "\ninterrupted at step 3; all regions have ended.\n" in said
    )


@pytest.mark.usefixtures("handlers")
def test_a_region_that_begins_while_it_is_stopped_has_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has saved a checkpoint: the command does not say that it was interrupted before training."""
    region = a_region(tmp_path, 0)
    region.status.write_text(json.dumps({"doing": "waiting to train"}))

    def watch(*args: Any) -> None:
        raise supervising.Interrupted(signal.SIGTERM)

    def stop(*args: Any) -> None:
        region.status.write_text(json.dumps({"doing": "training", "step": 2}))

    monkeypatch.setattr(supervising, "load_ahead", lambda: None)
    monkeypatch.setattr(supervising, "wait_until_loaded", lambda: None)
    monkeypatch.setattr(launch, "start", lambda *args, **options: [region])
    monkeypatch.setattr(launch, "watch", watch)
    monkeypatch.setattr(supervising, "_stop", stop)
    monkeypatch.setattr(supervising.Display, "step", 2)
    assert main(["train", "quickstart/diloco", "--set", f"training.output_dir={tmp_path}"]) == 143
    said = capsys.readouterr().err
    assert "stopping: no region of this command trains yet." in said
    assert "\ninterrupted at step 2; all regions have ended.\n" in said


def interrupted_while_importing(
    before: str,
    module: str = "hf_cocodc.cli.train",
    words: Sequence[str] = ("--version",),
    sent: signal.Signals = signal.SIGINT,
) -> subprocess.CompletedProcess:
    """`hf-cocodc` in a process that gets a signal when it imports a module."""
    script = f"""
import os, signal, sys
from hf_cocodc.__main__ import main
{before}
class Interrupt:
    def find_spec(self, name, *args):
        if name == {module!r}:
            os.kill(os.getpid(), {int(sent)})
sys.meta_path.insert(0, Interrupt())
sys.argv = ["hf-cocodc", *{words!r}]
sys.exit(main())
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_ctrl_c_while_the_command_is_imported() -> None:
    """The process ends at once: no traceback. Where Ctrl-C is ignored, it still is."""
    ended = interrupted_while_importing("")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
    ended = interrupted_while_importing("signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_libraries_are_imported(sent: signal.Signals, code: int) -> None:
    """The server of the regions imports them, and hears nothing of it; the command ends in good order."""
    ended = interrupted_while_importing("", "torch", ("train", "quickstart/diloco"), sent)
    assert (ended.returncode, ended.stderr) == (code, "interrupted\n")
    assert ended.stdout == "[1/5] loading the libraries\n"


def test_ctrl_c_after_the_command_is_imported() -> None:
    """It is an exception again: what the command has begun is ended in good order."""
    script = """
import hf_cocodc.cli.main as command, os, signal, sys
from hf_cocodc.__main__ import main
def wait(argv):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        print("in good order")
command.parse = wait
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "in good order\n", "")


def test_ctrl_c_ends_a_simulation() -> None:
    """Its regions are threads inside C++ code then: the process aborted, or did not end."""
    script = """
import os, signal, sys, torch
from hf_cocodc.cli.main import main
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.training import preflight, simulation
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets a command in the background ignore it
def train(region, link):
    large = torch.zeros(1000, 1000)
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        large @ large
simulation.simulate = lambda recipe, link: run_in_lockstep(2, train)
preflight.preflight = lambda recipe: None
sys.exit(main(["simulate", "quickstart/diloco"]))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_coordinator_ends_in_good_order(sent: signal.Signals) -> None:
    """SIGTERM killed it, and was ignored where it was the first process of a container."""
    command = [sys.executable, "-m", "hf_cocodc", "coordinator", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        assert served.stdout.readline().startswith("coordinator listening on")
        served.send_signal(sent)
        assert served.wait(60) == 0
