"""What a Trainer's regions read of one stream or dataset."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, region_shard, simulate
from hf_cocodc.errors import HandshakeError
from hf_cocodc.link.base import Link
from tests.toys import VOCAB, llama

COUNT, BATCH = 40, 2


def row(number: int) -> dict[str, Any]:
    """A sample whose first two tokens are its number."""
    ids = torch.tensor([number // 8 + 1, number % 8 + 1, 3, 4]) % VOCAB
    return {"input_ids": ids, "labels": ids}


class GloballyShuffled(IterableDataset[Any]):
    """Shuffles with torch's global generator, as many streams in scripts do."""

    def __iter__(self) -> Iterator[Any]:
        for number in torch.randperm(COUNT).tolist():
            yield row(number)


class Recorder(Trainer):
    """Notes the numbers of the rows that it trains on."""

    read: list[int]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.read += [(int(ids[0]) - 1) * 8 + int(ids[1]) - 1 for ids in inputs["input_ids"]]
        return super().training_step(model, inputs, *args, **kwargs)


class Early(TrainerCallback):
    """Saves at the end of a step, before our callback hears of it, as Trainer's just-in-time checkpoint does."""

    def __init__(self, trainer: Trainer, step: int) -> None:
        self._trainer, self._step = trainer, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._trainer._save_checkpoint(self._trainer.model, trial=None)


def train(
    folder: Path,
    make: Callable[[int], Any],
    steps: int,
    resume: int | None = None,
    early: int | None = None,
    **more: Any,
) -> list[list[int]]:
    """The rows that each of two regions has trained on, each with its part of what `make(region)` returns. `early`: a callback
    before ours saves at this step.
    """

    def body(region: int, link: Link) -> list[int]:
        common = {"max_steps": steps, "per_device_train_batch_size": BATCH, "seed": 3, "report_to": "none"}
        common |= {"save_strategy": "no", "use_cpu": True, "dataloader_pin_memory": False}
        args = TrainingArguments(output_dir=str(folder), **(common | {"disable_tqdm": True} | more))
        trainer = Recorder(
            llama(),
            args,
            train_dataset=region_shard(make(region), region, link.num_regions),
            callbacks=[CoCoDCCallback(OuterConfig(method="diloco", sync_interval=5), link=link)],
        )
        trainer.read = []
        if early is not None:
            trainer.callback_handler.callbacks.insert(0, Early(trainer, early))
        trainer.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
        if isinstance(
            trainer.train_dataset, datasets.IterableDataset
        ):  # a script may read it once more, whole
            assert len(list(trainer.train_dataset)) == len(list(region_shard(make(region), region, 2)))
        return trainer.read

    return simulate(body, regions=2)


