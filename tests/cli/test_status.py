"""`hf-cocodc status` and `hf-cocodc leave`, at a real store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hf_cocodc.cli import leave
from hf_cocodc.cli.main import main
from hf_cocodc.cli.status import lags, lines
from hf_cocodc.meeting import live
from hf_cocodc.meeting.store import SteadyStore, serve_store
from tests.meeting.records import RECORD, process
from tests.meeting.waiting import eventually


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(live, "BEAT_S", 0.05)
    monkeypatch.setattr(leave, "PATIENCE_S", 2.0)
    server = serve_store()
    yield f"127.0.0.1:{server.port}"
    del server


def test_status_shows_lag_waits_and_donors() -> None:
    """One line per region."""
    assert lines(RECORD) == [
        "run         mine",
        "regions     3; at least 2 train, at most 5 take part; epoch 2",
        "step        412 of 800; last landing at step 400, 1 s ago",
        "region 0    step 412, waits for region 2  [10.0.0.1]",
        "region 1    step 398, sends a base to region 3  [10.0.0.1]",
        "region 2    step 380 (32 behind), no inner step for 31 s  [10.0.0.2]",
    ]
    slow, *fast = RECORD.members
    ahead = replace(RECORD, members=(slow, *(replace(each, behind=-8) for each in fast)))
    assert lags(ahead) == [8, 0, 0], "the member that writes the record may itself be the one that is behind"
    few = replace(RECORD, members=RECORD.members[:1], landed_at=None, max_steps=None)
    assert lines(few)[1].startswith("regions     1 (training waits for others);")
    assert lines(few)[2] == "step        412; nothing has landed yet"


def test_status_of_the_runs_at_a_store(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all of them, or of one; as JSON, too."""
    records = [RECORD, replace(RECORD, name="other")]
    publishers = [
        live.Publisher(SteadyStore(address), each.name, process(0), lambda each=each: each)
        for each in records
    ]  # type: ignore[misc]
    store = SteadyStore(address)
    eventually(lambda: len(live.names(store)) == 2)
    assert main(["status", "--store", address]) == 0
    said = capsys.readouterr().out
    assert "run         mine\n" in said
    assert "run         other\n" in said
    assert main(["status", "--store", address, "--run", "mine", "--json", "-"]) == 0
    said = capsys.readouterr()
    [figures] = json.loads(said.out)
    assert "run         mine\n" in said.err
    assert main(["status", "--store", address, "--run", "mine", "--json", str(tmp_path / "found.json")]) == 0
    assert json.loads((tmp_path / "found.json").read_text())[0]["name"] == "mine"
    assert "run         mine\n" in capsys.readouterr().out
    assert (figures["name"], figures["epoch"], figures["members"][2]["behind"]) == ("mine", 2, 32)
    assert main(["leave", "--store", address, "--region", "2"]) == 2
    assert "several runs train at" in capsys.readouterr().err
    for each in publishers:
        each.close()


def test_status_says_that_there_is_nothing_to_see(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run, a run whose members have died, a store that is not there: one sentence, with exit code 2."""
    assert main(["status", "--store", address]) == 2
    said = capsys.readouterr().err
    assert f"no run trains at {address}. Only runs with regions.min or regions.on_loss=continue say" in said
    publisher = live.Publisher(SteadyStore(address), "mine", process(0), lambda: RECORD)
    store = SteadyStore(address)
    eventually(lambda: live.names(store))
    publisher.close()
    monkeypatch.setattr(live, "ALIVE_S", 0.2)
    assert main(["status", "--store", address]) == 2
    assert "Without a sign of life from any region: mine." in capsys.readouterr().err
    assert main(["status", "--store", address, "--run", "other"]) == 2
    assert "no run named 'other' trains" in capsys.readouterr().err
    live.Publisher(SteadyStore(address), "mine", process(0), lambda: None).close(ended=True)
    for which in ([], ["--run", "mine"]):
        assert main(["leave", "--region", "1", "--store", address, *which]) == 2
        assert "trains at" in (said := capsys.readouterr().err)
        assert "Ended in good order: mine." in said
    monkeypatch.setattr("hf_cocodc.meeting.store.CONNECT_S", 0.1)
    assert main(["status", "--store", "127.0.0.1:1"]) == 2
    assert "If `hf-cocodc train` has printed this address, its run has ended" in capsys.readouterr().err
    assert main(["status", "--store", "nonsense"]) == 2
    assert "regions.store='nonsense' must be HOST:PORT" in capsys.readouterr().err


def test_a_region_hears_that_it_shall_leave(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is no member is refused, and one that does not hear is named."""
    heard: list[str] = []
    publishers = [
        live.Publisher(SteadyStore(address), "mine", process(0), lambda: RECORD),
        live.Publisher(SteadyStore(address), "mine", process(1), lambda: None, heard.append),
    ]
    store = SteadyStore(address)
    eventually(lambda: live.names(store))
    assert main(["leave", "--store", address, "--region", "1"]) == 0
    assert capsys.readouterr().out == "region 1 sends what it has trained, and leaves run 'mine'.\n"
    assert heard == ["hf-cocodc leave"]
    assert main(["leave", "--store", address, "--region", "3"]) == 2
    assert "region 3 takes no part in run 'mine'. Its members are: 0, 1, 2." in capsys.readouterr().err
    assert main(["leave", "--store", address, "--region", "2"]) == 1
    assert "region 2 of run 'mine' has not answered for 2 s" in capsys.readouterr().err
    assert live.Request(SteadyStore(address), RECORD, 2).is_heard, "nobody asks any longer"
    for each in publishers:
        each.close()


@pytest.mark.slow
def test_a_store_that_goes_leaves_no_stack_trace_on_the_terminal() -> None:
    """A command that looks at the store after its run has ended, such as one that has claimed a number."""
    program = (
        "from hf_cocodc.settings import quiet_torch; quiet_torch(); import os\n"
        "from hf_cocodc.meeting.store import SteadyStore, StoreAwayError, serve_store\n"
        "server = serve_store(); store = SteadyStore(f'127.0.0.1:{server.port}'); store.set('a', 'b'); del server\n"
        "try: store.peek('a')\n"
        "except StoreAwayError: print(os.environ['TORCH_CPP_LOG_LEVEL'])\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "TORCH_CPP_LOG_LEVEL"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=env, check=True, capture_output=True, text=True
    )
    assert (ended.stdout, ended.stderr) == ("ERROR\n", "")
