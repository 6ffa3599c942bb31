"""How long a user waits for the first inner step: `python -m tests.benchmarks.start` (two minutes on two cores).

Starts the quickstart's model, without its evaluations, by a script with Trainer alone and by `hf-cocodc train` with each number
of regions. Prints the seconds from the command to its first words, and to the end of the first inner step in all regions; and the
latter beside the script's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hf_cocodc.tools.bench.report import BenchReport, Row, write

RECIPE = "recipes/quickstart/diloco.yaml"
SETS = ("eval_strategy=no", "eval_on_start=false", "logging_steps=1", "save_strategy=no", "max_steps=1000")
BARE = """
import sys
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.training import building, data

class Say(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        print("first step", flush=True)
        control.should_training_stop = True

recipe = Recipe.load(sys.argv[1], sys.argv[2:])
tokenizer = building.tokenizer(recipe)
text = data.load_text("python-stdlib", None, None, "train", "text", False)
blocks = data.pack(text, tokenizer, recipe.data.block_size)
args = TrainingArguments(**{**recipe.training, "use_cpu": True})
model = building.model(recipe, len(tokenizer))
Trainer(model, args, default_data_collator, blocks, callbacks=[Say()]).train()
"""
POLL_S = 0.02


class Start(NamedTuple):
    """Seconds from the command to its first line, and to the first step of all regions."""

    words_s: float
    step_s: float


def bare(folder: Path) -> float:
    """Seconds until a script with Trainer alone has made its first step."""
    began = time.perf_counter()
    sets = [f"training.{each}" for each in SETS]
    command = [sys.executable, "-c", BARE, RECIPE, *sets, f"training.output_dir={folder}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "first step\n":
                took = time.perf_counter() - began
                process.kill()
                return took
    raise SystemExit("the script has ended before its first step")


def ours(folder: Path, regions: int) -> Start:
    """Start a run of so many regions on this machine, and end it after its first step."""
    sets = [f"training.{each}" for each in SETS] + [f"regions.count={regions}"]
    sets += [f"training.output_dir={folder}"]
    command = [sys.executable, "-m", "hf_cocodc", "train", RECIPE]
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, *(part for each in sets for part in ("--set", each))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        printed, words_s = b"", 0.0
        while not all(has_stepped(folder / f"region-{each}") for each in range(regions)):
            printed += process.stdout.read() or b""
            words_s = words_s or (time.perf_counter() - began if printed else 0.0)
            if process.poll() is not None:
                raise SystemExit(f"the run has ended before its first step:\n{printed.decode()}")
            time.sleep(POLL_S)
        step_s = time.perf_counter() - began
        process.send_signal(signal.SIGINT)
        os.set_blocking(process.stdout.fileno(), True)
        process.stdout.read()
    return Start(words_s, step_s)


def has_stepped(folder: Path) -> bool:
    journal = folder / "cocodc" / "journal.jsonl"
    if not journal.is_file():
        return False
    return any(
        json.loads(line)["kind"] == "log"
        for line in journal.read_text().splitlines(keepends=True)
        if line[-1] == "\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.start", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--regions", type=int, nargs="+", default=[2, 16], metavar="N")
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        alone = statistics.median(bare(Path(folder, f"bare-{each}")) for each in range(options.repeats))
        rows: list[Row] = [
            {"what": "Trainer alone", "first words, s": None, "first step, s": alone, "ratio": 1.0}
        ]
        for count in options.regions:
            starts = [ours(Path(folder, f"{count}-{each}"), count) for each in range(options.repeats)]
            words_s, step_s = (statistics.median(each) for each in zip(*starts, strict=True))
            rows.append(
                {
                    "what": f"{count} regions",
                    "first words, s": words_s,
                    "first step, s": step_s,
                    "ratio": step_s / alone,
                }
            )
    report = BenchReport("start to the first step", {"repeats": options.repeats}, rows)
    sys.stdout.write("\n".join([*report.lines(), ""]))
    if options.json:
        write(options.json, [report])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
