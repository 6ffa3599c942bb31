"""What we need of Trainer beyond its public face: a new Transformers that moves any of it is noticed here first."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

import hf_cocodc.trainer
from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig
from hf_cocodc.trainer.patches import CALLED, COUNTERS, WRAPPED, Patches

PACKAGE = Path(hf_cocodc.trainer.__file__).parent


@pytest.mark.parametrize("name", sorted({**WRAPPED, **CALLED}))
def test_trainer_has_what_is_wrapped_or_called(name: str) -> None:
    """Each method is there, with the parameters that we name."""
    parameters = inspect.signature(getattr(Trainer, name)).parameters
    for parameter in (*WRAPPED.get(name, ()), *CALLED.get(name, ())):
        assert parameter in parameters, f"Trainer.{name} takes {', '.join(parameters)}"


def test_every_wrapped_method_has_a_wrapper() -> None:
    """And no wrapper is left over."""
    wrappers = {name for name, value in vars(Patches).items() if inspect.isfunction(value)}
    helpers = {"__init__", "_fill", "_chosen_weights", "_own_global_weights", "_tell_callbacks"}
    assert wrappers - helpers == set(WRAPPED)


@pytest.mark.parametrize("weights", ["equal", "tokens"])
def test_what_every_step_calls_is_wrapped_only_if_needed(weights: str, tmp_path: Path) -> None:
    """Each call costs microseconds: only where tokens are weights must they be counted."""
    callback = CoCoDCCallback(OuterConfig(weights=weights), RegionConfig(region=0, count=1))
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, callbacks=[callback])
    assert ("get_batch_samples" in vars(trainer)) == (weights == "tokens")


def test_nothing_private_of_trainer_is_used_besides() -> None:
    """Every `trainer._name` and `Trainer._name` in the package is declared in `patches`."""
    used = set()
    for module in PACKAGE.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
            ):
                owner = (
                    node.value.attr
                    if isinstance(node.value, ast.Attribute)
                    else getattr(node.value, "id", "")
                )
                if owner.lower().lstrip("_") == "trainer":
                    used.add(node.attr)
    assert used == set(CALLED) | set(COUNTERS)


@pytest.mark.parametrize("name", COUNTERS)
def test_trainer_still_counts_by_these_names(name: str) -> None:
    assert f"self.{name} = self.state.global_step" in inspect.getsource(Trainer._inner_training_loop)
