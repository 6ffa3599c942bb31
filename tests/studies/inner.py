"""The training of a region in a study: its model, its inner optimizer, and the loss on held-out text."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.training import building

from .text import VOCABULARY, english

CPU = torch.device("cpu")


def arguments_of(recipe: Recipe) -> Any:
    """The `TrainingArguments` of a recipe, for the CPU. Raises InputError if a value is refused."""
    from transformers import TrainingArguments

    here = {"use_cpu": True, "report_to": "none"}
    recipe = dataclasses.replace(recipe, training={**recipe.training, **here})
    return building.arguments(recipe, TrainingArguments)


def base(recipe: Recipe, steps: int, seed: int, vocabulary: int = VOCABULARY) -> nn.Module:
    """A model that was trained on other text than a study's: `english`, in `steps` steps of 16 sequences, without an adapter.

    Args:
        recipe: says which model, and how long a sequence is.
        steps: of AdamW at 3e-3 with a cosine schedule; 0 leaves the random weights.
        seed: of the weights and of the batches.
        vocabulary: number of tokens.
    """
    torch.manual_seed(seed)
    model: nn.Module = building.random_weights(recipe, building.config(recipe, vocabulary))
    text, length = english(), recipe.data.block_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (16,), generator=generator).tolist()
        loss_of(model, torch.stack([text[start : start + length] for start in starts]).long()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


class Inner:
    """A model, and its inner optimizer: AdamW, or Muon with AdamW if `training.optim` is muon.

    As in Trainer, vectors have no weight decay, gradients are clipped at `max_grad_norm`, the learning rate follows
    `lr_scheduler_type`, and with `bf16` it computes in bfloat16 over weights in fp32.

    Args:
        recipe: says which adapter, and all settings of the inner optimizer.
        base: the model to start from; it is copied.
        seed: of the adapter's weights.
        vocabulary: number of tokens.
        device: to train on.

    Attributes:
        device: that of the model.
        step: inner steps of the run so far.
    """

    def __init__(
        self,
        recipe: Recipe,
        base: nn.Module,
        seed: int,
        vocabulary: int = VOCABULARY,
        device: torch.device = CPU,
    ) -> None:
        from transformers import get_scheduler

        torch.manual_seed(seed)
        # random numbers of the CPU make the weights: they are the same on every device
        self.model = building.finished(recipe, copy.deepcopy(base), vocabulary).to(device)
        self.model.train()
        self.device = device
        self._recipe, self._given = recipe, arguments_of(recipe)
        self.step = 0
        self.restart()
        steps, warmup = self._given.max_steps, self._given.get_warmup_steps(self._given.max_steps)
        schedule = get_scheduler(self._given.lr_scheduler_type, self.optimizer, warmup, steps)
        self._factor = schedule.lr_lambdas[0]

    def restart(self) -> None:
        """Begin with a fresh inner optimizer, as a process that has just been started."""
        given = self._given
        params = [param for param in self.model.parameters() if param.requires_grad]
        groups = [
            {"params": [each for each in params if each.ndim > 1], "weight_decay": given.weight_decay},
            {"params": [each for each in params if each.ndim <= 1], "weight_decay": 0.0},
        ]
        betas = given.adam_beta1, given.adam_beta2
        self.optimizer: torch.optim.Optimizer = building.inner_optimizer(
            self._recipe, given, self.model
        ) or torch.optim.AdamW(
            groups, lr=given.learning_rate, betas=betas, eps=given.adam_epsilon, fused=True
        )

    @property
    def lr(self) -> float:
        """The learning rate of the next inner step."""
        return float(self._given.learning_rate * self._factor(self.step))

    def train(self, batch: Tensor) -> float:
        """One inner step on a batch (sequences, tokens); returns the learning rate that it used."""
        rate = self.lr
        with self._precision():
            loss = loss_of(self.model, batch.to(self.device, non_blocking=True))
        loss.backward()
        if self._given.max_grad_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._given.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return rate

    def held_out_loss(self, blocks: Tensor) -> float:
        """See `held_out_loss`."""
        with self._precision():
            return held_out_loss(self.model, blocks.to(self.device))

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self._given.bf16 else nullcontext()


def loss_of(model: nn.Module, blocks: Tensor) -> Tensor:
    """The mean loss of the next token over blocks (sequences, tokens), in nats."""
    logits = model(input_ids=blocks, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), blocks[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, blocks: Tensor) -> float:
    """The mean loss of the next token over all blocks, in nats."""
    model.eval()
    losses = [loss_of(model, part).item() * len(part) for part in blocks.split(32)]
    model.train()
    return sum(losses) / len(blocks)
