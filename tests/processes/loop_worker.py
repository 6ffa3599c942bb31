"""A region's script that saves mid-round and trains on to the end, or loads what was saved and does the same.

Arguments: loop | trainer, an output folder, save | load | load first. The last one loads before the outer optimizer is made.
`go_back` loads in the middle of the run what it has saved itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, OuterOptimizer, region_shard
from hf_cocodc.parts.tensors.flat import local_shard
from tests.processes.sharded_worker import shard
from tests.processes.worker import Tokens
from tests.toys import batch, llama, params_of

STEPS = 21
BACK_AT = 20
SAVED_AT = 13  # fragment 0 is on its way from step 12 to step 14; an epoch has 8 or 4 steps
BATCH = 4
CONFIG = OuterConfig(method="streaming", sync_interval=4, num_fragments=2, overlap_steps=2)


def with_loop(folder: Path, region: int, mode: str) -> torch.nn.Module:
    """A plain loop with a learning rate schedule, dropout and several epochs."""
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    )
    set_seed(7 * region, device_specific=True)
    model = llama(layers=2, dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    # a loader without a generator of its own takes a number from dropout's whenever it begins, so also where it resumes
    loader = DataLoader(region_shard(Tokens(64)), batch_size=BATCH, shuffle=True, generator=torch.Generator())
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    if mode == "load first":
        accelerator.load_state(str(folder / f"region-{region}"))
    loaded = folder / f"region-{region}" if mode == "load first" else None
    with OuterOptimizer(accelerator, model, optimizer, CONFIG, max_steps=STEPS, loaded=loaded) as outer:
        if mode == "load":
            accelerator.load_state(str(folder / f"region-{region}"))
        epoch, done = divmod(outer.inner_step, len(loader))
        while outer.inner_step < STEPS:
            loader.set_epoch(epoch)
            for batch in skip_first_batches(loader, done):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                outer.step()
                if outer.inner_step == SAVED_AT and mode == "save":
                    accelerator.save_state(str(folder / f"region-{region}"))
                if outer.inner_step == STEPS:
                    break
            epoch, done = epoch + 1, 0
    return accelerator.unwrap_model(model)


def with_trainer(folder: Path, region: int, mode: str) -> torch.nn.Module:
    """Trainer, which does all of this by itself."""
    loads = mode == "load"
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        save_strategy="no" if loads else "steps",
        save_steps=SAVED_AT,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    trainer = Trainer(
        model=llama(layers=2, dropout=0.2),
        args=args,
        train_dataset=region_shard(Tokens(64)),
        callbacks=[CoCoDCCallback(CONFIG)],
    )
    checkpoint = folder / f"region-{region}" / f"checkpoint-{SAVED_AT}"
    trainer.train(resume_from_checkpoint=str(checkpoint) if loads else None)
    return trainer.model


def begin(lr: float, sharded: bool = False) -> tuple[Accelerator, Any, Any, int, int]:
    """What a plain loop begins with, and which region and rank this is."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    if sharded:
        shard(accelerator)
    model = llama(layers=2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=lr))
    return accelerator, model, optimizer, int(os.environ["HF_COCODC_REGION"]), accelerator.process_index


def train_once(
    accelerator: Accelerator, model: Any, optimizer: Any, outer: OuterOptimizer, tokens: torch.Tensor
) -> None:
    """One inner step, and what is due after it."""
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()
    outer.step()


def go_back(folder: str, settings: dict[str, Any], sharded: bool = False) -> None:
    """A plain loop saves at SAVED_AT, trains to BACK_AT, loads what it has saved, and trains to BACK_AT once more."""
    accelerator, model, optimizer, region, rank = begin(1e-2, sharded)
    config = OuterConfig(sync_interval=4, num_fragments=2, overlap_steps=2, **settings)
    home, seen = Path(folder) / f"region-{region}", list[tuple[torch.Tensor, int]]()
    with OuterOptimizer(accelerator, model, optimizer, config, max_steps=STEPS) as outer:
        while outer.inner_step < STEPS:
            train_once(accelerator, model, optimizer, outer, batch(2 * region + rank, outer.inner_step))
            if outer.inner_step == SAVED_AT and not seen:
                accelerator.save_state(str(home))
            if outer.inner_step == BACK_AT:
                own = torch.cat([local_shard(param).detach().flatten() for param in model.parameters()])
                seen.append((own, outer.synchronizer.global_digest()))
                if len(seen) == 1:
                    accelerator.load_state(str(home))
    torch.save({"seen": seen}, Path(folder) / f"region{region}-rank{rank}.pt")


def stop_twice(folder: str) -> None:
    """A plain loop that region 1 stops early; all load what was saved on the way, and it stops them once more."""
    accelerator, model, optimizer, region, rank = begin(1e-2)
    home, stops = Path(folder) / f"region-{region}", list[tuple[int, str | None, str]]()
    with OuterOptimizer(
        accelerator, model, optimizer, OuterConfig(sync_interval=500), max_steps=1000
    ) as outer:
        for asks_at in (20, 60):
            while not outer.should_stop:
                train_once(accelerator, model, optimizer, outer, batch(2 * region + rank, outer.inner_step))
                if outer.inner_step == SAVED_AT and not stops:
                    accelerator.save_state(str(home))
                if outer.inner_step == asks_at and region:
                    outer.ask_to_stop(f"asked at {asks_at}")
            stops.append((outer.inner_step, outer.verdict, outer.why))
            accelerator.load_state(str(home))
            assert not outer.should_stop
    torch.save({"stops": stops}, Path(folder) / f"region{region}-rank{rank}.pt")


def poisoned(folder: str, sharded: bool) -> None:
    """A plain loop in which one step of region 1 is not finite."""
    accelerator, model, optimizer, region, rank = begin(1e-3, sharded)
    config = OuterConfig(method="streaming", sync_interval=4, num_fragments=2, overlap_steps=1)
    journal = Path(folder) / f"region-{region}.jsonl"
    with OuterOptimizer(accelerator, model, optimizer, config, max_steps=30, journal=journal) as outer:
        while outer.inner_step < 30:
            tokens = batch(2 * region + rank, outer.inner_step)
            loss = model(input_ids=tokens, labels=tokens).loss
            bad = region == 1 and rank == 1 and outer.inner_step == 5
            accelerator.backward(loss * float("nan") if bad else loss)
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
    own = torch.cat([local_shard(param).detach().flatten() for param in model.parameters()])
    torch.save({"weights": own}, Path(folder) / f"region{region}-rank{rank}.pt")


def main(kind: str, folder: str, mode: str) -> None:
    torch.set_num_threads(1)
    region, rank = os.environ["HF_COCODC_REGION"], os.environ.get("RANK", "0")
    body = with_trainer if kind == "trainer" else with_loop
    model = body(Path(folder), int(region), mode)
    torch.save({"weights": params_of(model)}, Path(folder) / f"region{region}-rank{rank}.pt")
