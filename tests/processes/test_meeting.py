"""Runs that share a store, in real processes over real gloo: none gets another's regions."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from hf_cocodc.meeting.store import serve_store
from tests.processes.ending_worker import live
from tests.processes.forks import TIMEOUT_S, fork, region_env


def test_two_runs_of_one_store_keep_to_themselves(tmp_path: Path) -> None:
    """Region 0 of one run and region 1 of another come first; both runs end as if the other were not there."""
    store, log = serve_store("127.0.0.1"), tmp_path / "log.txt"
    runs = {"first": 1e-3, "second": 2e-3}
    processes = []
    for name, region in (("first", 0), ("second", 1), ("second", 0), ("first", 1)):
        body = functools.partial(live, learning_rate=runs[name])
        (tmp_path / name).mkdir(exist_ok=True)
        processes.append(fork(body, str(tmp_path / name), log=log, **region_env(store, region)))
    for process in processes:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0, log.read_text()[-4000:]
    ends = {
        name: [torch.load(tmp_path / name / f"region{region}-rank0.pt")["weights"] for region in (0, 1)]
        for name in runs
    }
    for ours, theirs in ends.values():
        assert torch.equal(ours, theirs)
    assert not torch.equal(ends["first"][0], ends["second"][0])
