"""Exceptions of libraries are blamed on a section of the recipe, except those that no recipe is to blame for."""

from __future__ import annotations

import pytest
import torch

from hf_cocodc.errors import InputError
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
