"""What a Trainer's regions compare before they train."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer

from ..run.about import About, function_of, jsonable
from ..run.samples import first_samples

_COMPARED = (
    *("seed", "data_seed", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("label_smoothing_factor", "neftune_noise_alpha", "bf16", "fp16"),
)
"""Training arguments that change what a step does. max_steps is compared by itself; the number of epochs may change."""


def of_trainer(trainer: Trainer, model: nn.Module, more: Mapping[str, Any]) -> About:
    """What a Trainer's training is.

    Args:
        trainer: of this region, with the region's own output folder.
        model: unwrapped.
        more: more facts, by name.
    """
    args = trainer.args
    facts = {f"training.{name}": jsonable(getattr(args, name, None)) for name in _COMPARED}
    facts["batch"] = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    return About(
        run=Path(args.output_dir or ".").resolve().parent.name,
        model=function_of(model, trainer.processing_class),
        facts={**facts, **jsonable(dict(more))},
        first_samples=first_samples(trainer.train_dataset),
    )
