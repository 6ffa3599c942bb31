"""Damaged checkpoints: refused, skipped for older ones, or resumed with the exact numbers; never trained on, never a traceback.

The full run: `python -m tests.fuzz.checkpoints`; one case: `python -m tests.fuzz.checkpoints --case 17`. A case is made from its
number alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import Trainer

from hf_cocodc import simulate
from hf_cocodc.errors import CheckpointError
from hf_cocodc.link.base import Link
from hf_cocodc.snapshot import folders, manifest
from tests.run.test_resuming import checkpoint_of, make, resumed, weights_of

FULL = 1000
STEPS = (8, 10, 12)
"""Steps of the checkpoints of a run of 14 steps that was stopped after step 12."""


def prepare(folder: Path) -> list[Tensor]:
    """Train two regions; leave their checkpoints, and return the weights that a resumed run must come to."""
    whole = weights_of(resumed(folder, save_steps=2))
    for region in range(2):
        for step, path in folders.checkpoints(folder / f"region-{region}").items():
            if step not in STEPS:
                shutil.rmtree(path)
    return whole


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def cut(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content) + 1)])


def lengthen(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randint(1, 64)))


def edit_number(path: Path, chance: random.Random) -> None:
    """Change one digit, as somebody would who edits a file of JSON."""
    content = bytearray(path.read_bytes())
    digits = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    if digits:
        content[chance.choice(digits)] = ord(chance.choice("0123456789"))
    path.write_bytes(content)


def overwrite(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(chance.randbytes(len(content)) if chance.random() < 0.5 else bytes(len(content)))


def take_from_elsewhere(path: Path, chance: random.Random) -> None:
    """The same file of the other region, or of another step."""
    name = path.parent
    while not name.name.startswith(folders.PREFIX):
        name = name.parent
    inside = path.relative_to(name)
    others = [each / inside for each in name.parent.parent.glob("region-*/checkpoint-*") if each != name]
    found = [each for each in others if each.is_file()]
    if found:
        shutil.copyfile(chance.choice(sorted(found)), path)


def turn_into_a_folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def add_weights(path: Path, chance: random.Random) -> None:
    names = ("pytorch_model.bin", "scaler.pt", "adapter_model.safetensors", "rng_state_0.pth")
    (path.parent / chance.choice(names)).write_bytes(chance.randbytes(100))


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    *(flip, flip, flip, cut, lengthen, edit_number, edit_number, overwrite, take_from_elsewhere),
    *(turn_into_a_folder, add_weights, lambda path, chance: path.unlink()),
)


def damage(folder: Path, chance: random.Random) -> None:
    """One to four times: some file of some checkpoint, or the file that holds the number of the run."""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 4))):
        region, step = chance.randrange(2), chance.choice((*STEPS, *STEPS[-1:] * 3))
        checkpoint = checkpoint_of(folder, region, step)
        files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
        if chance.random() < 0.02:
            flip(folder / f"region-{region}" / folders.RUN, chance)
        elif files:
            chance.choice(DAMAGES)(chance.choice(files), chance)


class Words(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def case(number: int, run: Path, whole: list[Tensor], folder: Path) -> tuple[str, str]:
    """Damage a copy of the run and resume it: (outcome, fault); the fault is empty if the outcome is right."""
    chance = random.Random(number)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder, symlinks=True)
    damage(folder, chance)
    step = chance.choice(STEPS) if chance.random() < 0.25 else None
    good = [
        [
            each
            for each, path in folders.checkpoints(folder / f"region-{region}").items()
            if not manifest.damage(path)
        ]
        for region in range(2)
    ]

    common = set(good[0]) & set(good[1])

    def body(region: int, link: Link) -> Trainer:
        trainer = make(folder, link, save_strategy="no", logging_strategy="no")
        trainer.train(
            resume_from_checkpoint=True if step is None else str(checkpoint_of(folder, region, step))
        )
        return trainer

    words, logger = Words(), logging.getLogger("hf_cocodc")
    logger.addHandler(words)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            weights = weights_of(simulate(body, regions=2))
    except CheckpointError:
        ways = common if step is None else {step} & common
        said = traceback.format_exc()
        known = ways and "does not hold the number of the run" not in said
        return "refused", f"refused, though {ways} are good:\n{said}" if known else ""
    except Exception:
        return "traceback", traceback.format_exc()
    finally:
        logger.removeHandler(words)
    if torch.equal(torch.stack(weights), torch.stack(whole)):
        return "resumed exactly", ""
    if any("takes over" in line for line in words.said):
        return "taken over", f"taken over, though both regions have {common}" if common else ""
    return "other numbers", "\n".join(words.said)


def run_cases(numbers: range | list[int], folder: Path) -> tuple[Counter[str], dict[int, str]]:
    """How often each outcome came, and the faults by their cases."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        whole = prepare(folder / "whole")
    outcomes: Counter[str] = Counter()
    faults = {}
    for number in numbers:
        outcome, fault = case(number, folder / "whole", whole, folder / "again")
        outcomes[outcome] += 1
        if fault:
            faults[number] = f"{outcome}: {fault}"
    return outcomes, faults


def main() -> int:
    torch.set_num_threads(1)  # on models this small more threads only wait for each other
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.checkpoints", description=__doc__)
    parser.add_argument("--case", type=int, help="only the case of this number")
    parser.add_argument("--count", type=int, default=FULL, help=f"number of cases (default: {FULL})")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: 0)")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.count)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcomes, faults = run_cases(numbers if options.case is None else [options.case], Path(folder))
    for number, fault in faults.items():
        print(f"--- python -m tests.fuzz.checkpoints --case {number}\n{fault}")  # noqa: T201
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"{said}; {len(faults)} faults, {time.monotonic() - began:.0f} s")  # noqa: T201
    return min(len(faults), 1)


if __name__ == "__main__":
    sys.exit(main())
