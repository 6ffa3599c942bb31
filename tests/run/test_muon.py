"""Muon and AdamW as one optimizer: which parameters each trains, steps as the two alone, and exact states."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, OuterOptimizer, simulate
from hf_cocodc.errors import HandshakeError, InputError
from hf_cocodc.link.base import Link
from hf_cocodc.run.muon import MuonAdamW, muon
from hf_cocodc.settings.reading import read_yaml
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.snapshot.checkpoint import read
from hf_cocodc.training import building
from hf_cocodc.training.building import inner_optimizer
from hf_cocodc.training.preflight import check, preflight
from hf_cocodc.training.starter import starter
from hf_cocodc.training.train import run
from tests.matrix import arguments
from tests.processes.forks import TIMEOUT_S, fork
from tests.processes.launching import little_text
from tests.processes.worker import Tokens
from tests.toys import batch, llama, params_of

SHORT = ["training.eval_strategy=no", "training.eval_on_start=false", "training.logging_steps=1"]
SHORT += ["data.block_size=16", "model.config.hidden_size=16", "model.config.intermediate_size=16"]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> Tensor:
    for step in steps:
        tokens = batch(0, step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return params_of(model)


def test_matrices_in_blocks_are_muons() -> None:
    """Not the embedding, the head, the norms; norms do not decay; every trainable parameter has one group."""
    model = llama(layers=2)
    optimizer = muon(model, lr=1e-3, weight_decay=0.1)
    names = {id(param): name for name, param in model.named_parameters()}
    found = [
        (group["kind"], group["weight_decay"], {names[id(param)] for param in group["params"]})
        for group in optimizer.param_groups
    ]
    assert [(kind, decay) for kind, decay, _ in found] == [("muon", 0.1), ("adamw", 0.1), ("adamw", 0.0)]
    assert found[0][2] == {name for name in names.values() if "_proj" in name}
    assert found[1][2] == {"model.embed_tokens.weight", "lm_head.weight"}
    assert found[2][2] == {name for name in names.values() if "norm" in name}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_is_all_muons() -> None:
    """Its matrices are in blocks; what is frozen has no group."""
    torch.manual_seed(0)
    adapted = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    [group] = muon(adapted, lr=1e-3).param_groups
    assert len(group["params"]) == 8 and all(param.requires_grad for param in group["params"])
    train(adapted, [muon(adapted, lr=1e-3)], range(2))


def test_its_steps_are_those_of_the_two_alone() -> None:
    """Bit for bit; a learning rate that a schedule sets reaches both."""
    model, other = llama(), llama()
    ours = muon(model, lr=1e-3)
    matrices = [param for name, param in other.named_parameters() if "_proj" in name]
    plain = [param for name, param in other.named_parameters() if "embed" in name or "head" in name]
    norms = [param for name, param in other.named_parameters() if "norm" in name]
    groups: list[dict[str, Any]] = [
        {"params": plain, "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0},
    ]
    theirs = [
        torch.optim.Muon(
            matrices,
            lr=1e-3,
            weight_decay=0.1,
            momentum=0.9,
            nesterov=False,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99)),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in (ours, *theirs)
    ]
    for step in range(3):
        assert torch.equal(
            train(model, [ours], range(step, step + 1)), train(other, theirs, range(step, step + 1))
        )
        for schedule in schedules:
            schedule.step()


def test_its_state_goes_on_exactly() -> None:
    """Saved in the middle and loaded into a new one, which then takes the same steps; cleared, it begins anew.

    A region that comes in reads the state of another one: without pickled objects.
    """
    model = llama()
    ours = muon(model, lr=1e-3)
    train(model, [ours], range(3))
    file, weights = io.BytesIO(), copy.deepcopy(model.state_dict())
    torch.save(ours.state_dict(), file)
    file.seek(0)
    whole = train(model, [ours], range(3, 6))
    model.load_state_dict(weights)
    again = muon(model, lr=0.5)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(train(model, [again], range(3, 6)), whole)
    model.load_state_dict(weights)
    again.state.clear()
    assert not torch.equal(train(model, [again], range(3, 6)), whole)


def test_a_copy_takes_the_same_steps() -> None:
    """With its model, and apart from the one that it was copied from."""
    model = llama()
    ours = muon(model, lr=1e-3)
    train(model, [ours], range(2))
    other, theirs = copy.deepcopy((model, ours))
    assert torch.equal(train(model, [ours], range(2, 4)), train(other, [theirs], range(2, 4)))


def test_a_step_may_compute_its_loss() -> None:
    """The closure is called once, with gradients."""
    model, tokens = llama(), batch(0, 0)
    losses = []

    def closure() -> Tensor:
        losses.append(model(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
        return losses[-1]

    before = params_of(model)
    assert muon(model, lr=1e-3).step(closure) is losses[0] and len(losses) == 1
    assert not torch.equal(params_of(model), before)


def test_a_model_without_matrices_in_blocks_is_refused() -> None:
    with pytest.raises(InputError, match="Embedding has none that can be trained"):
        muon(nn.Embedding(4, 4), lr=1e-3)


def trained(folder: Path, resume: bool = False) -> Tensor:
    """Two regions with a Trainer, and an overlap: some checkpoints have a transfer in flight."""

    def body(region: int, link: Link) -> Tensor:
        model = llama()
        args = arguments(folder, learning_rate=1e-3).set_save("steps", steps=4)
        config = OuterConfig(method="muloco", sync_interval=3, overlap_steps=2, merge="additive")
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=Tokens(16, seed=link.region),
            callbacks=[CoCoDCCallback(config, link=link)],
            optimizers=(muon(model, lr=1e-3), None),
        )
        trainer.train(resume_from_checkpoint=resume)
        return params_of(model)

    return torch.stack(simulate(body, regions=2))


def test_a_resumed_run_ends_with_the_bits_of_one_never_stopped(tmp_path: Path) -> None:
    """MuLoCo with Trainer: Muon's momentum and AdamW's moments are those of the checkpoint, as is the transfer in flight."""
    whole = trained(tmp_path)
    for region in range(2):
        folder = tmp_path / f"region-{region}"
        entries = read(folder / "checkpoint-4").state["fragments"]
        assert any(entry["in_flight"] for entry in entries)
        for checkpoint in set(folder.glob("checkpoint-*")) - {folder / "checkpoint-4"}:
            shutil.rmtree(checkpoint)
    assert torch.equal(trained(tmp_path, resume=True), whole)
    assert torch.equal(whole[0], whole[1])


def loop(region: int, link: Link, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> Tensor:
    """A plain Accelerate loop."""
    accelerator, model = Accelerator(cpu=True), llama()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    config = OuterConfig(method="muloco", sync_interval=3)
    with OuterOptimizer(accelerator, model, optimizer, config, max_steps=6, link=link) as outer:
        for step in range(6):
            tokens = batch(region, step)
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
    return params_of(accelerator.unwrap_model(model))


def test_a_loop_with_muon_trains_and_one_without_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The method is named for its inner optimizer: the warning says what it is without."""
    with caplog.at_level(logging.WARNING):
        first, second = simulate(lambda r, link: loop(r, link, lambda m: muon(m, lr=1e-3)), regions=2)
        assert torch.equal(first, second)
        assert "MuLoCo" not in caplog.text and "muloco" not in caplog.text
        simulate(lambda r, link: loop(r, link, lambda m: torch.optim.SGD(m.parameters(), lr=1e-3)), regions=1)
    assert (
        "outer.method=muloco is DiLoCo with muon inside, but the inner optimizer is SGD. Give it hf_cocodc.muon,"
        in caplog.text
    )


