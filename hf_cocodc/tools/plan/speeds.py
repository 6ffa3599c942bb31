"""How fast machines are: an inner step of a recipe, which is measured here; codecs and outer steps, which are known."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from ...errors import CocodcError, InputError
from ...methods import Method
from ...run.journal import read

STEPS, EVERY, SKIPPED = 30, 5, 10
"""Inner steps, steps between two logs, and steps before the times count."""
_ERROR = "error: "
_CHANGES = (
    "regions=null",
    "regions.count=1",
    "outer=null",
    "outer.method=diloco",
    f"outer.sync_interval={10 * STEPS}",
    f"training.max_steps={STEPS}",
    "training.logging_strategy=steps",
    f"training.logging_steps={EVERY}",
    "training.logging_first_step=false",
    "training.eval_strategy=no",
    "training.eval_on_start=false",
    "training.save_strategy=no",
    "training.load_best_model_at_end=false",
    "training.report_to=none",
    "training.push_to_hub=false",
    "training.resume_from_checkpoint=false",
)


def step_seconds(path: str | os.PathLike, overrides: Sequence[str], launcher: Sequence[str]) -> float:
    """Seconds of an inner step of a region, measured on this machine; writes only to a temporary folder.

    `overrides` change the recipe, each as "section.key=value"; `launcher` has the region's arguments for accelerate launch.

    Raises:
        InputError: the recipe cannot be trained here; the message has the reason.
    """
    with tempfile.TemporaryDirectory() as name:
        changes = [*overrides, *_CHANGES, f"training.output_dir={name}"]
        sets = [word for change in changes for word in ("--set", change)]
        command = [sys.executable, "-m", "hf_cocodc", "train", os.fspath(path), *sets]
        env = {key: value for key, value in os.environ.items() if not key.startswith("HF_COCODC_")}
        done = subprocess.run(
            [*command, "--", *launcher] if launcher else command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise InputError(f"--measure: the recipe cannot be trained here: {_reason(done.stderr)}")
        events = read(Path(name) / "region-0" / "cocodc" / "journal.jsonl")
        times = {event["step"]: event["time_s"] for event in events if event["kind"] == "log"}
    marks = sorted(step for step in times if step >= SKIPPED and step % EVERY == 0)
    if len(marks) < 2:
        raise CocodcError("--measure: the short run logged no times. Measure it yourself, and give --step-s.")
    return median((times[b] - times[a]) / (b - a) for a, b in zip(marks, marks[1:], strict=False))


def _reason(stderr: str) -> str:
    """Why a run failed: its last error, which warnings and other lines precede.

    >>> _reason("UserWarning: x\\nerror: the disk is full.\\n")
    'the disk is full.'
    """
    lines = stderr.strip().splitlines() or ["it ended without a message"]
    errors = [line for line in lines if line.startswith(_ERROR)]
    return (errors or lines)[-1].removeprefix(_ERROR)


@dataclass(frozen=True)
class Speeds:
    """Seconds per value: to encode and decode, by the codec's name; and of the training thread's sends and landings.

    `land` is by what the merge reads: replace, mix or compensate; the outer step is in it.
    """

    encode: Mapping[str, float] = field(default_factory=dict)
    decode: Mapping[str, float] = field(default_factory=dict)
    send: float = 0.0
    land: Mapping[str, float] = field(default_factory=dict)

    def landing(self, method: Method) -> float:
        """Seconds per value of this method's landings."""
        merge = method.merge
        reads = "compensate" if merge.measure is not None else "mix" if merge.reads_local else "replace"
        return self.land.get(reads, 0.0)


CORE = Speeds(
    encode={
        **{"fp32": 4e-11, "bf16": 3e-10, "fp16": 4e-10, "int8": 1e-9, "int4": 1e-9, "fp4": 2e-9},
        **{"codebook_2bit": 8e-9, "topk": 5e-9, "topk_2bit": 6e-9, "lowrank": 5e-9},
    },
    decode={
        **{"fp32": 2e-10, "bf16": 4e-10, "fp16": 5e-10, "int8": 6e-10, "int4": 1e-9, "fp4": 2e-9},
        **{"codebook_2bit": 4e-9, "topk": 3e-10, "topk_2bit": 1e-9, "lowrank": 2e-9},
    },
    send=1.5e-9,
    land={"replace": 1.5e-9, "mix": 4e-9, "compensate": 8e-9},
)
"""One core that does nothing else, as `tests.benchmarks.codec` and `outer` measured it."""
_GPU = 30
"""How many times as fast a GPU is: by the copies that a transfer makes (docs/evidence/gpu.md), at 1 TB/s. Not measured."""


def of_device(use_cpu: bool) -> Speeds:
    """The speeds of what trains: a GPU, unless a recipe says that it is the CPU."""

    def faster(seconds: Mapping[str, float]) -> dict[str, float]:
        return {name: each / _GPU for name, each in seconds.items()}

    return (
        CORE
        if use_cpu
        else Speeds(faster(CORE.encode), faster(CORE.decode), CORE.send / _GPU, faster(CORE.land))
    )
