"""One region whose model is pulled while it trains: a plain loop, or Trainer, which saves each step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.run import giving
from tests.processes.coming_worker import Slow, take_time
from tests.processes.sharded_worker import ShardedTrainer, whole
from tests.processes.worker import Tokens
from tests.toys import batch, llama

METHODS = {
    "diloco": OuterConfig(sync_interval=4),
    "streaming": OuterConfig(method="streaming", sync_interval=6, num_fragments=2, overlap_steps=2),
}
RUN = "pulled"
STEP_S = 0.05


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each number that the model has."""
    words = Tokenizer(models.WordLevel({f"w{each}": each for each in range(64)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w0")


def begin(region: int, is_slow: bool) -> None:
    """No pause between two pulls. If it `is_slow`, region 0 sends what is pulled at the 1000th part of its rate limit."""
    giving.PART = 1.0
    if is_slow and not region:
        giving.SHARE = 1000


def trainer(
    folder: str,
    steps: int,
    method: str,
    saves: int = 0,
    is_slow: bool = False,
    adapter: bool = False,
    is_sharded: bool = False,
    **regions: Any,
) -> None:
    """Trainer; it saves every `saves` steps, and checkpoint-N has the global model of step N."""
    region, rank = int(os.environ["HF_COCODC_REGION"]), int(os.environ.get("RANK", 0))
    begin(region, is_slow)
    args = TrainingArguments(
        output_dir=f"{folder}/out",
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        save_strategy="steps" if saves else "no",
        save_steps=saves or 1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    model: Any = llama(layers=2)
    if adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    made = (ShardedTrainer if is_sharded else Trainer)(
        model=model,
        args=args,
        train_dataset=Tokens(64 + 8 * region),
        processing_class=tokenizer(),
        callbacks=[
            CoCoDCCallback(METHODS[method], RegionConfig(run=RUN, timeout_s=10.0, **regions)),
            Slow(Path(folder), region, STEP_S),
        ],
    )
    made.train()
    weights = torch.cat([whole(param).detach().reshape(-1) for param in made.model.parameters()])
    if not rank:
        torch.save(weights, f"{folder}/end-{region}.pt")


def loop(folder: str, steps: int, method: str, is_slow: bool = False, **regions: Any) -> None:
    """A plain loop; global-N.safetensors has the global params of step N, as region 0's engine holds them."""
    region, home = int(os.environ["HF_COCODC_REGION"]), Path(folder)
    begin(region, is_slow)
    accelerator = Accelerator(cpu=True)
    model = llama(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    config = RegionConfig(run=RUN, timeout_s=10.0, **regions)
    outer = OuterOptimizer(accelerator, model, optimizer, METHODS[method], config, max_steps=steps)
    with outer:
        for _ in range(steps):
            tokens = batch(region, outer.inner_step)
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            take_time(home, STEP_S)
            (home / f"step-{region}").write_text(str(outer.inner_step))
            outer.step()
            if not region and not outer.finished:
                save_file(global_params(outer), home / f"global-{outer.inner_step}.safetensors")
    torch.save(
        torch.cat([each.detach().reshape(-1) for each in model.parameters()]), home / f"end-{region}.pt"
    )


def global_params(outer: OuterOptimizer) -> dict[str, torch.Tensor]:
    """Copies of the global params by name, of fragments that split no parameter."""
    found: dict[str, torch.Tensor] = {}
    for each in outer.synchronizer.fragments:  # type: ignore[union-attr]
        views = each.fragment.views(each.global_params.clone())
        found |= {name: view.clone() for name, view in zip(each.fragment.names, views, strict=True)}
    return found
