"""Exceptions of libraries are blamed on a section of the recipe, except those that no recipe is to blame for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from hf_cocodc.errors import InputError
from hf_cocodc.parts.tensors.slices import cores
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


def test_no_more_workers_than_cores(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """A million would hang the machine. A line says what is taken."""
    training = {"output_dir": str(tmp_path), "use_cpu": True, "dataloader_num_workers": 1_000_000}
    recipe = dataclasses.replace(Recipe.load("quickstart/diloco"), training=training)
    assert building.arguments(recipe, TrainingArguments).dataloader_num_workers == cores()
    assert f"training.dataloader_num_workers=1000000, but this process may use {cores()} cores" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        ([], torch.float32),
        (["model.config.dtype=bfloat16"], torch.bfloat16),
        (["model.config.dtype=bfloat16", "model.dtype=float16"], torch.float16),
    ],
)
def test_a_config_says_its_number_format(overrides: list[str], dtype: torch.dtype) -> None:
    """As the config of a model on the Hub does, unless the recipe has a word of its own."""
    recipe = Recipe.load("quickstart/diloco", overrides)
    with torch.device("meta"):
        assert building.random_weights(recipe, building.config(recipe, 257)).dtype == dtype
