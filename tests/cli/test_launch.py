"""What `hf-cocodc launch` says of scripts that train otherwise than it can show, or not at all. Processes stand for regions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.cli import ending, supervising
from hf_cocodc.cli.main import main
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
    assert supervising.saved([region], is_script).endswith(", before the script") == is_script
