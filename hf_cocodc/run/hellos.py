"""What a region tells the others of itself before step 1, and what they say of it."""

import hashlib
import logging
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from .. import __version__
from ..coordinator.hello import in_recipe, may_differ, side_by_side
from ..coordinator.messages import PROTOCOL
from ..errors import InputError, nearest
from ..resolve import settings
from ..settings import OuterConfig, RegionConfig
from ..tensors.contents import bytes_of, contents
from ..tensors.pools import HOST
from .about import About

logger = logging.getLogger(__name__)


def own_hello(
    accelerator: Accelerator,
    model: nn.Module,
    config: OuterConfig,
    regions: RegionConfig,
    max_steps: int | None,
    about: About,
    num_lanes: int,
    frozen: str | None,
) -> dict[str, Any]:
    """What this region tells the others (`hello`); `frozen`: a digest of the rest of a sharded model."""
    shared = {
        **regions.compared,
        # other kinds of devices round differently; the kind is Accelerate's, as the model may not be there yet
        "device": (accelerator.device if config.device == "model" else HOST).type,
    }
    return hello(
        model,
        {**settings(config), **shared},
        max_steps,
        num_lanes,
        config=about.model,
        facts=about.facts,
        first_samples=about.first_samples,
        allowed=regions.allowed,
        frozen=frozen,
    )


def show_differences(hellos: Sequence[Mapping[str, Any]]) -> None:
    """Say in the log what regions have otherwise than the others."""
    for sentence in side_by_side(hellos):
        logger.warning(sentence)


def hello(
    model: nn.Module,
    settings: Mapping[str, Any],
    max_steps: int | None,
    num_lanes: int,
    *,
    config: Mapping[str, Any] = MappingProxyType({}),
    facts: Mapping[str, Any] = MappingProxyType({}),
    first_samples: str = "",
    allowed: Sequence[str] = (),
    frozen: str | None = None,
) -> dict[str, Any]:
    """Describe this region (JSON-able).

    Args:
        model: unwrapped. The hello lists its trainable parameters.
        settings: settings of the method and the link, by their names in OuterConfig and RegionConfig.
        max_steps: inner steps of the run; None if unknown.
        num_lanes: number of lanes of this region.
        config: the model's config, as far as it changes the model's function.
        facts: the training and the data.
        first_samples: digest of the first samples that this region trains on; empty if unknown.
        allowed: names of the facts in which regions may differ.
        frozen: digest of the rest of the model, of all ranks if they hold shards; by default that of `model`.

    Raises:
        InputError: `allowed` names no fact.
    """
    facts = {"torch": torch.__version__.split("+")[0], **facts}
    for name in allowed:
        if not any(may_differ(fact, [name]) for fact in facts):
            raise InputError(
                f"regions.may_differ={name!r} is not a setting in which regions may differ.{nearest(name, list(facts))}"
            )
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return {
        "protocol": PROTOCOL,
        "hf_cocodc": __version__,
        "byte order": sys.byteorder,
        **{in_recipe(name): value for name, value in settings.items()},
        "regions.may_differ": list(allowed),
        "max_steps": max_steps,
        "lanes": num_lanes,
        "model": dict(config),
        "facts": facts,
        "trainable parameters": [f"{name} {list(p.shape)} {p.dtype}" for name, p in trainable.items()],
        "frozen parameters and buffers (digest)": frozen or frozen_digest(model),
        "adapter settings": _adapter_settings(model),
        "first samples": first_samples,
        "versions": {name: version(name) for name in ("transformers", "accelerate")},
        "host": platform.node(),
    }


def _adapter_settings(model: nn.Module) -> list[str]:
    """PEFT settings that the parameters do not show (LoRA alpha), except the path of the base model."""
    found = []
    for name, config in getattr(model, "peft_config", {}).items():
        for key, value in sorted(config.to_dict().items()):
            if key not in _MAY_DIFFER:
                found.append(f"{name}.{key}={sorted(value) if isinstance(value, set) else value}")
    return found


_MAY_DIFFER = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision")


def frozen_digest(model: nn.Module) -> str:
    """Digest of everything that regions do not synchronise but that must be equal.

    Of a sharded tensor, only this rank's shard. This includes frozen parameters, saved buffers, and other saved tensors, for
    example the scales of quantised weights.
    """
    sha = hashlib.sha256()
    for name, tensor in contents(model).items():
        if not tensor.requires_grad:
            sha.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
            for part in bytes_of(tensor):
                sha.update(part)
    return sha.hexdigest()[:16]
