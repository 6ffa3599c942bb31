"""A region that comes to its end in some way: trains the toy Llama with Trainer, and writes what came out.

Forked by the tests, or run as a script with a folder and the arguments of `live` as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig
from hf_cocodc.errors import RunStopped
from tests.processes.worker import Tokens
from tests.toys import llama, params_of

STEPS = 30
CONFIG = OuterConfig(method="streaming", sync_interval=4, num_fragments=2, overlap_steps=1)
LATE_S = 8.0


class Dry(IterableDataset):
    """Rows that are there only once."""

    def __init__(self, rows: int) -> None:
        self.rows = iter(Tokens(rows))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from self.rows


class At(TrainerCallback):
    """Does something at the beginning of inner step `step`; every step takes `step_s` longer."""

    def __init__(self, step: int, action: Callable[[TrainerControl], None] | None, step_s: float) -> None:
        self.step, self.action, self.step_s = step, action, step_s

    def on_step_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        time.sleep(self.step_s)
        if self.action is not None and state.global_step == self.step - 1:
            self.action(control)


def stop(control: TrainerControl) -> None:
    control.should_training_stop = True


def fail(control: TrainerControl) -> None:
    raise ValueError("the data is broken")


def interrupt_twice(control: TrainerControl) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def die(control: TrainerControl) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dawdle(control: TrainerControl) -> None:
    time.sleep(LATE_S)


ACTIONS = {"stop": stop, "fail": fail, "die": die, "interrupt twice": interrupt_twice, "dawdle": dawdle}


def live(
    folder: str,
    *,
    action: str | None = None,
    at: int = 6,
    on_rank: int = 0,
    step_s: float = 0.0,
    policy: str = "auto",
    least: int | None = None,
    timeout_s: float = 60.0,
    may_differ: str | None = None,
    resume: bool = False,
    rows: int = 22,
    dry: bool = False,
    lingers: bool = False,
    late_s: float = 0.0,
    patience_s: float | None = None,
    outer: dict[str, Any] | None = None,
    **training: Any,
) -> None:
    """Train this region, `late_s` late; `action` happens to its rank `on_rank` at the beginning of inner step `at`.

    `patience_s` is the time-out of the region's own process group; Trainer's `ddp_timeout` has no effect on CPUs.
    """
    time.sleep(late_s)
    if patience_s is not None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=patience_s))
    rank = int(os.environ.get("RANK", "0"))
    happens = ACTIONS[action] if action and rank == on_rank else None
    regions = RegionConfig(when_one_ends=policy, min=least, timeout_s=timeout_s, may_differ=may_differ)
    callback = CoCoDCCallback(OuterConfig(**outer) if outer else CONFIG, regions)
    common = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "use_cpu": True}
    common |= {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    common |= {"dataloader_pin_memory": False, "accelerator_config": {"dispatch_batches": False}}
    data: Dataset = Dry(rows) if dry else Tokens(rows, seed=callback.region)
    trainer = Trainer(
        model=llama(layers=2),
        args=TrainingArguments(output_dir=folder, **(common | training)),
        train_dataset=data,
        eval_dataset=Tokens(2) if "eval_strategy" in training else None,
        callbacks=[callback, At(at, happens, step_s)],
    )
    error = ""
    try:
        trainer.train(resume_from_checkpoint=resume)
    except (RunStopped, RuntimeError, ValueError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    except KeyboardInterrupt:
        if not lingers:
            raise
        time.sleep(60)
    assert callback.outer is not None, error
    found = {"step": callback.outer.inner_step, "finished": callback.outer.finished, "error": error}
    found["weights"] = params_of(trainer.model)
    torch.save(found, Path(folder) / f"region{callback.region}-rank{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    live(sys.argv[1], **json.loads(sys.argv[2]))
