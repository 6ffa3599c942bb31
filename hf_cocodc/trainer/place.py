"""Where a region is in its stream. A checkpoint holds it: the number of the step does not say it where a region has joined."""

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer

from ..link.group import from_main
from ..run.streams import is_exact
from ..snapshot.folders import usable

FILE = "stream.json"
"""In a checkpoint: the pass over the stream, the batches of it that a rank has trained on, how many a step accumulates, and the
state of the stream one step before, or null. Trainer then skips this step, and so notices where a pass is over."""


class StreamPlace:
    """The place of one Trainer, of which only a stream's counts: samples of other datasets are drawn by the number of the step.

    Without a state, what was trained is read and skipped again.

    Attributes:
        passes: those that were made before the present one.
        trained: batches of the present pass that this rank has trained on, here or before a resume, or has got for the next step.
    """

    def __init__(self, trainer: Trainer, is_dealt: bool = False) -> None:
        self._trainer, self._is_dealt = trainer, is_dealt
        self.passes = self.trained = self._read = 0
        self._has_begun = False
        self._states: deque[tuple[int, Any]] = deque(maxlen=1)
        self._loaded: dict[str, Any] | None = None

    @property
    def _counts(self) -> bool:
        return (
            self._is_dealt or isinstance(self._trainer.train_dataset, IterableDataset)
        ) and not self._trainer.args.ignore_data_skip

    @property
    def _keeps_states(self) -> bool:
        """Whether reading can go on from a state: one process reads the stream, and it is exact."""
        args = self._trainer.args
        return (
            self._counts
            and not self._is_dealt
            and not args.dataloader_num_workers
            and args.world_size == 1
            and is_exact(self._trainer.train_dataset)
        )

    def begin(
        self, epochs: int, batches: int, checkpoint: Path | None, joined: int | None = None
    ) -> tuple[int, int]:
        """The pass to begin with, and the batches to skip in it, where Trainer would take `epochs` and `batches`.

        `joined`: the number of the run that a newcomer comes into. It goes on in its own part, from its own last checkpoint.
        """
        step = self._trainer.args.gradient_accumulation_steps
        self._states = deque(maxlen=2 * step + 2)  # some are read ahead
        self._has_begun = False
        self.passes, self.trained, self._read = epochs, batches, 0
        if not self._counts:
            return epochs, batches
        if joined is not None:
            own = usable(Path(self._trainer.args.output_dir or "."), joined)
            checkpoint = own[max(own)] if own else None
        path = None if checkpoint is None else checkpoint / FILE
        found = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else None
        found = from_main(self._trainer.accelerator, found)
        if found is None and joined is not None:
            self.passes = self.trained = 0
        elif found is not None:
            # a step may be divided into more or fewer batches than before, as on another number of GPUs
            self.passes, self.trained = found["pass"], -(-found["batches"] * step // found["accumulate"])
        if self._is_dealt:
            return epochs, batches  # Trainer counts on, and reads nothing
        if found is None or found["state"] is None or not self._keeps_states:
            return self.passes, self.trained
        self._trainer.train_dataset.load_state_dict(found["state"])
        self._loaded = found["state"]
        self._read = self.trained - step
        return self.passes, step

    def begin_pass(self) -> None:
        """Call at the beginning of each of Trainer's epochs."""
        if self._has_begun and not self._is_dealt:
            self.next_pass()
        self._has_begun = True

    def next_pass(self) -> None:
        """The present pass is over."""
        self.passes, self.trained, self._read = self.passes + 1, 0, 0
        self._states.clear()

    def after_step(self) -> None:
        if self._loaded is not None:  # a stream would begin there once more, whenever it is read in this pass
            self._trainer.train_dataset.load_state_dict({**self._loaded, "epoch": -1})
            self._loaded = None
        if not self._is_dealt:
            self.trained += self._trainer.current_gradient_accumulation_steps

    def recording(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`collate`, which also keeps the state of the stream after the samples of a batch, if reading can go on from it."""
        stream = self._trainer.train_dataset
        if not self._keeps_states:
            return collate

        def collate_and_note(samples: Any) -> Any:
            self._read += 1
            self._states.append((self._read, stream.state_dict()))
            return collate(samples)

        return collate_and_note

    def write(self, checkpoint: Path) -> None:
        """Add the place to a checkpoint that is being written."""
        if self._counts and self._trainer.args.should_save:
            accumulate = self._trainer.args.gradient_accumulation_steps
            before = self.trained - accumulate
            state = next((state for read, state in self._states if read == before), None)
            place = {"pass": self.passes, "batches": self.trained, "accumulate": accumulate, "state": state}
            (checkpoint / FILE).write_text(json.dumps(place), encoding="utf-8")
