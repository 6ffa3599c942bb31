"""`hf-cocodc doctor` looks, says and ends with its exit code; nothing is trained or written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cocodc import __version__
from hf_cocodc.cli.main import main
from hf_cocodc.coordinator.hello import differences
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.tools.doctor import coordinator, examine, facts
from hf_cocodc.tools.doctor.facts import OK, Finding
from hf_cocodc.training.preflight import on_meta


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def levels(file: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in json.loads(file.read_text(encoding="utf-8"))["findings"]:
        found.setdefault(each["topic"], []).append(each["level"])
    return found


def test_this_machine_can_train_the_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line of a run on one machine; the JSON holds the same, with version and date."""
    assert main(["doctor", "quickstart/diloco", "--json", "found.json"]) == 0
    said = capsys.readouterr().out
    content = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert content["hf_cocodc"] == __version__ and content["time"].endswith("Z")
    topics = [each["topic"] for each in content["findings"]]
    assert topics == ["versions", "devices", "recipe", "memory", "disk", "data", "network", "link"]
    assert all(topic in said for topic in topics)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["found.json"]


@pytest.mark.slow
def test_what_is_wrong_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe that cannot work, and a coordinator that does not answer: both are said, and what else is seen."""
    monkeypatch.setattr(coordinator.reach, "__defaults__", (0.5,))
    wrong = ["--set", "model.config.num_attention_heads=7", "--coordinator", "127.0.0.1:1", "--region", "0"]
    assert main(["doctor", "quickstart/diloco", *wrong, "--json", "found.json"]) == 2
    found = levels(tmp_path / "found.json")
    assert found["recipe"] == found["coordinator"] == ["wrong"] and found["address"] == ["ok"]
    wrong_lines = [
        each for each in json.loads(Path("found.json").read_text())["findings"] if each["level"] == "wrong"
    ]
    assert all(each["command"] for each in wrong_lines)
    ended = capsys.readouterr()
    assert "wrong: recipe, coordinator" in ended.err
    assert "must divide" in ended.out or "divisible" in ended.out or "heads" in ended.out


def test_the_command_mends_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """bf16 without a GPU: the keys of a recipe say nothing of it."""
    monkeypatch.setattr("hf_cocodc.training.preflight._has_accelerator", lambda: False)
    assert main(["doctor", "quickstart/diloco", "--set", "training.bf16=true"]) == 2
    assert "$ hf-cocodc train RECIPE --set training.bf16=false\n" in capsys.readouterr().out


def test_a_link_that_this_machine_does_not_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The doctor and `train` say it, before a region is started."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    wrong = ["quickstart/diloco", "--set", "regions.link=nccl"]
    assert main(["doctor", *wrong]) == 2
    ended = capsys.readouterr()
    assert "wrong: link" in ended.err and "$ hf-cocodc train RECIPE --set regions.link=tcp" in ended.out
    said = " ".join(ended.out.split())
    assert "wrong link regions.link=nccl moves payloads between CUDA devices, but torch" in said
    assert main(["train", *wrong, "--dry-run"]) == 2
    assert (
        "error: regions.link=nccl moves payloads between CUDA devices, but torch" in capsys.readouterr().err
    )
    assert main(["train", *wrong, "--dry-run", "--set", "regions.count=1"]) == 0


def test_a_coordinator_that_has_no_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a machine that nobody knows; what else is seen is said too."""
    wrong = [
        "--set",
        "model.config.model_type=lama",
        "--coordinator",
        "no-such-machine.invalid:1",
        "--region",
        "0",
    ]
    assert main(["doctor", "quickstart/diloco", *wrong]) == 2
    said = capsys.readouterr().out
    assert "host 'no-such-machine.invalid' has no address" in said and "Did you mean 'llama'" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--region", "2", "--coordinator", "127.0.0.1:1"], "--region 2 does not exist"),
        (["--region", "0"], "--region 0 of 2 needs a coordinator"),
        (["--wait", "5"], "it needs --region and --coordinator"),
        (["--wait", "-1"], "--wait -1 must lie in"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json cannot be written"),
    ],
)
def test_wrong_options(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One paragraph, before anything is loaded."""
    assert main(["doctor", "quickstart/diloco", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--region", "0"], ["--region", "2"], ["--region", "-1"]])
def test_it_refuses_what_train_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """In the same words."""
    said = []
    for command in ("doctor", "train"):
        assert main([command, "quickstart/diloco", *arguments]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and said[0].startswith("error: --region")


def test_the_number_of_a_region_that_joins_later(capsys: pytest.CaptureFixture[str]) -> None:
    """It may look at its machine before the run: `train --join` takes it."""
    more = ["--set", "regions.max=3", "--set", "regions.min=1", "--region", "2"]
    assert main(["doctor", "quickstart/diloco", *more]) == 2
    assert "--region 2 of 2 needs a coordinator" in capsys.readouterr().err


def test_a_held_out_split_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said where the run would evaluate on it, and only there."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("one line\n" * 100)
    words = ["doctor", "quickstart/diloco", "--set", "data.builtin=null", "--set", "data.path=data"]
    assert main(words) == 2
    said = capsys.readouterr()
    assert "data.eval_split='test', on which the run evaluates: " in said.out and "wrong: data" in said.err
    assert "$ python -c" in said.out and "--set data.eval_split=SPLIT" in said.out
    assert main([*words, "--set", "training.eval_strategy=no", "--set", "training.eval_on_start=false"]) == 0
    assert main([*words, "--set", "data.eval_split=train"]) == 0


def test_lines_are_printed_as_they_are_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while it waits leaves what it has found."""

    def interrupted(*given: object) -> Iterator[Finding]:
        yield Finding("clock", OK, "synchronized")
        raise KeyboardInterrupt

    monkeypatch.setattr(examine, "examine", interrupted)
    assert main(["doctor", "quickstart/diloco"]) == 130
    assert capsys.readouterr().out == "ok     clock        synchronized\n"


def test_a_package_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said, with the command that installs it; what needs the package is not looked at."""
    version = facts.metadata.version

    def without(name: str) -> str:
        if name == "datasets":
            raise facts.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(facts.metadata, "version", without)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["doctor", "quickstart/diloco", "--json", "found.json"]) == 2
    said = capsys.readouterr().out
    assert "needs datasets>=" in said and "has none" in said and "$ pip install 'datasets>=" in said
    assert levels(tmp_path / "found.json")["recipe"] == ["-"]


@pytest.mark.slow
def test_two_doctors_meet(tmp_path: Path) -> None:
    """Two processes, at a real coordinator: another learning rate is refused in both, before anybody trains."""
    server = serve_in_thread()
    words = ["doctor", "quickstart/diloco", "--wait", "120", "--coordinator", f"127.0.0.1:{server.port}"]
    here, there = ([*words, "--region", str(region), "--json", f"{region}.json"] for region in (0, 1))
    command = [sys.executable, "-m", "hf_cocodc", *there, "--set", "training.learning_rate=0.5"]
    with subprocess.Popen(command) as other:
        assert main(here) == 2
        assert other.wait(200) == 2
    assert all(levels(tmp_path / f"{region}.json")["regions"] == ["wrong"] for region in (0, 1))
    server.close()


def test_what_a_doctor_tells_of_a_recipe() -> None:
    """Settings, training, model and data, by the names of a recipe; equal recipes tell the same."""

    def told(data: str, *overrides: str) -> dict[str, Any]:
        recipe = Recipe.load("quickstart/diloco", ["regions.coordinator=127.0.0.1:1", *overrides])
        return json.loads(json.dumps(examine._told(recipe, on_meta(recipe), data)))

    mine = told("690 documents")
    assert differences(mine, told("690 documents")) == []
    other = told(
        "9 documents",
        "training.learning_rate=0.5",
        "model.config.hidden_size=64",
        "outer.sync_interval=7",
        "training.max_steps=9",
    )
    names = {each.field for each in differences(mine, other)}
    assert names >= {
        "data",
        "training.learning_rate",
        "outer.sync_interval",
        "max_steps",
        "model.config.hidden_size",
    }
    assert "data" not in told("690 documents", "regions.may_differ=path")["facts"], "it may be another"


def test_a_doctor_that_meets_nobody(tmp_path: Path) -> None:
    """--wait 0; and a region that joins later has nobody to meet."""
    server = serve_in_thread()
    command = ["doctor", "quickstart/diloco", "--coordinator", f"127.0.0.1:{server.port}"]
    for more in (
        ["--region", "0", "--wait", "0"],
        ["--region", "2", "--set", "regions.max=3", "--set", "regions.min=1"],
    ):
        assert main([*command, *more, "--json", "found.json"]) == 0
        assert levels(tmp_path / "found.json").get("regions", ["-"]) == ["-"]
    server.close()