def test_a_recipe_names_it() -> None:
    """training.optim=muon builds; the method without it is refused, and so is a model that has nothing for it."""
    recipe = Recipe.load("quickstart/muloco")
    preflight(recipe)
    with pytest.raises(
        InputError, match="muloco is DiLoCo with muon inside, but training.optim is not given"
    ):
        check(Recipe.load("quickstart/diloco", ["outer.method=muloco"]))
    with pytest.raises(InputError, match="but training.optim is 'sgd'. Set training.optim=muon"):
        check(Recipe.load("quickstart/muloco", ["training.optim=sgd"]))
    preflight(Recipe.load("quickstart/diloco", ["training.optim=muon"]))
    written = Recipe.from_dict(read_yaml(starter("m", "d", method="muloco"), "the recipe"))
    assert written.training["optim"] == "muon"
    check(written)


@pytest.mark.parametrize(
    ("given", "momentum", "nesterov"),
    [(None, 0.9, False), ("momentum=0.95, nesterov=True", 0.95, True), ("nesterov=true", 0.9, True)],
)
def test_a_recipe_sets_its_momentum(given: str | None, momentum: float, nesterov: bool) -> None:
    """In `training.optim_args`, as for Trainer's own optimizers."""
    recipe = Recipe.load("quickstart/muloco")
    recipe.training["optim_args"] = given
    optimizer = inner_optimizer(recipe, building.arguments(recipe, TrainingArguments), llama(layers=1))
    matrices, *_ = optimizer.param_groups
    assert (matrices["momentum"], matrices["nesterov"]) == (momentum, nesterov)


