"""Trainer and plain loops: stopped, resumed, joined by regions and left by them; all in one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Trainer,
    TrainingArguments,
)

from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig, simulate
from hf_cocodc.journal import read
from hf_cocodc.links.base import Link
from tests.processes.worker import Tokens
from tests.test_checkpoints import SETTINGS
from tests.toys import llama, params_of

H = 4
STEPS = 14


def config(name: str = "streaming") -> OuterConfig:
    settings = {**SETTINGS[name]}
    if "overlap_steps" in settings:
        settings["overlap_steps"] = 3
    return OuterConfig(method=name, sync_interval=H, **settings)


def make(
    folder: Path, link: Link, name: str = "streaming", callbacks: tuple = (), data: Any = None, **more: Any
) -> Trainer:
    """A Trainer of the region that `link` belongs to, with data of its own."""
    policy = more.pop("when_one_ends", "auto")
    common = {"max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 2, "learning_rate": 1e-3}
    common |= {"report_to": "none", "save_strategy": "steps", "save_steps": 1, "use_cpu": True}
    args = TrainingArguments(
        output_dir=str(folder), dataloader_pin_memory=False, disable_tqdm=True, **(common | more)
    )
    callback = CoCoDCCallback(config(name), RegionConfig(when_one_ends=policy), link=link)
    return Trainer(
        model=llama(),
        args=args,
        train_dataset=data if data is not None else Tokens(16, seed=link.region),
        eval_dataset=Tokens(4, seed=9),
        callbacks=[callback, *callbacks],
    )


def callback_of(trainer: Trainer) -> CoCoDCCallback:
    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, CoCoDCCallback))


@pytest.mark.parametrize("name", SETTINGS)
def test_trainer_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Resumed after 3, 6 and 9 of 14 steps, mid-round and with transfers in flight: the weights of a run never stopped."""

    def whole(region: int, link: Link) -> Tensor:
        trainer = make(tmp_path / "whole", link, name)
        trainer.train()
        return params_of(trainer.model)

    def again(region: int, link: Link) -> tuple[Tensor, list[dict]]:
        trainer = make(tmp_path / "again", link, name)
        trainer.train(resume_from_checkpoint=True)
        return params_of(trainer.model), read(
            tmp_path / "again" / f"region-{region}" / "cocodc" / "journal.jsonl"
        )

    expected = simulate(whole, regions=2)
    for step in (3, 6, 9):
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "again")
        for later in range(step + 1, STEPS + 1):
            for region in range(2):
                shutil.rmtree(tmp_path / "again" / f"region-{region}" / f"checkpoint-{later}")
        for (end, journal), reference in zip(simulate(again, regions=2), expected, strict=True):
            assert torch.equal(end, reference), f"resumed from step {step}"
            sends = [event["step"] for event in journal if event["kind"] == "send"]
            assert sends == sorted(sends), "the journal goes on from the checkpoint"
            assert [event["step"] for event in journal if event["kind"] == "resume"] == [step]
