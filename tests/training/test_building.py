"""Exceptions of libraries are blamed on a section of the recipe, except those that no recipe is to blame for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_cocodc.errors import InputError
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.training import building
from hf_cocodc.training.building import blaming


def test_a_value_that_a_library_refuses_is_blamed_on_its_section() -> None:
    """With the library's words."""
    with pytest.raises(InputError, match="training: no such thing"), blaming("training"):
        raise RuntimeError("no such thing.")


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_fault_of_the_gpu_passes_through(kind: type[Exception]) -> None:
    """A full or broken GPU says nothing about a value: its traceback shows what asked for memory."""
    with pytest.raises(kind, match="out of memory"), blaming("training"):
        raise kind("CUDA out of memory")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_leaves_the_recipe_as_it_is() -> None:
    """PEFT adds modules of its own to the list that it is given: a second model would be refused, or another one."""
    peft = {"r": 2, "task_type": "SEQ_CLS", "modules_to_save": ["norm"], "target_modules": ["q_proj"]}
    recipe = dataclasses.replace(Recipe.load("quickstart/diloco"), peft=peft)
    config = building.config(recipe, 257)
    for _ in range(2):
        with torch.device("meta"):
            building.finished(recipe, building.random_weights(recipe, config), 257)
        assert recipe.peft is not None and recipe.peft["modules_to_save"] == ["norm"]
