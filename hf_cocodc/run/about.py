"""What a region's training is, beside the method: what must be equal in all regions, and after a resume."""

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from ..coordinator.hello import may_differ
from ..errors import CheckpointError
from ..snapshot.local_weights import base_digest, scales_digest
from .inner_optimizer import parts_of
from .shards import facts_of_shards

logger = logging.getLogger(__name__)

_MODEL = "model.config"
_BASE = "frozen base (digest)"
SCALES = "quantization.scales"
_NOT_THE_FUNCTION = {
    *(
        "architectures",
        "attn_implementation",
        "auto_map",
        "dtype",
        "gradient_checkpointing",
        "id2label",
        "label2id",
    ),
    *("name_or_path", "output_attentions", "output_hidden_states", "return_dict", "task_specific_params"),
    "problem_type",  # the first labels set it
    *("tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "use_cache"),
}
"""Fields of a model's config that change neither its outputs nor its loss, or that follow from the data."""
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_OF_OPTIMIZERS = {"lr": "learning_rate", "weight_decay": "weight_decay", "betas": "betas", "eps": "eps"}


@dataclass(frozen=True, kw_only=True)
class About:
    """What a region's training is, beside the method.

    Attributes:
        run: name of the run where regions.run has none; None for the name of the script.
        model: the config of the model, as far as it changes its function; by names in a recipe.
        facts: the training and the data; by names in a recipe, JSON-able. Regions, and a resumed run, must have equal values
            unless regions.may_differ has the name.
        together: what regions do at the same inner steps, by names in a recipe, JSON-able: equal in all, and free at a resume.
        first_samples: digest of the first samples that this region trains on; empty if unknown.
        recipe: what regions get that join without a recipe (`settings/handed.py`); None if a script trains.
        why_fixed: why the run cannot go on without a lost region, in a sentence; empty if it can.
    """

    run: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    together: Mapping[str, Any] = field(default_factory=dict)
    first_samples: str = ""
    recipe: Mapping[str, Any] | None = None
    why_fixed: str = ""


def of_loop(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> About:
    """What an ordinary Accelerate loop shows of its training."""
    parts = parts_of(optimizer)
    kinds = list(dict.fromkeys(type(part).__name__ for part in parts))
    facts: dict[str, Any] = {
        "training.optimizer": kinds[0] if len(kinds) == 1 else kinds,
        "training.gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "training.mixed_precision": accelerator.mixed_precision,
    }
    for key, name in _OF_OPTIMIZERS.items():
        # a schedule keeps the first learning rate beside the present one
        first = [f"initial_{key}", key]
        values = [
            next(group[name] for name in first if name in group)
            for part in parts
            for group in part.param_groups
            if key in group
        ]
        facts[f"training.{name}"] = jsonable([v.item() if isinstance(v, Tensor) else v for v in values])
    return About(model=function_of(model), facts=facts | facts_of_shards())


def function_of(model: nn.Module, tokenizer: Any = None) -> dict[str, Any]:
    """The config of an unwrapped Transformers model without what changes neither its outputs nor its loss, flat by dotted
    names; and the digest of a frozen base that no checkpoint holds.

    Where Trainer has a `tokenizer` (or processor), the ids of special tokens are its own: Trainer writes them into the config,
    but only when it trains. The pad token matters: it has no gradient, and a classifier reads the token before it.
    """
    digest = base_digest(model)
    base = {} if digest is None else {_BASE: digest}
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return base
    fields = dict(_flat(_MODEL, config.to_dict())) | base
    if not hasattr(tokenizer, "pad_token_id"):
        tokenizer = getattr(tokenizer, "tokenizer", None)  # a processor's
    if not hasattr(tokenizer, "pad_token_id"):
        return fields
    rest = {name: value for name, value in fields.items() if name.rpartition(".")[2] not in _SPECIAL}
    return rest | {f"{_MODEL}.{name}": getattr(tokenizer, name) for name in _SPECIAL}


def scales_of(model: nn.Module) -> dict[str, str]:
    """As a fact: a digest of the scales of quantized weights. Regions may differ in it, because GPUs of different kinds may round
    scales that are quantized themselves (double quantization) differently.
    """
    digest = scales_digest(model)
    return {} if digest is None else {SCALES: f"{digest} (a digest; different GPUs may differ in a last bit)"}


def refuse_another_run(
    model: Mapping[str, Any], facts: Mapping[str, Any], about: About, allowed: Collection[str]
) -> list[str]:
    """Check that a checkpoint is of this model and this training; return in words the differences that `allowed` names.

    `model` and `facts` are those of `About` in the run that wrote it. Fields that only one of the two runs has are not
    compared, because versions may differ. Raises CheckpointError if anything else differs.
    """
    notes = []
    for theirs, ours, free in ((model, about.model, False), (facts, about.facts, True)):
        for name in theirs.keys() & ours.keys():
            if theirs[name] == ours[name]:
                continue
            if free and may_differ(name, allowed):
                notes.append(
                    f"{name} was {theirs[name]!r} when the checkpoint was written and is {ours[name]!r} now."
                )
                continue
            way_out = (
                f"Set it back, or allow the change: regions.may_differ={name}."
                if free
                else ("Set it back, or start a new run from the checkpoint's global model (checkpoint-N).")
            )
            raise CheckpointError(
                f"the checkpoint was written with {name}={theirs[name]!r}, this run has {ours[name]!r}. {way_out}"
            )
    return sorted(notes)


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        return [
            pair
            for key, part in value.items()
            if not str(key).startswith("_") and key not in _NOT_THE_FUNCTION
            for pair in _flat(f"{prefix}.{key}", part)
        ]
    return [(prefix, jsonable(value))]


def jsonable(value: Any) -> Any:
    """`value` as it comes back from JSON: other types become their names, and infinities and NaN become words, because
    checkpoints hold strict JSON, and NaN differs from itself.
    """
    text = json.dumps(value, default=lambda other: getattr(other, "value", type(other).__name__))
    return json.loads(text, parse_constant=lambda number: str(float(number)))
