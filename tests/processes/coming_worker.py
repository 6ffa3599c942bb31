"""One region of an elastic run: a plain loop, or Trainer. The tests kill it, stop it and start it again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.run.journal import read
from tests.processes.sharded_worker import ShardedTrainer, shard, whole
from tests.processes.worker import Tokens
from tests.toys import batch, llama

METHODS = {
    "diloco": OuterConfig(sync_interval=4),
    "diloco, 10 steps": OuterConfig(sync_interval=10),
    "streaming, 10 steps": OuterConfig(
        method="streaming", sync_interval=10, num_fragments=2, overlap_steps=2
    ),
    "seldom": OuterConfig(sync_interval=100),
    "eager": OuterConfig(method="eager", sync_interval=4),
    "streaming": OuterConfig(method="streaming", sync_interval=6, num_fragments=2, overlap_steps=2),
    # one for each layer and one for the embedding: transfers fly at every step
    "a fragment every step": OuterConfig(
        method="streaming", sync_interval=3, num_fragments=3, overlap_steps=2
    ),
}
HURRY = "hurry"
"""A file in the folder of a run whose regions shall go on to its end as fast as they can."""


def loop(
    folder: str,
    steps: int,
    step_s: float,
    method: str,
    least: int,
    saves: int = 0,
    hears_signals: bool = False,
    is_sharded: bool = False,
    **regions: Any,
) -> None:
    """A plain loop of `steps` inner steps, each of `step_s` seconds at least until HURRY lies in the folder.

    Its ranks hold replicas (DDP), or shards (FSDP2). It saves every `saves` steps, and asks to stop at SIGTERM if it
    `hears_signals`.
    """
    region, rank = int(os.environ["HF_COCODC_REGION"]), int(os.environ.get("RANK", 0))
    home = Path(folder)
    config = RegionConfig(min=least, run="elastic", **{"timeout_s": 10.0, **regions})
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    )
    if is_sharded:
        shard(accelerator)
    set_seed(7 * region + 1)
    model = llama(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    journal = home / f"region-{region}.jsonl"
    with OuterOptimizer(
        accelerator, model, optimizer, METHODS[method], config, max_steps=steps, journal=journal
    ) as outer:
        began_at = outer.inner_step
        if hears_signals:
            signal.signal(signal.SIGTERM, lambda *_: outer.ask_to_stop("SIGTERM"))
        while outer.inner_step < steps and not outer.should_stop:
            tokens = batch(region + 10 * rank, outer.inner_step)
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            take_time(home, step_s)
            if not rank:
                (home / f"step-{region}").write_text(str(outer.inner_step))
            outer.step()
            schedule.step()
            if saves and outer.inner_step % saves == 0:
                accelerator.save_state(str(home / f"saved-{region}"))
        if saves and outer.verdict == "stop":
            accelerator.save_state(str(home / f"saved-{region}"))
        lr, count, verdict = schedule.get_last_lr()[0], outer.inner_step, outer.verdict
    facts = {"lr": lr, "inner_step": count, "began_at": began_at, "verdict": verdict, "why": outer.why}
    _keep(home, region, rank, model, **facts)


class Slow(TrainerCallback):
    """Takes its time, and says where it is."""

    def __init__(self, home: Path, region: int, step_s: float) -> None:
        self._path, self._step_s = home / f"step-{region}", step_s
        self.seen: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        take_time(self._path.parent, self._step_s)
        self._path.write_text(str(state.global_step))
        self.seen.append(state.global_step)


def trainer(
    folder: str,
    steps: int,
    step_s: float,
    method: str,
    least: int,
    resume: bool = False,
    eval_every: int = 10,
    is_sharded: bool = False,
    **regions: Any,
) -> None:
    """The same with Trainer, which evaluates and saves on its way."""
    region, rank = int(os.environ["HF_COCODC_REGION"]), int(os.environ.get("RANK", 0))
    home = Path(folder)
    args = TrainingArguments(
        output_dir=str(home / "out"),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        save_strategy="steps",
        save_steps=10,
        eval_strategy="steps",
        eval_steps=eval_every,
        eval_on_start=True,
        metric_for_best_model="loss",
        load_best_model_at_end=True,
        logging_steps=5,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    config = RegionConfig(min=least, run="elastic", **{"timeout_s": 10.0, **regions})
    callback, slow = CoCoDCCallback(METHODS[method], config), Slow(home, region, step_s)
    data = Tokens(64 + 8 * region)
    _link_journal(home, region, rank)
    made = (ShardedTrainer if is_sharded else Trainer)(
        model=llama(layers=2),
        args=args,
        train_dataset=data,
        eval_dataset=Tokens(8),
        callbacks=[callback, slow],
    )
    made.train(resume_from_checkpoint=resume)
    assert callback.outer is not None
    facts = {"lr": made.lr_scheduler.get_last_lr()[0], "inner_step": made.state.global_step}
    facts |= {"began_at": slow.seen[0], "seen": slow.seen, "best": made.state.best_global_step}
    _keep(home, region, rank, made.model, **facts)


class Dealt(Trainer):
    """Takes its time for each micro-batch, and writes down which samples it has trained on, and whether they were dealt to it."""

    def __init__(self, home: Path, region: int, micro_batch_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._home, self._micro_batch_s, self._path = home, micro_batch_s, home / f"samples-{region}.txt"

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        take_time(self._home, self._micro_batch_s)
        [callback] = [each for each in self.callback_handler.callbacks if isinstance(each, CoCoDCCallback)]
        assert callback.outer is not None
        write_samples(self._path, callback.outer, inputs["number"])
        inputs = {name: value for name, value in inputs.items() if name != "number"}
        return super().training_step(model, inputs, *args, **kwargs)


class ShardedDealt(Dealt, ShardedTrainer):
    """The same over FSDP2."""


def write_samples(path: Path, outer: OuterOptimizer, numbers: torch.Tensor) -> None:
    """Add a line for a micro-batch: the inner step, the first sample of this region in it in the order of all that is dealt (-1
    if nothing is dealt to it yet), how many samples the region has in it, and all regions, and the micro-batch's samples.
    """
    part, step = outer.synchronizer.portion, outer.inner_step + 1
    line = [step, part.begins(step), part.samples, part.stride, *numbers.tolist()]
    with path.open("a") as file:
        file.write(" ".join(map(str, line)) + "\n")


class Numbered(Tokens):
    """Samples know their numbers."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "number": torch.tensor(index)}


