"""Runs that share a coordinator, in real processes over real sockets: none gets another's regions."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from hf_cocodc.coordinator.server import serve_in_thread
from tests.processes.ending_worker import live
from tests.processes.forks import TIMEOUT_S, fork, region_env


def test_two_runs_of_one_coordinator_keep_to_themselves(tmp_path: Path) -> None:
    """Region 0 of one run and region 1 of another come first; both runs end as if the other were not there."""
    coordinator, log = serve_in_thread(), tmp_path / "log.txt"
    runs = {"first": 1e-3, "second": 2e-3}
    processes = []
    for name, region in (("first", 0), ("second", 1), ("second", 0), ("first", 1)):
        body = functools.partial(live, learning_rate=runs[name])
        (tmp_path / name).mkdir(exist_ok=True)
        processes.append(fork(body, str(tmp_path / name), log=log, **region_env(coordinator, region)))
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


def test_another_learning_rate_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    """Both regions name the field and both values; with regions.may_differ they train, and the log shows both."""
    for allowed in (None, "learning_rate"):
        coordinator, folder = serve_in_thread(), tmp_path / str(allowed)
        folder.mkdir()
        log = folder / "log.txt"
        processes = [
            fork(
                functools.partial(live, learning_rate=rate, may_differ=allowed),
                str(folder),
                log=log,
                **region_env(coordinator, region),
            )
            for region, rate in enumerate((1e-3, 2e-3))
        ]
        for process in processes:
            process.join(TIMEOUT_S)
        said = log.read_text()
        if allowed is None:
            assert [process.exitcode for process in processes] == [1, 1]
            assert (
                said.count("disagree on training.learning_rate: region 0 has 0.001, region 1 has 0.002") >= 2
            )
        else:
            assert [process.exitcode for process in processes] == [0, 0], said[-4000:]
            assert "training.learning_rate, which may differ: 0.001 in region 0, 0.002 in region 1." in said
            assert "regions 0 and 1 begin with the same training samples" not in said
