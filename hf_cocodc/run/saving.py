"""Writes a region's checkpoint together with all its ranks; lets `accelerator.save_state` and `load_state` do so, too."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.utils.data import IterableDataset

from ..errors import InputError, expanded
from ..link.group import main_says, wait_for_ranks
from ..parts.tensors.flat import digests
from ..snapshot import checkpoint as disk
from ..snapshot import folders, local_weights
from ..snapshot.checkpoint import Saved
from .resuming import in_all, refuse_damaged, restore_buffers
from .training import Training

logger = logging.getLogger(__name__)

_PASS = "hf_cocodc_pass"
"""In the state of a loader: how many passes were made before the present one."""


def write(training: Training, checkpoint: Path, whole: bool = False) -> None:
    """Write every lane's part into a checkpoint that is not complete yet. A collective call of the region's ranks.

    If `whole`, our own file holds all local weights; else it holds buffers, and the caller saves the parameters. Raises
    CheckpointError if the disk refuses, LeftBehind if the others have gone on without this region.
    """
    accelerator, link, model = training.accelerator, training.link, training.model
    saved = Saved(training.engine.state_dict(), training.facts)
    main_says(link, accelerator, lambda: disk.begin(checkpoint), f"the folder {checkpoint}")
    if accelerator.is_main_process or link.lane:
        kept = local_weights.kept(model, saved.synchronized)
        disk.write(checkpoint, saved._replace(weights=digests(kept)), link.lane)
        with disk.saving(checkpoint):
            own = kept if whole else local_weights.buffers(model)
            local_weights.write(model, checkpoint, own, link.lane)


def seal(training: Training, checkpoint: Path) -> None:
    """Declare a checkpoint complete, once every rank has written its part. A collective call of the region's ranks."""
    what = f"all parts of {checkpoint}"
    wait_for_ranks(training.accelerator, what)
    main_says(
        training.link, training.accelerator, lambda: disk.seal(checkpoint), "the hashes of a checkpoint"
    )
    wait_for_ranks(training.accelerator, what)  # the leader must not end before the others have heard of it
    training.endings.tell(saved_at=training.inner_step)
    training.saved_in = checkpoint
    if training.link.num_regions == 1:
        training.endings.saved_everywhere = training.inner_step


