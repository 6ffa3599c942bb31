"""One accelerate launch for all regions, started and watched by our command: killed, interrupted, resumed. Real processes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from hf_cocodc.run.journal import read
from hf_cocodc.snapshot.folders import usable
from tests.listening import free_port
from tests.processes.launching import ROOT, accelerate, accelerate_on, environment, flags, little_text
from tests.processes.test_failures import RECIPE, TINY, wait_for_step

SCRIPT = ROOT / "tests" / "processes" / "clm_script.py"
TIMEOUT_S = 240


def command(words: list[str], launcher: list[str], program: list[str], folder: Path) -> subprocess.Popen:
    """Our command with the arguments of an accelerate launch."""
    behind = launcher[launcher.index("--quiet") + 1 :]
    return subprocess.Popen(
        [sys.executable, "-m", "hf_cocodc", *words, "--", *behind, *(["--", *program] if program else [])],
        env=environment(HF_DATASETS_CACHE=str(folder / "cache")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def ranks_of(parent: int) -> dict[int, psutil.Process]:
    """The processes of a launch below `parent`, by their ranks in it."""
    children = psutil.Process(parent).children(recursive=True)
    return {int(each.environ()["RANK"]): each for each in children if each.name().startswith("region-")}


def assert_equal_ends(folder: Path, step: int) -> None:
    """Both regions have finished at one step, with one model."""
    journals = [folder / f"region-{region}" / "cocodc" / "journal.jsonl" for region in (0, 1)]
    ends = [next(e for e in reversed(read(each)) if e["kind"] == "finish") for each in journals]
    assert [each["step"] for each in ends] == [step] * 2
    models = [load_file(folder / f"region-{region}" / "model.safetensors") for region in (0, 1)]
    assert models[0].keys() == models[1].keys()
    assert all(bool((models[0][name] == models[1][name]).all()) for name in models[0])


@pytest.mark.slow
def test_a_rank_of_one_launch_is_killed_and_all_come_back(tmp_path: Path) -> None:
    """Two ranks, each a region: the other region saves a checkpoint, the command names who has failed, each region has a log of
    its own, and --resume goes on from that checkpoint to one model.
    """
    draw = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
    (tmp_path / "text.txt").write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(200)))

    def start(*options: str, steps: int) -> subprocess.Popen:
        flags = f"--train_file text.txt --output_dir out --max_steps {steps} --save_steps 10 --use_cpu"
        program = [str(SCRIPT), *flags.split(), "--logging_steps", "5", "--report_to", "none"]
        return command(["launch", "--split", "2", *options], accelerate(2), program, tmp_path)

    run = start(steps=100_000)
    wait_for_step(run, tmp_path / "out")
    ranks = ranks_of(run.pid)
    assert sorted(ranks) == [0, 1]
    ranks[0].kill()
    said, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 1, (said, errors)
    assert errors.startswith("error: [region 0] was killed") and "SIGKILL" in errors
    assert "coordinator of this run: 127.0.0.1:" in said
    assert not psutil.wait_procs(list(ranks.values()), timeout=TIMEOUT_S)[1]
    stopped = max(usable(tmp_path / "out" / "region-1"))

    run = start("--resume", steps=stopped + 20)
    said, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, (said, errors)
    assert f"resumed from step {stopped}" in said and "\nglobal model " in said
    assert_equal_ends(tmp_path / "out", stopped + 20)
    for region in (0, 1):
        log = (tmp_path / "runs" / "clm_script" / f"region-{region}" / "log.txt").read_text()
        assert "Traceback" not in log.partition("ChildFailedError")[2]
        assert log.count("train_loss") >= region, "each region writes into its own"


@pytest.mark.slow
def test_one_launch_on_two_machines_is_stopped_and_resumed(tmp_path: Path) -> None:
    """Each of the machines, which are this one, is a region of two ranks. Ctrl-C at machine 0 stops both regions at one
    step, with a checkpoint: its command ends as interrupted, the other one with exit code 3.

    With --resume on both they go on. Then a scheduler signals every process, as Slurm does: commands, launchers and ranks.
    Launchers end their ranks after a while, which have stopped before.
    """
    port, machines, ranks = free_port(), list[subprocess.Popen](), list[psutil.Process]()
    sets = ["training.output_dir=out", "outer.sync_interval=10", "data.block_size=32", *TINY]
    words = ["train", RECIPE, *flags([*sets, *little_text(tmp_path / "text")])]

    def start(step: int, *options: str) -> None:
        given = [*words, "--split", "machines", *options]
        machines[:] = [command(given, accelerate_on(each, 2, 4, port), [], tmp_path) for each in (0, 1)]
        for each in machines:
            wait_for_step(each, tmp_path / "out", step=step)
        ranks[:] = [each for machine in machines for each in ranks_of(machine.pid).values()]
        assert len(ranks) == 4

    def ends(*codes: int) -> tuple[list[str], list[str], int]:
        """What the commands have printed, their errors, and the step of both regions' newest checkpoint."""
        outputs, errors = zip(*(each.communicate(timeout=TIMEOUT_S) for each in machines), strict=True)
        assert [each.returncode for each in machines] == [*codes], errors
        assert not psutil.wait_procs(ranks, timeout=TIMEOUT_S)[1]
        [stopped] = {max(usable(tmp_path / "out" / f"region-{region}")) for region in (0, 1)}
        return outputs, errors, stopped

    start(20)
    machines[0].send_signal(signal.SIGINT)
    _, (first, second), stopped = ends(130, 3)
    assert "checkpoint-" in first and "is complete in region 0 under" in first
    assert "error: [region 1] all regions stopped at step" in second

    start(stopped + 10, "--resume")
    for each in [psutil.Process(machine.pid) for machine in machines]:
        for process in (each, *each.children(recursive=True)):
            process.terminate()
    (said, _), (first, second), again = ends(143, 143)
    assert f"resumed from step {stopped}" in said
    assert "is complete in region 0 under" in first and "is complete in region 1 under" in second
    assert again > stopped
