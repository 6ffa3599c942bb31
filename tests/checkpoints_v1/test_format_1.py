"""Checkpoints of format 1 are read for as long as the package lives, and trained on to the same numbers.

`pytest tests/checkpoints_v1 --write-golden` wrote them. They are never written anew: a change that cannot read them raises
`manifest.FORMAT`, keeps a way to read format 1, and brings a folder of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kept import SETTINGS, check

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("name", SETTINGS)
def test_a_checkpoint_of_format_1(name: str, request: pytest.FixtureRequest) -> None:
    check(FOLDER, name, 1, may_write=request.config.getoption("--write-golden"))
