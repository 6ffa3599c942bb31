"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch  # noqa: F401  for the examples

from tests.house.test_house import MODULES, PACKAGE

NAMES = [
    ".".join(["hf_cocodc", *module.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
    for module in MODULES
    if ">>> " in module.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_module(name: str) -> None:
    """At least one, and none fails."""
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed


def test_there_are_examples() -> None:
    """Of the parts at least, which readers try out first."""
    assert {f"hf_cocodc.parts.{part}" for part in ("fragments", "schedules", "outer", "merges")} <= set(NAMES)
