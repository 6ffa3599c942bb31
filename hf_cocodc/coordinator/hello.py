"""What regions must have in common: the coordinator compares them before step 1, and when one joins.

Different settings would hang a run (sync_interval) or silently ruin it (frozen base weights).
"""

import base64
import dataclasses
import zlib
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from ..errors import HandshakeError, InputError, nearest
from ..settings import OuterConfig, RegionConfig

DIGEST, FROZEN = "frozen parameters and buffers (digest)", "frozen parameters and buffers"
"""Fields of a hello: what is not synchronized and must be equal, and its tensors one by one (`packed`), for the message."""
ORDER = "data.order"
"""A fact of a hello: what `region_shard` has divided, in digests."""
RECIPE = "recipe"
"""Field of a hello: what a region hands over to those that join without a recipe (`settings/handed.py`)."""
_WAYS_OUT = {
    ORDER: "Regions divide different samples, or another order of them, so some would be trained twice and some never. Shuffle "
    "or split with the same seed in every region before region_shard, or shuffle its result."
}
_WAY_OUT = (
    "Start every region with the same recipe or options, the same weights and the same package versions."
)
_ONLY_SHOWN = ("host", "versions", "first samples", FROZEN, RECIPE)
_MOST_NAMES = 1 << 24
"""Bytes of unpacked lines that are read."""
_SEVERAL = ("model", "facts")
"""Fields that hold several values, each of which messages name."""


class Difference(NamedTuple):
    """A field in which two regions differ, with both values in short."""

    field: str
    mine: str
    theirs: str
    free: bool
    """Whether regions.may_differ may name it."""


def may_differ(fact: str, allowed: Collection[str]) -> bool:
    """Whether `allowed` has the name of a fact: in full, or without its section."""
    return fact in allowed or fact.rpartition(".")[2] in allowed


def check_allowed(allowed: Sequence[str], facts: Collection[str]) -> None:
    """Raise InputError for a name in regions.may_differ that is none of the facts that regions compare."""
    for name in allowed:
        if not any(may_differ(fact, [name]) for fact in facts):
            raise InputError(
                f"regions.may_differ={name!r} is not a setting in which regions may differ.{nearest(name, list(facts))}"
            )


def compare(hellos: Sequence[Mapping[str, Any]]) -> None:
    """Compare all hellos, in the order of regions. Raises HandshakeError that names two regions, the field and both values."""
    for region, other in enumerate(hellos[1:], start=1):
        wrong = first_difference(0, hellos[0], region, other)
        if wrong is not None:
            raise HandshakeError(wrong)


def first_difference(
    first: int, mine: Mapping[str, Any], second: int, theirs: Mapping[str, Any]
) -> str | None:
    """What two regions disagree on, and the way out, in words; None if they agree."""
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
        return (
            f"region {first} and region {second} disagree on {field}: region {first} has {own}, region {second} has {other}. "
            f"{_WAYS_OUT.get(field, _WAY_OUT)}{remedy} If these are two runs at one "
            "coordinator, give each a name of its own (regions.run, --run or HF_COCODC_RUN)."
        )
    return None


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """What must be equal in two hellos, or allowed to differ, and is not."""
    differing = []
    same_versions = mine.get("versions") == theirs.get("versions")
    for name in {**mine, **theirs}:
        ours, other = mine.get(name), theirs.get(name)
        if name in _ONLY_SHOWN or ours == other:
            continue
        if name == DIGEST:
            ours, other = _first_tensor(mine, theirs) or (ours, other)
        if name not in _SEVERAL or not (isinstance(ours, Mapping) and isinstance(other, Mapping)):
            differing.append(Difference(name, *_show(ours, other), free=False))
            continue
        # another version of Transformers may know more fields of a config
        fields = {**ours, **other} if same_versions else [field for field in ours if field in other]
        differing += [
            Difference(field, *_show(ours.get(field), other.get(field)), free=name == "facts")
            for field in fields
            if ours.get(field) != other.get(field)
        ]
    return differing


def packed(lines: Sequence[str]) -> str:
    """Lines that are much alike, such as names of tensors, as a short text."""
    return base64.b64encode(zlib.compress("\n".join(lines).encode(), 9)).decode()


def _unpacked(text: str) -> list[str]:
    unpacking = zlib.decompressobj()
    lines = unpacking.decompress(base64.b64decode(text), _MOST_NAMES).decode()
    if not unpacking.eof:
        raise ValueError("the text is cut off, or too long")
    return lines.split("\n") if lines else []


def _first_tensor(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first frozen tensor in which two regions differ, as each has it; None if they do not say."""
    try:
        pairs = zip_longest(_unpacked(mine[FROZEN]), _unpacked(theirs[FROZEN]), fillvalue="nothing")
    except (KeyError, TypeError, ValueError, zlib.error):
        return None
    return next(((own, other) for own, other in pairs if own != other), None)


def side_by_side(hellos: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences about what regions have otherwise than region 0, and about regions that train on the same samples."""
    sentences = []
    for region, other in enumerate(hellos[1:], start=1):
        for field, mine, theirs, _ in differences(hellos[0], other):
            sentences.append(f"{field}, which may differ: {mine} in region 0, {theirs} in region {region}.")
        versions = _versions(other)
        for name, version_there in _versions(hellos[0]).items():
            if version_there != versions.get(name):
                sentences.append(
                    f"other versions of {name}: {version_there} in region 0, {versions.get(name)} in region {region}."
                )
    samples = [str(each.get("first samples", "")) for each in hellos]
    for sample in sorted(set(samples) - {""}):
        same = [region for region, each in enumerate(samples) if each == sample]
        if len(same) > 1:
            sentences.append(
                f"regions {' and '.join(map(str, same))} begin with the same training samples: do they train on the same data? "
                "Give each region its own part: train_dataset=region_shard(dataset), or region_shard(dataset, regions) where "
                "a RegionConfig, not the environment, says which region this is."
            )
    return sentences


def _versions(hello: Mapping[str, Any]) -> Mapping[str, Any]:
    """The versions of a region; empty if it has written anything else: regions need not agree in them."""
    versions = hello.get("versions")
    return versions if isinstance(versions, Mapping) else {}


def _show(mine: Any, theirs: Any) -> tuple[str, str]:
    """Show both values; for two lists, show the first entry that differs."""
    if isinstance(mine, list) and isinstance(theirs, list):
        for a, b in zip(mine, theirs, strict=False):
            if a != b:
                return repr(a), repr(b)
        return f"{len(mine)} entries", f"{len(theirs)} entries"
    return repr(mine), repr(theirs)


def in_recipe(setting: str) -> str:
    """The name of a setting in a recipe, under which regions compare it."""
    for section, config in (("outer", OuterConfig), ("regions", RegionConfig)):
        if setting in (field.name for field in dataclasses.fields(config)):
            return f"{section}.{setting}"
    return setting
