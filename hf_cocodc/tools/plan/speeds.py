"""How fast this machine encodes, decodes and takes outer steps: seconds per value, measured in a few seconds."""

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ... import parts
from ...errors import CocodcError, InputError
from ...methods import Method
from ...parts.codecs.base import Codec
from ...parts.tensors.flat import moved
from ...parts.tensors.memory import HOST, Buffers
from ...run.journal import read
from .timing import LANDINGS, llama_like, matrices, now, rounds, transfer

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
        coded = {name: _coding(name, device) for name in codecs}
    finally:
        torch.set_num_threads(before)

    def seconds(call: Callable[[], Any]) -> float:
        began = now(device)
        call()
        return now(device) - began

    shapes = llama_like(OUTER_VALUES)
    numel = sum(map(math.prod, shapes))
    found = {reads: rounds(config, shapes, device, REPEAT, seconds) for reads, config in LANDINGS.items()}
    return Speeds(
        encode={name: encode_s for name, (encode_s, _) in coded.items()},
        decode={name: decode_s for name, (_, decode_s) in coded.items()},
        send=median(each.send for each in found["replace"]) / numel,
        land={reads: median(each.landing for each in every) / numel for reads, every in found.items()},
    )


def _coding(name: str, device: torch.device) -> tuple[float, float]:
    """Seconds per value to encode with a codec, and to decode."""
    codec: Codec = getattr(parts.codecs, name)()
    fragment = matrices(CODEC_VALUES)
    values = torch.randn(fragment.numel, generator=torch.Generator(HOST).manual_seed(0), device=HOST).to(
        device
    )
    state, buffers, means = moved(codec.init(fragment), device), Buffers(device), list[Tensor]()
    tries = []
    for _ in range(REPEAT + 1):
        buffers.give(*means)
        means.clear()
        tries.append(transfer(codec, fragment, values, state, buffers, means)[:2])
    encode, decode = (median(each) for each in zip(*tries[1:], strict=True))  # the first allocates memory
    return encode / fragment.numel, decode / fragment.numel
