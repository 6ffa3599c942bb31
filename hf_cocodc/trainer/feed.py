"""The micro-batches of a Trainer whose region shares the global batch with others (`regions.balance`).

Trainer makes `gradient_accumulation_steps` micro-batches in each inner step, and counts epochs, steps and what it skips at a
resume by that. So it still gets that many, but they are bundles: all are empty but the last one, which holds what this region was
dealt. An epoch of Trainer's is then no pass over the data: batches come from a reader that goes on from pass to pass.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import skip_first_batches
from torch import Tensor
from transformers import Trainer

from ..link.process_state import random_state_kept
from ..run.feed import DealtBatches, DealtSamples, Now
from .place import StreamPlace


class Bundle(list):
    """Micro-batches that Trainer takes for one."""


class Feed(Iterator):
    """Reads the batches of a Trainer, pass by pass; or, if there are `num_parts` of the data, as they are dealt. `now`: see
    `run.feed`.
    """

    def __init__(
        self,
        trainer: Trainer,
        place: StreamPlace,
        now: Now,
        num_parts: int | None,
    ) -> None:
        self._trainer, self._place, self._now, self._num_parts = trainer, place, now, num_parts
        self.micro_batches = trainer.args.gradient_accumulation_steps
        self._batches: Iterator[Any] | None = None
        self.loader: Any = None
        """Trainer's, once it trains."""

    def begin(self, loader: Any) -> None:
        """A training begins, with Trainer's dataloader."""
        self.loader = loader
        self._batches = None if self._num_parts is None else DealtBatches(loader, self._now)
        self.micro_batches = self._trainer.args.gradient_accumulation_steps

    def __next__(self) -> Any:
        batch = self._next()
        self._place.trained += 1
        return batch

    def sampler(self) -> DealtSamples | None:
        """In the place of Trainer's own; None if it has its own."""
        if self._num_parts is None:
            return None
        args = self._trainer.args
        shuffles = args.train_sampling_strategy == "random"
        seed = args.seed if args.data_seed is None else args.data_seed
        return DealtSamples(
            len(self._trainer.train_dataset), self._num_parts, seed if shuffles else None, self._now
        )

    def _next(self) -> Any:
        is_new = self._batches is None
        if self._batches is not None:
            with contextlib.suppress(StopIteration):
                return next(self._batches)
            self._place.next_pass()
        skipped = self._place.trained if is_new else 0
        loader, passes = self.loader, self._place.passes
        if skipped:
            loader = skip_first_batches(loader, skipped)
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(passes)
        self._batches = iter(loader)
        # what begins a pass must draw nothing: after the first batches of a resume, Trainer goes back to saved random numbers
        with random_state_kept():
            torch.manual_seed(self._trainer.args.seed + passes)
            first = next(self._batches, None)
        if first is not None:
            return first
        if not skipped:
            raise StopIteration
        return self._next()  # the pass was over

    def bundles(self, batches: list[Any], slots: int) -> list[Bundle]:
        """As many as Trainer has asked for."""
        return [Bundle() for _ in range(slots - 1)] + [Bundle(batches)] if batches else []

    def train(self, step: Callable, model: Any, bundle: Any, *args: Any, **kwargs: Any) -> Tensor:
        """`step` is Trainer's `training_step`; returns the sum of what it returns for each micro-batch."""
        trainer = self._trainer
        if not isinstance(bundle, Bundle):
            return step(model, bundle, *args, **kwargs)
        loss = torch.zeros((), device=trainer.args.device)
        trainer.current_gradient_accumulation_steps = len(bundle)  # by which Trainer divides a loss
        for place, batch in enumerate(bundle, 1):
            is_last = place == len(bundle)
            with contextlib.nullcontext() if is_last else trainer.accelerator.no_sync(model):
                loss = loss + step(model, batch, *args, **kwargs)
        return loss
