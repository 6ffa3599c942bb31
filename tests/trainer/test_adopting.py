"""Trainers whose callbacks unfreeze layers, switch between layers, or add an adapter while regions train."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from hf_cocodc import simulate
from hf_cocodc.errors import HandshakeError
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


def frozen(folder: Path, link: Link, name: str, callback: TrainerCallback) -> Trainer:
    """A Trainer whose optimizer knows every parameter, and whose model has frozen layers when training begins."""
    trainer = make(folder, link, name, (callback,))
    trainer.create_optimizer()
    layers(trainer.model)[0].requires_grad_(False)
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def adoptions(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read(folder / "cocodc" / "journal.jsonl") if event["kind"] == "adopt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("streaming", Gradually), ("cocodc", Lisa), ("dilocox", Gradually)]
)
def test_layers_that_are_unfrozen_are_trained_together(
    name: str, kind: type[TrainerCallback], tmp_path: Path
) -> None:
    """Regions end equal, and a run that is resumed after an adoption ends with the same bits."""

    def whole(region: int, link: Link) -> dict[str, Tensor]:
        trainer = frozen(tmp_path / "whole", link, name, kind())
        trainer.train()
        return weights(trainer)

    def again(region: int, link: Link) -> dict[str, Tensor]:
        trainer = frozen(tmp_path / "again", link, name, kind())
        trainer.train(resume_from_checkpoint=True)
        return weights(trainer)

    mine, theirs = simulate(whole, regions=2)
    same(mine, theirs)
    adopted = adoptions(tmp_path / "whole" / "region-1")
    assert {each.split(".")[2] for event in adopted for each in event["averaged"]} == {"0"}
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for later in range(12, 15):
        for region in range(2):
            shutil.rmtree(tmp_path / "again" / f"region-{region}" / f"checkpoint-{later}")
    for end in simulate(again, regions=2):
        same(end, mine)


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
@pytest.mark.parametrize("name", ["diloco", pytest.param("cocodc", marks=pytest.mark.slow)])
def test_an_adapter_that_is_added_is_trained_together(name: str, tmp_path: Path) -> None:
    """From region 0's random numbers; the adapter from before stays adopted, though PEFT has frozen it."""

    def live(region: int, link: Link) -> dict[str, Tensor]:
        model = get_peft_model(llama(), LoraConfig(r=4, task_type="CAUSAL_LM"))
        trainer = make(
            tmp_path, link, name, (Adding(),), model=model, save_strategy="no", lr_scheduler_type="constant"
        )
        trainer.train()
        return weights(trainer)

    mine, theirs = simulate(live, regions=2)
    assert any(".second." in each for each in mine)
    same(mine, theirs)
    [event] = adoptions(tmp_path / "region-0")
    assert all(".second." in each for each in event["created"]) and not event["averaged"]


class Borrowed(TrainerCallback):
    """Trains a weight of the base, beside the adapters, until step 7."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        [norm] = [param for name, param in model.named_parameters() if name.endswith("model.norm.weight")]
        norm.requires_grad_(state.global_step < 7)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")  # of older releases of PEFT
@pytest.mark.parametrize("saved_at", [5, 9])
def test_a_base_that_was_trained_beside_adapters_is_resumed(saved_at: int, tmp_path: Path) -> None:
    """Also where it is frozen again when the checkpoint is saved, and frozen when the run is resumed."""

    def train(folder: Path, link: Link, resumes: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)  # of the base, which no checkpoint holds
        model = get_peft_model(llama(), LoraConfig(r=4, task_type="CAUSAL_LM"))
        trainer = make(folder, link, "diloco", (Borrowed(),), model=model, save_steps=saved_at, max_steps=12)
        trainer.create_optimizer()
        norm = model.get_submodule("base_model.model.model.norm").weight
        if norm not in set(trainer.optimizer.param_groups[1]["params"]):
            trainer.optimizer.param_groups[1]["params"].append(norm)
        trainer.train(resume_from_checkpoint=resumes)
        return weights(trainer)

    whole = simulate(lambda region, link: train(tmp_path, link, False), regions=2)
    for region in range(2):
        shutil.rmtree(tmp_path / f"region-{region}" / "checkpoint-12")
    for mine, theirs in zip(
        whole, simulate(lambda region, link: train(tmp_path, link, True), regions=2), strict=True
    ):
        same(mine, theirs)


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


class Alone(TrainerCallback):
    """Unfreezes a layer in one region alone."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if state.global_step == 2 and "region-1" in args.output_dir:
            layers(model)[1].requires_grad_(True)


def test_a_layer_that_one_region_unfreezes_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """In every region; the link is left in good order, and the journal says why."""

    def live(region: int, link: Link) -> None:
        model = llama()
        layers(model)[1].requires_grad_(False)
        trainer = make(tmp_path, link, "streaming", (Alone(),), model=model, save_strategy="no")
        with pytest.raises(HandshakeError, match=r"only region 1 has model\.layers\.1\..* and 6 more"):
            trainer.train()
        [error] = [
            event
            for event in read(tmp_path / f"region-{region}" / "cocodc" / "journal.jsonl")
            if event["kind"] == "error"
        ]
        assert "do not train the same parameters" in error["message"]

    simulate(live, regions=2)
