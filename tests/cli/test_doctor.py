"""`hf-cocodc doctor` looks, says and ends with its exit code; nothing is trained or written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_cocodc import __version__
from hf_cocodc.cli.main import main
from hf_cocodc.meeting.store import serve_store


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
    assert topics == ["versions", "devices", "recipe", "memory", "disk", "data", "network"]
    assert all(topic in said for topic in topics)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["found.json"]


def test_what_is_wrong_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe that cannot work, and a store that does not answer: both are said, and what else is seen."""
    wrong = ["--set", "model.config.num_attention_heads=7", "--store", "127.0.0.1:1", "--region", "0"]
    assert main(["doctor", "quickstart/diloco", *wrong, "--json", "found.json"]) == 2
    found = levels(tmp_path / "found.json")
    assert found["recipe"] == found["store"] == ["wrong"] and found["interface"] == ["ok"]
    ended = capsys.readouterr()
    assert "wrong: recipe, store" in ended.err
    assert "must divide" in ended.out or "divisible" in ended.out or "heads" in ended.out


def test_a_store_that_has_no_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a machine that nobody knows; what else is seen is said too."""
    wrong = ["--set", "outer.codec=bf17", "--store", "no-such-machine.invalid:1", "--region", "0"]
    assert main(["doctor", "quickstart/diloco", *wrong]) == 2
    said = capsys.readouterr().out
    assert "no way to the store at no-such-machine.invalid:1: " in said and "Did you mean 'bf16'" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--region", "2", "--store", "127.0.0.1:1"], "--region 2 does not exist"),
        (["--wait", "5"], "it needs --region and --store"),
        (["--wait", "-1"], "--wait -1 must lie in"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json cannot be written"),
    ],
)
def test_wrong_options(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One paragraph, before anything is loaded."""
    assert main(["doctor", "quickstart/diloco", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_two_doctors_compare(tmp_path: Path) -> None:
    """As processes, at a real store: they call each other, and other data is found."""
    server = serve_store()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "hf_cocodc", "doctor", "quickstart/diloco", "--region", str(region)]
            + ["--store", f"127.0.0.1:{server.port}", "--wait", "120", "--json", f"{region}.json"],
            stdout=subprocess.DEVNULL,
        )
        for region in (0, 1)
    ]
    assert [process.wait(200) for process in processes] == [0, 0]
    for region in (0, 1):
        assert levels(tmp_path / f"{region}.json")[f"region {1 - region}"] == ["ok", "ok"]
    other = ["--set", "data.split=test", "--region", "1", "--store", f"127.0.0.1:{server.port}"]
    assert main(["doctor", "quickstart/diloco", *other, "--json", "other.json"]) == 2
    assert "wrong" in levels(tmp_path / "other.json")["region 0"]
