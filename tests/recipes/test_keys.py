"""The table of all keys is the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from hf_cocodc.cli.main import main
from hf_cocodc.recipes.keys import keys, table
from hf_cocodc.recipes.recipe import DataSection
from hf_cocodc.settings import OuterConfig, RegionConfig

README = Path(__file__).parents[2] / "recipes" / "README.md"


def test_the_readmes_table_has_all_keys() -> None:
    """Write it anew with: hf-cocodc recipe keys --markdown."""
    text = README.read_text(encoding="utf-8")
    [found] = re.findall(r"<!-- recipe keys -->\n(.*?)\n<!-- /recipe keys -->", text, flags=re.DOTALL)
    assert found == table()


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
    said = capsys.readouterr().out
    assert "outer.sync_interval: a whole number\n    H: each fragment is sent once" in said
    assert max(map(len, said.splitlines())) <= 100
    assert main(["recipe", "keys", "--markdown"]) == 0
    assert capsys.readouterr().out == table() + "\n"
