"""The weights of regions that have several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.errors import InputError
from tests.processes import weights_worker
from tests.processes.forks import TIMEOUT_S, fork, fork_regions, rank_env, torch_master
from tests.processes.weights_worker import STEPS, TRAINED


@pytest.mark.slow
def test_the_tokens_of_all_ranks_of_a_region_are_its_weight(tmp_path: Path) -> None:
    """Against the mean by hand: DDP means the gradients of a region, and its tokens are the sum over its ranks."""
    found = fork_regions(weights_worker.main, 2, [str(tmp_path)], tmp_path)
    gradients = [(TRAINED[region, 0][0] + TRAINED[region, 1][0]) / 2 for region in (0, 1)]
    tokens = [TRAINED[region, 0][1] + TRAINED[region, 1][1] for region in (0, 1)]
    mean = sum(g * t for g, t in zip(gradients, tokens, strict=True)) / sum(tokens)
    for rank in found.values():
        torch.testing.assert_close(rank["weight"], torch.full((1, 3), -STEPS * mean))


def loop(accelerator: Accelerator, fault: Any) -> None:
    """Rank 1 gives a wrong number of tokens in its second step."""
    bare = nn.Linear(3, 1, bias=False)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=1.0))
    with OuterOptimizer(accelerator, model, optimizer, CONFIG, RegionConfig(count=1)) as outer:
        for step in range(STEPS):
            accelerator.backward(model(torch.ones(1, 3)).sum())
            optimizer.step()
            optimizer.zero_grad()
            assert step < 2
            outer.step(tokens=fault if step == 1 and accelerator.process_index == 1 else 5)


def fail(folder: Path) -> None:
    """What a rank hears of each of `FAULTS`; then of a batch without labels, which only rank 1 has."""
    accelerator = Accelerator(cpu=True)
    rank, heard = accelerator.process_index, []
    for fault in FAULTS:
        with pytest.raises(InputError) as caught:
            loop(accelerator, fault)
        heard.append(str(caught.value))
    args = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=1,
        max_steps=STEPS,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    callback = CoCoDCCallback(CONFIG, RegionConfig(count=1))
    data = [{"pixels": torch.ones(3), "labels": torch.ones(3)} for _ in range(2 * STEPS)]
    del data[3]["labels"]  # the second batch of rank 1
    trainer = InOrder(Pixels(), args, train_dataset=data, callbacks=[callback])
    with pytest.raises(InputError) as caught:
        trainer.train()
    heard.append(str(caught.value))
    (folder / f"heard-{rank}.json").write_text(json.dumps(heard))


class Pixels(nn.Module):
    """A model that needs no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": (pixels * self.weight).sum()}


class InOrder(Trainer):
    """Takes the rows in their order."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


CONFIG = OuterConfig(sync_interval=3, weights="tokens")
FAULTS = (None, -1, "many")


def test_what_one_rank_says_of_its_tokens_ends_all_ranks_alike(tmp_path: Path) -> None:
    """The leader knows of it alone, or another rank does: nobody waits for the other."""
    master = torch_master()
    ranks = [fork(fail, tmp_path, log=tmp_path / "log", **rank_env(master, rank, 2)) for rank in range(2)]
    for process in ranks:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0, (tmp_path / "log").read_text()[-2000:]
    heard, same = (json.loads((tmp_path / f"heard-{rank}.json").read_text()) for rank in range(2))
    assert heard == same
    words = [
        "nobody has said how many",
        "outer.step(tokens=-1): ",
        "outer.step(tokens='many'): ",
        "a batch (pixels) has no",
    ]
    assert all(word in message for word, message in zip(words, heard, strict=True)), heard
