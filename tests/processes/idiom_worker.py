"""A region's script that resumes as the examples of Transformers do, and writes the weights that it ends with.

Arguments: the output folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_cocodc import CoCoDCCallback, OuterConfig, region_shard
from tests.processes.worker import Tokens
from tests.toys import llama, params_of

STEPS, SAVED = 9, 3


def main(folder: Path) -> None:
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        save_steps=SAVED,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    callback = CoCoDCCallback(OuterConfig(method="diloco", sync_interval=4))
    trainer = Trainer(llama(), args, train_dataset=region_shard(Tokens()), callbacks=[callback])
    trainer.train(resume_from_checkpoint=last)
    assert callback.outer is not None
    found = {"final": params_of(trainer.model), "last": last}
    torch.save(found, folder / f"region{os.environ['HF_COCODC_REGION']}-rank0.pt")
