"""Switches of the test run."""

import signal

import pytest

# A shell that starts the tests in the background lets them ignore Ctrl-C, and with them every process they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-golden",
        action="store_true",
        help="rewrite tests/golden/*.json (see CONTRIBUTING for when that is allowed); write kept checkpoints that are missing",
    )
