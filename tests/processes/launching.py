"""Start regions as users do, with `accelerate launch`, bounded in time."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from hf_cocodc.coordinator.server import serve_in_thread

ROOT = Path(__file__).parents[2]
WORKER = str(Path(__file__).with_name("worker.py"))
TIMEOUT_S = 120


def accelerate(num_processes: int) -> list[str]:
    """The launcher's command on CPUs; `--cpu` with several processes starts only one."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_processes", str(num_processes)]
    return launcher + (["--cpu"] if num_processes == 1 else ["--multi_gpu", "--main_process_port", "0"])


def accelerate_on(machine: int, machines: int, num_processes: int, port: int) -> list[str]:
    """The command for one of several machines, which are all this one, with as many processes in all."""
    return [
        *accelerate(num_processes)[:-2],
        *("--num_machines", str(machines), "--machine_rank", str(machine)),
        *("--main_process_ip", "127.0.0.1", "--main_process_port", str(port)),
    ]


def environment(**more: str) -> dict[str, str]:
    """Ours, for one CPU thread a process."""
    common = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_COCODC")}
    return {**kept, **common, **more}


def little_text(folder: Path, length: int | None = None) -> list[str]:
    """Settings of a recipe that train on a little text in `folder`. The standard library takes each region seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.txt").write_text(Path(argparse.__file__).read_text(encoding="utf-8")[:length])
    return ["data.builtin=null", f"data.path={folder}"]


def flags(settings: Sequence[str]) -> list[str]:
    """Settings as a command takes them."""
    return [word for each in settings for word in ("--set", each)]


def run_all(commands: Sequence[tuple[list[str], dict[str, str]]]) -> None:
    """Run commands side by side; the output of one that fails is the error."""
    started = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, env in commands
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]


def run_regions(
    num_regions: int,
    num_processes: int,
    arguments: Sequence[str],
    folder: Path,
) -> dict[str, dict]:
    """Run worker.py as `num_regions` worlds of `num_processes` ranks; what each rank wrote, by "region0-rank0"."""
    coordinator = serve_in_thread("127.0.0.1")
    run_all(
        [
            (
                [*accelerate(num_processes), WORKER, *arguments],
                environment(
                    HF_COCODC_REGION=str(region),
                    HF_COCODC_REGIONS=str(num_regions),
                    HF_COCODC_COORDINATOR=f"127.0.0.1:{coordinator.port}",
                ),
            )
            for region in range(num_regions)
        ]
    )
    return outcomes(folder)


def outcomes(folder: Path) -> dict[str, dict]:
    return {path.stem: torch.load(path) for path in sorted(folder.glob("region*-rank*.pt"))}
