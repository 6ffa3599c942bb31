"""Train a Llama across regions that are pipelines: each rank is a stage, with its own inner and its own outer optimizer.

This is DiLoCoX's dual optimizer (2506.21263). Activations travel between the stages of a region, as in every pipeline. An outer
gradient travels only from a stage to the same stage of the other regions. With one process per region the same code trains the
unpipelined model.

To train two regions of two stages on the CPUs of this machine, run each line in its own terminal:

    hf-cocodc coordinator --port 29650
    HF_COCODC_REGION=0 accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 recipes/pipeline/train_stages.py
    HF_COCODC_REGION=1 accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 recipes/pipeline/train_stages.py

In the last two terminals, run this first:

    export ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 HF_COCODC_REGIONS=2 HF_COCODC_COORDINATOR=127.0.0.1:29650

On GPUs, omit the first two variables. To train without a pipeline, replace `--multi_gpu --num_processes 2` by
`--num_processes 1`, or on CPUs by `--cpu --num_processes 1`. The fields of Options are flags, and so are the settings of
hf_cocodc, with a prefix: for example `--outer_method dilocox --outer_sync_interval 20 --outer_rank 16`. The global model ends
up in `runs/pipeline/region-{r}`.

Not supported: tied embeddings, because their two ends would lie in two stages, and an end before `max_steps` (see `stage` of
`OuterOptimizer`).
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaConfig, LlamaForCausalLM

from hf_cocodc import OuterOptimizer, region_shard, script_parser
from hf_cocodc.training.data import byte_tokenizer, load_text, pack


@dataclass
class Options:
    """Options that the outer optimizer does not use."""

    max_steps: int = 400
    batch_size: int = 8
    num_microbatches: int = 4
    learning_rate: float = 2e-3
    num_layers: int = 4
    block_size: int = 128
    save_steps: int = 100
    resume_step: int = 0
    output_dir: str = "runs/pipeline"


class Absent(nn.Module):
    """Takes the place of a module that another stage holds; returns its input."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class Stage(LlamaForCausalLM):
    """One stage: a Llama without the modules of other stages. Its parameters have the same names as in the whole model.

    The first stage takes token ids, every other stage takes hidden states. The last stage returns logits. Every stage makes
    the masks and rotary embeddings as the whole model does.
    """

    def __init__(self, config: LlamaConfig, index: int, num_stages: int) -> None:
        super().__init__(config)
        if index > 0:
            self.model.embed_tokens = Absent()
        for layer in range(config.num_hidden_layers):
            if layer * num_stages // config.num_hidden_layers != index:
                self.model.layers[layer] = Absent()
        if index < num_stages - 1:
            self.model.norm = self.lm_head = Absent()

    def forward(self, ids_or_hidden: Tensor) -> Tensor:
        return super().forward(input_ids=ids_or_hidden, use_cache=False).logits


def pipeline(accelerator: Accelerator, stage: Stage, num_microbatches: int) -> Schedule1F1B:
    """The region's pipeline; this rank runs `stage`. The loss is the mean over micro-batches."""
    if not dist.is_initialized():  # Accelerate makes no group for a single process
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    runtime = PipelineStage(stage, dist.get_rank(), dist.get_world_size(), accelerator.device)
    return Schedule1F1B(runtime, num_microbatches, loss_fn=next_token_loss)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gradients(schedule: Schedule1F1B, stage: Stage, rows: Tensor, max_norm: float = 1.0) -> float | None:
    """Forward and backward pass for token ids (batch, length), equal in all ranks of a region; the last stage returns the loss.

    Clips gradients by their norm over all stages, as for the whole model.
    """
    losses: list[Tensor] = []
    is_first, is_last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    inputs = (rows,) if is_first else ()
    target = {"target": rows, "losses": losses} if is_last else {}
    schedule.step(*inputs, **target, return_outputs=False)
    squared = nn.utils.get_total_norm([param.grad for param in stage.parameters()]) ** 2
    dist.all_reduce(squared)
    nn.utils.clip_grads_with_norm_(stage.parameters(), max_norm, squared.sqrt())
    return float(torch.stack(losses).detach().mean()) if is_last else None


