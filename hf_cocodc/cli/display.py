"""Show the progress of all regions, from what they say of themselves (see `status`, and `run.progress` for what it is)."""

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..status import LEFT, TOO_LATE, heard, phase_in_words, phase_of

LINE_S = 60.0
"""Where the output is no terminal, lines are at most so far apart."""
LONG_S = 30.0
"""A region that makes no step for so long is named."""
_LEAST_BAR = 10
"""A progress bar with less room is left out."""
_QUIET = ("evaluating", "saving the model", "running the rest of the script")
"""What deserves a word only once it has taken long."""


def fitting(line: str, indent: int = 0) -> str:
    """A line that ends with whole words on a terminal, if the output is one; what follows is indented."""
    if not sys.stdout.isatty():
        return line
    columns = max(shutil.get_terminal_size().columns, indent + 20)
    rest = " " * indent
    return textwrap.fill(
        line, columns, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


class Display:
    """Shows a line that changes on a terminal, and elsewhere one after each tenth of the run, and once a minute at least.

    Args:
        statuses: one per region: files in which regions say how far they are.
        max_steps: inner steps of the run, until the regions say so; 0 or negative if unknown.
        clock: returns seconds since the epoch.
    """

    def __init__(
        self,
        regions: Sequence[int],
        statuses: Sequence[Path],
        max_steps: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._regions, self._statuses, self._max_steps = list(regions), list(statuses), max_steps
        self._told: list[dict[str, Any]] = [{} for _ in regions]
        self._phases, self._shown_phase = [0 for _ in regions], 1  # a command has told of its own
        self._newest = [0 for _ in regions]
        self._has_said: set[str] = set()
        self._lost: set[int] = set()
        self._clock = clock
        self._printed_step, self._printed_at = -1, clock()
        self._is_terminal = sys.stdout.isatty()
        self._width = 0  # of what is shown of the line that changes

    @property
    def step(self) -> int:
        """The inner step that every region has reached; of those that were lost, only if there are no others."""
        steps = [told.get("step", 0) for told in self._told]
        return min([steps[index] for index in self._present()] or steps)

    def lose(self, region: int, line: str) -> None:
        """Show `line`, and from now on nothing of a lost region, except the lines that it says when it is back."""
        self._lost.add(self._regions.index(region))
        self.say(line)

    def update(self) -> None:
        """Read what the regions say, and show it."""
        self._told = [heard(status) for status in self._statuses]
        self._max_steps = max([self._max_steps, *(told.get("max_steps", 0) for told in self._told)])
        for index, told in enumerate(self._told):
            self._phases[index] = max(self._phases[index], phase_of(told.get("doing")))
            self._say_lines(index, told.get("lines", []))
        phase = min([self._phases[index] for index in self._present()], default=0)
        if phase > self._shown_phase and not self._has_begun:
            self._shown_phase = phase
            self.say(phase_in_words(phase))
        elif self._is_line_due() and not self._is_terminal:
            self._printed_step, self._printed_at = self.step, self._clock()
            print("  ".join(self._words()) or "starting", flush=True)
        if self._is_terminal:
            self._draw()

    def close(self) -> None:
        """Remove the line that changes from the terminal."""
        self._rewrite("")

    def say(self, text: str) -> None:
        """Show lines that stay. On a terminal they end with whole words, but for commands, which are indented."""
        if not self._is_terminal:
            print(text, flush=True)
            return
        self._rewrite("")
        for line in text.splitlines():
            print(line if line.startswith("    ") else fitting(line), flush=True)

    def _draw(self) -> None:
        """Show the line that changes: what has no room is left out, from the end; a bar fills the rest."""
        room = shutil.get_terminal_size().columns - 1
        words = self._words() or ["starting"]
        line = words[0][:room]
        for each in words[1:]:
            if len(line) + 2 + len(each) <= room:
                line += f"  {each}"
            else:
                break
        bar = room - len(line) - 2
        if self._has_begun and self._max_steps > 0 and bar >= _LEAST_BAR:
            done = round(bar * min(self.step / self._max_steps, 1))
            line += f"  {'#' * done}{'.' * (bar - done)}"
        self._rewrite(line)

    def _rewrite(self, line: str) -> None:
        if self._is_terminal and (line or self._width):
            end = "" if line else "\r"
            sys.stdout.write(f"\r{line:<{self._width}}{end}")
            sys.stdout.flush()
            self._width = len(line)

    def _say_lines(self, index: int, lines: Sequence[dict[str, Any]]) -> None:
        """Say what a region has said since the last call, unless another one has said the same."""
        for each in lines:
            key = each.get("once", "")
            is_for_another = each.get("by_one", False) and index != min(self._present(), default=0)
            if each["number"] <= self._newest[index] or key in self._has_said or is_for_another:
                continue
            if key:
                self._has_said.add(key)
            self.say(each["line"])
            if set(each.get("lost", ())).difference(self._regions):
                self.say(each["hint"])
        self._newest[index] = max([self._newest[index], *(each["number"] for each in lines)])

    @property
    def _has_begun(self) -> bool:
        """Whether some region trains."""
        return any("step" in told for told in self._told)

    def _is_line_due(self) -> bool:
        """Whether a minute has passed since the last line, or a tenth of the run if there is a loss to show."""
        next_step = self._printed_step + max(1, self._max_steps // 10)
        is_far = self.step >= next_step and any(told.get("loss") is not None for told in self._told)
        return is_far or self._clock() >= self._printed_at + LINE_S

    def _present(self) -> list[int]:
        """The places of the regions that were not lost, and have not left."""
        newest = max(self._told, key=lambda told: told.get("epoch", -1))
        members = newest.get("members", self._regions)
        return [
            index
            for index, region in enumerate(self._regions)
            if index not in self._lost and region in members and not _is_gone(self._told[index])
        ]

    def _words(self) -> list[str]:
        """The parts of the line that changes."""
        present = [self._told[index] for index in self._present()]
        doings = self._doings()
        if not self._has_begun:
            return doings
        of = f"/{self._max_steps}" if self._max_steps > 0 else ""
        steps = [f"step {self.step}{of}"] if any(told.get("step") for told in present) else []
        losses = ["-" if told.get("loss") is None else f"{told['loss']:.3f}" for told in present]
        if not self._is_terminal:
            losses = [
                f"region {self._regions[i]}: {loss}" for i, loss in zip(self._present(), losses, strict=True)
            ]
        shown = [f"loss {', '.join(losses)}"] if steps else []
        return [*steps, *shown, *_rates(present), *_landings(present), *doings]

    def _doings(self) -> list[str]:
        """What regions do that do not train, and for which region they wait."""
        words, now = [], self._clock()
        for index, (region, told) in enumerate(zip(self._regions, self._told, strict=True)):
            doing, since = told.get("doing"), told.get("since", now)
            if doing is None or index in self._lost or _is_gone(told):
                continue
            if doing == "training":
                since = told.get("stepped_at", now)
                if now - since < LONG_S:
                    continue  # a region that trains is worth a word only if it pauses for long
                awaits = told.get("awaits")
                doing = "at this step" if awaits is None else f"waiting for region {awaits}"
            elif doing in _QUIET and now - since < LONG_S:
                continue
            words.append(f"region {region}: {doing} for {tqdm.format_interval(max(now - since, 0))}")
        return words


def _is_gone(told: dict[str, Any]) -> bool:
    return told.get("doing") in (LEFT, TOO_LATE)


def _rates(told: Sequence[dict[str, Any]]) -> list[str]:
    """Tokens per second of all regions shown, time to the end, and the share of the time in which nothing held training."""
    moving = [each for each in told if each.get("steps_made") and each.get("trained_s")]
    if not moving:
        return []
    words = []
    if all("tokens_per_step" in each for each in moving):
        tokens = sum(each["batches_made"] * each["tokens_per_step"] / each["trained_s"] for each in moving)
        words.append(f"{tokens:.0f} tokens/s")
    if all(each.get("max_steps") for each in moving):
        left_s = max(
            (each["max_steps"] - each["step"]) * each["trained_s"] / each["steps_made"] for each in moving
        )
        words.append(f"ETA {tqdm.format_interval(max(left_s, 0))}")
    share = min(1 - each["blocked_s"] / each["trained_s"] for each in moving)
    return [*words, f"utilization {100 * max(share, 0):.0f} %"]


def _landings(told: Sequence[dict[str, Any]]) -> list[str]:
    """The inner step of each region's last landing; once if they are equal."""
    steps = [each.get("landed") for each in told]
    if not any(steps):
        return []
    shown = steps[:1] if len(set(steps)) == 1 else steps
    return ["last landing at step " + ", ".join("-" if step is None else str(step) for step in shown)]
