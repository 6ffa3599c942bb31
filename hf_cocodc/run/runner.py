"""What the parts of an elastic run need of a region's outer optimizer, and how its ranks act as one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..engine.synchronizer import Synchronizer
from ..snapshot.donor import Inner
from .endings import Endings
from .saving import Savable
from .session import RegionSession

T = TypeVar("T")


class Runner(Savable, Protocol):
    """An outer optimizer, as far as it takes part in an elastic run.

    Attributes:
        synchronizer: its engine.
        endings: how it ends early.
        inner: returns the rest of its training, for newcomers.
        started: what the regions agreed on before step 1, for newcomers; JSON-able.
        has_jumped: called with the inner step before and after, where steps were made without training.
        takes_over: called with the folder of a base from which this region goes on in the same process.
    """

    synchronizer: Synchronizer
    endings: Endings
    inner: Callable[[], Inner]
    started: dict[str, Any]
    has_jumped: Callable[[int, int], object]
    takes_over: Callable[[Path], object]

    @property
    def should_stop(self) -> bool: ...

    @property
    def is_at_the_end(self) -> bool:
        """Whether every region is known to end at this step."""
        ...

    def finish(self) -> None:
        """End the run with the others, which are at its end."""
        ...

    def coast_one(self, alone: bool = False) -> None:
        """Make an inner step without training; `alone`: without what comes after it (`Elastic.guard`)."""
        ...


class Say(Protocol):
    """Calls a function on the region's leader. All ranks get what it returns, or the error that it raises.

    What it returns travels as JSON; `read` makes of it what it was.
    """

    def __call__(
        self, call: Callable[[RegionSession], T], what: str, read: Callable[[Any], T] = ...
    ) -> T: ...