@pytest.mark.parametrize(
    ("changes", "beta2"),
    [([], 0.99), (["training.adam_beta2=0.95"], 0.95), (["training.optim=adamw_torch"], 0.999)],
)
def test_a_recipe_without_a_second_beta_has_that_of_the_authors(changes: list[str], beta2: float) -> None:
    """Only with Muon, and in the arguments that regions compare, too; a recipe that has one keeps it."""
    recipe = Recipe.load("quickstart/diloco", ["training.adam_beta2=null", "training.optim=muon", *changes])
    args = building.arguments(recipe, TrainingArguments)
    assert args.adam_beta2 == beta2
    optimizer = inner_optimizer(recipe, args, llama(layers=1))
    assert optimizer is None or optimizer.param_groups[-1]["betas"] == (0.9, beta2)
    assert building.arguments(Recipe.load("quickstart/muloco"), TrainingArguments).adam_beta2 == 0.99


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("momentum=1.5", r"muon: momentum=1.5 must lie in \[0, 1\)"),
        ("momentum=often", "muon: momentum='often' must be a number"),
        ("nesterov=1", "muon: nesterov=1 must be true or false"),
        ("beta=0.9", "training.optim_args='beta=0.9': .* unexpected keyword argument 'beta'"),
        ("lr=1", "training.optim_args='lr=1': .* multiple values for keyword argument 'lr'"),
        ("momentum", "muon: momentum='' must be a number"),
    ],
)
def test_what_muon_does_not_take_is_refused(given: str, said: str) -> None:
    """Before a region starts."""
    with pytest.raises(InputError, match=said):
        preflight(Recipe.load("quickstart/muloco", [f"training.optim_args={given}"]))


@pytest.mark.slow
def test_a_recipe_trains_with_it_and_regions_compare_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both regions end with one model, which AdamW would not have found; with different optimizers they refuse."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    short = [*SHORT, "training.max_steps=4", "outer.sync_interval=2", f"training.output_dir={tmp_path}"]
    short += little_text(tmp_path / "text")
    first, second = simulate("quickstart/muloco", overrides=short)
    assert isinstance(first.optimizer.optimizer, MuonAdamW)
    assert torch.equal(params_of(first.model), params_of(second.model))
    ours = Recipe.load("quickstart/muloco", short)
    theirs = Recipe.load("quickstart/diloco", [*short, "outer.codec=int4", "outer.outer_lr=0.7"])
    recipes = [
        dataclasses.replace(each, outer=theirs.outer, regions=dataclasses.replace(each.regions, count=2))
        for each in (ours, theirs)
    ]
    with pytest.raises(HandshakeError, match="disagree on training.optim: region 0 has 'muon'"):
        simulate(lambda region, link: run(recipes[region], link), regions=2)


def test_shards_are_refused(tmp_path: Path) -> None:
    """Muon computes with whole matrices: FSDP2 is refused by name at the first step."""
    # in a process of its own: one that has had a process group must not be forked again, as DataLoader's workers are
    log = tmp_path / "log.txt"
    process = fork(refuse_shards, log=log)
    process.join(TIMEOUT_S)
    assert process.exitcode == 0, log.read_text()


def refuse_shards() -> None:
    with local_world():
        model = llama()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = muon(model, lr=1e-3)
        tokens = batch(0, 0)
        model(input_ids=tokens, labels=tokens).loss.backward()
        with pytest.raises(InputError, match="Muon needs whole matrices, but FSDP2 has cut one of shape"):
            optimizer.step()


@contextlib.contextmanager
def local_world() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
