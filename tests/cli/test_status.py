"""`hf-cocodc status` and `hf-cocodc leave`, at a real coordinator."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_cocodc.cli import leave, status
from hf_cocodc.cli.main import main
from hf_cocodc.cli.status import lines
from hf_cocodc.coordinator.client import status as runs_at
from hf_cocodc.coordinator.messages import Beat, Bye, Heard, LeaveNow
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.run.training import Training
from tests.coordinator.regions import Region, hello, meet, part, wait_until


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(leave, "PATIENCE_S", 2.0)
    served = serve_in_thread()
    yield served.address
    served.close()


def begun(address: str, name: str, count: int = 3, elastic: bool = True) -> list[Region]:
    """A run that trains."""
    return meet(address, *(hello(region, count, elastic) for region in range(count)), run=name)


def member(region: int, step: int, **more: Any) -> dict[str, Any]:
    quiet = {"behind": 0, "moved_s": 0.4, "samples": None, "awaits": None, "doing": "", "heard_s": 0.1}
    return {"region": region, "ticket": region, "address": "10.0.0.1", "step": step, **quiet, **more}


RUN: dict[str, Any] = {
    "run": "run-1",
    "name": "mine",
    "phase": "trains",
    "epoch": 2,
    "losses": 1,
    "members": [
        member(0, 412, awaits=2),
        member(1, 398, doing="sends a base to region 3"),
        member(2, 380, behind=32, moved_s=31.0, address="10.0.0.2"),
    ],
    "newcomers": [],
    "lost": [],
    "waiting": [],
    "elastic": True,
    "count": 3,
    "least": 2,
    "most": 5,
    "max_steps": 800,
    "landed_at": 400,
    "landed_s": 1.0,
    "cosine": None,
    "ended": None,
}


def test_status_shows_lag_waits_and_donors() -> None:
    """One line per region."""
    assert lines(RUN) == [
        "run         mine",
        "regions     3; at least 2 train, at most 5 take part; epoch 2",
        "step        412 of 800; last landing at step 400, 1 s ago",
        "region 0    step 412, waits for region 2  [10.0.0.1]",
        "region 1    step 398, sends a base to region 3  [10.0.0.1]",
        "region 2    step 380 (32 behind), no inner step for 31 s  [10.0.0.2]",
    ]
    few = {**RUN, "members": RUN["members"][:1], "landed_at": None, "max_steps": None}
    assert lines(few)[1].startswith("regions     1 (training waits for others);")
    assert lines(few)[2] == "step        412; nothing has landed yet"


def test_status_shows_how_regions_agree_and_what_was_dealt() -> None:
    """A region that has come in since the last landing has no share yet."""
    members = [member(0, 412, samples=12), member(1, 412, samples=4), member(2, 411)]
    assert lines({**RUN, "cosine": 0.4142, "members": members})[3:] == [
        "agreement   cosine 0.41 of the regions' outer gradients at the last landing",
        "region 0    step 412, 12 of 16 samples a step  [10.0.0.1]",
        "region 1    step 412, 4 of 16 samples a step  [10.0.0.1]",
        "region 2    step 411  [10.0.0.1]",
    ]


@pytest.mark.parametrize(("rule", "samples"), [("fixed", 12), ("per_region", 12), ("own", 0), (None, 0)])
def test_a_region_says_what_has_landed(rule: str | None, samples: int) -> None:
    """Its share only where regions divide the samples of a step by their speeds."""
    link = SimpleNamespace(beat=Beat(max_steps=40))
    engine = SimpleNamespace(portion=SimpleNamespace(samples=12), report={"cosine": 0.5})
    training: Any = SimpleNamespace(session=SimpleNamespace(link=link), engine=engine, rule_of_batch=rule)
    Training._show_landing(training)
    assert link.beat == Beat(max_steps=40, cosine=0.5, samples=samples)


def test_status_shows_who_is_lost() -> None:
    """Since when, where it was, and why; where it died before it said so, without its step."""
    lost = {"region": 3, "step": 120, "since_s": 340.2, "why": "its process has died. Start it again."}
    shown = lines({**RUN, "lost": [lost, {**lost, "region": 4, "step": None}]})
    assert shown[-2:] == [
        "region 3    lost at step 120, 340 s ago: its process has died",
        "region 4    lost, 340 s ago: its process has died",
    ]


def test_status_shows_who_comes() -> None:
    """Newcomers, regions that wait, and a run that ends with a lost region."""
    coming = {**RUN, "newcomers": [{"region": 3, "ticket": 9, "address": "10.0.0.4"}], "waiting": [4]}
    assert lines(coming)[-2:] == ["region 3    is to come in  [10.0.0.4]", "region 4    waits to take part"]
    assert lines({**RUN, "elastic": False})[1] == "regions     3; the run ends when one is lost; epoch 2"
    gathering = {**RUN, "members": [], "phase": "gathering", "waiting": [0, 2]}
    assert lines(gathering) == [
        "run         mine",
        "region 0    waits to take part",
        "region 2    waits to take part",
    ]
    ended = {"how": "stopped", "step": 98, "place": "a:/runs/region-0"}
    assert lines({**RUN, "phase": "gathering", "waiting": [1], "ended": ended}) == [
        "run         mine",
        "before      stopped at step 98; its model is at a:/runs/region-0",
        "region 1    waits to take part",
    ]


def test_status_of_the_runs_at_a_coordinator(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all of them, or of one; as JSON, too."""
    regions = [*begun(address, "mine"), *begun(address, "other")]
    regions[0].shows = {"landed_at": 28, "cosine": 0.7, "samples": 6}
    regions[1].shows = {"landed_at": 30, "cosine": -0.25, "samples": 2}
    wait_until(
        lambda: (
            {each["samples"] for each in runs_at(address, None, "mine", 5.0)[0]["members"]} == {6, 2, None}
        )
    )
    regions[1].step = 32
    wait_until(lambda: runs_at(address, None, "mine", 5.0)[0]["members"][1]["step"] == 32)
    assert main(["status", "--coordinator", address]) == 0
    said = capsys.readouterr().out
    assert "run         mine\n" in said
    assert "run         other\n" in said
    assert main(["status", "--coordinator", address, "--run", "mine", "--json", "-"]) == 0
    found = capsys.readouterr()
    [figures] = json.loads(found.out)
    assert "run         mine\n" in found.err
    file = tmp_path / "found.json"
    assert main(["status", "--coordinator", address, "--run", "mine", "--json", str(file)]) == 0
    assert json.loads(file.read_text())[0]["name"] == "mine"
    assert "run         mine\n" in capsys.readouterr().out
    assert (figures["name"], figures["epoch"], figures["phase"]) == ("mine", 0, "trains")
    assert (figures["landed_at"], figures["cosine"]) == (30, -0.25)
    assert [each["samples"] for each in figures["members"]] == [6, 2, None]
    assert [each["address"] for each in figures["members"]] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert main(["leave", "--coordinator", address, "--region", "2"]) == 2
    assert "several runs train at" in capsys.readouterr().err
    part(*regions)


