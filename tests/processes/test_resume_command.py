"""`hf-cocodc train RECIPE --resume` after every process of the run was killed: the model file of a run that nobody touched."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import psutil
import pytest

from hf_cocodc import simulate
from hf_cocodc.cli.main import main
from hf_cocodc.run.journal import read
from hf_cocodc.snapshot import checkpoint as state
from hf_cocodc.snapshot import folders
from tests.processes.launching import ROOT, environment, flags, little_text
from tests.processes.test_failures import training_processes

TIMEOUT_S = 120
STEPS = 36
H = 6
ENOUGH = 2 * H + 2
TINY = [
    *("model.config.hidden_size=32", "model.config.intermediate_size=64", "model.config.num_hidden_layers=3"),
    *("data.block_size=32", "training.eval_strategy=no", "training.eval_on_start=false"),
    *(f"training.max_steps={STEPS}", "training.warmup_steps=4", "training.logging_steps=3"),
    f"outer.sync_interval={H}",
]
SAVING = ["training.save_strategy=steps", "training.save_steps=1", "training.save_total_limit=2"]
METHODS = {
    "diloco": [],
    "dilocox": ["outer.rank=2"],
    "cocodc": [
        *("outer.num_fragments=3", "outer.codec=fp4"),
        *("outer.overlap_steps=2", "outer.sends_per_interval=3"),
    ],
}


def recipe(method: str) -> str:
    return str(ROOT / "recipes" / "quickstart" / f"{method}.yaml")


def overrides(method: str, folder: Path) -> list[str]:
    """A run of seconds, on little text: it makes more than one epoch."""
    return [
        *TINY,
        *little_text(folder.parent / "text", 9000),
        *METHODS[method],
        f"training.output_dir={folder}",
    ]


def arguments(method: str, folder: Path) -> list[str]:
    sets = [*overrides(method, folder), *SAVING]
    return ["train", recipe(method), "--resume", *flags(sets)]


def start(method: str, folder: Path) -> subprocess.Popen:
    """`hf-cocodc train RECIPE --resume`."""
    code = "import sys; from hf_cocodc.cli.main import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments(method, folder)],
        env=environment(HF_DATASETS_CACHE=str(folder.parent / "cache")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


@pytest.fixture
def train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[[str, Path], str]:
    """The same command from here, to the end of the run; gives what was printed."""
    for name, value in environment(HF_DATASETS_CACHE=str(tmp_path / "cache")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def run(method: str, folder: Path) -> str:
        assert main(arguments(method, folder)) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def newest(folder: Path, region: int) -> int:
    found = folders.checkpoints(folder / f"region-{region}")
    return max((step for step, path in found.items() if (path / state.COMPLETE).is_file()), default=0)


def kill_all(run: subprocess.Popen, folder: Path) -> str:
    """SIGKILL to every process of the run, region 0 having come farther than region 1; what was printed until then."""
    deadline = time.monotonic() + TIMEOUT_S
    while newest(folder, 1) < ENOUGH:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate(timeout=5)
        time.sleep(0.005)
    behind = training_processes(run.pid)[1]
    while newest(folder, 0) <= newest(folder, 1):
        behind.suspend()
        time.sleep(0.3)  # so that region 0 comes to where it waits for region 1
        if newest(folder, 0) <= newest(folder, 1):
            behind.resume()
            time.sleep(0.02)
    everyone = [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]
    for process in everyone:
        process.kill()
    psutil.wait_procs(everyone, timeout=30)
    return run.communicate(timeout=30)[0]


def sends(folder: Path, region: int) -> list[tuple[int, int]]:
    """Step and fragment of every send that the journal tells of."""
    journal = read(folder / f"region-{region}" / "cocodc" / "journal.jsonl")
    return [(event["step"], event["fragment"]) for event in journal if event["kind"] == "send"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cocodc"])
def test_a_run_whose_processes_were_all_killed_is_resumed_exactly(
    method: str, train: Callable[[str, Path], str], tmp_path: Path
) -> None:
    """Resumed where nothing was saved, killed while the regions stand at different steps, resumed."""
    again, whole = tmp_path / "again", tmp_path / "whole"
    again.mkdir()
    printed = kill_all(start(method, again), again)
    assert "no checkpoint is complete in every region: training starts from the beginning" in printed
    step = newest(again, 1)
    assert newest(again, 0) > step

    assert f"resumed from step {step}" in train(method, again)
    resumes = [
        event["step"]
        for event in read(again / "region-0" / "cocodc" / "journal.jsonl")
        if event["kind"] in ("start", "resume")
    ]
    assert resumes == [0, step]
    simulate(recipe(method), overrides=overrides(method, whole))
    for region in (0, 1):
        ours, theirs = (
            folder / f"region-{region}" / "model.safetensors" for folder in (again, whole / "simulated")
        )
        assert ours.read_bytes() == theirs.read_bytes()
        assert sends(again, region) == sends(whole / "simulated", region)


@pytest.mark.slow
def test_a_kill_before_every_region_has_its_first_checkpoint(
    train: Callable[[str, Path], str], tmp_path: Path
) -> None:
    """SIGKILL to all when region 0 has saved and region 1 has not: it takes over, and both end with the same model."""
    again = tmp_path / "again"
    again.mkdir()
    run, begun = start("diloco", again), again / "region-1" / folders.RUN
    deadline = time.monotonic() + TIMEOUT_S
    found: dict[int, psutil.Process] = {}
    while not begun.is_file():
        assert run.poll() is None and time.monotonic() < deadline, run.communicate(timeout=5)
        if 1 not in found:  # before: the search takes long beside a step
            found = training_processes(run.pid)
        time.sleep(0.002)
    found[1].suspend()
    while newest(again, 0) < 1:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate(timeout=5)
        time.sleep(0.005)
    everyone = [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]
    for process in everyone:
        process.kill()
    psutil.wait_procs(everyone, timeout=30)
    run.communicate(timeout=30)
    assert newest(again, 1) == 0

    assert f"resumed from step {newest(again, 0)}" in train("diloco", again)
    ours, theirs = (again / f"region-{region}" / "model.safetensors" for region in (0, 1))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
def test_a_run_that_has_finished_is_left_as_it_is(train: Callable[[str, Path], str], tmp_path: Path) -> None:
    """Resumed once more it says so, and where its model lies."""
    folder = tmp_path / "run"
    simulate(recipe("diloco"), overrides=[*overrides("diloco", folder), *SAVING])
    for region in (0, 1):
        (folder / "simulated" / f"region-{region}").rename(folder / f"region-{region}")
    model = folder / "region-0" / "model.safetensors"
    before = model.read_bytes()
    printed = train("diloco", folder)
    assert f"the run has finished at step {STEPS}: nothing is left to train" in printed
    assert f"Its model is in {model.parent / f'checkpoint-{STEPS}'}." in printed
    assert model.read_bytes() == before
