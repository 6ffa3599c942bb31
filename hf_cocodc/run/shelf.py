"""What a region has on its disk to resume from. Checking a checkpoint reads all of it, so only those that may be used are."""

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from accelerate import Accelerator

from ..links.base import Link
from ..links.group import error_of, failure_of
from . import checkpoint as disk
from . import manifest, numbering
from .ranks import from_main

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class Good(NamedTuple):
    """A checkpoint that a region can resume from.

    Attributes:
        step: its step; 0 if there is none.
        writers: regions that took part when it was written.
        stopping: whether all regions stopped there, at a step at which no checkpoint was due.
    """

    step: int
    writers: tuple[int, ...]
    stopping: bool


class Shelf:
    """The checkpoints of a region's run, newest first.

    Args:
        folder: of the region's checkpoints.
        link: of this region.
        accelerator: of this region.
        beside: a checkpoint in the folder: of its run; by default of the run that writes to the folder now, or of the newest
            checkpoint if the folder does not say, because a checkpoint was copied there.

    Attributes:
        run: number of the run.
        is_unsaved: whether the run began here from step 0, and was ended before it had a complete checkpoint here.
        skipped: one sentence for each checkpoint that was looked at and cannot be used; only on the main process.
        num_damaged: how many of them were saved to their end, and have changed since or are of another run. Those of another
            run do not count if `is_unsaved`: the run had none.

    All ranks of the region make the same calls in the same order; the main process looks at the disk.

    Raises:
        CheckpointError: the number of the run cannot be read.
    """

    def __init__(
        self, folder: Path, link: Link, accelerator: Accelerator, beside: Path | None = None
    ) -> None:
        self._accelerator, self._folder, self._link = accelerator, folder, link
        self._checked: dict[int, str | None] = {}
        self.skipped: list[str] = []
        self.num_damaged = 0
        self.run, self.is_unsaved = self._main_says(
            lambda: (_run(folder, beside), numbering.is_unsaved(folder))
        )

    def newest(self, bound: int | None = None) -> Good:
        """The newest good checkpoint, of step `bound` at most."""
        good, self.num_damaged = self._main_says(lambda: (self._newest(bound), self.num_damaged))
        step, writers, stopping = good
        return Good(step, tuple(writers), stopping)

    def _main_says(self, find: Callable[[], Value]) -> Value:
        return main_says(self._link, self._accelerator, find, "the check of this region's checkpoints")

    def _newest(self, bound: int | None) -> Good:
        for step, path in reversed(disk.checkpoints(self._folder).items()):
            if (bound is None or step <= bound) and self._is_good(step, path):
                facts = disk.facts_of(path)
                return Good(step, tuple(facts.writers), facts.stopping)
        return Good(0, (), False)

    def _is_good(self, step: int, path: Path) -> bool:
        if step not in self._checked:
            wrong = self._checked[step] = disk.unusable(path, self.run)
            if wrong is not None:
                another = disk.is_of_another_run(path, self.run) and self.is_unsaved
                self.num_damaged += manifest.is_sealed(path) and not another
                self.skipped.append(f"region {self._link.region}: {path} is not used: {wrong}.")
                logger.warning("%s", self.skipped[-1])
        return self._checked[step] is None


def _run(folder: Path, beside: Path | None) -> int:
    if beside is not None:
        with contextlib.suppress(ValueError):  # its list of files is missing or damaged
            return manifest.read(beside).run
    if (folder / numbering.RUN).exists():
        return numbering.run_of(folder)
    found = [
        path for path in disk.checkpoints(folder).values() if manifest.damage(path, hashes=False) is None
    ]
    return manifest.read(found[-1]).run if found else 0


def main_says(
    link: Link,
    accelerator: Accelerator,
    find: Callable[[], Value],
    what: str,
    read: Callable[[Any], Value] = lambda plain: plain,
) -> Value:
    """What `find` returns in the region's main process, in all of its ranks. A collective call of the region's ranks.

    `find` may read for longer than a collective call may take: the other ranks wait for it without a time-out.

    Args:
        link: of this region.
        accelerator: of this region.
        find: called in the main process.
        what: names the call in messages.
        read: the value again, from what JSON makes of it.

    Raises:
        Exception: what `find` has raised, in the main process; in the other ranks an error of the same kind, or LinkError.
    """

    value: Any = None
    failed: Exception | None = None

    def attempt(_: Link) -> str | None:
        nonlocal value, failed
        if not accelerator.is_main_process:  # every pipeline stage leads itself
            return None
        try:
            value = find()
            return json.dumps({"value": value}, default=_plain) if accelerator.num_processes > 1 else None
        except Exception as error:
            failed = error
            return json.dumps({"failure": failure_of(error)})

    said = from_main(accelerator, link.lead(attempt, what))
    if failed is not None:
        raise failed
    if accelerator.is_main_process:
        return value
    told = json.loads(said)
    if "failure" in told:
        raise error_of(told["failure"])
    return read(told["value"])


def _plain(value: Any) -> Any:
    """What JSON cannot express by itself, as what it can."""
    return str(value) if isinstance(value, Path) else asdict(value)
