"""What scripts do around a training: each habit is stopped in the middle and resumed, and ends with the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer

from hf_cocodc.errors import CheckpointError
from tests.processes.worker import Tokens
from tests.toys import VOCAB, llama
from tests.trainer.test_training_variants import STEPS, Outcome, train

SAVED = {"save_strategy": "steps", "save_steps": STEPS // 2, "logging_steps": 2}

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Evaluates(Trainer):
    """On the same rows in every region."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(eval_dataset=Tokens(8, seed=9), **kwargs)


class Builds(Trainer):
    """Its model itself, with other random weights each time."""

    built = 0

    def __init__(self, model: nn.Module, **kwargs: Any) -> None:
        def build() -> nn.Module:
            Builds.built += 1
            with torch.random.fork_rng():  # Accelerate shuffles by the seed that it finds
                return llama(seed=Builds.built)

        super().__init__(model_init=build, **kwargs)


class Chooses(Trainer):
    """An optimizer and a schedule of its own."""

    def __init__(self, model: nn.Module, **kwargs: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS)
        super().__init__(model=model, optimizers=(optimizer, cycle), **kwargs)


class Groups(Trainer):
    """Another learning rate for the embedding; it also computes the loss."""

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        params: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for name, param in self.model.named_parameters():
            params["embed" in name].append(param)
        groups = [{"params": params[True], "lr": 1e-4}, {"params": params[False], "lr": 1e-2}]
        self.optimizer = torch.optim.AdamW(groups)
        return self.optimizer

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **kwargs: Any) -> Tensor:
        return next_token_loss(model(input_ids=inputs["input_ids"]).logits, inputs["labels"])


class Plain(nn.Module):
    """A model that is not of Transformers, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits = self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))
        return {"loss": next_token_loss(logits, labels), "logits": logits}


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


def with_dropout(seed: int) -> nn.Module:
    return llama(seed, dropout=0.2)


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Plain()


def with_more_tokens(seed: int) -> PreTrainedModel:
    """Tied embeddings of a larger vocabulary than the config had, and other settings for generation."""
    model = llama(seed, tie=True)
    model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    model.generation_config.update(top_k=7, do_sample=True)
    return model


EVALUATION = {"kind": Evaluates, "eval_strategy": "steps", "eval_steps": 2}
FALLING = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}}
GREEDY = {"lr_scheduler_type": "greedy", "lr_scheduler_kwargs": {"patience": 1, "min_lr": 1e-5}}
NOISE = {"neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.1}
COUNTS = {
    "include_num_input_tokens_seen": "all",
    "logging_nan_inf_filter": False,
    "torch_empty_cache_steps": 2,
}


HABITS: dict[str, tuple[Callable[[int], nn.Module], dict[str, Any]]] = {
    "noise and smoothing": (with_dropout, NOISE),
    "a larger vocabulary, counted tokens": (with_more_tokens, COUNTS),
    "a plain module with BatchNorm": (plain, {}),
    "model_init": (llama, {"kind": Builds}),
    "a rate that follows the evaluation": (llama, EVALUATION | FALLING | {"learning_rate": 0.1}),
    "a greedy rate": (llama, EVALUATION | GREEDY | {"learning_rate": 0.1}),
    "evaluation in bf16": (llama, EVALUATION | {"bf16_full_eval": True, "eval_accumulation_steps": 1}),
    "own optimizer and schedule": (llama, {"kind": Chooses}),
    "own groups and loss": (llama, {"kind": Groups}),
    "no seedable sampler": (
        llama,
        {"accelerator_config": {"use_seedable_sampler": False, "split_batches": True}},
    ),
    "rebalanced batches": (
        llama,
        {"train_sampling_strategy": "batch_rebalance", "dataloader_drop_last": True},
    ),
    "accumulation, checkpointing, deterministic": (
        with_dropout,
        {"full_determinism": True, "gradient_accumulation_steps": 3, "activation_checkpointing": True},
    ),
    "a worker": (with_dropout, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}),
}
QUICK = list(HABITS)[:5]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in HABITS]
)
def test_a_habit(name: str, tmp_path: Path) -> None:
    """Resumed from the middle, in models with other random weights, with the same weights, buffers, rates and counts."""
    model, habit = HABITS[name]
    whole = train(tmp_path, lambda region: model(0), **(SAVED | habit))
    drop_the_end(tmp_path)
    again = train(tmp_path, lambda region: model(1), resume=True, **(SAVED | habit))
    for one, other in zip(whole, again, strict=True):
        ours, theirs = one.trainer.model.state_dict(), other.trainer.model.state_dict()
        assert ours.keys() == theirs.keys()
        assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []
        assert rates(one) == rates(other) == rates(whole[0])
        assert one.trainer.state.num_input_tokens_seen == other.trainer.state.num_input_tokens_seen


def drop_the_end(folder: Path) -> None:
    """Leave the checkpoint in the middle as the newest."""
    for region in range(2):
        shutil.rmtree(folder / f"region-{region}" / f"checkpoint-{STEPS}")


def rates(outcome: Outcome) -> list[float]:
    """The learning rates of a region's run."""
    history = outcome.trainer.state.log_history
    return [entry["learning_rate"] for entry in history if "learning_rate" in entry]


def test_what_was_set_before_training_is_exported(tmp_path: Path) -> None:
    """A larger vocabulary, tied weights and settings for generation: in a checkpoint and in the final model."""
    outcome = train(tmp_path, lambda region: with_more_tokens(0), **SAVED)[0]
    outcome.trainer.save_model()
    for folder in (tmp_path / "region-0", tmp_path / "region-0" / f"checkpoint-{STEPS}"):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert loaded.generation_config.top_k == 7
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert loaded.lm_head.weight.shape == (VOCAB + 8, 16)
        assert torch.equal(
            torch.cat([param.detach().reshape(-1) for param in loaded.parameters()]), outcome.params
        )


@pytest.mark.slow
def test_another_batch_size_and_data_from_the_start(tmp_path: Path) -> None:
    """A resume with another batch size is refused by name; ignore_data_skip resumes, on other data as it was asked to."""
    for outcome in train(tmp_path, **SAVED):
        outcome.trainer.save_state()
        outcome.trainer.save_metrics("train", {"train_loss": 1.0})
    for region in range(2):
        names = {path.name for path in (tmp_path / f"region-{region}").iterdir()}
        assert {"trainer_state.json", "train_results.json", "all_results.json"} <= names
    drop_the_end(tmp_path)
    with pytest.raises(CheckpointError, match="written with batch=2, this run has 4"):
        train(tmp_path, resume=True, per_device_train_batch_size=4, **SAVED)
    train(tmp_path, resume=True, ignore_data_skip=True, **SAVED)
