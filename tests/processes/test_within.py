"""What the main rank finds on its disk, in all ranks of its region; also where each leads itself, as a pipeline stage does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from hf_cocodc.errors import CheckpointError, LeftBehind, LinkError, RegionLostError
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.link.log import Marker
from hf_cocodc.link.within import main_says, of_all
from hf_cocodc.net.letters import Member
from hf_cocodc.run.elastic import News, _news_in
from hf_cocodc.run.newcomer import _marker_in
from hf_cocodc.snapshot.receive import DonorLost, Received, received_in
from tests.processes.forks import TIMEOUT_S, fork, rank_env, torch_master


def ask(folder: Path) -> None:
    """Two questions, the second without an answer; what this rank hears is written to a file. Then all that ranks are told."""
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
    for what, (value, read) in TOLD.items():
        found = main_says(link, accelerator, lambda value=value: value, what, read)  # type: ignore[misc]
        assert found == value, what
        assert type(found) is type(value), what
    for error in ERRORS:
        kept = rank == 0 or type(error) in KEPT
        with pytest.raises(type(error) if kept else LinkError) as caught:
            main_says(link, accelerator, partial(_raise, error), "a question without an answer")
        assert type(caught.value) is (type(error) if kept else LinkError)
        assert not kept or str(caught.value) == str(error)
    assert of_all(accelerator, f"{rank}{rank}") == ["00", "11"]
    assert of_all(accelerator, "") == ["", ""]


def _raise(error: Exception) -> None:
    raise error


_MARKER = Marker(12, 40, 3, 1, (Member(0, 5), Member(2, 9)), (7,), (9,), True)
TOLD: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a base": (Received(Path("/a/folder"), 1, 40, 77, {"run": 77}), received_in),
    "what newcomers want": (News((Member(1, 3),), "the lease ends"), _news_in),
    "a marker": (_MARKER, _marker_in),
    "no marker": (None, _marker_in),
}
KEPT = (DonorLost, LeftBehind)
ERRORS = (DonorLost("it sends no more"), LeftBehind("gone on"), RegionLostError(1, "lost"), KeyError("x"))


def test_an_error_of_the_main_rank_reaches_every_stage(tmp_path: Path) -> None:
    """The others must not wait for an answer that never comes."""
    master = torch_master()
    ranks = [fork(ask, tmp_path, log=tmp_path / "log", **rank_env(master, rank, 2)) for rank in range(2)]
    for process in ranks:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0, (tmp_path / "log").read_text()[-2000:]
    heard = [(tmp_path / f"heard-{rank}").read_text() for rank in range(2)]
    assert heard == ["rank 0 says; the disk of rank 0 is broken"] * 2
