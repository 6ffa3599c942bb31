"""A region of the matrix: every method, with Trainer and in a plain loop, over DDP or FSDP2, one after the other.

Arguments: ddp | fsdp, an output folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_cocodc import CoCoDCCallback, OuterConfig, OuterOptimizer
from hf_cocodc.errors import InputError
from tests.matrix import STEPS, arguments, config
from tests.processes.sharded_worker import ShardedTrainer, shard, whole
from tests.processes.worker import Tokens
from tests.toys import llama

Outcome = tuple[Tensor, int]


def region() -> int:
    return int(os.environ["HF_COCODC_REGION"])


def with_trainer(sharded: bool, outer: OuterConfig, folder: Path) -> Outcome:
    callback = CoCoDCCallback(outer)
    trainer = (ShardedTrainer if sharded else Trainer)(
        model=llama(region()),
        args=arguments(folder),
        train_dataset=Tokens(64, seed=region()),
        callbacks=[callback],
    )
    trainer.train()
    assert callback.outer is not None
    return final(trainer.model), callback.outer.synchronizer.totals.landings


def with_loop(sharded: bool, outer: OuterConfig, folder: Path) -> Outcome:
    accelerator = Accelerator(cpu=True)
    if sharded:
        shard(accelerator)
    model = llama(region())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Tokens(64, seed=region()), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with OuterOptimizer(accelerator, model, optimizer, outer, max_steps=STEPS) as regions:
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            regions.step()
            if regions.inner_step == STEPS:
                break
    return final(accelerator.unwrap_model(model)), regions.synchronizer.totals.landings


def final(model: torch.nn.Module) -> Tensor:
    return torch.cat([whole(param).detach().reshape(-1).float() for param in model.parameters()])


def main(kind: str, folder: Path) -> None:
    outcomes: dict[str, Outcome | str] = {}
    for method in ("diloco", "streaming", "eager", "co2", "dilocox", "cocodc"):
        for name, train in (("Trainer", with_trainer), ("plain loop", with_loop)):
            try:
                outcomes[f"{method}, {name}"] = train(kind == "fsdp", config(method), folder / method)
            except InputError as error:
                outcomes[f"{method}, {name}"] = str(error)
    torch.save(outcomes, folder / f"region{region()}-rank{os.environ.get('RANK', '0')}.pt")
