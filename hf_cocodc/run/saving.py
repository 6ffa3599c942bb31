"""Lets `accelerator.save_state` and `load_state` save and load an outer optimizer too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator

from ..errors import CheckpointError
from ..links.base import Link
from . import checkpoint as disk
from .checkpoint import Saved
from .shelf import main_says


class Savable(Protocol):
    """An outer optimizer, as far as it is saved and loaded."""

    link: Link

    def save(self, checkpoint: str | Path) -> None: ...

    def seal(self, checkpoint: str | Path) -> None: ...

    def load(self, saved: Saved) -> None: ...


def hook_into_saving(accelerator: Accelerator, outer: Savable) -> list[Callable[[], Any]]:
    """Let `accelerator.save_state` and `load_state` save and load `outer` too; returns functions that undo this.

    Accelerate calls hooks before it writes or reads its own files, and the hooks receive the folder. Our last part must come
    after Accelerate's files: the two methods of this accelerator are therefore wrapped.
    """
    folder: list[str] = []
    read: list[Saved] = []
    save_state, load_state = accelerator.save_state, accelerator.load_state

    def before_saving(models: Any, weights: Any, output_dir: str) -> None:
        folder[:] = [output_dir]
        outer.save(output_dir)

    def before_loading(models: Any, input_dir: str) -> None:
        checkpoint = Path(input_dir)
        wrong = main_says(
            outer.link, accelerator, lambda: disk.damage(checkpoint), f"the check of {checkpoint}"
        )
        if wrong is not None:
            raise CheckpointError(
                f"{checkpoint} cannot be loaded: {wrong}. Load another checkpoint of the run."
            )
        read[:] = [disk.read(checkpoint, outer.link.lane, checked=True)]

    def save_all(*args: Any, **kwargs: Any) -> Any:
        result = save_state(*args, **kwargs)
        outer.seal(folder[0])
        return result

    def load_all(*args: Any, **kwargs: Any) -> None:
        load_state(*args, **kwargs)
        outer.load(read[0])

    hooks = [
        accelerator.register_save_state_pre_hook(before_saving),
        accelerator.register_load_state_pre_hook(before_loading),
    ]
    accelerator.save_state, accelerator.load_state = save_all, load_all

    def unwrap() -> None:
        accelerator.save_state, accelerator.load_state = save_state, load_state

    return [unwrap, *(hook.remove for hook in hooks)]
