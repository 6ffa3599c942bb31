"""Regions compare their settings before step 1.

Different settings would hang a run (sync_interval) or silently ruin it (frozen base weights). Each region writes a hello.
Every region then compares all hellos: if two differ, all regions raise the same error.
"""

import dataclasses
import hashlib
import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import __version__
from ..errors import HandshakeError, InputError, nearest
from ..settings import OuterConfig, RegionConfig
from ..tensors.contents import bytes_of, contents

PROTOCOL = 13
"""Version of the data on the link. Raise it when two versions of this package could misunderstand each other."""


_ONLY_SHOWN = ("host", "versions", "first samples")
_SEVERAL = ("model", "facts")
"""Fields of a hello that hold several, by the names that messages call them."""


class Difference(NamedTuple):
    """A field in which two regions differ, with both values in short."""

    field: str
    mine: str
    theirs: str
    free: bool
    """Whether regions.may_differ may name it."""


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


def may_differ(fact: str, allowed: Collection[str]) -> bool:
    """Whether `allowed` has the name of a fact: in full, or without its section."""
    return fact in allowed or fact.rpartition(".")[2] in allowed


def compare(hellos: Sequence[Mapping[str, Any]]) -> None:
    """Check that all hellos, in the order of regions, agree in all that must be equal.

    Raises:
        HandshakeError: two hellos differ; the message names the two regions, the field and both values.
    """
    for region, other in enumerate(hellos[1:], start=1):
        compare_two(0, hellos[0], region, other)


def compare_two(first: int, mine: Mapping[str, Any], second: int, theirs: Mapping[str, Any]) -> None:
    """Check that the hellos of two regions agree. Raises HandshakeError like `compare`."""
    named = mine.get("regions.may_differ")
    allowed = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    for field, own, other, free in differences(mine, theirs):
        if free and may_differ(field, allowed):
            continue
        remedy = (
            f" If regions shall differ in it, set regions.may_differ={','.join([*allowed, field])} in all."
            if free
            else ""
        )
        raise HandshakeError(
            f"region {first} and region {second} disagree on {field}: region {first} has {own}, region {second} has {other}. "
            f"Start every region with the same recipe or options, the same weights and the same package versions.{remedy} If "
            "these are two runs on one store, give each a name of its own (regions.run, --run or HF_COCODC_RUN)."
        )


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """What must be equal in two hellos, or allowed to differ, and is not."""
    found = []
    same_versions = mine.get("versions") == theirs.get("versions")
    for name in {**mine, **theirs}:
        ours, other = mine.get(name), theirs.get(name)
        if name in _ONLY_SHOWN or ours == other:
            continue
        if name not in _SEVERAL or not (isinstance(ours, Mapping) and isinstance(other, Mapping)):
            found.append(Difference(name, *_show(ours, other), free=False))
            continue
        # another version of Transformers may know more fields of a config
        fields = {**ours, **other} if same_versions else [field for field in ours if field in other]
        found += [
            Difference(field, *_show(ours.get(field), other.get(field)), free=name == "facts")
            for field in fields
            if ours.get(field) != other.get(field)
        ]
    return found


def side_by_side(hellos: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences about what regions have otherwise than region 0, and about regions that train on the same samples."""
    said = []
    for region, other in enumerate(hellos[1:], start=1):
        for field, mine, theirs, _ in differences(hellos[0], other):
            said.append(f"{field}, which may differ: {mine} in region 0, {theirs} in region {region}.")
        versions = _versions(other)
        for name, version_there in _versions(hellos[0]).items():
            if version_there != versions.get(name):
                said.append(
                    f"other versions of {name}: {version_there} in region 0, {versions.get(name)} in region {region}."
                )
    samples = [str(each.get("first samples", "")) for each in hellos]
    for sample in sorted(set(samples) - {""}):
        same = [region for region, each in enumerate(samples) if each == sample]
        if len(same) > 1:
            said.append(
                f"regions {' and '.join(map(str, same))} begin with the same training samples: do they train on the same data? "
                "Give each region its own part: train_dataset=region_shard(dataset), or region_shard(dataset, regions) where "
                "a RegionConfig, not the environment, says which region this is."
            )
    return said


def _versions(hello: Mapping[str, Any]) -> Mapping[str, Any]:
    """What another region may have written in any way: regions need not agree in it."""
    versions = hello.get("versions")
    return versions if isinstance(versions, Mapping) else {}


def in_recipe(setting: str) -> str:
    """The name of a setting in a recipe, under which regions compare it."""
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
