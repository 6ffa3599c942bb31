"""TRL's SFTTrainer across regions: our callback is all that is added."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_cocodc import CoCoDCCallback, region_shard, simulate
from hf_cocodc.link.base import Link
from hf_cocodc.training.data import byte_tokenizer
from tests.processes.forks import run_recipe
from tests.trainer.test_training_variants import CONFIG, STEPS, trained_params

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # TRL's, for names of transformers 4
]

SUMS = [(a, b) for a in range(8) for b in range(8)]
TEXTS = datasets.Dataset.from_list([{"text": f"{a} and {b} is {a + b}"} for a, b in SUMS])
ANSWERS = datasets.Dataset.from_list(
    [{"prompt": f"{a} and {b}", "completion": f" is {a + b}"} for a, b in SUMS]
)
WAYS: dict[str, dict[str, Any]] = {
    "text": {},
    "packing": {"packing": True},
    "prompt and completion": {"data": ANSWERS},
    "stream": {"data": TEXTS.to_iterable_dataset(num_shards=2)},
    "adapter": {"peft_config": LoraConfig(r=4, target_modules="all-linear")},
}


def byte_llama() -> LlamaForCausalLM:
    """A Llama for byte_tokenizer."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    sizes = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends))


@pytest.mark.parametrize("way", WAYS)
def test_sft_across_regions(way: str, tmp_path: Path) -> None:
    """Regions end equal, evaluate and export the same global weights, add to TRL's card, and resume bit for bit."""
    own = {"data": TEXTS, "peft_config": None, **WAYS[way]}
    data, peft_config = own.pop("data"), own.pop("peft_config")
    common = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "max_length": 32}
    common |= {"save_steps": 5, "eval_strategy": "steps", "eval_steps": 5, "logging_steps": 5}
    common |= {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}

    def body(region: int, link: Link) -> tuple[Tensor, list[float]]:
        trainer = trl.SFTTrainer(
            model=byte_llama(),
            args=trl.SFTConfig(output_dir=str(tmp_path), dataloader_pin_memory=False, **(common | own)),
            train_dataset=region_shard(data, region, link.num_regions),
            eval_dataset=TEXTS.select(range(8)),
            processing_class=byte_tokenizer(),
            peft_config=peft_config,
            callbacks=[CoCoDCCallback(CONFIG, link=link)],
        )
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == STEPS
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        return trained_params(trainer.model), losses

    whole = simulate(body, regions=2)
    assert torch.equal(whole[0][0], whole[1][0])
    assert len(whole[0][1]) >= 2
    assert whole[0][1] == whole[1][1]
    exported = tmp_path / "region-1" / f"checkpoint-{STEPS}"
    if peft_config is None:
        assert torch.equal(trained_params(AutoModelForCausalLM.from_pretrained(exported)), whole[0][0])
    else:
        adapter = PeftModel.from_pretrained(byte_llama(), str(exported), is_trainable=True)
        assert torch.equal(trained_params(adapter), whole[0][0])
    card = (tmp_path / "region-1" / "README.md").read_text(encoding="utf-8")
    assert "trl" in card
    assert "| method | streaming |" in card
    for region in range(2):
        for step in (10, STEPS):
            shutil.rmtree(tmp_path / f"region-{region}" / f"checkpoint-{step}")
    assert torch.equal(simulate(body, regions=2)[0][0], whole[0][0])


def test_the_recipe_trains(tmp_path: Path) -> None:
    """By its docstring's lines: both regions end with one model."""
    few = [
        "--max_steps",
        "7",
        "--outer_sync_interval",
        "4",
        "--eval_steps",
        "5",
        "--output_dir",
        str(tmp_path),
    ]
    run_recipe("recipes/trl/sft.py", few, tmp_path)
    first, second = (tmp_path / f"region-{region}" / "model.safetensors" for region in range(2))
    assert first.read_bytes() == second.read_bytes()
