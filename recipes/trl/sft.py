"""Teach a small Llama to add, with TRL's SFTTrainer across regions (`pip install 'hf-cocodc[trl]'`).

To train two regions on the CPUs of this machine, run each line in its own terminal:

    hf-cocodc coordinator --port 29650
    HF_COCODC_REGION=0 accelerate launch --cpu --num_processes 1 recipes/trl/sft.py
    HF_COCODC_REGION=1 accelerate launch --cpu --num_processes 1 recipes/trl/sft.py

In the last two terminals, run this first:

    export OMP_NUM_THREADS=1 HF_COCODC_REGIONS=2 HF_COCODC_COORDINATOR=127.0.0.1:29650

It takes about a minute. The fields of SFTConfig are flags, and so are the settings of hf_cocodc, with a prefix: for example
`--packing --outer_method diloco`. On GPUs, give `accelerate launch` its usual arguments. The global model ends up in
`runs/sft/region-{r}`.
"""

import random
from typing import Any

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

from hf_cocodc import CoCoDCCallback, region_shard, script_parser
from hf_cocodc.training.data import byte_tokenizer

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/sft",
    "max_steps": 600,
    "per_device_train_batch_size": 32,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "max_length": 16,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "logging_steps": 50,
    "report_to": "none",
    "bf16": False,
    "outer_method": "streaming",
    "outer_sync_interval": 20,
}


def sums() -> Dataset:
    """Every sum of two numbers below 100, in the same order in all regions."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(pairs)
    return Dataset.from_list([{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a, b in pairs])


def small_llama() -> LlamaForCausalLM:
    """A byte-level Llama of about 0.8M parameters."""
    sizes = {"vocab_size": 257, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ends = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends))


def main() -> None:
    parser = script_parser(SFTConfig)
    parser.set_defaults(**DEFAULTS)
    args, outer, regions = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    parts = sums().train_test_split(test_size=200, shuffle=False)
    trainer = SFTTrainer(
        model=small_llama(),
        args=args,
        train_dataset=region_shard(parts["train"]),
        eval_dataset=parts["test"],
        processing_class=byte_tokenizer(),
        callbacks=[CoCoDCCallback(outer, regions)],
    )
    trainer.train()
    trainer.save_model()
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
