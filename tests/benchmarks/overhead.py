"""What the callback costs in an inner step in which nothing is due: `python -m tests.benchmarks.overhead` (seconds).

Trains a Llama of 600 parameters with Trainer, alone and with the callback of a single region, in turns. In the fifth step it
calls what Trainer calls in every step again and again, and prints the microseconds of each call.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig
from hf_cocodc.tools.bench.report import BenchReport, Row, write

EVENTS = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
MANY = 10**6
CALLS, REPEATS, TURNS = 1000, 5, 5
_SAMPLE = {"input_ids": torch.arange(8), "labels": torch.arange(8)}


class Probe(TrainerCallback):
    """Measures in the fifth step, and ends the training."""

    trainer: Trainer

    def __init__(self) -> None:
        self.microseconds: dict[str, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != 5:
            return
        trainer, handler = self.trainer, self.trainer.callback_handler
        handler.remove_callback(self)
        for event in EVENTS:
            tell = getattr(handler, event)
            self.microseconds[event] = fastest(partial(tell, args, state, control))
        batch = {name: values[None] for name, values in _SAMPLE.items()}
        samples = lambda: trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))  # noqa: E731
        self.microseconds["get_batch_samples"] = fastest(samples)
        nothing = [None] * 6
        due = lambda: trainer._maybe_log_save_evaluate(*nothing, start_time=0.0)  # noqa: E731
        self.microseconds["_maybe_log_save_evaluate"] = fastest(due)
        raise Measured


class Measured(Exception):
    """The training may end."""


def fastest(call: Callable[[], Any]) -> float:
    """Microseconds of a call: the fastest of several repeats, because other programs only make it slower."""
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - began) / CALLS * 1e6)
    return min(found)


def measure(folder: Path, *callbacks: TrainerCallback) -> dict[str, float]:
    probe = Probe()
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    args = TrainingArguments(
        str(folder), max_steps=MANY, logging_steps=MANY, per_device_train_batch_size=1, use_cpu=True
    )
    args.report_to, args.save_strategy, args.disable_tqdm = [], "no", True
    probe.trainer = Trainer(
        LlamaForCausalLM(config), args, train_dataset=[_SAMPLE] * 100, callbacks=[*callbacks, probe]
    )
    with contextlib.suppress(Measured):
        probe.trainer.train()
    return probe.microseconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.overhead", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    outer, found = OuterConfig(method="diloco", sync_interval=MANY), []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(TURNS):
            found.append(measure(Path(folder, f"alone-{turn}")))
            callback = CoCoDCCallback(outer, RegionConfig(region=0, count=1))
            found.append(measure(Path(folder, f"ours-{turn}"), callback))
    alone, ours = (
        {name: min(each[name] for each in half) for name in half[0]} for half in (found[::2], found[1::2])
    )
    rows: list[Row] = [
        {"called in every step": name, "Trainer alone, us": alone[name], "with the callback, us": ours[name]}
        for name in alone
    ]
    total = sum(ours.values()) - sum(alone.values())
    report = BenchReport(
        "the callback in an inner step in which nothing is due",
        {"calls": CALLS, "repeats": REPEATS, "turns": TURNS},
        rows,
        notes=[f"The callback adds {total:.1f} us to a step."],
        formats={"Trainer alone, us": ".1f", "with the callback, us": ".1f"},
    )
    sys.stdout.write("\n".join([*report.lines(), ""]))
    if options.json:
        write(options.json, [report])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
