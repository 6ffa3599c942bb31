"""The weights of a Trainer's model: how they get into a checkpoint, and out of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer

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
    copies into the model.
    Raises CheckpointError if the checkpoint has other weights than the model.
    """
    model = _bare(trainer)
    lane = trainer.accelerator.process_index if trainer.is_fsdp_enabled else 0
    saved = read(checkpoint, with_values=False)
    taken_over = saved.facts.taken_over
    if trainer.is_fsdp_enabled and not taken_over:
        load()  # Accelerate's own files hold the shards under the model's names
    expected = local_weights.buffers(model) if trainer.is_fsdp_enabled else local_weights.kept(model)
    names = expected.keys() - saved.synchronized if taken_over else expected.keys()
    local_weights.restore(model, checkpoint, names, lane)


def _bare(trainer: Trainer) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
