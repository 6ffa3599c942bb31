"""Regions of an elastic run as real processes: one dies or freezes, and the others train on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.meeting.store import serve_store
from tests.processes.elastic_worker import train
from tests.processes.forks import TIMEOUT_S, fork, wait_until


def run_three(folder: Path, name: str, hit: int, **terms: Any) -> dict[int, dict[str, Any]]:
    """Three regions train; region 1 gets the signal `hit` in the middle. What the others saw."""
    store, log = serve_store("127.0.0.1"), folder / "log.txt"
    steps = 24
    processes = [
        fork(train, region, 3, f"127.0.0.1:{store.port}", folder, name, steps, 0.02, log=log)
        for region in range(3)
    ]

    def has_begun() -> bool:
        made = folder / "steps-1.txt"
        return made.exists() and len(made.read_text().split()) >= 7

    wait_until(has_begun, processes[1], log)
    pid = processes[1].pid
    assert pid is not None
    os.kill(pid, hit)
    try:
        for region in (0, 2):
            processes[region].join(TIMEOUT_S)
            assert processes[region].exitcode == 0, log.read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {region: json.loads((folder / f"region-{region}.json").read_text()) for region in (0, 2)}


@pytest.mark.parametrize("name", ["diloco", "streaming"])
def test_the_others_train_on_when_a_region_is_killed(name: str, tmp_path: Path) -> None:
    """They agree who is lost, and on every bit of the global params, at every step to the end."""
    found = run_three(tmp_path, name, signal.SIGKILL)
    assert found[0]["digests"] == found[2]["digests"] and len(found[0]["digests"]) == 24
    assert found[0]["end"] == found[2]["end"]
    assert found[0]["members"] == found[2]["members"]
    assert found[0]["members"][0] == [0, 1, 2] and found[0]["members"][-1] == [0, 2]
    for each in found.values():
        epochs = [facts["members"] for kind, facts in each["events"] if kind == "epoch"]
        assert epochs == [[0, 2]]