def test_status_says_that_there_is_nothing_to_see(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run, a run whose members have died, one that has ended, a coordinator that is not there (exit code 1): a sentence."""
    assert main(["status", "--coordinator", address]) == 2
    assert f"no run trains at {address}." in capsys.readouterr().err
    part(*begun(address, "mine"))
    wait_until(lambda: runs_at(address, None, None, 5.0)[0]["phase"] == "silent")
    assert main(["status", "--coordinator", address]) == 2
    assert "Without a heartbeat from any region: mine." in capsys.readouterr().err
    assert main(["status", "--coordinator", address, "--run", "other"]) == 2
    assert "no run named 'other' trains" in capsys.readouterr().err
    first, *others = begun(address, "over")
    first.client.close(Bye(how="finished", step=800, place="/out/region-0"))
    part(*others)
    wait_until(lambda: runs_at(address, None, "over", 5.0)[0]["phase"] == "ended")
    for which in ([], ["--run", "over"]):
        assert main(["leave", "--region", "1", "--coordinator", address, *which]) == 2
        said = capsys.readouterr().err
        assert "Ended: over (finished at step 800; its model is at /out/region-0)." in said
    monkeypatch.setattr(status, "PATIENCE_S", 0.1)
    assert main(["status", "--coordinator", "127.0.0.1:1"]) == 1
    assert "If `hf-cocodc train` has printed this address, its run has ended" in capsys.readouterr().err
    assert main(["status", "--coordinator", "nonsense"]) == 2
    assert "regions.coordinator='nonsense' must be HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["leave", "--region", "1"]], ids=lambda each: each[0])
@pytest.mark.parametrize("name", ["mistyped", "mistyped/run7"])
def test_a_folder_that_is_not_there_is_named_and_not_made(
    command: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--coordinator", f"file://{tmp_path}/{name}"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/mistyped" in said and "folder" in said and "Correct the URL" in said
    assert not [*tmp_path.iterdir()]


def test_a_region_hears_that_it_shall_leave(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is no member is refused, and one that does not hear is named."""
    regions = begun(address, "mine")

    def answer() -> None:
        regions[1].wait_for(LeaveNow)
        regions[1].client.send(Heard())

    thread = threading.Thread(target=answer)
    thread.start()
    assert main(["leave", "--coordinator", address, "--region", "1"]) == 0
    thread.join()
    assert capsys.readouterr().out == "region 1 sends what it has trained, and leaves run 'mine'.\n"
    assert main(["leave", "--coordinator", address, "--region", "3"]) == 2
    assert "region 3 takes no part in run 'mine'. Its members are: 0, 1, 2." in capsys.readouterr().err
    assert main(["leave", "--coordinator", address, "--region", "-1"]) == 2
    assert "--region -1 does not exist: regions are numbered from 0." in capsys.readouterr().err
    assert main(["leave", "--coordinator", address, "--region", "2"]) == 1
    assert "region 2 of run 'mine' has not answered for 2 s" in capsys.readouterr().err
    part(*regions)


def test_nobody_leaves_a_run_that_ends_with_a_lost_region(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    regions = begun(address, "fixed", elastic=False)
    assert main(["leave", "--coordinator", address, "--region", "1"]) == 2
    assert "run 'fixed' ends when a region is lost: none can leave it" in capsys.readouterr().err
    assert not any(isinstance(each, LeaveNow) for each in regions[1].heard)
    part(*regions)
