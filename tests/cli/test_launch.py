"""What `hf-cocodc launch` says of scripts that train otherwise than it can show, or not at all. Processes stand for regions."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.cli import ending, supervising
from hf_cocodc.cli.main import main
from hf_cocodc.errors import RunStopped
from hf_cocodc.run.connect import show_differences
from hf_cocodc.status import ENV_STATUS, heard
from hf_cocodc.training import launch
from hf_cocodc.training.region import live


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the regions tell, which end at once with exit code 0; the test runs in a folder that has a script."""
    facts: dict[str, Any] = {}

    def start(
        program: launch.Program, planned: list[launch.Launch], **more: Any
    ) -> list[launch.RegionProcess]:
        regions = []
        for each in planned:
            each.folder.mkdir(parents=True, exist_ok=True)
            process = subprocess.Popen([sys.executable, "-c", ""])
            process.wait()
            status = each.folder / "status.json"
            status.write_text(json.dumps(facts))
            log = (each.folder / "log.txt").open("ab")
            regions.append(launch.RegionProcess(each.region, each.folder, process, log, 0, status, True))
        return regions

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    return facts


@pytest.mark.usefixtures("told")
def test_a_script_without_the_callback_has_trained_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Its regions trained each on its own: that is no success."""
    assert main(["launch", "--regions", "2", "script.py"]) == 2
    errors = capsys.readouterr().err
    assert "no region has trained with the others" in errors and "CoCoDCCallback" in errors
    assert "runs/script/region-0/log.txt" in errors


def test_a_loop_without_a_journal_ends_well(told: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    told.update(doing="running the rest of the script", step=12, folder=None)
    assert main(["launch", "--regions", "2", "script.py"]) == 0
    assert "finished at inner step 12" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["launch", "--regions", "0", "script.py"], ["train", "quickstart/diloco", "--regions", "0"]]
)
@pytest.mark.usefixtures("told")
def test_no_regions_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """They once stood for the default."""
    assert main(words) == 2
    assert "regions.count=0 must lie in 1 .. 1024" in capsys.readouterr().err


@pytest.mark.usefixtures("told")
def test_a_module_that_is_not_there_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--regions", "2", "-m", "no_such.module"]) == 2
    assert "-m 'no_such.module': there is no module 'no_such'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    (tmp_path / "mine_of_this_test.py").touch()
    assert main(["launch", "--regions", "2", "--dry-run", "-m", "mine_of_this_test"]) == 0


@pytest.mark.usefixtures("told")
def test_a_recipe_is_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    """Python would say that its fourth line is no valid syntax."""
    Path("mine.yaml").touch()
    assert main(["launch", "--regions", "2", "mine.yaml"]) == 2
    assert "A recipe is trained with hf-cocodc train" in capsys.readouterr().err


@pytest.mark.usefixtures("told")
def test_a_file_is_no_folder_for_logs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--regions", "2", "--logs", "script.py", "--dry-run", "script.py"]) == 2
    errors = capsys.readouterr().err
    assert "script.py is no folder" in errors and "--logs" in errors


def test_a_folder_without_a_model_is_not_named_as_one(tmp_path: Path) -> None:
    """A script saves its model where it likes, or not at all."""
    assert ending._model(tmp_path) == "where the script has saved it"
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert ending._model(tmp_path) == str(tmp_path)


def test_a_command_hears_that_regions_train_on_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_STATUS, str(tmp_path / "status.json"))
    show_differences(["regions 0 and 1 begin with the same training samples"])
    lines = heard(tmp_path / "status.json")["lines"]
    assert [each["line"] for each in lines] == ["regions 0 and 1 begin with the same training samples"]


def test_how_a_script_ends_itself_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command: the last lines of the log are the script's own."""
    monkeypatch.setenv(ENV_STATUS, str(tmp_path / "status.json"))

    def script() -> None:
        raise SystemExit(7)

    assert live(script, is_script=True) == 7
    assert heard(tmp_path / "status.json")["error"] == "its script has ended with exit code 7"
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "told_code", "code", "said"),
    [
        (SystemExit(3), 3, 1, "its script has ended with exit code 3"),
        (SystemExit(5), 5, 5, "its script has ended with exit code 5"),
        (KeyboardInterrupt(), 130, 130, "it was interrupted (KeyboardInterrupt)"),
        (RunStopped("all regions stopped at step 7"), 3, 3, "all regions stopped at step 7"),
    ],
)
def test_the_exit_code_says_what_has_ended_a_script(
    error: BaseException,
    told_code: int,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """3 only if all regions have stopped, whatever number a script of a user's own ends with."""
    monkeypatch.setenv(ENV_STATUS, str(tmp_path / "status.json"))

    def script() -> None:
        raise error

    assert live(script, is_script=True) == told_code
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({told_code})"])
    process.wait()
    with (tmp_path / "log.txt").open("ab") as log:
        pass
    region = launch.RegionProcess(0, tmp_path, process, log, 0, tmp_path / "status.json")
    assert region.has_stopped == isinstance(error, RunStopped)
    capsys.readouterr()
    assert supervising.report_failure([region], [region], elastic=True) == code
    assert f"error: [region 0] {said}\n" in capsys.readouterr().err


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_region_that_a_signal_has_ended(
    sent: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it trains it tells of nothing. Only what nobody can catch may be for want of memory."""
    process = subprocess.Popen([sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(sent)})"])
    process.wait()
    with (tmp_path / "log.txt").open("ab") as log:
        pass
    region = launch.RegionProcess(0, tmp_path, process, log, 0, tmp_path / "status.json")
    assert supervising.report_failure([region], [region], elastic=True) == 1
    how = "interrupted (SIGTERM)" if sent == signal.SIGTERM else "killed, or ended without an error message"
    assert f"error: [region 0] was {how}; its last lines:" in capsys.readouterr().err


@pytest.mark.parametrize("is_script", [True, False])
def test_resume_stands_before_a_script(
    is_script: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (tmp_path / "region-0").mkdir()
    with (tmp_path / "log").open("wb") as log:
        region = launch.RegionProcess(0, tmp_path / "region-0", process, log, 0, tmp_path / "status")
    monkeypatch.setattr("hf_cocodc.snapshot.folders.usable", lambda folder: {20: folder})
    assert supervising.saved([region], 1, is_script).endswith(", before the script") == is_script


SPLIT = ["--", "--multi_gpu", "--num_machines", "1", "--num_processes", "4"]


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("words", [["--split", "2"], []], ids=["option", "variable"])
def test_a_split_launch_is_one_command_for_all_regions(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The regions number themselves: no variable does it for them."""
    if not words:
        monkeypatch.setenv("HF_COCODC_SPLIT", "2")
    assert main(["launch", *words, "--dry-run", *SPLIT, "--", "script.py", "--lr", "1"]) == 0
    shown = capsys.readouterr().out
    [command] = [line for line in shown.splitlines() if line.startswith("command ")]
    assert "accelerate.commands.launch --quiet --multi_gpu --num_machines 1 --num_processes 4 -m" in command
    assert command.endswith("script.py --lr 1")
    assert "HF_COCODC_REGION=" not in command and "HF_COCODC_REGIONS=" not in command
    assert "HF_COCODC_ON_LOSS" not in command, "its regions end together"
    assert "would train  region 0, 1 of 2" in shown
    assert "runs/script/region-0" in shown and "runs/script/region-1" in shown


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        (["--region", "0"], {}, "--region (or a variable"),
        (["--coordinator", "h:1"], {}, "--coordinator (or a variable"),
        ([], {"HF_COCODC_COORDINATOR": "h:1"}, "--coordinator (or a variable"),
        ([], {"HF_COCODC_REGIONS": "2"}, "HF_COCODC_REGIONS (or a variable"),
        (["--join"], {}, "--join (or a variable"),
        (["--regions", "3"], {}, "divides one launch into 2 region(s), but regions.count=3"),
    ],
)
def test_what_numbers_regions_beside_a_split_is_refused(
    words: list[str],
    env: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", "--split", "2", *words, *SPLIT, "--", "script.py"]) == 2
    errors = capsys.readouterr().err
    assert "--split='2' divides one launch into 2 region(s)" in errors and message in errors


def test_a_recipe_whose_count_differs_from_the_split_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "quickstart/diloco", "--set", "regions.count=3", "--split", "2", *SPLIT]
    assert main(words) == 2
    assert "--split='2' divides one launch into 2 region(s), but regions.count=3" in capsys.readouterr().err


