"""Writes a region's checkpoint together with all its ranks; lets `accelerator.save_state` and `load_state` do so, too."""

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


def write(accelerator: Accelerator, link: Link, checkpoint: Path, saved: Saved) -> None:
    """Write the part of every lane into a checkpoint that is not complete yet. A collective call of the region's ranks.

    Raises:
        CheckpointError: the disk refuses.
    """
    if accelerator.is_main_process:
        disk.begin(checkpoint)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process or link.lane:
        disk.write(checkpoint, saved, link.lane)


def seal(accelerator: Accelerator, link: Link, checkpoint: Path) -> None:
    """Declare a checkpoint complete, once every rank has written its part. A collective call of the region's ranks."""
    accelerator.wait_for_everyone()
    is_main = accelerator.is_main_process  # every pipeline stage leads itself
    # hashing may take longer than a collective call may wait
    link.lead(lambda _: disk.seal(checkpoint) if is_main else None, "the hashes of a checkpoint")
    accelerator.wait_for_everyone()  # the leader must not end before the others have heard of it


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
