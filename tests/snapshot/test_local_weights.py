"""Local weights come back bit for bit, or a resume ends before a step is made."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_cocodc import OuterOptimizer, simulate
from hf_cocodc.errors import CheckpointError
from hf_cocodc.link.base import Link
from hf_cocodc.parts.tensors.flat import digests
from hf_cocodc.snapshot.local_weights import base_digest, buffers, check, kept, restore, write
from tests.run.test_resuming import STEPS, checkpoint_of, config, make
from tests.toys import batch, llama


class Odd(nn.Module):
    """Weights of many kinds: tied, frozen, views of one memory, not contiguous; buffers that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2, 6)
        self.first, self.second = nn.Parameter(both[0]), nn.Parameter(both[1])
        self.tied = self.first
        self.sixteen = nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16).t())
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("angles", torch.polar(torch.ones(4), torch.randn(4)), persistent=False)
        self.register_buffer("cache", torch.randn(4), persistent=False)
        self.register_buffer("mask", torch.rand(3) < 0.5)


def bits(model: nn.Module) -> dict[str, bytes]:
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    return {
        name: t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, t in tensors.items()
    }


def written(checkpoint: Path, model: nn.Module) -> Path:
    """A checkpoint with the local weights of a model."""
    (checkpoint / "cocodc").mkdir(parents=True)
    write(model, checkpoint, kept(model))
    return checkpoint


def test_every_kind_of_weight_comes_back(tmp_path: Path) -> None:
    """Also a buffer that has grown. Tied weights are saved once."""
    saved, other = Odd(), Odd()
    saved.cache = torch.randn(9)
    file = written(tmp_path / "whole", saved)
    assert "tied" not in kept(saved)
    assert digests(kept(saved)) != digests(kept(other))
    restore(other, file, kept(other))
    assert bits(other) == bits(saved)
    check(other, digests(kept(saved)), ())
    other.second.data[3] += 1e-6
    with pytest.raises(
        CheckpointError,
        match=r"1 of 8 weights and buffers.*\(second: \[6\] float32 .* was saved, the model has",
    ):
        check(other, digests(kept(saved)), ())
    check(other, {}, ())  # taken over


class Late(nn.Module):
    """Makes buffers at its first forward pass, as caches are made: one from nothing, one in a place kept for it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.register_buffer("kept_for_it", None, persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        if self.kept_for_it is None:
            self.register_buffer("from_nothing", torch.rand(3), persistent=False)
            self.kept_for_it = torch.rand(2)
        return self.model(input_ids=input_ids, labels=labels, use_cache=False)


def test_a_buffer_that_the_model_makes_later_comes_back(tmp_path: Path) -> None:
    """The resumed run does not make it anew; a region that takes over has it, too."""

    def body(link: Link, resume: bool, steps: int) -> dict[str, bytes]:
        model = Late()
        trainer = make(tmp_path, link, model=model, max_steps=steps, save_steps=2)
        trainer.train(resume_from_checkpoint=resume)
        return {name: each for name, each in bits(model).items() if name in ("from_nothing", "kept_for_it")}

    first = simulate(lambda region, link: body(link, False, 4), regions=2)
    assert len(first[0]) == 2
    assert simulate(lambda region, link: body(link, True, 6), regions=2) == first
    shutil.rmtree(tmp_path / "region-1")
    assert simulate(lambda region, link: body(link, True, 8), regions=2) == [first[0]] * 2


@pytest.mark.parametrize("name", ["sixteen", "mask"])
def test_a_name_too_few_or_too_many_is_refused(name: str, tmp_path: Path) -> None:
    fewer = Odd()
    delattr(fewer, name)
    of_fewer, of_all = written(tmp_path / "fewer", fewer), written(tmp_path / "all", Odd())
    with pytest.raises(CheckpointError, match=f"the model has {name}, local-lane0.safetensors does not"):
        restore(Odd(), of_fewer, kept(Odd()))
    with pytest.raises(CheckpointError, match=f"local-lane0.safetensors has {name}, the model does not"):
        restore(fewer, of_all, kept(fewer))
    restore(Odd(), of_fewer, kept(fewer))


def test_a_parameter_of_another_shape_is_refused(tmp_path: Path) -> None:
    wider = Odd()
    wider.frozen = nn.Parameter(torch.randn(4))
    checkpoint = written(tmp_path / "wider", wider)
    with pytest.raises(CheckpointError, match=r"frozen is \[4\] torch.float32 in local-lane0.*, and \[3\]"):
        restore(Odd(), checkpoint, kept(Odd()))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_frozen_base_under_an_adapter_is_compared_but_not_saved() -> None:
    """The digest is of the base alone: it stays while the adapter trains."""

    def adapted(seed: int) -> Any:
        return get_peft_model(llama(seed), LoraConfig(r=2, target_modules="all-linear"))

    model = adapted(0)
    assert (
        kept(model).keys()
        == {n for n, p in model.named_parameters() if p.requires_grad} | buffers(model).keys()
    )
    before = base_digest(model)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(1)
    assert base_digest(model) == before != base_digest(adapted(1))
    assert base_digest(llama()) is None


def test_weights_that_another_changes_after_loading_end_the_run(tmp_path: Path) -> None:
    """Before a step is made; the message names the weight."""

    def body(region: int, link: Link, spoil: bool) -> None:
        trainer = make(tmp_path, link, "diloco", save_steps=7)
        create = trainer.create_optimizer

        def spoil_and_create(*args: Any) -> Any:
            with torch.no_grad():
                trainer.model.lm_head.weight[3, 3] += 1e-3
            return create(*args)

        if spoil:
            trainer.create_optimizer = spoil_and_create
        trainer.train(resume_from_checkpoint=str(checkpoint_of(tmp_path, region, 7)) if spoil else None)

    simulate(lambda region, link: body(region, link, False), regions=2)
    with pytest.raises(CheckpointError, match=r"lm_head.weight: .* No step was made"):
        simulate(lambda region, link: body(region, link, True), regions=2)


def test_a_plain_loop_is_checked_too(tmp_path: Path) -> None:
    """Accelerate's own file holds its weights; what it leaves out, a changed cos table for example, ours brings back."""
    tables: list[Tensor] = []

    def loop(link: Link, save: bool, spoil: bool = False) -> None:
        accelerator, model = Accelerator(cpu=True), llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        bare = accelerator.unwrap_model(model)
        load_state = accelerator.load_state

        def load(folder: str) -> None:
            load_state(folder)
            with torch.no_grad():
                bare.lm_head.weight.add_(1e-3 * spoil)

        accelerator.load_state = load
        with OuterOptimizer(accelerator, model, optimizer, config(), max_steps=STEPS, link=link) as outer:
            if save:
                bare.model.rotary_emb.inv_freq.mul_(0.5)
                accelerator.save_state(str(tmp_path / "here"))
            else:
                accelerator.load_state(str(tmp_path / "here"))
            tables.append(bare.model.rotary_emb.inv_freq.clone())
            tokens = batch(0, 0)
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            outer.step()
            outer.close()

    for save in (True, False):
        simulate(lambda region, link, s=save: loop(link, s), regions=1)
    assert torch.equal(*tables)
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        simulate(lambda region, link: loop(link, False, True), regions=1)
