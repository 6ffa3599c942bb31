"""A disk that is slower than the time-out of the region's process group: the other ranks wait for the writer all the same."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.run import newcomer
from hf_cocodc.snapshot import checkpoint as disk
from hf_cocodc.snapshot import local_weights, manifest
from tests.processes.forks import TIMEOUT_S, fork, rank_env, torch_master
from tests.toys import llama

PATIENCE_S, WRITES_S = 2.0, 3.0


def slow(function):  # noqa: ANN001, ANN201
    def later(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        time.sleep(WRITES_S)
        return function(*args, **kwargs)

    return later


def save(folder: Path) -> None:
    """One region of two ranks saves, and drops a base that its ranks have read, one of them slowly."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    accelerator, model = Accelerator(cpu=True), llama(layers=1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    alone = RegionConfig(count=1, region=0)
    with OuterOptimizer(accelerator, model, optimizer, OuterConfig(sync_interval=2), alone) as outer:
        for module, name in ((disk, "begin"), (disk, "write"), (local_weights, "write"), (disk, "seal")):
            with mock.patch.object(module, name, slow(getattr(module, name))):
                accelerator.save_state(str(folder / name))
                assert manifest.damage(folder / name) is None
        asked: list[str] = []
        rank = newcomer.JoiningRank(outer.training, folder)
        if accelerator.process_index:
            time.sleep(WRITES_S)
        with mock.patch.object(outer.training, "say", lambda call, what: asked.append(what)):
            rank._forget_base()
        assert asked == ["the end of the base"]
    (folder / f"ended-{accelerator.process_index}").touch()


def test_ranks_wait_for_a_slow_disk_however_long_it_takes(tmp_path: Path) -> None:
    master = torch_master()
    logs = [tmp_path / f"log-{rank}" for rank in range(2)]
    processes = [fork(save, tmp_path, log=logs[rank], **rank_env(master, rank, 2)) for rank in range(2)]
    for process, log in zip(processes, logs, strict=True):
        process.join(TIMEOUT_S)
        assert process.exitcode == 0, log.read_text()[-4000:]
    assert len(list(tmp_path.glob("ended-*"))) == 2
