"""How fast this machine encodes, decodes and takes outer steps: seconds per value, measured with the programs of `bench`."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from ...errors import CocodcError, InputError
from ...methods import Method
from ...parts.tensors.memory import HOST
from ...run.journal import read
from ..bench import codec, outer

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
    "training.resume_from_checkpoint=null",
)

CODEC_VALUES, OUTER_VALUES = 2_000_000, 2_000_000
REPEAT = 3
_ROWS = {
    "replace": "land, replace (diloco)",
    "mix": "land, mix (streaming)",
    "compensate": "land, compensate (cocodc)",
}


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


def measure(codecs: Sequence[str], accelerated: bool) -> Speeds:
    """Measure this machine for some seconds, on its GPU if one trains (`accelerated`)."""
    device = torch.device("cuda") if accelerated and torch.cuda.is_available() else HOST
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # the link's thread has one
        rows = {row["codec"]: row for row in codec.measure(CODEC_VALUES, REPEAT, codecs, device).rows}
    finally:
        torch.set_num_threads(before)
    report = outer.measure(OUTER_VALUES, REPEAT, [before], device)
    took = {row["what"]: row["ms"] / 1e3 / report.setting["parameters"] for row in report.rows}
    return Speeds(
        encode={name: 4e-9 / row["encode GB/s"] for name, row in rows.items()},
        decode={name: 4e-9 / row["decode GB/s"] for name, row in rows.items()},
        send=took["send"],
        land={reads: took[row] for reads, row in _ROWS.items()},
    )
