"""Show the progress of all regions, read from their journals."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

_FROM_THE_START = "no checkpoint is complete in every region: training starts from the beginning"


class Display:
    """Shows a progress bar on a terminal, and elsewhere a line from time to time.

    Args:
        regions: numbers of the regions to show.
        journals: one per region.
        max_steps: inner steps of the run; 0 or negative if unknown.
        resumed: the journals already hold an earlier part of the run. The display shows the step of that part, but not
            its evaluations.
    """

    def __init__(
        self, regions: Sequence[int], journals: Sequence[Path], max_steps: int, resumed: bool = False
    ) -> None:
        self._regions = list(regions)
        self._journals = list(journals)
        found = [journal.stat() if journal.is_file() else None for journal in journals]
        # the journal of an earlier run stays until this run has begun; only a resumed run continues it
        seen = [None if resumed else each for each in found]
        self._positions = [each.st_size if each else 0 for each in seen]
        self._inodes = [each.st_ino if each else 0 for each in seen]
        self._resumed = resumed
        self._inodes_before = [each.st_ino if each else 0 for each in found]
        self._notes: list[list[str]] = [[] for _ in journals]
        self._start_step: int | None = None
        self._last: list[dict[str, Any]] = [{} for _ in journals]
        self._max_steps = max_steps
        self._printed_step = -1
        self._bar = None
        print("starting: loading the model, packing the text, waiting for all regions", flush=True)
        if sys.stdout.isatty():
            self._bar = tqdm(
                total=max_steps if max_steps > 0 else None, unit="step", file=sys.stdout, leave=False
            )

    @property
    def step(self) -> int:
        """The inner step that every region has reached."""
        return min(int(last.get("step", 0)) for last in self._last)

    @property
    def has_trained(self) -> bool:
        """Whether region 0 has begun to train: it then replaces the journal of the earlier run by a new file."""
        return self._inodes[0] != self._inodes_before[0]

    def update(self) -> None:
        """Read the new events of all journals and show them."""
        for index in range(len(self._journals)):
            self._read(index)
        if self._bar is not None:
            self._bar.n = self.step
            self._bar.set_postfix_str(self._losses(), refresh=False)
            self._bar.refresh()
        elif self._is_line_due():
            self._printed_step = self.step
            total = f"/{self._max_steps}" if self._max_steps > 0 else ""
            print(f"step {self.step}{total}  {self._losses()}", flush=True)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.close()

    def _read(self, index: int) -> None:
        events, is_new_file = self._new_events(index)
        is_history = self._resumed and is_new_file
        is_of_this_run = self._inodes[index] != self._inodes_before[index]
        for event in events:
            if event["kind"] in ("log", "send", "land"):
                self._last[index].update(event)
            if event["kind"] in ("start", "resume") and is_of_this_run:
                self._notes[index] = []
                self._start_step = event["step"] if index == 0 else self._start_step
            if event["kind"] == "note" and is_of_this_run:
                self._notes[index].append(event["message"])
            if event["kind"] == "evaluate" and index == 0 and not is_history:
                self._say_evaluation(event)
        if self._resumed and events and index == 0 and not is_history and self._start_step is not None:
            self._say(f"resumed from step {self._start_step}" if self._start_step else _FROM_THE_START)
            self._start_step = None
        while self._notes[index]:
            self._say(self._notes[index].pop(0))

    def _new_events(self, index: int) -> tuple[list[dict[str, Any]], bool]:
        """The events of a journal since the last call, and whether the file is new.

        A region that resumes a run replaces its journal by a new file.
        """
        journal = self._journals[index]
        if not journal.is_file():
            return [], False
        with journal.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            is_new_file = inode != self._inodes[index]
            if is_new_file:
                self._inodes[index], self._positions[index] = inode, 0
            file.seek(self._positions[index])
            whole, newline, _ = file.read().rpartition(b"\n")
        self._positions[index] += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()], is_new_file

    def _is_line_due(self) -> bool:
        """Whether there is a loss to show, and a tenth of the run has passed since the last line."""
        next_step = self._printed_step + max(1, self._max_steps // 10)
        return self.step >= next_step and any("loss" in last for last in self._last)

    def _losses(self) -> str:
        return "loss " + ", ".join(
            f"region {region}: {last['loss']:.3f}" if last.get("loss") is not None else f"region {region}: -"
            for region, last in zip(self._regions, self._last, strict=True)
        )

    def _say_evaluation(self, event: dict[str, Any]) -> None:
        shown = ", ".join(
            f"{name.removeprefix('eval_')} {event[name]:.3f}"
            for name in ("eval_loss", "eval_perplexity", "eval_accuracy")
            if event.get(name) is not None
        )
        self._say(f"step {event['step']}: held out, {event.get('weights', 'global')} weights: {shown}")

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)
