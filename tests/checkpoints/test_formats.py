"""Checkpoints of released formats are read for as long as the package lives, and trained on to the same numbers.

`pytest tests/checkpoints --write-golden` writes those of the present format that are missing. What is there is never written
anew: a change that cannot read it raises `manifest.FORMAT`, and keeps a way to read what is there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_cocodc.snapshot.manifest import FORMAT
from tests.kept import SETTINGS, check

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("number", range(3, FORMAT + 1))
def test_a_kept_checkpoint(name: str, number: int, request: pytest.FixtureRequest) -> None:
    may_write = number == FORMAT and request.config.getoption("--write-golden")
    check(FOLDER / f"format-{number}", name, number, may_write)