@pytest.mark.usefixtures("told")
def test_regions_that_one_launcher_has_ended_are_blamed_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They fail at once, with one exit code: who was refused comes first, then who was killed, then who told of it first; who has
    only stopped, or ended well, is not to blame.
    """
    facts: list[dict[str, Any]] = [
        {"step": 9, "is_done": True},
        {"step": 9, "error": "stopped", "exit_code": 3, "has_stopped": True, "since": 1.0},
        {"step": 9, "error": "second", "exit_code": 1, "since": 3.0},
        {"step": 9, "error": "first", "exit_code": 1, "since": 2.0},
        {"step": 9},
    ]

    def regions(told: list[dict[str, Any]]) -> list[launch.RegionProcess]:
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
        process.wait()
        made = []
        for number, each in enumerate(told):
            status = tmp_path / f"region-{number}.json"
            status.write_text(json.dumps(each))
            log = (tmp_path / f"log-{number}.txt").open("ab")
            made.append(launch.RegionProcess(number, tmp_path, process, log, 0, status))
        return made

    failed = launch.watch(regions(facts), lambda: None)
    assert [each.region for each in failed] == [4, 3, 2, 1, 0]
    refused = {"error": "a disk is full", "exit_code": 2, "since": 9.0}
    failed = launch.watch(regions([*facts, refused]), lambda: None)
    assert [each.region for each in failed] == [5, 4, 3, 2, 1, 0]
    assert supervising.report_failure(failed, failed, elastic=False) == 2
    assert "error: [region 5] a disk is full" in capsys.readouterr().err.splitlines()[0]
