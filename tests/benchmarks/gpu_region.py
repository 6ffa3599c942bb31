"""One region of the comparison on a GPU: `python -m tests.benchmarks.gpu_region PLACE`. The driver starts it.

It imports slow modules once, and runs one row after the other in the same process: each is a line of JSON on standard input, and
its answer one on standard output. What else is printed goes to a file. After a row that failed the driver starts a new process.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
import traceback
from copy import copy
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig
from hf_cocodc.engine.account import Totals
from hf_cocodc.engine.replicas import Engine
from hf_cocodc.parts.tensors.memory import HOST
from hf_cocodc.tools.doctor.needs import most_in_flight
from tests.benchmarks.timing import now

from . import codec, outer
from .contestants import torchft_around
from .worker import Gate
from .workload import Region

MANY = 10**6
"""Samples that no run of this program comes to the end of."""


class RandomTokens(Dataset):
    """Blocks of random tokens, others in each region."""

    def __init__(self, vocabulary: int, block: int, region: int) -> None:
        self._vocabulary, self._block, self._region = vocabulary, block, region

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(7 * index + self._region)
        tokens = torch.randint(self._vocabulary, (self._block,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class Clock:
    """What happens in whole rounds of inner steps, those after `begin` up to `end`, and inside `ours`, a callback among them.

    The device is waited for at `begin` and at `end` alone. Between them the clock is the host's, which Trainer keeps with the
    device: it looks at each loss.
    """

    def __init__(self, begin: int, end: int, device: torch.device, ours: CoCoDCCallback | None) -> None:
        self._begin, self._end, self._device, self._ours = begin, end, device, ours
        self._has_gpu = device.type == "cuda"
        self._before = torch.cuda.memory_allocated() if self._has_gpu else 0
        self._entered = 0.0
        self._totals: list[Totals] = []
        self.ended_at: list[float] = []
        self.held_s = 0.0
        self.peak = self.event_peak = self.resting = 0
        """Most bytes in training, most bytes inside the callback, and bytes before the last time."""

    @property
    def synchronizer(self) -> Engine | None:
        return None if self._ours is None or self._ours.outer is None else self._ours.outer.synchronizer

    @property
    def counted(self) -> tuple[float, int]:
        """The seconds that our own figures say training was blocked, and the bytes sent."""
        if not self._totals:
            return 0.0, 0
        first, last = self._totals
        return last.blocked_s - first.blocked_s, last.bytes_sent - first.bytes_sent

    def enter(self, step: int) -> None:
        """The callback is about to begin."""
        if self._has_gpu:
            if self._begin < step <= self._end:
                self.peak = max(self.peak, torch.cuda.max_memory_allocated() - self._before)
            self.resting = torch.cuda.memory_allocated() - self._before
            torch.cuda.reset_peak_memory_stats()
        self._entered = time.perf_counter()

    def leave(self, step: int) -> None:
        """The callback has ended."""
        left = time.perf_counter()
        if not self._begin <= step <= self._end:
            return
        if step > self._begin:
            self.held_s += left - self._entered
            if self._has_gpu:
                self.event_peak = max(self.event_peak, torch.cuda.max_memory_allocated() - self._before)
        if step in (self._begin, self._end):
            left = now(self._device)
            if self.synchronizer is not None:
                self._totals.append(copy(self.synchronizer.totals))
        self.ended_at.append(left)


class Before(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock.enter(state.global_step)


class After(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock.leave(state.global_step)


def train(place: Region, row: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Train with Trainer: alone, with our callback, or with torchft around its optimizer."""
    shape, (begin, end) = row["shape"], row["steps"]
    torch.manual_seed(0)
    with device:  # there the first weights take no time
        model = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False))
    args = TrainingArguments(
        str(place.folder / row["row"]),
        max_steps=end + 1,  # the last step ends the run, which is not measured
        per_device_train_batch_size=row["batch"],
        learning_rate=4e-4,
        bf16=device.type == "cuda",
        use_cpu=device.type != "cuda",
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    ours = None
    if row["outer"] is not None:
        regions = RegionConfig(
            region=place.region,
            count=place.count,
            coordinator=row["coordinator"],
            run=row["row"],
            link=row["link"],
        )
        ours = CoCoDCCallback(OuterConfig(sync_interval=row["interval"], **row["outer"]), regions)
    clock = Clock(begin, end, device, ours)
    callbacks = [Before(clock), *([] if ours is None else [ours]), After(clock)]
    data = RandomTokens(shape["vocab_size"], shape["max_position_embeddings"], place.region)
    trainer = Trainer(model, args, train_dataset=data, callbacks=callbacks)
    alive: Any = None
    if row["torchft"] is not None:
        inner = trainer.create_optimizer()
        alive = torchft_around(place, model, inner, row["interval"], **row["torchft"])
    Gate(place, row["row"]).meet("start")
    trainer.train()
    del alive
    took = [after - before for before, after in itertools.pairwise(clock.ended_at)]
    counted_s, sent = clock.counted
    return {
        "parameters": sum(param.numel() for param in model.parameters()),
        "step_s": sum(took) / len(took),
        "longest_s": max(took),
        "seconds": took,
        "held_s": clock.held_s,
        "counted_s": counted_s,
        "sent": sent,
        "peak": clock.peak,
        "event_peak": clock.event_peak,
        "resting": clock.resting,
        "forecast": None if clock.synchronizer is None else forecast(clock.synchronizer, device),
    }


def forecast(synchronizer: Engine, device: torch.device) -> int:
    """The bytes that `hf-cocodc doctor` expects outer state and transfers to take on the model's device."""
    flying = most_in_flight(synchronizer.method, len(synchronizer.facts))
    each = synchronizer.memory()[device]
    return each.kept + flying * each.per_transfer + each.staged


def about(device: torch.device) -> dict[str, Any]:
    """The card, its free memory, and the versions."""
    has_gpu = device.type == "cuda"
    return {
        "card": torch.cuda.get_device_name() if has_gpu else None,
        "free": torch.cuda.mem_get_info()[0] if has_gpu else None,
        "versions": {
            "torch": torch.__version__,
            "CUDA": torch.version.cuda,
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
        },
    }


def run(place: Region, row: dict[str, Any], device: torch.device) -> Any:
    match row["kind"]:
        case "about":
            return about(device)
        case "train":
            return train(place, row, device)
        case "codecs":
            return list(codec.measure(row["values"], row["repeat"], device=device).rows)
        case "outer":
            threads = [torch.get_num_threads()]
            return list(outer.measure(row["values"], row["repeat"], threads, device=device).rows)
    raise ValueError(f"{row['kind']!r} is no kind of row")


def forget(device: torch.device) -> None:
    """Leave nothing of a row to the next one."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    spec = json.loads(sys.argv[1])
    folder = Path(spec["folder"])
    answers = os.fdopen(os.dup(1), "w")
    log = os.open(folder / f"log.{spec['region']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else HOST
    for line in sys.stdin:
        row = json.loads(line)
        place = Region(spec["region"], row["regions"], folder, "127.0.0.1", "127.0.0.1", row["port"])
        try:
            answer = {"found": run(place, row, device)}
            forget(device)
        except BaseException as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # whatever threads are left


if __name__ == "__main__":
    main()
