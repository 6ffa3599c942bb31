"""Regions compare their settings before step 1.

Different settings would hang a run (sync_interval) or silently ruin it (frozen base weights). Each region writes a hello.
Every region then compares all hellos: if two differ, all regions raise the same error.
"""

import dataclasses
import hashlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import HandshakeError
from ..settings import OuterConfig, RegionConfig
from ..tensors.sharding import local_shard

PROTOCOL = 7
"""Version of the data on the link. Raise it when two versions of this package could misunderstand each other."""


def hello(
    model: nn.Module, settings: Mapping[str, Any], max_steps: int | None, num_lanes: int
) -> dict[str, Any]:
    """Describe this region (JSON-able).

    Args:
        model: unwrapped. The hello lists its trainable parameters and contains a digest of the rest.
        settings: settings of the method and the link, by their names in OuterConfig and RegionConfig.
        max_steps: inner steps of the run; None if unknown.
        num_lanes: number of lanes of this region.
    """
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return {
        "protocol": PROTOCOL,
        "torch": torch.__version__.split("+")[0],
        "byte order": __import__("sys").byteorder,
        **{_in_recipe(name): value for name, value in settings.items()},
        "max_steps": max_steps,
        "lanes": num_lanes,
        "trainable parameters": [f"{name} {list(p.shape)} {p.dtype}" for name, p in trainable.items()],
        "frozen parameters and buffers (digest)": _frozen_digest(model),
        "adapter settings": _adapter_settings(model),
        "host": platform.node(),
    }


def compare(hellos: Sequence[Mapping[str, Any]]) -> None:
    """Check that all hellos, in the order of regions, agree in every field except the host.

    Raises:
        HandshakeError: two hellos differ; the message names the two regions, the field and both values.
    """
    for region, other in enumerate(hellos[1:], start=1):
        compare_two(0, hellos[0], region, other)


def compare_two(first: int, mine: Mapping[str, Any], second: int, theirs: Mapping[str, Any]) -> None:
    """Check that the hellos of two regions agree. Raises HandshakeError like `compare`."""
    for field, own, other in differences(mine, theirs):
        raise HandshakeError(
            f"region {first} and region {second} disagree on {field}: region {first} has {own}, region {second} has {other}. "
            "Start every region with the same recipe or options, the same weights and the same package versions. If these are "
            "two runs on one store, give each a name of its own (regions.run, --run or HF_COCODC_RUN)."
        )


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Fields in which two hellos differ but must agree, each with both values in short."""
    return [
        (field, *_show(mine.get(field), theirs.get(field)))
        for field in {**mine, **theirs}
        if field != "host" and mine.get(field) != theirs.get(field)
    ]


def _in_recipe(setting: str) -> str:
    """The name of a setting in a recipe."""
    for section, config in (("outer", OuterConfig), ("regions", RegionConfig)):
        if setting in (field.name for field in dataclasses.fields(config)):
            return f"{section}.{setting}"
    return setting


def _show(mine: Any, theirs: Any) -> tuple[str, str]:
    """Show both values; for two lists, show the first entry that differs."""
    if isinstance(mine, list) and isinstance(theirs, list):
        for a, b in zip(mine, theirs, strict=False):
            if a != b:
                return repr(a), repr(b)
        return f"{len(mine)} entries", f"{len(theirs)} entries"
    return repr(mine), repr(theirs)


def _adapter_settings(model: nn.Module) -> list[str]:
    """PEFT settings that the parameters do not show (LoRA alpha), except the path of the base model."""
    found = []
    for name, config in getattr(model, "peft_config", {}).items():
        for key, value in sorted(config.to_dict().items()):
            if key not in _MAY_DIFFER:
                found.append(f"{name}.{key}={sorted(value) if isinstance(value, set) else value}")
    return found


_MAY_DIFFER = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision")


def _frozen_digest(model: nn.Module) -> str:
    """Digest of everything that regions do not synchronise but that must be equal.

    This includes frozen parameters, saved buffers, and other saved tensors, for example the scales of quantised weights.
    """
    sha = hashlib.sha256()
    saved = model.state_dict(keep_vars=True)
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    buffers = [(name, b) for name, b in model.named_buffers() if name in saved]
    named = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    others = [(name, t) for name, t in saved.items() if isinstance(t, Tensor) and id(t) not in named]
    for name, tensor in frozen + buffers + others:
        sha.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        for part in _parts(local_shard(tensor)):
            sha.update(memoryview(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return sha.hexdigest()[:16]


def _parts(tensor: Any) -> list[Tensor]:
    """Plain tensors inside `tensor`.

    A quantised weight may be a tensor subclass that holds values and scales, but no bytes of its own.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]
