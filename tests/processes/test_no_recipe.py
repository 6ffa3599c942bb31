"""A machine that joins a run without its recipe: real processes, through the command line, in folders of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hf_cocodc import RegionConfig
from hf_cocodc.coordinator.client import status
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.errors import RunStopped
from hf_cocodc.run.journal import read
from hf_cocodc.settings.handed import handed_over
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.snapshot.folders import usable
from tests.coordinator.regions import hello, meet, part
from tests.processes.launching import environment
from tests.processes.pages import SMALL

TIMEOUT_S = 400
RECIPE = (
    SMALL.replace("STEPS", "100000")
    + """
outer: {method: diloco, sync_interval: 10}
regions: {count: 2, min: 1, max: 3, run: mine}
"""
)


def train(folder: Path, address: str, *words: str) -> subprocess.Popen:
    """`hf-cocodc train` in a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "hf_cocodc", "train", *words, "--coordinator", address],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )


def wait_until(is_so: Callable[[], bool], runs: list[subprocess.Popen]) -> None:
    """While all commands go on."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        ended = [run for run in runs if run.poll() is not None]
        assert not ended, ended[0].communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_recipe_that_lies_runs_no_code(tmp_path: Path) -> None:
    """A module in the folder of the command, which its interpreter would import: it has not run when the command ends."""
    (tmp_path / "evil.py").write_text("open('was-run', 'w').close()\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    coordinator = serve_in_thread()
    recipe = Recipe.load(tmp_path / "recipe.yaml", ["outer.method=evil:method", "outer.sync_interval=null"])
    regions = RegionConfig(region=0, count=2, min=1, coordinator=coordinator.address).resolved({})
    told = handed_over(recipe, regions, 2)
    members = meet(
        coordinator.address, *(hello(each, elastic=True, recipe=told) for each in (0, 1)), run="mine"
    )
    try:
        joins = train(tmp_path, coordinator.address, "--join")
        said = joins.communicate(timeout=TIMEOUT_S)[0]
    finally:
        part(*members)
        coordinator.close()
    assert joins.returncode == 2
    assert "settings that can run code on this machine, or name files: outer.method='evil:method'" in said
    assert Recipe.load(tmp_path / "runs" / "mine.yaml").outer.method == "evil:method"
    assert not (tmp_path / "was-run").exists()


@pytest.mark.slow
def test_a_machine_without_a_recipe_joins_trains_and_comes_back(tmp_path: Path) -> None:
    """Two regions have it. The third gets it from the run, and names its own data; all stop, and go on, the third with the file
    that it was given. In the end the three models are equal, bit for bit.
    """
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there / "texts", here / "disk" / "texts"):
        folder.mkdir(parents=True)
        (folder / "train.txt").write_text("\n".join(f"{each} bottles of beer" * 20 for each in range(200)))
    (there / "mine.yaml").write_text(RECIPE)
    coordinator = serve_in_thread()
    address = coordinator.address
    runs: list[subprocess.Popen] = []
    try:
        runs = [train(there, address, "mine.yaml", "--region", str(region)) for region in (0, 1)]
        wait_until(lambda: any(each["phase"] == "trains" for each in status(address, None)), runs)
        refused = train(here, address, "--join")
        assert (
            "--set data.path=FOLDER. Its last part must be 'texts'"
            in refused.communicate(timeout=TIMEOUT_S)[0]
        )
        assert refused.returncode == 2
        runs.append(train(here, address, "--join", "--set", "data.path=disk/texts"))
        journal = here / "runs" / "mine" / "region-2" / "cocodc" / "journal.jsonl"
        wait_until(
            lambda: (
                len(status(address, None)[0]["members"]) == 3
                and journal.is_file()
                and sum(each["kind"] == "land" for each in read(journal)) > 3
            ),
            runs,
        )
        runs[0].send_signal(signal.SIGINT)
        outputs = [run.communicate(timeout=TIMEOUT_S)[0] for run in runs]
        assert [run.returncode for run in runs] == [130, RunStopped.exit_code, RunStopped.exit_code], outputs
        assert "recipe of run 'mine', written to runs/mine.yaml" in outputs[2]
        assert Recipe.load(here / "runs" / "mine.yaml").data.path == "disk/texts"
        homes = [there / "out" / "region-0", there / "out" / "region-1", here / "runs" / "mine" / "region-2"]
        [step] = {max(usable(home)) for home in homes}
        again = ["--regions", "3", "--resume", "--set", f"training.max_steps={step + 25}"]
        places = [(there, "mine.yaml"), (there, "mine.yaml"), (here, "runs/mine.yaml")]
        runs = [
            train(folder, address, file, "--region", str(region), *again)
            for region, (folder, file) in enumerate(places)
        ]
        outputs = [run.communicate(timeout=TIMEOUT_S)[0] for run in runs]
        assert [run.returncode for run in runs] == [0, 0, 0], outputs
    finally:
        for run in runs:
            run.kill()
            run.wait()
        coordinator.close()
    models = [load_file(home / "model.safetensors") for home in homes]
    assert models[0].keys() == models[1].keys() == models[2].keys()
    for name, first in models[0].items():
        assert all(first.equal(other[name]) for other in models[1:]), name
    ends = [read(home / "cocodc" / "journal.jsonl")[-1] for home in homes]
    assert {each["step"] for each in ends} == {step + 25}
