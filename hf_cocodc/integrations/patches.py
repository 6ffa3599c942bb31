"""Every method of Trainer that is wrapped, and every private one that is relied on."""

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerState, TrainingArguments

from ..errors import InputError
from ..run import checkpoint as state


def has_finished(facts: dict[str, Any], args: TrainingArguments, checkpoint: Path) -> bool:
    """Whether the run of a checkpoint had finished, and no more steps or epochs are asked for now.

    Raises:
        InputError: it had not, but fewer steps are asked for than it has made.
    """
    if args.max_steps > 0:
        if facts["finished"] or facts["step"] < args.max_steps:
            return args.max_steps <= facts["step"]
        raise InputError(
            f"{checkpoint} is of step {facts['step']} of a run that was stopped, and max_steps={args.max_steps} leaves nothing "
            f"to train. Raise max_steps, or take the global model of that moment: {checkpoint / state.EXPORT}."
        )
    if not facts["finished"]:
        return False
    trained = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    return args.num_train_epochs <= trained.num_train_epochs


def export(trainer: Trainer, folder: str) -> None:
    """Save the model as it is; also where Trainer itself would save shards alone."""
    if not trainer.is_fsdp_enabled:
        trainer.save_model(folder, _internal_call=True)
        return
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.args.should_save:
        trainer._save(folder, state_dict=weights)