def add_to_checkpoints(accelerator: Accelerator, stage: Stage, optimizer: torch.optim.Optimizer) -> None:
    """Let `accelerator.save_state` and `load_state` include this stage, which Accelerate has not prepared.

    Call it after the OuterOptimizer is made: a checkpoint then counts as complete only if it holds every stage.
    """
    name = f"stage-{accelerator.process_index}.pt"

    def save(models: Any, weights: Any, folder: str) -> None:
        torch.save({"stage": stage.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder, name))

    def load(models: Any, folder: str) -> None:
        saved = torch.load(Path(folder, name), map_location="cpu")
        stage.load_state_dict(saved["stage"])
        optimizer.load_state_dict(saved["optimizer"])

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def save_model(accelerator: Accelerator, stage: Stage, folder: Path) -> None:
    """Save the whole model for `from_pretrained`: every stage writes its file, and the first stage writes the index.

    No rank ever holds the whole model. All ranks of a region must be able to write to `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = f"model-{accelerator.process_index + 1:05}-of-{accelerator.num_processes:05}.safetensors"
    part = {name: tensor.cpu().contiguous() for name, tensor in stage.state_dict().items()}
    save_file(part, folder / file, metadata={"format": "pt"})
    entries = gather_object([(name, file, tensor.nbytes) for name, tensor in part.items()])
    if accelerator.is_main_process:
        stage.config.save_pretrained(folder)
        total = {"total_size": sum(nbytes for _, _, nbytes in entries)}
        index = {"metadata": total, "weight_map": {name: file for name, file, _ in entries}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def main() -> None:
    options, config, regions = script_parser(Options).parse_args_into_dataclasses()
    regions, accelerator = regions.resolved(), Accelerator()
    rank, num_stages = accelerator.process_index, accelerator.num_processes
    logging.basicConfig(level=logging.INFO, format=f"region {regions.region} stage {rank}: %(message)s")
    folder = Path(options.output_dir, f"region-{regions.region}")

    tokenizer = byte_tokenizer()
    text = load_text("python-stdlib", None, None, "train", "text", streaming=False).shuffle(seed=0)
    blocks = pack(region_shard(text, regions.region, regions.count), tokenizer, options.block_size)
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=options.num_layers,
        num_attention_heads=4,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    set_seed(0)
    stage = Stage(llama, rank, num_stages).to(accelerator.device)
    schedule = pipeline(accelerator, stage, options.num_microbatches)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=options.learning_rate)
    run = {"max_steps": options.max_steps, "stage": (rank, num_stages)}
    with OuterOptimizer(accelerator, stage, optimizer, config, regions, **run) as outer:
        add_to_checkpoints(accelerator, stage, optimizer)
        if options.resume_step:
            accelerator.load_state(str(folder / f"checkpoint-{options.resume_step}"))
        while outer.inner_step < options.max_steps:
            draw = torch.Generator().manual_seed(outer.inner_step)
            chosen = torch.randint(len(blocks), (options.batch_size,), generator=draw).tolist()
            rows = torch.tensor(blocks[chosen]["input_ids"], device=accelerator.device)
            loss = gradients(schedule, stage, rows)
            optimizer.step()
            optimizer.zero_grad()
            outer.step(loss)
            if loss is not None and outer.inner_step % 20 == 0:
                logging.info("step %d of %d: loss %.3f", outer.inner_step, options.max_steps, loss)
            if outer.inner_step % options.save_steps == 0 and outer.inner_step < options.max_steps:
                accelerator.save_state(str(folder / f"checkpoint-{outer.inner_step}"))
    save_model(accelerator, stage, folder)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(folder)
    logging.info("%.2f MB sent to this stage elsewhere", outer.report.get("bytes_sent", 0) / 1e6)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