MICRO_BATCH_S = 0.04
"""Seconds of a micro-batch at a speed of 1."""


def dealt(
    folder: str,
    steps: int,
    samples: int,
    speeds: Sequence[float],
    least: int,
    has_trainer: bool = False,
    is_sharded: bool = False,
    balance: str = "auto",
) -> None:
    """Samples are dealt to regions of different speed, in the order of the data: to Trainer, or to a plain loop."""
    region, rank = int(os.environ["HF_COCODC_REGION"]), int(os.environ.get("RANK", 0))
    home = Path(folder)
    config = RegionConfig(min=least, run="elastic", timeout_s=10.0, balance=balance, shards="dealt")
    micro_batch_s = MICRO_BATCH_S / speeds[region]
    body = _dealt_to_trainer if has_trainer else _dealt_to_loop
    model = body(home, region, rank, steps, Numbered(samples), config, micro_batch_s, is_sharded)
    _keep(home, region, rank, model)


def _dealt_to_loop(
    home: Path,
    region: int,
    rank: int,
    steps: int,
    data: Numbered,
    config: RegionConfig,
    micro_batch_s: float,
    is_sharded: bool,
) -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    if is_sharded:
        shard(accelerator)
    set_seed(7 * region + 1)
    model = llama(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=1))
    journal = home / f"region-{region}.jsonl"
    with OuterOptimizer(
        accelerator, model, optimizer, METHODS["diloco"], config, max_steps=steps, journal=journal
    ) as outer:
        for inputs in outer.batches(loader):
            if not rank:
                (home / f"step-{region}").write_text(str(outer.inner_step))
            take_time(home, micro_batch_s)
            write_samples(home / f"samples-{region}.txt", outer, inputs.pop("number"))
            with accelerator.accumulate(model):
                accelerator.backward(model(**inputs).loss)
                optimizer.step()
                optimizer.zero_grad()
                outer.step()
    return model


def _dealt_to_trainer(
    home: Path,
    region: int,
    rank: int,
    steps: int,
    data: Numbered,
    config: RegionConfig,
    micro_batch_s: float,
    is_sharded: bool,
) -> Any:
    args = TrainingArguments(
        output_dir=str(home / "out"),
        max_steps=steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        save_strategy="no",
        logging_steps=5,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    _link_journal(home, region, rank)
    made = (ShardedDealt if is_sharded else Dealt)(
        home,
        region,
        micro_batch_s,
        model=llama(layers=2),
        args=args,
        train_dataset=data,
        callbacks=[CoCoDCCallback(METHODS["diloco"], config), Slow(home, region, 0.0)],
    )
    made.train()
    return made.model


def _link_journal(home: Path, region: int, rank: int) -> None:
    """Name Trainer's journal as a loop names its own."""
    journal = home / f"region-{region}.jsonl"
    if not rank:
        journal.unlink(missing_ok=True)
        journal.symlink_to(home / "out" / f"region-{region}" / "cocodc" / "journal.jsonl")


def _keep(home: Path, region: int, rank: int, model: Any, **facts: Any) -> None:
    """Write down with what a rank has ended."""
    weights = torch.cat([whole(param).detach().reshape(-1) for param in model.parameters()])
    torch.save({"weights": weights, **facts}, home / f"{_name(region, rank)}.pt")


def take_time(home: Path, step_s: float) -> None:
    if not (home / HURRY).exists():
        time.sleep(step_s)


def _name(region: int, rank: int) -> str:
    return f"region-{region}-rank-{rank}" if rank else f"region-{region}"


def step_of(folder: Path, region: int) -> int:
    """The inner step that a region is at."""
    path = folder / f"step-{region}"
    text = path.read_text() if path.is_file() else ""
    return int(text) if text else -1


def events(folder: Path, region: int, *kinds: str) -> list[dict[str, Any]]:
    """The events of these kinds in a region's journal."""
    path = folder / f"region-{region}.jsonl"
    return [event for event in (read(path) if path.is_file() else []) if event["kind"] in kinds]
