"""What the matrix in docs/methods/index.md is made of: each method with settings for a run of a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from hf_cocodc.settings import OuterConfig
from tests.methods import small

STEPS = 7
SETTINGS = small(
    {
        "diloco": {},
        "streaming": {"num_fragments": 2},
        "eager": {"num_fragments": 2, "fragment_pattern": "strided"},
        "co2": {"outer_momentum": 0.3},
        "dilocox": {"rank": 2},
        "cocodc": {"num_fragments": 2, "overlap_steps": 1, "sends_per_interval": 2},
    }
)


def config(method: str) -> OuterConfig:
    """The method over rounds of 3 inner steps."""
    return OuterConfig(method=method, sync_interval=3, **SETTINGS[method])


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    """Trainer's for such a run."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
        **more,
    )
