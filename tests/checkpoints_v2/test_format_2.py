"""Checkpoints of format 2 are read for as long as the package lives, and trained on to the same numbers.

`pytest tests/checkpoints_v2 --write-golden` writes those that are missing. What is there is never written anew: a change
that cannot read it raises `manifest.FORMAT`, keeps a way to read format 2, and brings a folder of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kept import SETTINGS, check

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("name", SETTINGS)
def test_a_checkpoint_of_format_2(name: str, request: pytest.FixtureRequest) -> None:
    check(FOLDER, name, 2, may_write=request.config.getoption("--write-golden"))
