"""A run that cannot start leaves the record of the run before it: real processes, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_cocodc.run.journal import Journal
from tests.processes.test_failures import TIMEOUT_S, start


@pytest.mark.slow
def test_a_run_that_fails_before_it_begins_destroys_nothing(tmp_path: Path) -> None:
    """Text that does not fill a block is found late, in the region's own process."""
    before = {}
    for region in (0, 1):
        folder = tmp_path / f"region-{region}"
        Journal(folder / "cocodc" / "journal.jsonl").write("finish", step=800)
        (folder / "log.txt").write_text("the log of the run before\n")
        (folder / "model.safetensors").write_bytes(b"the model of the run before")
        (folder / "checkpoint-9").mkdir()
        (folder / "cocodc" / "run").write_text("7")
        before.update({path: path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    run = start(tmp_path, "--set", "data.block_size=100000000")
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 2
    assert "do not fill one block" in errors
    for path, held in before.items():
        now = path.with_name("log.1.txt") if path.name == "log.txt" else path
        assert now.read_bytes() == held
