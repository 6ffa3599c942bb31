"""The weights of a Trainer's model: how they get into a checkpoint, and out of it."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import CheckpointError
from ..snapshot import local_weights
from ..snapshot.checkpoint import read


def export(trainer: Trainer, folder: Path, save_model: Callable[[], None]) -> None:
    """Save the model as it is, even if Trainer itself would save only shards."""
    if not trainer.is_fsdp_enabled:
        save_model()
        return
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.args.should_save:
        trainer._save(str(folder), state_dict=weights)


def load_local(trainer: Trainer, checkpoint: Path, load: Callable[[], None]) -> None:
    """Load the local weights of a checkpoint into a Trainer's model; `load` is Trainer's own method for it.

    Of a checkpoint that was taken over, only what is not trained: the rest are the global params, which the outer optimizer
    copies into the model. If its run had finished, there may be no outer optimizer, and the global model is loaded as well.
    Raises CheckpointError if the checkpoint has other weights than the model.
    """
    model = _bare(trainer)
    lane = trainer.accelerator.process_index if trainer.is_fsdp_enabled else 0
    saved = read(checkpoint, with_values=False)
    taken_over, is_whole = saved.facts.taken_over, not any(isinstance(p, DTensor) for p in model.parameters())
    if taken_over and saved.facts.finished and is_whole:
        _load_beside(model, checkpoint, load, converted=trainer.is_fsdp_enabled)
    if trainer.is_fsdp_enabled and not taken_over:
        load()  # Accelerate's own files hold the shards under the model's names
    expected = local_weights.buffers(model) if trainer.is_fsdp_enabled else local_weights.kept(model)
    names = expected.keys() - saved.synchronized if taken_over else expected.keys()
    local_weights.restore(model, checkpoint, names, lane)


def load_pretrained_(model: nn.Module, folder: Path) -> None:
    """Copy the files of `save_pretrained` into a model of this class. Raises CheckpointError if a weight is missing."""
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(
            f"the weights in {folder} have other names than those of {type(model).__name__}, which is not a model of "
            "Transformers. Load them in your script."
        )
    # fp32 holds every value of a 16-bit weight
    with torch.random.fork_rng():
        loaded, loading_info = type(model).from_pretrained(
            folder, config=copy.deepcopy(model.config), dtype=torch.float32, output_loading_info=True
        )
    lacking = sorted({*loading_info["missing_keys"], *(each[0] for each in loading_info["mismatched_keys"])})
    theirs = loaded.state_dict()
    lacking += sorted(model.state_dict().keys() - theirs.keys())
    if lacking:
        raise CheckpointError(
            f"{folder} has no weights, or weights of another shape, for {lacking[0]}, nor has from_pretrained found any under "
            f"another name ({len(lacking)} in all). Resume with the model and the version of Transformers that wrote it."
        )
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(theirs[name])


def _load_beside(
    model: nn.Module, checkpoint: Path, load: Callable[[], None], converted: bool = False
) -> None:
    """Load the global weights, which `save_pretrained` has written beside our folder."""
    adapters = set(getattr(model, "peft_config", None) or ())
    # Trainer's own method leaves out weights that have another name in the file (transformers#48805)
    if not adapters and (converted or _has_other_names(model, checkpoint)):
        load_pretrained_(model, checkpoint)
        return
    load()
    # exports that a user has added are no adapters of this model
    for adapter in set(getattr(model, "peft_config", None) or ()) - adapters:
        model.delete_adapter(adapter)  # type: ignore[operator]


def _has_other_names(model: nn.Module, checkpoint: Path) -> bool:
    """Whether a file of weights lacks some of the model's, or has others. Of tied weights one is enough."""
    index, single = checkpoint / SAFE_WEIGHTS_INDEX_NAME, checkpoint / SAFE_WEIGHTS_NAME
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    elif single.is_file():
        with safe_open(single, framework="pt") as file:
            names = set(file.keys())
    else:
        return False
    own: dict[str, Tensor] = model.state_dict(keep_vars=True)
    there = {id(tensor) for name, tensor in own.items() if name in names}
    return not names <= own.keys() or any(id(tensor) not in there for tensor in own.values())


def _bare(trainer: Trainer) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