def hook_into_saving(
    training: Training, spare: Callable[[str], AbstractContextManager[None]]
) -> list[Callable[[], Any]]:
    """Let `accelerator.save_state` and `load_state` save and load the run too; returns functions that undo this. Warns if
    `save_state` leaves out state of the inner optimizer. `spare` stands around what a region can do without.

    Accelerate calls hooks before it writes or reads its own files, but our last part must come after them: the two methods of
    this accelerator are therefore wrapped.
    """
    accelerator, link = training.accelerator, training.link
    folder: list[Path] = []
    read: list[Saved] = []
    loading = ExitStack()
    save_state, load_state = accelerator.save_state, accelerator.load_state

    def read_own(checkpoint: Path) -> None:
        folder[:] = [checkpoint]
        read[:] = [disk.read_own(link, checkpoint)]

    def before_saving(models: Any, weights: Any, output_dir: str) -> None:
        folder[:] = [Path(output_dir)]
        training.inner.warn_of_unsaved(accelerator)
        _note_passes(accelerator)
        write(training, folder[0])

    def before_loading(models: Any, input_dir: str) -> None:
        if not read:  # Accelerate has found the newest folder itself
            refuse_damaged(link, accelerator, Path(input_dir))
            read_own(Path(input_dir))

    def save_all(*args: Any, **kwargs: Any) -> Any:
        training.inner.refuse_midway(training.inner_step)
        spent, number = training.timer(), training.started.get("run", 0)
        given, home = _folders(accelerator, *args, **kwargs)
        into = given or Path(accelerator.project_dir or ".")
        # else nobody else can save there, or be told apart
        if home is not None and link.most_regions > 1 and number:
            mine = partial(folders.claim, home, number, link.region, link.members)
            main_says(link, accelerator, mine, f"whose folder {home} is")  # before Accelerate writes anything
        result, project = None, accelerator.project_configuration
        limit = project.total_limit
        with spare(f"a checkpoint of step {training.inner_step}"), disk.saving(into):
            if given is not None:
                place = main_says(
                    link, accelerator, partial(folders.place_to_save, given), f"the place of {given}", Path
                )
                args, kwargs = (str(place), *args[1:]), {k: v for k, v in kwargs.items() if k != "output_dir"}
            if (
                limit is not None
            ):  # Accelerate deletes old ones before the new one is there, and ends if it cannot
                project.total_limit = None
            try:
                result = save_state(*args, **kwargs)
            finally:
                project.total_limit = limit or project.total_limit
            seal(training, folder[0])
            if given is not None:
                main_says(link, accelerator, partial(folders.move_in, given), f"the new files of {given}")
                result = str(given)
            if limit and project.automatic_checkpoint_naming and accelerator.is_main_process:
                folders.rotate_named(folder[0].parent, limit)
            training.journal.write_later("save", step=training.inner_step, **spent())
        return result

    def load_all(*args: Any, **kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("input_dir")
        read.clear()

        def load() -> None:
            _refuse_inexact(accelerator)
            home = None if given is None else expanded(given)
            if home is not None:
                main_says(link, accelerator, partial(folders.move_in, home), f"the new files of {home}")
                refuse_damaged(link, accelerator, home)
            # Accelerate changes the model from here on: a loop that goes on after an error must not train it
            loading.enter_context(training.engine.whole("a load of a checkpoint"))
            if home is not None:
                read_own(home)
            load_state(*args, **kwargs)
            _go_to_passes(accelerator)
            restore_buffers(training.model, folder[0], link.lane)

        with loading:
            in_all(link, accelerator, load, "what regions load")
            training.load(read[0])

    hooks = [
        accelerator.register_save_state_pre_hook(before_saving),
        accelerator.register_load_state_pre_hook(before_loading),
    ]
    accelerator.save_state, accelerator.load_state = save_all, load_all

    def unwrap() -> None:
        accelerator.save_state, accelerator.load_state = save_state, load_state

    return [unwrap, *(hook.remove for hook in hooks)]


def _folders(
    accelerator: Accelerator, output_dir: str | None = None, *args: Any, **kwargs: Any
) -> tuple[Path | None, Path | None]:
    """The folder into which `save_state` saves, called with these arguments, None if Accelerate makes a new one; and the folder
    of the region, None if they name none.
    """
    named = None if output_dir is None else expanded(output_dir)
    if accelerator.project_configuration.automatic_checkpoint_naming:
        project = accelerator.project_dir
        return None, None if project is None else Path(project)
    return named, named


def _note_passes(accelerator: Accelerator) -> None:
    """Call before Accelerate saves: the state of each loader says its pass, too."""
    for loader in _loaders(accelerator):
        loader.dl_state_dict = {**loader.dl_state_dict, _PASS: loader.iteration}


def _go_to_passes(accelerator: Accelerator) -> None:
    """Call after Accelerate has loaded: each loader goes on in the pass that was saved, or with the next one if that was over."""
    for loader in _loaders(accelerator):
        plain = loader.base_dataloader
        state = plain.next_iter_state
        if state is None:
            continue
        if _PASS not in state:
            logger.warning(
                "the checkpoint does not say in which pass over its stream a dataloader was: it goes on as in the first one."
            )
            continue
        loader.iteration = state[_PASS]
        if state.get("_iterator_finished"):
            loader.iteration += 1
            plain.next_iter_state = None


def _refuse_inexact(accelerator: Accelerator) -> None:
    """Raise InputError if a loader would go on with other samples than those that come next."""
    for loader in _loaders(accelerator):
        import datasets  # takes long, and only streams need it

        from .streams import is_exact

        if isinstance(loader.dataset, datasets.IterableDataset) and not is_exact(loader.dataset):
            raise InputError(
                "load_state would leave samples out: this dataloader is a stateful one (use_stateful_dataloader=True), and the "
                "state of its stream lacks what is in the shuffle buffer. Prepare it without use_stateful_dataloader, and skip "
                "what was read: accelerator.skip_first_batches(loader, batches)."
            )


def _loaders(accelerator: Accelerator) -> list[Any]:
    """Its stateful dataloaders (torchdata) of streams. Accelerate saves the place of each within a pass, but not the pass: a loop
    that loads it would go on as in the first one, and so read other samples.
    """
    return [
        loader
        for loader in accelerator._dataloaders
        if getattr(loader, "use_stateful_dataloader", False) and isinstance(loader.dataset, IterableDataset)
    ]
