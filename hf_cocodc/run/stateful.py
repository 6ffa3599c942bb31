"""Accelerate's stateful dataloaders (torchdata) of a plain loop that reads a stream.

`accelerator.save_state` saves the place of such a loader within a pass, but not the number of the pass: a loop that loads it
would go on as in the first pass, and so read other samples.
"""

import logging
from typing import Any

from accelerate import Accelerator
from torch.utils.data import IterableDataset

from ..errors import InputError

logger = logging.getLogger(__name__)

_PASS = "hf_cocodc_pass"
"""In the state of a loader: how many passes were made before the present one."""


def note_passes(accelerator: Accelerator) -> None:
    """Call before Accelerate saves: the state of each loader says its pass, too."""
    for loader in _loaders(accelerator):
        loader.dl_state_dict = {**loader.dl_state_dict, _PASS: loader.iteration}


def go_to_passes(accelerator: Accelerator) -> None:
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


def refuse_inexact(accelerator: Accelerator) -> None:
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
    return [
        loader
        for loader in accelerator._dataloaders
        if getattr(loader, "use_stateful_dataloader", False) and isinstance(loader.dataset, IterableDataset)
    ]
