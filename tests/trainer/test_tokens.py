"""How many tokens an inner step of Trainer has, for the weights of the regions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import InputError
from hf_cocodc.trainer.patches import tokens_of
from tests.processes.worker import Tokens
from tests.toys import llama, params_of

STEPS = 5


class Ragged(Dataset):
    """Row i has a loss on its first i + 1 tokens."""

    def __init__(self) -> None:
        self._rows = Tokens(12)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index]["input_ids"]
        return {"input_ids": row, "labels": torch.where(torch.arange(16) <= index, row, -100)}


class InOrder(Trainer):
    """Does not shuffle."""

    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(Ragged())


def train(folder: Path, weights: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], torch.Tensor]:
    """The tokens of each inner step, and the params at the end."""
    told, step = [], Synchronizer.step

    def spy(self: Synchronizer, *args: Any, tokens: int | None = None, **kwargs: Any) -> Any:
        told.append(tokens)
        return step(self, *args, tokens=tokens, **kwargs)

    monkeypatch.setattr(Synchronizer, "step", spy)
    config = OuterConfig(sync_interval=2, weights=weights)
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    callback = CoCoDCCallback(config, RegionConfig(count=1))
    trainer = InOrder(llama(layers=2), args, train_dataset=Ragged(), callbacks=[callback])
    trainer.train()
    monkeypatch.undo()
    return told, params_of(trainer.model)


def test_the_labels_of_all_micro_batches_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches of two rows a step, over two epochs of twelve rows; counting changes no training."""
    told, params = train(tmp_path / "tokens", "tokens", monkeypatch)
    assert told == [1 + 2 + 3 + 4, 5 + 6 + 7 + 8, 9 + 10 + 11 + 12, 1 + 2 + 3 + 4, 5 + 6 + 7 + 8]
    untold, same = train(tmp_path / "equal", "equal", monkeypatch)
    assert untold == [None] * STEPS
    torch.testing.assert_close(params, same, rtol=1e-6, atol=1e-6)


def test_batches_without_labels() -> None:
    """The attention mask counts, or all of input_ids; a batch with none of them is refused."""
    ids, mask = torch.ones(2, 5, dtype=torch.int64), torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    assert int(tokens_of([{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}])) == 14
    assert int(tokens_of([])) == 0
    with pytest.raises(InputError, match=r"a batch \(pixels\) has no labels, attention_mask or input_ids"):
        tokens_of([{"pixels": ids}])
    with pytest.raises(InputError, match=r"a batch \(tuple\) has no labels"):
        tokens_of([(ids,)])
