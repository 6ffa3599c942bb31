"""What neither a config nor a library refuses before it trains: values that mean nothing, and a step that fails."""

import math
from typing import Any

from ..coordinator.hello import ORDER, check_allowed
from ..errors import InputError, reason, shown
from ..run.about import SCALES
from ..settings.fields import Limit, at_least, within
from ..settings.recipe import Recipe, facts_of_data
from . import building

MOST_WORK = 2e9
"""Parameters times tokens of a step that is made: about a second of one core. Larger ones are not tried."""

_SHARE = Limit(lambda share: 0 <= share < 1, "must lie in [0, 1)")
_AMOUNT = within(0, 1000)
_LIMITS = {
    "training.adam_epsilon": within(0, 1),
    "training.eval_accumulation_steps": at_least(1),
    "training.label_smoothing_factor": _SHARE,
    "training.learning_rate": _AMOUNT,
    "training.max_grad_norm": Limit(lambda norm: norm >= 0, "must not be negative"),
    "training.neftune_noise_alpha": _AMOUNT,
    "training.weight_decay": _AMOUNT,
    "peft.lora_alpha": Limit(lambda alpha: 0 < alpha <= 1e6, "must be positive, and at most 1e6"),
    "peft.lora_dropout": _SHARE,
}
"""What Trainer and PEFT take without a check."""


def refuse_nonsense(recipe: Recipe) -> None:
    """Refuse numbers that would train on nonsense, and names in regions.may_differ that no region compares."""
    from ..trainer.callback import COMPARED

    for name, limit in _LIMITS.items():
        section, _, key = name.partition(".")
        value = (getattr(recipe, section) or {}).get(key)
        if value is not None:
            limit.check(name, value)
    _refuse_infinite("model.config", recipe.model.config or {})
    of_training = [f"training.{name}" for name in COMPARED]
    check_allowed(
        recipe.regions.allowed, ["torch", "batch", ORDER, SCALES, *of_training, *facts_of_data(recipe)]
    )


def _refuse_infinite(name: str, value: Any) -> None:
    """Refuse an infinite number of a config: a model computes with it, and its loss may look sound."""
    if isinstance(value, dict):
        for key, each in value.items():
            _refuse_infinite(f"{name}.{key}", each)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name}={value} must be finite. Correct it, or remove it for the default.")


def try_step(recipe: Recipe, args: Any, tokenizer: Any, num_params: int, on_cpu: bool) -> None:
    """Make one forward and backward step of one row, on the CPU and from random weights, if the model is small.

    Raises InputError if its loss is no number, if it trains nothing, or if it fails: at any error if regions train `on_cpu`,
    else at those that a GPU would meet, too.
    """
    import torch

    length = recipe.data.block_size
    if num_params * length > MOST_WORK:
        return
    vocab_size = len(tokenizer)
    with torch.device("cpu"):
        model = building.random_weights(recipe, building.config(recipe, vocab_size))
        model = building.finished(recipe, model, vocab_size).train()
    if args.gradient_checkpointing:
        with building.blaming("training.gradient_checkpointing"):
            model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    row = (torch.arange(length, device="cpu") % vocab_size)[None]
    try:
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
    except Exception as error:
        positions = getattr(model.config, "max_position_embeddings", None)
        if isinstance(error, IndexError) and positions is not None and positions < length:
            raise InputError(
                f"data.block_size={length} is more than the {positions} positions of the model. Lower data.block_size."
            ) from error
        if on_cpu or isinstance(error, IndexError):
            raise InputError(
                f"model: a step with a row of {shown(length)} tokens fails: {reason(error)}. Correct model.config."
            ) from error
    if not loss.isfinite():
        raise InputError(
            f"model: the loss of a first step is {loss.item()}. Correct the numbers in model.config."
        )
    if not any(each.grad is not None and each.grad.any() for each in model.parameters()):
        raise InputError(
            "model: a first step changes nothing, because every gradient is 0. Correct the numbers in model.config."
        )
