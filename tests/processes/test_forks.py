"""Processes that tests fork, whoever has started the server that forks them."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from tests.processes.forks import fork


def write_variables(file: Path) -> None:
    file.write_text(json.dumps(dict(os.environ)))


def test_a_fork_has_the_variables_of_its_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a data loader's worker of another test has started the server, with the variables of that test."""
    monkeypatch.setenv("OF_ANOTHER_TEST", "1")
    multiprocessing.get_context("forkserver").Process(target=os.getpid).start()
    monkeypatch.delenv("OF_ANOTHER_TEST")
    monkeypatch.setenv("OF_THIS_TEST", "1")
    process = fork(write_variables, tmp_path / "env.json", log=tmp_path / "log.txt", RANK="1")
    process.join(60)
    found = json.loads((tmp_path / "env.json").read_text())
    assert found["ACCELERATE_USE_CPU"] == "true"
    assert found["OF_THIS_TEST"] == found["RANK"] == "1"
    assert "OF_ANOTHER_TEST" not in found
