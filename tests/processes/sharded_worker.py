"""A region of the sharded tests: Trainer over FSDP2, or over DDP to compare with, and what came out.

Arguments: fsdp | ddp, an output folder, the OuterConfig as JSON, FULL | SHARDED, the steps, the step to stop at (0:
none), and more arguments of Trainer as JSON.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, OuterOptimizer
from hf_cocodc.errors import HandshakeError, InputError, RunStopped
from tests.processes.worker import Tokens
from tests.run.test_resuming import At
from tests.toys import batch, llama


def shard(accelerator: Accelerator, state_dict_type: str = "FULL_STATE_DICT") -> None:
    """Let a fresh Accelerator shard with FSDP2 on CPUs; it takes FSDP for DDP where there is no device."""
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        state_dict_type=state_dict_type,
        reshard_after_forward=True,
    )


class ShardedTrainer(Trainer):
    """A Trainer that shards on CPUs."""

    state_dict_type = "FULL_STATE_DICT"

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        shard(self.accelerator, self.state_dict_type)
        self.is_fsdp_enabled = True


def whole(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


def main(kind: str, folder: Path, outer: str, how: str, steps: int, stop: int, training: str = "{}") -> None:
    config = OuterConfig(**json.loads(outer))
    ShardedTrainer.state_dict_type = f"{how}_STATE_DICT"
    callback = CoCoDCCallback(config)
    given = {"learning_rate": 1e-3, "save_strategy": "steps", "save_steps": steps} | json.loads(training)
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        **given,
        lr_scheduler_type="constant",
        report_to="none",
        eval_strategy="steps",
        eval_steps=3,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    trainer = (ShardedTrainer if kind == "fsdp" else Trainer)(
        model=llama(callback.region),
        args=args,
        train_dataset=Tokens(256, seed=callback.region),
        eval_dataset=Tokens(8, seed=9),
        callbacks=[callback],
    )
    if stop and (callback.region, trainer.args.process_index) == (0, 1):
        trainer.add_callback(At(stop, lambda control: callback._note_signal("SIGTERM")))
    result: dict[str, Any] = {}
    try:
        trainer.train(resume_from_checkpoint=True)
        result["final"] = torch.cat([whole(p).detach().reshape(-1) for p in trainer.model.parameters()])
        trainer.save_model()
    except RunStopped as error:
        result["stopped"] = str(error)
    if callback.outer is not None:  # else the run had finished
        synchronizer = callback.outer.synchronizer
        engine = getattr(synchronizer, "_engine", synchronizer)  # of DDP ranks, only the leader has one
        result |= {
            "evaluations": [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e],
            "digest": synchronizer.global_digest(),
            "numel": sum(each.numel for each in synchronizer.facts),
            "pieces": sum(len(param) > 2 for fragment in synchronizer.layout for param in fragment),
            "num_params": synchronizer.num_params,
            "bytes_sent": synchronizer.totals.bytes_sent,
            "change": [] if engine is None else list(engine.measured.agreed.change),
            "sends": synchronizer.totals.sends,
        }
    torch.save(
        result, folder / f"region{os.environ['HF_COCODC_REGION']}-rank{os.environ.get('RANK', '0')}.pt"
    )


def meet(folder: Path) -> None:
    """Regions meet with sharded models whose frozen rows differ in region 1, in rank 1's shard alone."""
    accelerator = Accelerator(cpu=True)
    shard(accelerator)
    model = llama()
    frozen = model.model.embed_tokens.weight.requires_grad_(False)
    if os.environ["HF_COCODC_REGION"] == "1":
        with torch.no_grad():
            frozen[-1] += 1
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    said = ""
    try:
        OuterOptimizer(accelerator, model, optimizer, OuterConfig(sync_interval=2), max_steps=2)
    except HandshakeError as error:
        said = str(error)
    torch.save({"said": said}, folder / f"region{os.environ['HF_COCODC_REGION']}-rank{os.environ['RANK']}.pt")


def change(kind: str, folder: Path) -> None:
    """Train by hand, and freeze or unfreeze the first layer before step 4; a buffer differs between regions."""
    accelerator = Accelerator(cpu=True)
    shard(accelerator)
    region = int(os.environ["HF_COCODC_REGION"])
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.model.layers[0].requires_grad_(kind == "freeze")
    model.register_buffer("seen", torch.zeros(2))
    model, optimizer = accelerator.prepare(model, optimizer)
    bare = accelerator.unwrap_model(model)
    said = ""
    try:
        with OuterOptimizer(
            accelerator, model, optimizer, OuterConfig(sync_interval=3), max_steps=10
        ) as outer:
            for step in range(1, 11):
                if step == 4:
                    bare.model.layers[0].requires_grad_(kind == "unfreeze")
                tokens = batch(10 * region + accelerator.process_index, step)
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                optimizer.step()
                optimizer.zero_grad()
                bare.seen.add_(region)
                outer.step()
    except InputError as error:
        said = str(error)
    result = {"said": said, "seen": bare.seen.clone()}
    result |= {name: whole(param).detach().clone() for name, param in bare.named_parameters()}
    torch.save(result, folder / f"region{region}-rank{os.environ['RANK']}.pt")