def test_a_globally_shuffled_stream_is_read_once(tmp_path: Path) -> None:
    """Regions have random numbers of their own for dropout; the order of the stream does not come from them."""
    read = train(tmp_path, lambda region: GloballyShuffled(), COUNT // BATCH // 2)
    assert sorted(read[0] + read[1]) == list(range(COUNT))


def test_orders_without_a_seed_are_refused(tmp_path: Path) -> None:
    """Before step 1, in words that say what to do."""
    rows = datasets.Dataset.from_list(
        [{key: ids.tolist() for key, ids in row(n).items()} for n in range(COUNT)]
    )

    def shuffled(region: int) -> Any:
        np.random.seed(region)  # as two processes would have it
        return rows.shuffle()

    with pytest.raises(HandshakeError, match=r"disagree on data\.order.*with the same seed.*data\.order"):
        train(tmp_path, shuffled, 2)


def noted(calls: list[int], batch: dict[str, Any]) -> dict[str, Any]:
    calls.append(len(batch["input_ids"]))
    return batch


ROWS = {key: [row(n)[key].tolist() for n in range(COUNT)] for key in ("input_ids", "labels")}


@pytest.mark.parametrize(
    ("kind", "steps", "accumulate"), [("plain", 6, 1), ("mapped", 3, 2), ("shuffled", 6, 1), ("torch", 13, 1)]
)
def test_a_stream_is_resumed_where_it_was(kind: str, steps: int, accumulate: int, tmp_path: Path) -> None:
    """In the pass and at the batch of the checkpoint, of which the steps say nothing; from its state if that is exact."""
    calls: list[int] = []

    def make(region: int) -> Any:
        if kind == "torch":
            return GloballyShuffled()
        stream = datasets.Dataset.from_dict(ROWS).to_iterable_dataset(num_shards=3)
        if kind == "shuffled":
            return stream.shuffle(seed=1, buffer_size=5)
        return stream.map(partial(noted, calls), batched=True, batch_size=3) if kind == "mapped" else stream

    more = {"save_strategy": "steps", "save_steps": steps, "gradient_accumulation_steps": accumulate}
    straight = train(tmp_path, make, 2 * steps, **more)
    before = len(calls)
    for region in range(2):
        (place,) = (tmp_path / f"region-{region}" / f"checkpoint-{steps}").glob("stream.json")
        assert (json.loads(place.read_text())["state"] is not None) == (kind in ("plain", "mapped"))
    resumed = train(tmp_path, make, 2 * steps, resume=steps, **more)
    half = steps * accumulate * BATCH
    assert [part[half:] for part in straight] == resumed
    assert kind != "mapped" or len(calls) - before < before - 4


def test_a_stream_is_resumed_in_its_second_pass(tmp_path: Path) -> None:
    """And where a pass is over."""
    per_pass = COUNT // BATCH // 2
    for steps in (per_pass, per_pass + 3):
        folder = tmp_path / str(steps)
        more = {"save_strategy": "steps", "save_steps": steps}
        straight = train(
            folder, lambda region: datasets.Dataset.from_dict(ROWS).to_iterable_dataset(2), 25, **more
        )
        resumed = train(
            folder,
            lambda region: datasets.Dataset.from_dict(ROWS).to_iterable_dataset(2),
            25,
            resume=steps,
            **more,
        )
        assert [part[steps * BATCH :] for part in straight] == resumed


def test_a_checkpoint_of_a_callback_before_ours_has_the_place_too(tmp_path: Path) -> None:
    """No batch of its last step is read again."""

    def make(region: int) -> Any:
        return datasets.Dataset.from_dict(ROWS).to_iterable_dataset(2)

    straight = train(tmp_path, make, 8, early=5)
    assert [part[5 * BATCH :] for part in straight] == train(tmp_path, make, 8, resume=5)


def test_a_stream_is_resumed_with_other_batches_of_the_same_step(tmp_path: Path) -> None:
    """As on fewer GPUs: a step has the same samples in fewer, larger batches."""
    common = {"save_strategy": "steps", "save_steps": 3}
    straight = train(tmp_path, lambda region: GloballyShuffled(), 5, gradient_accumulation_steps=2, **common)
    other = {"per_device_train_batch_size": 2 * BATCH, "gradient_accumulation_steps": 1, **common}
    resumed = train(tmp_path, lambda region: GloballyShuffled(), 5, resume=3, **other)
    assert [part[3 * 2 * BATCH :] for part in straight] == resumed


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_state_of_one_reader_is_not_given_to_several(tmp_path: Path) -> None:
    """Each DataLoader worker has files of its own: what was trained is read and skipped instead."""

    def make(region: int) -> Any:
        return datasets.Dataset.from_dict(ROWS).to_iterable_dataset(4)

    train(tmp_path, make, 4, early=4)
    folder = tmp_path / "whole"
    straight = train(folder, make, 8, dataloader_num_workers=2)
    resumed = train(tmp_path, make, 8, resume=4, dataloader_num_workers=2)
    assert [part[4 * BATCH :] for part in straight] == resumed
