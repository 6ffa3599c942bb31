"""Streams that Accelerate's stateful dataloaders (torchdata) read: a resumed run reads on with the samples that come next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from hf_cocodc import InputError, OuterConfig, OuterOptimizer, region_shard, simulate
from hf_cocodc.link.base import Link
from hf_cocodc.run import saving
from tests.toys import llama
from tests.trainer import test_streams
from tests.trainer.test_streams import BATCH, ROWS, GloballyShuffled, Recorder, noted

pytest.importorskip("torchdata", reason="no torchdata here, which has stateful dataloaders")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # in torchdata
STEPS, PER_PASS = 16, 10
CONFIG = OuterConfig(method="diloco", sync_interval=5)


def rows() -> datasets.IterableDataset:
    return datasets.Dataset.from_dict(ROWS).to_iterable_dataset(num_shards=4)


STREAMS: dict[str, Callable[[], Any]] = {
    "plain": rows,
    "mapped": lambda: rows().map(partial(noted, []), batched=True, batch_size=3),
    "torch": GloballyShuffled,
}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([torch.as_tensor(each[key]) for each in samples]) for key in samples[0]}


def loop(folder: Path, make: Callable[[], Any], save: int, resumes: bool = False) -> list[list[int]]:
    """The rows that each of two regions trains on in a plain loop, which saves after some steps, or resumes from there."""

    def body(region: int, link: Link) -> list[int]:
        state = str(folder / f"region-{region}" / "state")
        stateful = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=stateful)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(region_shard(make(), region, 2), batch_size=BATCH, collate_fn=collate)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        read: list[int] = []
        with OuterOptimizer(accelerator, model, optimizer, CONFIG, link=link, max_steps=STEPS) as outer:
            if resumes:
                accelerator.load_state(state)
            while not outer.should_stop:
                for batch in loader:
                    read += [(int(ids[0]) - 1) * 8 + int(ids[1]) - 1 for ids in batch["input_ids"]]
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    outer.step()
                    if outer.inner_step == save and not resumes:
                        accelerator.save_state(state)
                    if outer.should_stop:
                        break
        return read

    return simulate(body, regions=2)


@pytest.mark.parametrize("save", [6, PER_PASS, 13], ids=["first pass", "its end", "second pass"])
@pytest.mark.parametrize("kind", STREAMS)
def test_a_plain_loop_reads_on(kind: str, save: int, tmp_path: Path) -> None:
    """In the pass that was saved, of which Accelerate's own state says nothing."""
    straight = loop(tmp_path, STREAMS[kind], save)
    assert [part[save * BATCH :] for part in straight] == loop(tmp_path, STREAMS[kind], save, resumes=True)


def test_a_state_that_does_not_say_its_pass_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Accelerate alone saves it. The loop goes on as in the first pass, and nobody must take that for exact."""
    with monkeypatch.context() as patch:
        patch.setattr(saving, "_note_passes", lambda accelerator: None)
        loop(tmp_path, rows, 6)
    assert "in which pass" not in caplog.text
    loop(tmp_path, rows, 6, resumes=True)
    assert "the checkpoint does not say in which pass over its stream a dataloader was" in caplog.text


def test_a_shuffle_buffer_is_refused(tmp_path: Path) -> None:
    """Its samples would be left out. The error says how to go on from the checkpoint all the same."""

    def make() -> Any:
        return rows().shuffle(seed=1, buffer_size=5)

    loop(tmp_path, make, 6)
    with pytest.raises(InputError, match=r"load_state would leave samples out.*skip_first_batches"):
        loop(tmp_path, make, 6, resumes=True)


class Stateful(Recorder):
    """A Trainer that turns it on: its arguments cannot."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.dataloader_config.use_stateful_dataloader = True


@pytest.mark.parametrize("kind", [*STREAMS, "shuffled"])
def test_a_trainer_reads_on(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the place that our checkpoint has; what it reads is what it would read without torchdata."""

    def make(region: int) -> Any:
        return rows().shuffle(seed=1, buffer_size=5) if kind == "shuffled" else STREAMS[kind]()

    more = {"save_strategy": "steps", "save_steps": 6}
    without = test_streams.train(tmp_path / "without", make, 12, **more)
    monkeypatch.setattr(test_streams, "Recorder", Stateful)
    straight = test_streams.train(tmp_path, make, 12, **more)
    resumed = test_streams.train(tmp_path, make, 12, resume=6, **more)
    assert straight == without
    assert [part[6 * BATCH :] for part in straight] == resumed
