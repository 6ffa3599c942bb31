"""The list of all keys is the code."""

from __future__ import annotations

import dataclasses

import pytest

from hf_cocodc.cli.main import main
from hf_cocodc.settings import OuterConfig, RegionConfig
from hf_cocodc.settings.recipe import DataSection
from hf_cocodc.settings.reference import in_markdown, keys


def test_the_method_decides_what_a_recipe_leaves_open() -> None:
    """Only where that is so does the list say it."""
    text = in_markdown()
    assert "`outer.sync_interval` (a whole number; by default the method's own): H" in text
    assert "`outer.weights` (text; by default `equal`): Share" in text
    assert (
        "`outer.guard` (a mapping or text): Norm" in text
        and "`regions.rate_limit` (a number): Highest" in text
    )
    assert max(map(len, text.splitlines())) <= 110


def test_every_key_has_a_meaning_and_its_default() -> None:
    found = {key.name: key for key in keys()}
    for section, cls in (("outer", OuterConfig), ("regions", RegionConfig), ("data", DataSection)):
        assert [name for name in found if name.startswith(f"{section}.")] == [
            f"{section}.{each.name}" for each in dataclasses.fields(cls)
        ]
    assert all(key.values and key.meaning.endswith(".") and "|" not in key.meaning for key in found.values())
    assert found["outer.sync_interval"].values == "a whole number"
    assert found["regions.timeout_s"].default == "120.0"
    assert found["data.streaming"].default == "false"
    assert found["evaluation.metrics"].default == "[perplexity, accuracy]"


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "keys"]) == 0
    assert capsys.readouterr().out == in_markdown() + "\n"
