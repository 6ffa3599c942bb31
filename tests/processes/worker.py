"""A region's script for the process tests: trains the toy Llama with Trainer or a plain loop, and writes what came out.

Arguments: trainer | loop, an output folder, the OuterConfig as JSON, and optionally `split` (one launch for all regions).
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__" and sys.argv[4:] == ["split"]:
    from hf_cocodc.run.split_world import split_world

    split_world(2)

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, OuterOptimizer, RegionConfig, region_shard
from hf_cocodc.engine.replicas import Engine
from hf_cocodc.link.base import Link
from hf_cocodc.link.tcp import TcpLink
from tests.toys import VOCAB, llama

STEPS = 11
BATCH = 4


class Tokens(Dataset):
    """Fixed random token rows."""

    def __init__(self, rows: int = 256, seed: int = 5) -> None:
        self.rows = torch.randint(1, VOCAB, (rows, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def outcome(synchronizer: Engine, model: torch.nn.Module) -> dict:
    return {
        "final": torch.cat([p.detach().reshape(-1) for p in model.parameters()]),
        "global_digest": synchronizer.global_digest(),
        "sends": synchronizer.totals.sends,
        "landings": synchronizer.totals.landings,
        "bytes_sent": synchronizer.totals.bytes_sent,
    }


class Watch(TrainerCallback):
    """Counts, in the middle of training, the ways out of this process."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS // 2:
            sockets = psutil.Process().net_connections(kind="tcp")
            self.connections = sum(socket.status == psutil.CONN_ESTABLISHED for socket in sockets)
            self.world_size = dist.get_world_size() if dist.is_initialized() else 0


def count_link_calls() -> Counter:
    """Count every call of the link from here on."""
    calls: Counter = Counter()
    for name in ("mean", "broadcast", "gather"):
        setattr(TcpLink, name, _counted(getattr(TcpLink, name), name, calls))
    return calls


def _counted(call: Any, name: str, calls: Counter) -> Any:
    def counted(*args: Any) -> Any:
        calls[name] += 1
        return call(*args)

    return counted


def with_trainer(folder: Path, config: OuterConfig, link: Link | None = None) -> dict:
    """Trainer with nothing but the callback (and a look at the process from outside)."""
    calls = count_link_calls() if link is None else Counter()
    callback, watch = CoCoDCCallback(config, RegionConfig(may_differ="batch"), link=link), Watch()
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
        logging_strategy="no",
        seed=3,
    )
    shard = region_shard(Tokens(), callback.region, callback.num_regions)
    trainer = Trainer(
        model=llama(callback.region), args=args, train_dataset=shard, callbacks=[callback, watch]
    )
    trainer.train()
    trainer.save_model()
    assert callback.outer is not None
    found = outcome(callback.outer.synchronizer, trainer.model)
    if link is None:
        found["promise"] = {"calls": calls, "connections": watch.connections, "world_size": watch.world_size}
    return found


def with_loop(config: OuterConfig, link: Link | None = None, accumulate: int = 1) -> dict:
    """A plain Accelerate loop that sees the batches that Trainer sees."""
    region, count = (
        (link.region, link.num_regions)
        if link
        else (int(os.environ["HF_COCODC_REGION"]), int(os.environ["HF_COCODC_REGIONS"]))
    )
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
    )
    model = llama(region)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, weight_decay=0.0)
    loader = DataLoader(region_shard(Tokens(), region, count), batch_size=BATCH // accumulate, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with OuterOptimizer(accelerator, model, optimizer, config, max_steps=STEPS, link=link) as outer:
        batches = iter(loader)
        while outer.inner_step < STEPS:
            with accelerator.accumulate(model):
                accelerator.backward(model(**next(batches)).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                outer.step()
    return outcome(outer.synchronizer, accelerator.unwrap_model(model))


def main(kind: str, folder: str, outer: str, *_: str) -> None:
    config = OuterConfig(**json.loads(outer))
    torch.set_num_threads(1)
    result = with_trainer(Path(folder), config) if kind == "trainer" else with_loop(config)
    name = f"region{os.environ['HF_COCODC_REGION']}-rank{os.environ.get('RANK', '0')}.pt"
    torch.save(result, Path(folder) / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
