"""What the main rank finds on its disk, in all ranks of its region; also where each leads itself, as a pipeline stage does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig
from hf_cocodc.errors import CheckpointError, InputError, LeftBehind, LinkError, RegionLostError
from hf_cocodc.link.group import main_says, ranks_of_region
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.link.log import Marker
from hf_cocodc.net.members import Member
from hf_cocodc.run.elastic import News
from hf_cocodc.run.resuming import in_all
from hf_cocodc.snapshot.receive import DonorLost, Received
from tests.processes.forks import TIMEOUT_S, fork, rank_env, torch_master
from tests.processes.worker import Tokens
from tests.toys import llama


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
    for what, (value, kind) in TOLD.items():
        found = main_says(link, accelerator, lambda value=value: value, what, kind)  # type: ignore[misc]
        assert found == value, what
        assert type(found) is type(value), what
    for error in ERRORS:
        kept = rank == 0 or type(error) in KEPT
        with pytest.raises(type(error) if kept else LinkError) as caught:
            main_says(link, accelerator, partial(_raise, error), "a question without an answer")
        assert type(caught.value) is (type(error) if kept else LinkError)
        assert not kept or str(caught.value) == str(error)
    for failing in range(2):  # and the other rank is not left to go on
        with pytest.raises(CheckpointError, match=f"^the disk of rank {failing} is broken$"):
            in_all(link, accelerator, partial(_fail_on, rank, failing), "what ranks load")
    assert ranks_of_region().of_all([rank, str(rank)], "a word") == [[0, "0"], [1, "1"]]


def _fail_on(rank: int, failing: int) -> None:
    if rank == failing:
        raise CheckpointError(f"the disk of rank {rank} is broken")


def _raise(error: Exception) -> None:
    raise error


_MARKER = Marker(12, 40, 3, 1, (Member(0, 5), Member(2, 9)), (7,), (9,), True)
TOLD: dict[str, tuple[Any, Any]] = {
    "a base": (Received(Path("/a/folder"), 1, 40, 77, {"run": 77}), Received),
    "what newcomers want": (News((Member(1, 3),), "the lease ends"), News),
    "a marker": (_MARKER, Marker | None),
    "no marker": (None, Marker | None),
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


def train_unevenly(folder: Path) -> None:
    """A Trainer whose first rank has a batch more than the second, in a region that is alone."""
    config = OuterConfig(method="diloco", sync_interval=2)
    args = TrainingArguments(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=1,
        num_train_epochs=1,
        accelerator_config={"even_batches": False},
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    callback = CoCoDCCallback(config, RegionConfig(region=0, count=1))
    trainer = Trainer(model=llama(), args=args, train_dataset=Tokens(7), callbacks=[callback])
    with pytest.raises(InputError) as caught:
        trainer.train()
    (folder / f"said-{args.process_index}").write_text(str(caught.value))


@pytest.mark.slow
def test_ranks_with_different_numbers_of_batches_are_refused(tmp_path: Path) -> None:
    """Before step 1, in all ranks: they would wait for each other in the first step that only one of them makes."""
    master = torch_master()
    ranks = [
        fork(train_unevenly, tmp_path, log=tmp_path / "log", **rank_env(master, rank, 2)) for rank in range(2)
    ]
    for process in ranks:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0, (tmp_path / "log").read_text()[-2000:]
    for rank in range(2):
        assert (tmp_path / f"said-{rank}").read_text() == (
            "the ranks of this region would not train equally long: rank 0 has 4 batches an epoch and makes 4 inner steps, rank "
            "1 has 3 batches an epoch and makes 3 inner steps. Ranks wait for each other in every step, so all need as many "
            "batches: set even_batches=True (accelerator_config), or dataloader_drop_last=True, or give every rank the same "
            "max_steps and as much data."
        )
