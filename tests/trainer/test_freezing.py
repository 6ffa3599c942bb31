"""Trainers whose callbacks freeze and unfreeze layers, or add an adapter, while regions train."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from hf_cocodc import simulate
from hf_cocodc.errors import HandshakeError, InputError
from hf_cocodc.link.base import Link
from hf_cocodc.run.journal import read
from tests.run.test_resuming import make
from tests.toys import llama


def layers(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("model.layers"))


class Gradually(TrainerCallback):
    """Unfreezes the first layer last."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        for place, layer in enumerate(reversed(layers(model))):
            layer.requires_grad_(place < 3 or state.global_step >= 5)


class Lisa(TrainerCallback):
    """One layer is trained at a time (LISA, 2403.17919): another one every two steps."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        for place, layer in enumerate(layers(model)):
            layer.requires_grad_(place == (1 + state.global_step // 2) % 4)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streaming", "cocodc"])
def test_layers_that_take_turns_are_trained_together(name: str, tmp_path: Path) -> None:
    """All are trainable when training begins. Regions end equal, and a run that is resumed ends with the same bits."""

    def whole(region: int, link: Link) -> dict[str, Tensor]:
        trainer = make(tmp_path / "whole", link, name, (Lisa(),))
        trainer.train()
        return weights(trainer)

    def again(region: int, link: Link) -> dict[str, Tensor]:
        trainer = make(tmp_path / "again", link, name, (Lisa(),))
        trainer.train(resume_from_checkpoint=True)
        return weights(trainer)

    mine, theirs = simulate(whole, regions=2)
    same(mine, theirs)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for later in range(12, 15):
        for region in range(2):
            shutil.rmtree(tmp_path / "again" / f"region-{region}" / f"checkpoint-{later}")
    for end in simulate(again, regions=2):
        same(end, mine)


def refused(folder: Path, build: Callable[[], nn.Module], callback: TrainerCallback, name: str) -> None:
    """The run ends in every region with the parameter's name, also in the journal."""

    def live(region: int, link: Link) -> None:
        more = {"save_strategy": "no", "lr_scheduler_type": "constant"}
        trainer = make(folder, link, "streaming", (callback,), model=build(), **more)
        with pytest.raises(InputError, match=name):
            trainer.train()
        events = read(folder / f"region-{region}" / "cocodc" / "journal.jsonl")
        [error] = [event for event in events if event["kind"] == "error"]
        assert "is trainable now, and was not when the run began" in error["message"]

    simulate(live, regions=2)


def test_a_layer_that_is_unfrozen_ends_the_run_with_its_name(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = llama()
        layers(model)[0].requires_grad_(False)
        return model

    refused(tmp_path, build, Gradually(), r"model\.layers\.0\..* is trainable now")


class Adding(TrainerCallback):
    """Trains another adapter from step 6 on."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if state.global_step == 5:
            model.add_adapter("second", LoraConfig(r=2, init_lora_weights="gaussian"))
            model.set_adapter("second")
            new = [param for name, param in model.named_parameters() if ".second." in name]
            optimizer.param_groups[0]["params"] += new


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_that_is_added_ends_the_run_with_its_name(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return get_peft_model(llama(), LoraConfig(r=4, task_type="CAUSAL_LM"))

    refused(tmp_path, build, Adding(), r"\.second\..* is trainable now")


class Spoiling(TrainerCallback):
    """Changes a frozen weight in one region alone."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if state.global_step == 2 and "region-1" in args.output_dir:
            model.get_submodule("model.layers.1.mlp.up_proj").weight.data.add_(1)


def test_frozen_weights_that_come_apart_end_the_run_with_their_name(tmp_path: Path) -> None:
    """In every region, and no region's model is saved as the result."""

    def live(region: int, link: Link) -> None:
        model = llama()
        layers(model)[1].requires_grad_(False)
        trainer = make(tmp_path, link, "diloco", (Spoiling(),), model=model, save_strategy="no", max_steps=6)
        with pytest.raises(
            HandshakeError, match=r"in model\.layers\.1\.mlp\.up_proj\.weight \(region 1 and region 0\)"
        ):
            trainer.train()

    simulate(live, regions=2)
