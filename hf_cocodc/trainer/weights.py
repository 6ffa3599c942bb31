"""The weights of a Trainer's model: how they get into a checkpoint, and out of it."""

import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer

from ..errors import InputError
from ..snapshot import local_weights
from ..snapshot.checkpoint import read


def refuse_unsaved(model: nn.Module) -> None:
    """Raise InputError if `save_pretrained` of an unwrapped model would leave out parameters that are trained: what the run
    exports would be another model than the one that it has trained.
    """
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    adapters = set(getattr(model, "peft_config", None) or ())
    if not adapters:
        lost = sorted(trained.keys() & set(getattr(model, "_keys_to_ignore_on_save", None) or ()))
        way_out = (
            "Freeze them (requires_grad_(False)), or take them out of the model's _keys_to_ignore_on_save."
        )
    else:
        beside = {name: param for name, param in trained.items() if not adapters & set(name.split("."))}
        saved = _saved_of_adapters(model, adapters) if beside else set()
        lost = sorted(name for name, param in beside.items() if id(param) not in saved)
        modules = sorted({_module_of(name) for name in lost})
        way_out = (
            f"Name their modules in the adapter's config ({modules=}: modules_to_save), freeze them (requires_grad_(False)), or "
            "train the whole model."
        )
    if lost:
        named = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if lost[3:] else "")
        raise InputError(
            f"{type(model).__name__}.save_pretrained leaves out parameters that this run trains ({named}): the saved model would "
            f"not be the trained one. {way_out}"
        )


def _module_of(param: str) -> str:
    """The name of a parameter's module, by which an adapter's config names it."""
    return param.rpartition(".")[0].removesuffix(".base_layer").rpartition(".")[2]


def _saved_of_adapters(model: nn.Module, adapters: Collection[str]) -> set[int]:
    """The ids of the parameters that PEFT saves with these adapters of a model."""
    from peft import get_peft_model_state_dict

    own = model.state_dict(keep_vars=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # saving will give them
        return {
            id(tensor) for name in adapters for tensor in get_peft_model_state_dict(model, own, name).values()
        }


def export(trainer: Trainer, folder: Path, save_model: Callable[[], None]) -> None:
    """Save the model as it is. Trainer's own `save_model` writes no weights of an FSDP2 model whose states are saved as shards,
    which is Accelerate's default.
    """
    if trainer.is_fsdp_enabled and "FULL" not in str(trainer.accelerator.state.fsdp_plugin.state_dict_type):
        weights = trainer.accelerator.get_state_dict(trainer.model)
        if trainer.args.should_save:
            trainer._save(str(folder), state_dict=weights)
    save_model()  # after it: it may push what lies in the folder


def load_local(trainer: Trainer, checkpoint: Path, load: Callable[[], None]) -> None:
    """Load the local weights of a checkpoint into a Trainer's model; `load` is Trainer's own method for it.

    Of a checkpoint that was taken over, only what is not trained: the rest are the global params, which the outer optimizer
    copies into the model. Raises CheckpointError if the checkpoint has other weights than the model.
    """
    model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    lane = trainer.accelerator.process_index if trainer.is_fsdp_enabled else 0
    saved = read(checkpoint, with_values=False)
    taken_over = saved.facts.taken_over
    if trainer.is_fsdp_enabled and not taken_over:
        load()  # Accelerate's own files hold the shards under the model's names
    expected = local_weights.buffers(model) if trainer.is_fsdp_enabled else local_weights.kept(model)
    names = expected.keys() - saved.synchronized if taken_over else expected.keys()
    local_weights.restore(model, checkpoint, names, lane)
