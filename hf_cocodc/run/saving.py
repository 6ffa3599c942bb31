"""Writes a region's checkpoint together with all its ranks; lets `accelerator.save_state` and `load_state` do so, too."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from torch import nn

from ..link.base import Link
from ..link.within import main_says
from ..parts.tensors.flat import digests
from ..snapshot import checkpoint as disk
from ..snapshot import folders, local_weights
from ..snapshot.checkpoint import Facts, Saved
from .inner_optimizer import InnerOptimizer
from .resuming import in_all, refuse_damaged, restore_buffers, take_loaded

if TYPE_CHECKING:
    from .outer_optimizer import OuterOptimizer


def facts_of(outer: "OuterOptimizer") -> Facts:
    """What identifies the run of an outer optimizer, as it is now."""
    mark = outer.journal.mark()
    return Facts.of(
        outer.link,
        step=outer.inner_step,
        settings=outer.settings,
        finished=outer.finished,
        journal=mark.position,
        journal_sha256=mark.sha256,
        stopping=outer.verdict == "stop",
        model=dict(outer.about.model),
        facts=dict(outer.about.facts),
    )


def write(
    accelerator: Accelerator, link: Link, model: nn.Module, checkpoint: Path, saved: Saved, whole: bool
) -> None:
    """Write every lane's part into a checkpoint that is not complete yet. A collective call of the region's ranks.

    `model` is unwrapped, with the local weights. If `whole`, our own file holds all of them; else it holds buffers, and the
    caller saves the parameters. Raises CheckpointError if the disk refuses.
    """
    if accelerator.is_main_process:
        disk.begin(checkpoint)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process or link.lane:
        kept = local_weights.kept(model, saved.synchronized)
        disk.write(checkpoint, saved._replace(weights=digests(kept)), link.lane)
        with disk.saving(checkpoint):
            own = kept if whole else local_weights.buffers(model)
            unsaved = local_weights.unsaved_buffers(model)
            local_weights.write(checkpoint / local_weights.weights_file(link.lane), own, unsaved)


def seal(accelerator: Accelerator, link: Link, checkpoint: Path) -> None:
    """Declare a checkpoint complete, once every rank has written its part. A collective call of the region's ranks."""
    accelerator.wait_for_everyone()
    main_says(link, accelerator, lambda: disk.seal(checkpoint), "the hashes of a checkpoint")
    accelerator.wait_for_everyone()  # the leader must not end before the others have heard of it


def hook_into_saving(
    accelerator: Accelerator, outer: "OuterOptimizer", inner: InnerOptimizer
) -> list[Callable[[], Any]]:
    """Let `accelerator.save_state` and `load_state` save and load `outer` too; returns functions that undo this. Warns if
    `save_state` leaves out state of `inner`.

    Accelerate calls hooks before it writes or reads its own files, but our last part must come after them: the two methods of
    this accelerator are therefore wrapped.
    """
    folder: list[Path] = []
    read: list[Saved] = []
    save_state, load_state = accelerator.save_state, accelerator.load_state

    def before_saving(models: Any, weights: Any, output_dir: str) -> None:
        folder[:] = [Path(output_dir)]
        inner.warn_of_unsaved(accelerator)
        outer.save(output_dir)

    def before_loading(models: Any, input_dir: str) -> None:
        checkpoint = Path(input_dir)
        refuse_damaged(outer.link, accelerator, checkpoint)
        folder[:] = [checkpoint]
        read[:] = [disk.read_own(outer.link, checkpoint, checked=True)]

    def save_all(*args: Any, **kwargs: Any) -> Any:
        result, spent = None, outer.timer()
        given = args[0] if args else kwargs.get("output_dir")
        into = Path(given or accelerator.project_dir or ".")
        home, run, link = _home_of(accelerator, *args, **kwargs), outer.started.get("run", 0), outer.link
        if link.most_regions == 1 or not run:
            home = None  # nobody else can save there, or be told apart
        if home is not None:  # before Accelerate writes anything
            mine = partial(folders.claim, home, run, link.region, link.members)
            main_says(link, accelerator, mine, f"whose folder {home} is")
        with outer.spare(f"a checkpoint of step {outer.inner_step}"), disk.saving(into):
            result = save_state(*args, **kwargs)
            if home is not None and accelerator.is_main_process:
                folders.forget_earlier(home, run)
            outer.seal(folder[0])
            outer.journal.write_later("save", step=outer.inner_step, **spent())
        return result

    def load_all(*args: Any, **kwargs: Any) -> None:
        def load() -> None:
            load_state(*args, **kwargs)
            take_loaded(accelerator)  # this outer optimizer sees to it
            restore_buffers(outer.model, folder[0], outer.link.lane)

        in_all(outer.link, load, "what regions load")
        outer.load(read[0])

    hooks = [
        accelerator.register_save_state_pre_hook(before_saving),
        accelerator.register_load_state_pre_hook(before_loading),
    ]
    accelerator.save_state, accelerator.load_state = save_all, load_all

    def unwrap() -> None:
        accelerator.save_state, accelerator.load_state = save_state, load_state

    return [unwrap, *(hook.remove for hook in hooks)]


def _home_of(
    accelerator: Accelerator, output_dir: str | None = None, *args: Any, **kwargs: Any
) -> Path | None:
    """The folder of the region that calls `save_state` with these arguments; None if they name none."""
    if accelerator.project_configuration.automatic_checkpoint_naming:
        # of all checkpoints: Accelerate makes a new folder in it for each
        output_dir = accelerator.project_dir
    return None if output_dir is None else Path(output_dir)
