"""How an outer optimizer ends its run: alone or with the other regions, at the last inner step or before it."""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable

from ..engine.saving import wait_for_transfers
from ..engine.synchronizer import Synchronizer
from ..errors import LeftBehind, LinkError
from ..link.base import Link
from ..link.records import Ending, Words
from .elastic import Elastic
from .endings import Endings


class Finishing(ABC):
    """The part of an outer optimizer that ends its run.

    Attributes:
        link: reaches the other regions.
        synchronizer: the engine.
        endings: what regions say about their ends.
        elastic: what a run does whose regions come and go; None in others.
        finished: whether the model holds the global weights at the end of the run.
    """

    link: Link
    synchronizer: Synchronizer
    endings: Endings
    elastic: Elastic | None
    finished: bool
    _max_steps: int | None

    @property
    def inner_step(self) -> int:
        """Inner steps made so far."""
        return self.synchronizer.inner_step

    @property
    def verdict(self) -> str | None:
        """What the regions have agreed to do before max_steps: "finish" or "stop"; None to train on.

        "leave": this region alone has left, and the others train on.
        """
        return self.endings.verdict

    @property
    def why(self) -> str:
        """The reason for the verdict, in words."""
        return self.endings.why

    @property
    def should_stop(self) -> bool:
        """Whether the run has ended here: leave the loop.

        With `verdict` "finish" the model holds the global weights; with "stop" call `accelerator.save_state` before you
        leave, and resume later.
        """
        return self.finished or self.verdict is not None

    def note_loss(self, loss: float) -> None:
        """Tell the others this region's training loss with the next transfers."""
        told = float(loss)
        self.endings.tell(loss=math.inf if math.isnan(told) else told)  # NaN says that it is unknown

    def say(self, ending: Ending) -> None:
        """Tell the others with the next transfer that this region is about to end; train on until `should_stop`."""
        self.endings.tell(ending=ending)

    def ask_to_stop(self, reason: str) -> None:
        """Ask all regions to stop with a checkpoint; train on until `should_stop`, which takes about a second.

        Regions agree on the step through the coordinator. One rank of one region is enough, and a signal's handler may call this.
        """
        self.endings.ask_to_stop(reason)

    def leave(self, reason: str) -> None:
        """After an error: tell the others why, and `coast`. Steps since the last sends are lost: they may be incomplete.

        The others save the transfers that are in flight then; this region takes part in them to their end.
        """
        self.synchronizer.give_up_unsent()
        self.ask_to_stop(reason)
        self.coast()
        wait_for_transfers(self.synchronizer.fragments)

    def coast(self, end: Callable[[], None] = lambda: None) -> None:
        """Keep step with the others without training, until they have heard of it and all `end` together."""
        while not self.should_stop and not self.is_at_the_end:
            self._advance(trained=False)
            if self.is_at_the_end:
                end()
            self.endings.while_coasting()

    def finish(self) -> None:
        """End the run: the model holds the global weights afterwards. A collective call; calling it again does nothing.

        Regions may come here after different numbers of inner steps: an early one coasts until the others have heard of
        it. After a `verdict` to stop or leave nothing is exchanged and the model keeps its local weights.
        """
        if not self.finished and not self.is_at_the_end:
            self.say(Ending.DONE)
            self.coast(self._finish)
        self._finish()

    def _finish(self) -> None:
        while not self.finished and self.verdict not in ("stop", "leave"):
            try:
                words = self.synchronizer.finish(self.endings.word)
            except LeftBehind as error:
                self._go_on_to_the_end(error)
                continue
            self.endings.note_saved_everywhere(words)
            if ruined := self._ruined_at_the_end():
                self.endings.stop(ruined)
                continue
            self.finished = True
            if not self.endings.keep_link:
                self.close()

    def _go_on_to_the_end(self, error: LeftBehind) -> None:
        """The others have gone on without this region, which had come to its end: come back, and keep step with them to theirs.

        Raises:
            LinkError: they have ended, too.
        """
        assert self.elastic is not None
        step = self.inner_step
        try:
            self.elastic.come_back(error)
        except LinkError as gone:
            raise LinkError(
                f"region {self.link.region} came to its end at step {step}, but the other regions had gone on without it, and it "
                f"cannot come back ({gone}) Its model lacks what they exchanged last: take the model from the folder of another "
                "region, which has the global weights. If they have not ended either, start this region again with the same "
                "command: it joins them."
            ) from gone
        self.coast()

    def spare(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around what a region can do without, if the others have gone on without it; see `Elastic.spare`."""
        return contextlib.nullcontext() if self.elastic is None else self.elastic.spare(what)

    @property
    def is_at_the_end(self) -> bool:
        """Whether every region is known to end at this step, so that the last round can take place."""
        known = self._max_steps is not None and self.inner_step >= self._max_steps
        is_alone = self.link.num_regions == 1 and not self.link.is_elastic  # else others may come
        return known or is_alone or self.verdict is not None

    def coast_one(self, alone: bool = False) -> None:
        """Make an inner step without training; `alone`: without what comes after it in an elastic run."""
        if alone:
            self._step(trained=False)
        else:
            self._advance(trained=False)
        self.endings.while_coasting()

    def _advance(self, inner_lr: float = 0.0, trained: bool = True) -> None:
        """Count an inner step, and end if the regions have agreed to."""
        if self.elastic is None:
            self._step(inner_lr, trained)
        else:
            self.elastic.guard(lambda: self._step(inner_lr, trained))
        if self.verdict == "finish":
            self._finish()

    @abstractmethod
    def _ruined_at_the_end(self) -> str:
        """Why the run must not end as if it were well; empty if it may."""

    @abstractmethod
    def _step(self, inner_lr: float = 0.0, trained: bool = True) -> Words | None:
        """Count an inner step, and hold its events."""

    @abstractmethod
    def close(self, reason: str | None = None) -> None:
        """Leave the other regions without finishing, and tell them the `reason`. Calling it again does nothing."""
