"""One progress display for all regions, fed from their journals."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

_ANEW = "no region has a complete checkpoint: training starts from the beginning"


class Display:
    """A bar on a terminal, a line now and then elsewhere.

    Args:
        regions: the numbers of the regions shown.
        journals: one a region.
        max_steps: inner steps of the run; not positive where they are not known beforehand.
        resumed: the journals tell of an earlier part of the run already; of that only where it stands is shown.
    """

    def __init__(
        self, regions: Sequence[int], journals: Sequence[Path], max_steps: int, resumed: bool = False
    ) -> None:
        self._regions = list(regions)
        self._journals = list(journals)
        self._read = [0] * len(journals)
        self._files = [0] * len(journals)
        self._resumed = resumed
        self._before = journals[0].stat().st_ino if journals[0].is_file() else 0
        self._begun: int | None = None
        self._last: list[dict[str, Any]] = [{} for _ in journals]
        self._max_steps = max_steps
        self._said = -1
        self._bar = None
        print("starting: loading, packing the text, waiting for all regions", flush=True)
        if sys.stdout.isatty():
            self._bar = tqdm(
                total=max_steps if max_steps > 0 else None, unit="step", file=sys.stdout, leave=False
            )

    @property
    def step(self) -> int:
        """Inner step that every region has reached."""
        return min(int(last.get("step", 0)) for last in self._last)

    def update(self) -> None:
        """Take in what the journals have got since the last call."""
        for index, journal in enumerate(self._journals):
            events, another_file = self._new_events(index, journal)
            history = self._resumed and another_file
            for event in events:
                if event["kind"] in ("log", "send", "land"):
                    self._last[index].update(event)
                if event["kind"] in ("start", "resume") and index == 0:
                    self._begun = event["step"]
                if event["kind"] == "evaluate" and index == 0 and not history:
                    self._say_evaluation(event)
            if self._resumed and events and index == 0 and not history and self._begun is not None:
                self._say(f"resumed from step {self._begun}" if self._begun else _ANEW)
                self._begun = None
        if self._bar is not None:
            self._bar.n = self.step
            self._bar.set_postfix_str(self._losses(), refresh=False)
            self._bar.refresh()
        elif self.step >= self._said + max(1, self._max_steps // 10) and any(
            "loss" in last for last in self._last
        ):
            self._said = self.step
            total = f"/{self._max_steps}" if self._max_steps > 0 else ""
            print(f"step {self.step}{total}  {self._losses()}", flush=True)

    @property
    def has_trained(self) -> bool:
        """Whether region 0 has begun to train: it puts a journal of its own in the place of the one of before."""
        return self._files[0] != self._before

    def close(self) -> None:
        """Leave the line to others."""
        if self._bar is not None:
            self._bar.close()

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

    def _new_events(self, index: int, journal: Path) -> tuple[list[dict[str, Any]], bool]:
        """What a journal has got since the last call; whether it is another file, put in the place of the one read before.

        That is done when a run is resumed.
        """
        if not journal.is_file():
            return [], False
        with journal.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            another_file = number != self._files[index]
            if another_file:
                self._files[index], self._read[index] = number, 0
            file.seek(self._read[index])
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read[index] += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()], another_file
