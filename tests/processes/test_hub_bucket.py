"""Regions that meet in a bucket of the Hub, as real processes, against a fake of the Hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cocodc.coordinator.server import serve_in_thread
from tests.net.fake_hub import BUCKET, fake_hub, reach
from tests.processes.forks import fork, region_env
from tests.toys import llama

STEPS, PATIENCE_S = 12, 240.0


def train(folder: str, hub: str) -> None:
    """One region: writes the digest of its parameters at the end."""
    from accelerate import Accelerator

    from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
    from hf_cocodc.parts.tensors.flat import digest

    if hub:
        reach(hub, pytest.MonkeyPatch())
    torch.set_num_threads(1)
    region = int(os.environ["HF_COCODC_REGION"])
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = llama(layers=2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    tokens = torch.arange(16).view(1, 16) + region
    config, regions = (
        OuterConfig(method="streaming", sync_interval=4, num_fragments=2, overlap_steps=1),
        RegionConfig(run="hub"),
    )
    with OuterOptimizer(accelerator, model, optimizer, config, regions, max_steps=STEPS) as outer:
        while not outer.should_stop:
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
    flat = torch.cat([param.detach().flatten() for param in model.parameters()])
    Path(folder, f"region-{region}.json").write_text(json.dumps(digest(flat)))


def together(folder: Path, hub: str, **env: str) -> list[Any]:
    """What both regions write."""
    folder.mkdir()
    log = folder / "log.txt"
    served = serve_in_thread()
    try:
        processes = [
            fork(train, str(folder), hub, log=log, **{**region_env(served, region, 2), **env})
            for region in (0, 1)
        ]
        for process in processes:
            process.join(PATIENCE_S)
            assert process.exitcode == 0, log.read_text()[-4000:]
    finally:
        served.close()
    return [json.loads((folder / f"region-{region}.json").read_text()) for region in (0, 1)]


@pytest.mark.slow
def test_regions_in_a_bucket_of_a_fake_hub_find_what_they_find_over_tcp(tmp_path: Path) -> None:
    with fake_hub() as hub:
        url = f"hf://buckets/{BUCKET}/meeting"
        through = together(tmp_path / "hub", hub.url, HF_COCODC_COORDINATOR=url)
        assert hub.asked["batch"] > 20
    assert through == together(tmp_path / "tcp", "")
    assert through[0] == through[1]
