"""Small models and drivers that many tests share: regions in one process, each with data of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from hf_cocodc import OuterOptimizer
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import VirtualLink, run_in_lockstep
from hf_cocodc.methods import Method
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from hf_cocodc.settings.recipe import Recipe

T = TypeVar("T")
Build = Callable[[int], tuple[nn.Module, torch.optim.Optimizer]]
VOCAB = 64
_NAMES = {field.name for field in dataclasses.fields(TrainingArguments)}
RECOMPUTING = "activation_checkpointing" if "activation_checkpointing" in _NAMES else "gradient_checkpointing"
"""The argument of Trainer that recomputes activations; older releases of transformers have the second name."""


def llama(
    seed: int = 0,
    tie: bool = False,
    dtype: torch.dtype = torch.float32,
    layers: int = 4,
    dropout: float = 0.0,
) -> LlamaForCausalLM:
    """A Llama of about 30 thousand parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
        attention_dropout=dropout,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(dtype)


class Rows(Dataset):
    """Rows that are told apart by their numbers: row i of the list holds `first + i`, or what `made` makes of that number."""

    def __init__(self, count: int, first: int = 0, made: Callable[[int], Any] = torch.tensor) -> None:
        self._numbers, self._made = range(first, first + count), made

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self._made(self._numbers[index])


class Stream(IterableDataset):
    """Rows, in order."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self._rows[index] for index in range(len(self._rows)))


def tokens_from(first: int) -> dict[str, Tensor]:
    """A row of 16 tokens that begins with this one."""
    tokens = torch.arange(first, first + 16) % VOCAB
    return {"input_ids": tokens, "labels": tokens}


def batch(region: int, step: int, size: int = 2, length: int = 16) -> Tensor:
    """Token ids (size, length) that only this region sees at this step."""
    return torch.randint(
        1, VOCAB, (size, length), generator=torch.Generator().manual_seed(1000 * region + step)
    )


class Blocks(nn.Module):
    """Vectors of the given sizes as blocks of a model, for losses written down by hand."""

    def __init__(self, vectors: Iterable[Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ParameterList([vector.clone()]) for vector in vectors)

    def vectors(self) -> list[nn.Parameter]:
        return list(self.parameters())


@dataclass
class Region:
    """A model, its inner optimizer and its Synchronizer."""

    index: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    synchronizer: Synchronizer

    def step(self) -> None:
        """The inner optimizer's step and the outer one's, after the gradients are there."""
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.synchronizer.step(lr)


def run(
    num_regions: int,
    method: Method | OuterConfig,
    build: Build,
    live: Callable[[Region], T],
    virtual: VirtualLink | None = None,
) -> list[T]:
    """Run live(region) for every region in lockstep, on the model and optimizer that build(index) makes."""
    chosen = from_config(method) if isinstance(method, OuterConfig) else method

    def body(index: int, link: Link) -> T:
        model, optimizer = build(index)
        return live(Region(index, model, optimizer, Synchronizer(model, chosen, link)))

    return run_in_lockstep(num_regions, body, virtual)


def llama_adamw(seed: int = 0) -> Build:
    """Regions with the same tiny Llama and AdamW."""

    def build(index: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = llama(seed + index)  # different seeds: region 0's parameters have to reach the others
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    return build


def train_llama(region: Region, step: int) -> float:
    """One step of a causal LM on the region's own batch of step `step`; returns the loss."""
    tokens = batch(region.index, step)
    loss = region.model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    region.step()
    return float(loss.detach())


def train_loop(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: OuterOptimizer,
    until: int,
) -> None:
    """A plain loop of Accelerate, from where the outer optimizer is to an inner step."""
    for step in range(outer.inner_step, until):
        tokens = batch(outer.link.region, step)
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
        outer.step()


def params_of(model: nn.Module) -> Tensor:
    """All parameters, flat."""
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def global_of(region: Region) -> Tensor:
    """All global params, flat, in the order of the fragments."""
    return torch.cat([state.global_params for state in region.synchronizer.fragments])


def with_known_names(recipe: Recipe) -> Recipe:
    """The recipe with the arguments of Trainer as the installed transformers names them."""
    training = {
        RECOMPUTING if "checkpointing" in key else key: value for key, value in recipe.training.items()
    }
    return dataclasses.replace(recipe, training=training)
