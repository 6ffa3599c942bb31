"""Switches of the test run."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-golden",
        action="store_true",
        help="rewrite tests/golden/*.json (see CONTRIBUTING for when that is allowed); write kept checkpoints that are missing",
    )
