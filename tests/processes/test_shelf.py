"""What the main rank finds on its disk, in all ranks of its region; also where each leads itself, as a pipeline stage does."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator

from hf_cocodc.errors import CheckpointError
from hf_cocodc.links.lockstep import loopback
from hf_cocodc.meeting.store import serve_store
from hf_cocodc.run.shelf import main_says
from tests.processes.forks import TIMEOUT_S, fork, rank_env


def ask(folder: Path) -> None:
    """Two questions, the second without an answer; what this rank hears is written to a file."""
    accelerator, link = Accelerator(cpu=True), loopback()
    rank = accelerator.process_index

    def fail() -> int:
        raise CheckpointError(f"the disk of rank {rank} is broken")

    heard = [main_says(link, accelerator, lambda: f"rank {rank} says", "a question")]
    try:
        main_says(link, accelerator, fail, "another")
    except CheckpointError as error:
        heard.append(str(error))
    (folder / f"heard-{rank}").write_text("; ".join(heard))


def test_an_error_of_the_main_rank_reaches_every_stage(tmp_path: Path) -> None:
    """The others must not wait for an answer that never comes."""
    master = serve_store("127.0.0.1")
    ranks = [fork(ask, tmp_path, log=tmp_path / "log", **rank_env(master, rank, 2)) for rank in range(2)]
    for process in ranks:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0, (tmp_path / "log").read_text()[-2000:]
    heard = [(tmp_path / f"heard-{rank}").read_text() for rank in range(2)]
    assert heard == ["rank 0 says; the disk of rank 0 is broken"] * 2
