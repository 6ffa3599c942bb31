"""A region of DDP ranks whose gradients are constant: rank k of region r has the gradient and the tokens that `TRAINED` says."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from hf_cocodc import OuterConfig, OuterOptimizer

STEPS = 6
TRAINED = {(0, 0): (1.0, 10), (0, 1): (2.0, 30), (1, 0): (-3.0, 5), (1, 1): (5.0, 0)}


def main(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    region, rank = int(os.environ["HF_COCODC_REGION"]), accelerator.process_index
    gradient, tokens = TRAINED[region, rank]
    bare = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        bare.weight.zero_()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=1.0))
    config = OuterConfig(sync_interval=3, outer_lr=1.0, outer_momentum=0.0, weights="tokens")
    with OuterOptimizer(accelerator, model, optimizer, config, max_steps=STEPS) as outer:
        while outer.inner_step < STEPS:
            accelerator.backward(model(torch.full((1, 3), gradient)).sum())
            optimizer.step()
            optimizer.zero_grad()
            outer.step(tokens=tokens)
    weight = accelerator.unwrap_model(model).weight.detach().clone()
    torch.save({"weight": weight}, Path(folder) / f"region{region}-rank{rank}.pt")
