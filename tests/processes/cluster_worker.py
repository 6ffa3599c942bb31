"""A region's script that trains with every method, one after the other: what it ends with, by method."""

from __future__ import annotations

from pathlib import Path

import torch

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.parts.tensors.flat import local_shard
from hf_cocodc.run.journal import read
from tests.methods import small
from tests.processes.loop_worker import begin, train_once
from tests.toys import batch

STEPS = 9
# of itself, cocodc sends as often as the measured times allow: two runs differ
SETTINGS = small({"cocodc": {"num_fragments": 2, "overlap_steps": 1, "sends_per_interval": 2}})


def main(folder: str, link: str, names: list[str], sharded: bool) -> None:
    found = {}
    for name in names:
        accelerator, model, optimizer, region, rank = begin(1e-2, sharded)
        config = OuterConfig(method=name, sync_interval=4, **SETTINGS[name])
        journal = Path(folder) / f"{name}-{region}.jsonl"
        regions = RegionConfig(link=link, run=name)
        with OuterOptimizer(
            accelerator, model, optimizer, config, regions, max_steps=STEPS, journal=journal
        ) as outer:
            while outer.inner_step < STEPS:
                train_once(accelerator, model, optimizer, outer, batch(2 * region + rank, outer.inner_step))
            sent = outer.synchronizer.totals.bytes_sent
        own = torch.cat([local_shard(param).detach().flatten() for param in model.parameters()])
        found[name] = {"weights": own, "bytes": sent}
        if not rank:
            found[name]["link"] = [event["link"] for event in read(journal) if event["kind"] == "link"]
    torch.save(found, Path(folder) / f"region{region}-rank{rank}.pt")
