"""Fine-tune a causal language model on text files, as the documentation of Trainer shows it; across regions by one more line.

Nothing here was written for hf_cocodc but the line that adds the callback.
"""

from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_cocodc import CoCoDCCallback
from hf_cocodc.training.data import byte_tokenizer


@dataclass
class DataArguments:
    train_file: str = field(metadata={"help": "A text file to train on."})
    block_size: int = field(default=32, metadata={"help": "Tokens of a sample."})


def main() -> None:
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = byte_tokenizer()
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    raw = load_dataset("text", data_files={"train": data_args.train_file})["train"]
    tokenized = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])
    samples = tokenized.filter(lambda row: len(row["input_ids"]) >= data_args.block_size)
    samples = samples.map(lambda row: {"input_ids": row["input_ids"][: data_args.block_size]})
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=samples.select_columns(["input_ids"]),
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.add_callback(CoCoDCCallback("diloco", sync_interval=10))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
