"""Two notebooks and one storage: all cells run in two real processes at once, and both end with one model."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.storages import folder_url
from tests.processes.launching import ROOT, environment
from tests.processes.notebook import cells

NOTEBOOK = ROOT / "recipes" / "notebook" / "two_notebooks.ipynb"
TIMEOUT_S = 480
STEPS = 160


class Notebooks:
    """Two notebooks and a folder in place of their bucket. Each runs in a folder and a process of its own, as on a machine of its
    own.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self.hurry = folder, folder / "hurry"
        self._env = environment(
            RUN_URL=folder_url(folder / "storage"),
            RUN_STEPS=str(steps),
            HF_COCODC_SECRET=secrets.token_hex(32),
        )
        self.running: list[subprocess.Popen] = []

    def start(self, region: int, name: str) -> subprocess.Popen:
        """Run all cells on the machine `name`."""
        (self._folder / name).mkdir()
        words = [
            sys.executable,
            "-m",
            "tests.processes.notebook",
            str(NOTEBOOK),
            str(region),
            str(self.hurry),
        ]
        with (self._folder / f"{name}.txt").open("w") as output:
            self.running.append(
                subprocess.Popen(
                    words,
                    cwd=self._folder / name,
                    env=self._env,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
        return self.running[-1]

    def said(self, name: str) -> str:
        return (self._folder / f"{name}.txt").read_text(encoding="utf-8")

    def model(self, region: int, name: str) -> bytes:
        return (self._folder / name / f"runs/notebook/region-{region}/model.safetensors").read_bytes()

    def end(self) -> None:
        for each in self.running:
            each.kill()
            each.wait()


@pytest.fixture
def notebooks(tmp_path: Path) -> Iterator[Notebooks]:
    found = Notebooks(tmp_path, STEPS)
    yield found
    found.end()


@pytest.mark.slow
def test_a_lost_notebook_comes_back_on_an_empty_machine(notebooks: Notebooks) -> None:
    """All its cells again, as after a disconnected Colab; the other one has trained on, and both end with one model."""
    stays, lost = notebooks.start(0, "0"), notebooks.start(1, "lost")
    until = time.monotonic() + TIMEOUT_S
    while "'loss'" not in notebooks.said("lost"):  # it has logged, and so made 50 steps
        assert lost.poll() is None and time.monotonic() < until, notebooks.said("lost")
        time.sleep(0.2)
    lost.kill()
    back = notebooks.start(1, "new")
    while "region 1 is in the run, from step" not in notebooks.said("new"):
        assert back.poll() is None and time.monotonic() < until, notebooks.said("new")
        time.sleep(0.2)
    notebooks.hurry.touch()
    codes = [each.wait(TIMEOUT_S) for each in (stays, back)]
    assert codes == [0, 0], notebooks.said("0") + notebooks.said("new")
    assert notebooks.model(0, "0") == notebooks.model(1, "new")
    for region, name in enumerate(("0", "new")):
        assert f"streaming, step {STEPS}, journals of region {region}" in notebooks.said(name)
    # the summary comes from one region, without any logging set up
    assert "the models of all 2 regions are equal" in notebooks.said("0")


def test_the_notebook_is_as_short_as_it_says() -> None:
    """Eight cells, of which the first one explains; none has an output of ours."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert [cell["cell_type"] for cell in found] == ["markdown", *["code"] * 7]
    assert not any(cell.get("outputs") for cell in found)
    first, second = (cells(NOTEBOOK, region) for region in (0, 1))
    assert sum(one != other for one, other in zip(first, second, strict=True)) == 1
