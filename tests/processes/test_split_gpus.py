"""Which GPUs the ranks of a launch see once `split_world` has split it. Forks stand for its ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hf_cocodc.run.gpus import VISIBLE
from hf_cocodc.run.split_world import split_world
from tests.processes.forks import TIMEOUT_S, fork, rank_env, torch_master


def tell_what_it_sees(folder: str, gpus: int) -> None:
    """The body of a rank on a machine where torch counts so many GPUs."""
    torch.cuda.device_count = lambda: gpus
    rank = os.environ["RANK"]
    split_world(2)
    words = " ".join([os.environ["LOCAL_RANK"], os.environ.get(VISIBLE, "all")])
    Path(folder, rank).write_text(words, encoding="utf-8")


@pytest.mark.parametrize(
    ("gpus", "given", "use_cpu", "seen", "shares"),
    [
        (4, None, "no", ["0 0,1", "1 0,1", "0 2,3", "1 2,3"], False),
        (4, "4,5,6,7", "no", ["0 4,5", "1 4,5", "0 6,7", "1 6,7"], False),
        (3, None, "no", ["0 0,1", "1 0,1", "0 2,0", "1 2,0"], True),
        (2, "6,7", "no", ["0 6,7", "1 6,7", "0 6,7", "1 6,7"], True),
        (1, None, "no", ["0 all", "1 all", "0 all", "1 all"], False),
        (1, None, "no", ["0 0", "0 0"], True),
        (2, None, "no", ["0 0", "0 1"], False),
        (1, None, "yes", ["0 all", "0 all"], False),
        (0, None, "no", ["0 all", "0 all"], False),
    ],
)
def test_regions_of_one_launch_divide_the_gpus_or_share_them(
    gpus: int, given: str | None, use_cpu: str, seen: list[str], shares: bool, tmp_path: Path
) -> None:
    """Each region sees as many as it has ranks. With fewer GPUs than ranks, region 1 saw none, and trained on the CPU."""
    master, log, size = torch_master(), tmp_path / "log.txt", len(seen)
    env = {"ACCELERATE_USE_CPU": use_cpu, **({} if given is None else {VISIBLE: given})}
    ranks = [
        fork(tell_what_it_sees, str(tmp_path), gpus, log=log, **env, **rank_env(master, rank, size))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.join(TIMEOUT_S)
        assert rank.exitcode == 0, log.read_text()[-4000:]
    assert [(tmp_path / str(rank)).read_text(encoding="utf-8") for rank in range(size)] == seen
    said = f"share {gpus} GPU(s): an inner step takes up to {-(-size // max(gpus, 1))} times as long"
    assert log.read_text(encoding="utf-8").count(said) == shares
