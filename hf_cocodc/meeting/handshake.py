"""What must agree between regions before step 1.

Settings that differ would hang a run (another interval), or ruin it without a word (another frozen base). Each region
says a hello; all compare all of them and say the same thing where they differ.
"""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import HandshakeError
from ..tensors.sharding import local_shard

PROTOCOL = 5
"""Version of what crosses the link; raised whenever two versions of this package could misunderstand each other."""


def hello(
    model: nn.Module, settings: Mapping[str, Any], max_steps: int | None, num_lanes: int
) -> dict[str, Any]:
    """What this region says of itself (JSON-able).

    Args:
        model: unwrapped; its trainable parameters are listed, the rest enters as a digest.
        settings: of the method and the link, by the names users know them by.
        max_steps: inner steps of the run, where known.
        num_lanes: lanes of the region.
    """
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return {
        "protocol": PROTOCOL,
        "torch": torch.__version__.split("+")[0],
        "byte order": __import__("sys").byteorder,
        **{f"outer.{name}": value for name, value in settings.items()},
        "max_steps": max_steps,
        "lanes": num_lanes,
        "trainable parameters": [f"{name} {list(p.shape)} {p.dtype}" for name, p in trainable.items()],
        "frozen parameters and buffers (digest)": _frozen_digest(model),
        "adapter settings": _adapter_settings(model),
        "host": platform.node(),
    }


def compare(hellos: Sequence[Mapping[str, Any]]) -> None:
    """Check that all regions said the same, in what must agree.

    Raises:
        HandshakeError: names the two regions, the field and both values.
    """
    first = hellos[0]
    for region, other in enumerate(hellos[1:], start=1):
        for field in first:
            if field == "host" or first[field] == other.get(field):
                continue
            mine, theirs = _show(first[field], other.get(field))
            raise HandshakeError(
                f"region 0 and region {region} disagree on {field}: region 0 has {mine}, region {region} has {theirs}. "
                "Start every region from the same recipe and the same weights, and with the same versions."
            )


def _show(mine: Any, theirs: Any) -> tuple[str, str]:
    """Both values; of two lists the first entry that differs."""
    if isinstance(mine, list) and isinstance(theirs, list):
        for a, b in zip(mine, theirs, strict=False):
            if a != b:
                return repr(a), repr(b)
        return f"{len(mine)} of them", f"{len(theirs)} of them"
    return repr(mine), repr(theirs)


def _adapter_settings(model: nn.Module) -> list[str]:
    """What PEFT's adapters do that no parameter tells, such as LoRA's alpha; not where a region has the base model from."""
    found = []
    for name, config in getattr(model, "peft_config", {}).items():
        for key, value in sorted(config.to_dict().items()):
            if key not in _OF_ONE_PLACE:
                found.append(f"{name}.{key}={sorted(value) if isinstance(value, set) else value}")
    return found


_OF_ONE_PLACE = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision")


def _frozen_digest(model: nn.Module) -> str:
    """Digest of everything that is not synchronised but has to be equal.

    Frozen parameters, buffers that are saved, and whatever else layers save: the scales of quantised weights, say.
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
    """What a tensor is made of: a quantised weight may be a subclass that holds values and scales, and no bytes itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]
