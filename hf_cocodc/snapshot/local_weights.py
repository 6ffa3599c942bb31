"""A region's local weights in its checkpoints: in a file of our own, under the model's own names, with a digest of each.

When it saves a model, Transformers renames some weights and splits others; Trainer then loads those that still have their names
and leaves out the rest (transformers#48805). Our file holds what the model holds. After a resume has loaded weights, from
whichever file, they are compared with the digests that were saved.
"""

import contextlib
import json
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import CheckpointError
from ..parts.tensors.flat import alone, digests, local_shard, offloaded, reshard
from .manifest import FOLDER

_UNSAVED = "unsaved_buffers"
"""Metadata of the file: a JSON list of the buffers that a state_dict leaves out."""


def weights_file(lane: int | str = 0) -> str:
    """File of a lane's local weights in a checkpoint; "*" stands for every lane."""
    return f"{FOLDER}/local-lane{lane}.safetensors"


def kept(model: nn.Module, synchronized: Collection[str] = ()) -> dict[str, Tensor]:
    """What a checkpoint restores of an unwrapped model, by name: this rank's own tensors, tied ones once.

    These are all parameters and buffers, except what every run loads anew and `base_digest` compares: the frozen base under
    adapters or quantized weights, and what is offloaded. Parameters that the run has trained (`synchronized`) count, even if
    they are frozen now.
    """
    adapters = set(getattr(model, "peft_config", None) or ())
    whole, elsewhere = not _has_adapters(model), offloaded(model)
    frozen = {
        name
        for name, param in model.named_parameters()
        if not (whole or param.requires_grad or name in synchronized or adapters & set(name.split(".")))
    }
    return {name: each for name, each in _all(model).items() if not (name in frozen or name in elsewhere)}


def _all(model: nn.Module) -> dict[str, Tensor]:
    reshard(model)  # an evaluation may have left whole parameters in the place of shards
    params = {name: local_shard(param) for name, param in model.named_parameters()}
    return {**params, **buffers(model)}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """All buffers of a model by name, even those that a state_dict leaves out: a longer context may have changed them."""
    return {name: local_shard(buffer) for name, buffer in model.named_buffers()}


def _has_adapters(model: nn.Module) -> bool:
    """Whether a model's frozen weights are a base that no checkpoint holds."""
    return bool(getattr(model, "peft_config", None)) or bool(getattr(model, "is_quantized", False))


def write(model: nn.Module, checkpoint: Path, tensors: Mapping[str, Tensor], lane: int = 0) -> None:
    """Write these tensors of an unwrapped model, of which two may share memory, into our file in a checkpoint. It says which
    a state_dict leaves out: the model may make such a buffer only at its first forward pass.
    """
    saved = model.state_dict(keep_vars=True)
    unsaved = json.dumps(sorted(name for name, _ in model.named_buffers() if name not in saved))
    content = {name: alone(tensor) for name, tensor in tensors.items()}
    save_file(content, checkpoint / weights_file(lane), {_UNSAVED: unsaved})


@torch.no_grad()
def restore(model: nn.Module, checkpoint: Path, expected: Iterable[str], lane: int = 0) -> None:
    """Copy the tensors of a checkpoint's file into an unwrapped model, in place; there may be more than the names `expected`.

    A buffer takes the shape that it had when it was saved. One that a state_dict leaves out is made if the model lacks it yet.

    Raises:
        CheckpointError: the file lacks a name, or has one that the model does not have, or another shape or type.
    """
    path = checkpoint / weights_file(lane)
    own = _all(model)
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        for name in set(json.loads((file.metadata() or {}).get(_UNSAVED, "[]"))) & names - own.keys():
            owner, _, last = name.rpartition(".")
            with contextlib.suppress(AttributeError):  # no such module: refused below
                device = next(iter(own.values())).device
                module = model.get_submodule(owner)
                module.register_buffer(last, file.get_tensor(name).to(device), persistent=False)
                own[name] = module.get_buffer(last)
        for name in sorted((names - own.keys()) | (set(expected) - names)):
            has, lacks = (path.name, "the model") if name in names else ("the model", path.name)
            raise CheckpointError(
                f"{checkpoint} cannot be resumed from: {has} has {name}, {lacks} does not. Resume with the model and the "
                f"versions of the libraries that wrote it, or start a new run from its global model ({checkpoint})."
            )
        for name in file.keys():  # noqa: SIM118
            tensor, here = file.get_tensor(name), own[name]
            if (tensor.shape, tensor.dtype) == (here.shape, here.dtype):
                here.copy_(tensor)
            elif tensor.dtype == here.dtype and name in buffers(model):
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, tensor.to(here.device, copy=True))
            else:
                raise CheckpointError(
                    f"{checkpoint} cannot be resumed from: {name} is {list(tensor.shape)} {tensor.dtype} in {path.name}, "
                    f"and {list(here.shape)} {here.dtype} in the model. Resume with the model that wrote it."
                )


def check(model: nn.Module, saved: Mapping[str, str], synchronized: Collection[str]) -> None:
    """Check that an unwrapped model, after every file has been loaded, holds the local weights that were saved.

    Args:
        saved: `digests` of what was saved; empty if it was taken over: nothing is compared then.
        synchronized: names of the parameters that the run had trained.

    Raises:
        CheckpointError: it does not; names the first tensors that differ.
    """
    if not saved:
        return
    current = digests(kept(model, synchronized))
    wrong = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
    if wrong:
        first = "; ".join(
            f"{name}: {saved.get(name, 'nothing')} was saved, the model has {current.get(name, 'nothing')}"
            for name in wrong[:3]
        )
        raise CheckpointError(
            f"after loading the checkpoint, {len(wrong)} of {len(saved)} weights and buffers are not those that were saved "
            f"({first}; the last number of each is a checksum). No step was made. Resume with the model, the script and the "
            "versions of the libraries that wrote the checkpoint; nothing may change weights before training starts. Or start "
            "a new run from the checkpoint's global model (checkpoint-N)."
        )


def base_digest(model: nn.Module) -> str | None:
    """A digest of all parameters and buffers that no checkpoint holds: the frozen base under adapters, and what is offloaded.
    None if the model has no base, or if this rank does not hold it yet.
    """
    elsewhere = offloaded(model)
    if not elsewhere and not _has_adapters(model):
        return None
    mine = kept(model)
    named = dict((*model.named_parameters(), *model.named_buffers()))
    base = {name: local_shard(named[name]) for name in sorted(named.keys() - mine.keys())}
    if any(tensor.is_meta and name not in elsewhere for name, tensor in base.items()):
        return None
    return _checksum(digests(base, elsewhere))


def scales_digest(model: nn.Module) -> str | None:
    """A digest of the tensors that modules save beside parameters and buffers: the scales of quantized weights. None if they save
    none, or if this rank does not hold them yet. What `get_extra_state` saves may change in training, and is each region's own.
    """
    named = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    scales = {
        name: local_shard(each)
        for name, each in sorted(model.state_dict(keep_vars=True).items())
        if isinstance(each, Tensor) and id(each) not in named and not name.endswith("_extra_state")
    }
    if not scales or any(tensor.is_meta for tensor in scales.values()):
        return None
    return _checksum(digests(scales))


def _checksum(lines: Mapping[str, str]) -> str:
    return f"{zlib.crc32(repr(lines).encode()):08x}"
