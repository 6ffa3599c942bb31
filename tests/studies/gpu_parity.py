"""Is a model of 35M parameters as good? DiLoCo beside data-parallel training on one GPU: `python -m tests.studies.gpu_parity`.

It trains a Llama on a real text, made from this machine's own packages and manuals (`corpus`), in 1, 2 and 4 regions of one
process (`simulate`) and data-parallel, on the same tokens in the same order, and puts the losses beside those of DiLoCo's
scaling laws (arXiv 2503.09799, Table 4). Nothing is downloaded. Every run is written as soon as it is finished: stopped at any
time, the same command goes on. Seed comes after seed, so that all arms have the same ones.

`--size tiny` rehearses all of it on CPUs in a minute; its figures say nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import hf_cocodc
from hf_cocodc.errors import InputError
from hf_cocodc.settings.outer import AUTO_VALUES
from hf_cocodc.settings.reading import override_key
from tests.benchmarks.gpu import llama
from tests.studies import training
from tests.studies.corpus import Corpus, corpus_of, documents, machine, standard_library
from tests.studies.lines import Lines, Result, key_of
from tests.studies.spec import Settings
from tests.studies.statistics import Interval, interval, tail_loss

NAME = "gpu_parity"
RESULTS = Path(__file__).parents[2] / "docs" / "evidence" / "studies"
REHEARSAL = Path("runs") / NAME
PARALLEL = "data-parallel"
REGIONS = {"one region": 1, "two regions": 2, "four regions": 4}
PAPER = {1: "-0.4 to -0.1", 2: "+0.7", 4: "+2.0"}
"""Percent of the loss of data-parallel training, in 2503.09799: by regions, H = 30, 35M parameters (M = 1: of all sizes)."""
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Size:
    """All that decides how long a run takes.

    Attributes:
        shape: the Llama's width, hidden size, layers and heads.
        vocabulary: tokens.
        trained_on: characters from which the tokenizer is made.
        least, most: bytes of text.
        training: as in a recipe, with the batch of all regions together.
        block: tokens of a sequence.
        eval_blocks: held-out sequences.
        interval: H.
        seeds: how many.
        minutes: no run starts that would not be finished then.
    """

    shape: tuple[int, int, int, int]
    vocabulary: int
    trained_on: int
    least: int
    most: int
    training: dict[str, Any]
    block: int
    eval_blocks: int
    interval: int
    seeds: int
    minutes: float


def _training(steps: int, batch: int, rate: float, eval_steps: int, **more: Any) -> dict[str, Any]:
    return {
        "max_steps": steps,
        "eval_steps": eval_steps,
        "per_device_train_batch_size": batch,
        "learning_rate": rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": steps // 10,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        **more,
    }


SIZES = {
    "full": Size(
        shape=(512, 1408, 8, 8),
        vocabulary=8192,
        trained_on=10_000_000,
        least=200_000_000,
        most=220_000_000,
        training=_training(960, 32, 1e-3, 60, bf16=True),
        block=512,
        eval_blocks=128,
        interval=30,
        seeds=3,
        minutes=8.0,
    ),
    "tiny": Size(
        shape=(32, 64, 2, 2),
        vocabulary=512,
        trained_on=300_000,
        least=800_000,
        most=1_000_000,
        training=_training(40, 8, 5e-3, 5),
        block=32,
        eval_blocks=32,
        interval=5,
        seeds=2,
        minutes=math.inf,
    ),
}


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def settings_of(size: Size, arm: str, seed: int, overrides: Sequence[str]) -> Settings:
    """The settings of one run. Overrides of the outer optimizer do not concern data-parallel training."""
    parallel = arm == PARALLEL
    regions = max(REGIONS.values()) if parallel else REGIONS[arm]
    base: Settings = {
        "model": {
            "config": {
                "model_type": "llama",
                **llama(*size.shape, size.vocabulary, size.block),
                "bos_token_id": 0,
                "eos_token_id": 0,
            }
        },
        "tokenizer": {"name_or_path": "corpus"},
        "data": {"path": "corpus", "block_size": size.block, "eval_blocks": size.eval_blocks},
        "training": size.training,
        "outer": {"method": "diloco", "sync_interval": size.interval, **AUTO_VALUES["diloco"]},
        "regions": {"count": regions},
        "study": {"data_parallel": parallel, "streams": max(REGIONS.values())},
    }
    settings = copy.deepcopy(base)
    for each in overrides:
        if not (parallel and each.startswith("outer.")):
            override_key(settings, each)
    settings["seed"], most = seed, max(REGIONS.values())
    blocks = settings["training"]["per_device_train_batch_size"]
    if blocks % most:
        raise InputError(
            f"training.per_device_train_batch_size={blocks}: it is the batch of all regions together here, and must be a "
            f"multiple of {most}."
        )
    settings["training"]["per_device_train_batch_size"] = blocks // regions
    return settings


class Parity:
    """The runs, those that are there and those that are to be made.

    Args:
        size: of them.
        corpus: the text.
        device: to train on.
        lines: the results so far; takes the new ones.
        seeds: how many.
        overrides: of the settings, SECTION.KEY=VALUE.
        until: moment of `time.monotonic`: no run starts that would not be finished then.
    """

    def __init__(
        self,
        size: Size,
        corpus: Corpus,
        device: torch.device,
        lines: Lines,
        seeds: int,
        overrides: Sequence[str],
        until: float,
    ) -> None:
        self._corpus, self._device, self._lines, self._until = corpus, device, lines, until
        self.made = {
            "hf_cocodc": hf_cocodc.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "text": corpus.digest,
            "tokens": corpus.tokens_digest,
        }
        self.runs = {
            (arm, seed): settings_of(size, arm, seed, overrides)
            for seed in range(1, seeds + 1)
            for arm in (PARALLEL, *REGIONS)
        }
        for settings in self.runs.values():
            # refuses at once what could only fail later
            training.Run(settings, corpus.tokens, device).method()

    def results(self) -> dict[str, dict[int, Result]]:
        """By arm and seed, what is there."""
        found: dict[str, dict[int, Result]] = {arm: {} for arm in (PARALLEL, *REGIONS)}
        for (arm, seed), settings in self.runs.items():
            if (key := key_of(settings, self.made)) in self._lines:
                found[arm][seed] = self._lines[key]
        return found

    def make(self) -> bool:
        """Make what is not there yet; false if the time did not suffice."""
        here = self.results()
        waiting = [place for place in self.runs if place[1] not in here[place[0]]]
        say(f"{len(self.runs) - len(waiting)} of {len(self.runs)} runs are there")
        for number, place in enumerate(waiting):
            if time.monotonic() + (self._forecast_s(place[0]) or 0.0) >= self._until:
                left = len(waiting) - number
                say(
                    f"stopped before {_told(place)}: {left} runs are still to be made. The same command goes on."
                )
                return False
            self._make(place, waiting[number + 1 :])
        return True

    def _make(self, place: tuple[str, int], later: Sequence[tuple[str, int]]) -> None:
        settings, began = self.runs[place], time.monotonic()
        steps = settings["training"]["max_steps"]

        said: set[int] = set()

        def watch(step: int, loss: float) -> None:
            if step in said:  # the finished model, at the step of the last evaluation
                return
            said.add(step)
            took = time.monotonic() - began
            run_s = took * steps / step
            left = (run_s - took + sum(self._forecast_s(arm) or run_s for arm, _ in later)) / 60
            step_ms = 1e3 * took / step
            say(
                f"{_told(place)}: step {step} of {steps}, loss {loss:.4f}, {step_ms:.0f} ms a step; {left:.1f} minutes to go"
            )

        result = training.run(settings, self._corpus.tokens, self._device, watch)
        result["took_s"] = round(time.monotonic() - began, 2)
        self._lines.add(settings, self.made, result)

    def _forecast_s(self, arm: str) -> float | None:
        """Seconds of a run of an arm, from those that were made; None if there are none of any arm."""
        took = {name: [each["took_s"] for each in seeds.values()] for name, seeds in self.results().items()}
        known = took[arm] or [max(each) for each in took.values() if each]
        return max(known, default=None)


def _told(place: tuple[str, int]) -> str:
    return f"seed {place[1]}, {place[0]}"


def check_pairs(results: dict[str, dict[int, Result]]) -> None:
    """Refuse to compare runs of a seed that did not begin alike. Raises InputError."""
    for seed in {seed for each in results.values() for seed in each}:
        starts = {arm: each[seed]["weights"] for arm, each in results.items() if seed in each}
        if len(set(starts.values())) > 1:
            raise InputError(f"seed {seed}: the arms differ in their first weights: {starts}.")


def rows_of(results: dict[str, dict[int, Result]]) -> list[dict[str, Any]]:
    """A row for each arm that has results."""
    check_pairs(results)
    losses = {
        arm: {seed: loss for seed, each in seeds.items() if math.isfinite(loss := tail_loss(each["curve"]))}
        for arm, seeds in results.items()
    }
    rows = []
    for arm, seeds in results.items():
        if not seeds:
            continue
        pairs = [seed for seed in losses[arm] if seed in losses[PARALLEL]]
        more = [100 * (losses[arm][seed] / losses[PARALLEL][seed] - 1) for seed in pairs]
        rows.append(
            {
                "arm": arm,
                "seeds": sorted(seeds),
                "diverged": len(seeds) - len(losses[arm]),
                "loss": _interval(list(losses[arm].values())),
                "more_percent": _interval(more) if arm != PARALLEL else None,
                "paper_percent": PAPER.get(REGIONS.get(arm, 0)),
                "megabytes": next(iter(seeds.values()))["bytes"] / 1e6 if REGIONS.get(arm) != 1 else None,
                "seconds": mean(each["took_s"] for each in seeds.values()),
            }
        )
    return rows


def _interval(values: list[float]) -> Interval | None:
    return interval(values, CONFIDENCE) if values else None


def page(parity: Parity, corpus: Corpus, command: str) -> str:
    """The table, in Markdown."""
    results = parity.results()
    settings = parity.runs["two regions", 1]
    run, outer = settings["training"], settings["outer"]
    params = next(each["params"] for seeds in results.values() for each in seeds.values())
    batch = run["per_device_train_batch_size"] * 2
    block = settings["data"]["block_size"]
    tokens = run["max_steps"] * batch * block
    per_token = corpus.num_characters / (len(corpus.tokens.train) + len(corpus.tokens.held_out))
    lines = [
        "# Parity on one GPU",
        "",
        *(["**A rehearsal: its figures say nothing.**", ""] if params < 1e6 else []),
        f"`{command}`, on {parity.made['device']}, hf_cocodc {parity.made['hf_cocodc']}, torch {parity.made['torch']}.",
        "",
        f"- Llama, {params / 1e6:.2f}M parameters, {run['max_steps']} inner steps of {batch} sequences of {block} tokens in all "
        f"arms: {tokens / 1e6:.2f}M tokens, {tokens / params:.2g} a parameter. The paper has 20.",
        f"- H = {outer['sync_interval']}, {run['max_steps'] // outer['sync_interval']} rounds, outer_lr {outer['outer_lr']}, "
        f"outer_momentum {outer['outer_momentum']}, inner learning rate {run['learning_rate']}. Nothing was swept.",
        f"- Text: {corpus.num_characters / 1e6:.1f}M characters of packages and manuals, {per_token:.2f} a token. SHA-256 of its "
        f"documents: `{corpus.digest}`. CRC-32 of its tokens: `{corpus.tokens_digest}`.",
        "- Loss: in nats a token, of the global model on held-out documents, averaged over the last sixth of the evaluations. "
        f"Intervals: {100 * CONFIDENCE:.0f} %, Student's t over seeds; *more* is of runs of the same seed.",
        "- MB sent: by region 0. Data-parallel: an all-reduce of fp32 gradients among four regions in every inner step.",
        "",
        "| arm | n | loss | more than data-parallel, % | 2503.09799, % | MB sent | seconds a run |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows_of(results):
        diverged = f" ({row['diverged']} diverged)" if row["diverged"] else ""
        sent = "" if row["megabytes"] is None else f"{row['megabytes']:.3g}"
        lines.append(
            f"| {row['arm']} | {len(row['seeds'])}{diverged} | {_cell(row['loss'], '.4f')} | "
            f"{_cell(row['more_percent'], '+.2f')} | {row['paper_percent'] or ''} | {sent} | {row['seconds']:.0f} |"
        )
    return "\n".join([*lines, ""])


def _cell(value: Interval | None, form: str) -> str:
    if value is None:
        return ""
    half = "" if value.half is None else f" ± {value.half:{form.removeprefix('+')}}"
    told = f"{value.mean:{form}}{half}"
    return f"**{told}**" if "+" in form and value.decides else told


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.studies.{NAME}", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--seeds", type=int, metavar="N", help="default: 3; tiny: 2")
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="start no run that would end later (default: 8; tiny: no limit)",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        default=[],
        metavar="FOLDER",
        help="more folders with source and documentation",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="change a setting, as in a recipe; such runs are others, and are kept beside the rest",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help=f"default: docs/evidence/studies; tiny, or with --set: {REHEARSAL}",
    )
    options = parser.parse_args(arguments)
    try:
        return _parity(options, time.monotonic())
    except InputError as error:
        say(f"error: {error}")
        return error.exit_code


def _parity(options: argparse.Namespace, began: float) -> int:
    size = SIZES[options.size]
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no GPU here. Use --device cpu, with --size tiny.")
    if device.type == "cpu":
        torch.set_num_threads(1)  # as all studies: threads that spin take the core of those that compute
    seeds = size.seeds if options.seeds is None else options.seeds
    minutes = size.minutes if options.minutes is None else options.minutes
    if seeds < 1:
        raise InputError(f"--seeds {seeds}: it must be at least 1.")
    output = options.output or (RESULTS if options.size == "full" and not options.overrides else REHEARSAL)
    folders = [*(machine() if options.size == "full" else standard_library()), *options.text]
    say("reading the text of this machine")
    found = documents(folders, size.least, size.most)
    say(
        f"text: {len(found.train)} documents to train on, {len(found.held_out)} held out, {found.size / 1e6:.1f}M characters "
        f"(found: {found.found / 1e6:.0f} MB), SHA-256 {found.digest}"
    )
    corpus = corpus_of(
        found, size.vocabulary, size.trained_on, output if options.size == "tiny" else REHEARSAL, say
    )
    say(
        f"tokens: {len(corpus.tokens.train)} to train on, {len(corpus.tokens.held_out)} held out, CRC-32 {corpus.tokens_digest}"
    )
    lines = Lines(output / f"{NAME}.jsonl", say)
    parity = Parity(size, corpus, device, lines, seeds, options.overrides, began + 60 * minutes)
    finished = parity.make()
    lines.close()
    if any(parity.results().values()):
        _write(parity, corpus, output, options)
    say(f"{(time.monotonic() - began) / 60:.1f} minutes{'' if finished else '; not all runs are made'}")
    return 0


def _write(parity: Parity, corpus: Corpus, output: Path, options: argparse.Namespace) -> None:
    words = ["python -m tests.studies.gpu_parity", *(["--size tiny"] if options.size == "tiny" else [])]
    words += [f"--set {each}" for each in options.overrides]
    text = page(parity, corpus, " ".join(words))
    rows = [
        {name: value._asdict() if isinstance(value, Interval) else value for name, value in row.items()}
        for row in rows_of(parity.results())
    ]
    content = {
        "made": parity.made,
        "characters": corpus.num_characters,
        "settings": parity.runs["two regions", 1],
        "rows": rows,
    }
    (output / f"{NAME}.md").write_text(text, encoding="utf-8")
    (output / f"{NAME}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    say(f"\n{text}\nwritten: {output / NAME}.md, .json and .jsonl")


if __name__ == "__main__":
    sys.exit(main())
