"""Show the progress of all regions, from their journals and from what they say that they are doing."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import short
from ..run.journal import BEGINNINGS, lines_of
from ..status import LEFT, PHASES, TOO_LATE, heard, phase_in_words, phase_of
from ..tools.report.journals import wrong_with

LINE_S = 60.0
"""Where the output is no terminal, lines are at most so far apart."""
LONG_S = 30.0
"""A region that makes no step for so long is named."""
_LONGEST_WHY = 300
_WAY_BACK = (
    "    A process that lives comes back by itself. For a region whose process has died, start its command again; one that still "
    "runs has said how to bring it back."
)
_FROM_THE_START = "no checkpoint is complete in every region: training starts from the beginning"


class Display:
    """Shows a progress bar on a terminal, and elsewhere a line after each tenth of the run, and once a minute at least.

    Args:
        max_steps: inner steps of the run; 0 or negative if unknown.
        resumed: the journals hold an earlier part of the run, of which the step is shown, but no evaluations.
        joins: the regions join a run that trains, of which their journals may hold earlier parts.
        statuses: one per region: files in which regions say what they are doing (see `status`).
        clock: returns seconds since the epoch.
    """

    def __init__(
        self,
        regions: Sequence[int],
        journals: Sequence[Path],
        max_steps: int,
        resumed: bool = False,
        joins: bool = False,
        statuses: Sequence[Path] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._regions = list(regions)
        self._journals = list(journals)
        # a new run begins behind the lines of earlier ones; a resumed run shows where it was
        sizes = [0 if resumed or joins or not each.is_file() else each.stat().st_size for each in journals]
        self._positions = sizes
        self._resumed, self._joins = resumed, joins
        self.has_trained = False
        """Whether region 0 has begun to train."""
        self._notes: list[list[str]] = [[] for _ in journals]
        self._lost: set[int] = set()
        self._members: list[int] | None = None
        self._epoch = self._num_losses = 0
        self._start_step: int | None = None
        self._last: list[dict[str, Any]] = [{} for _ in journals]
        self._landed: list[int | None] = [None for _ in journals]
        self._max_steps = max_steps
        self._statuses = list(statuses)
        self._told: list[dict[str, Any]] = [{} for _ in journals]
        self._num_news = [0 for _ in journals]
        self._clock = clock
        self._made_at = clock()
        self._printed_step, self._printed_at = -1, self._made_at
        self._bar = None
        self._has_begun = False
        self._phases, self._shown_phase = [0 for _ in journals], 2  # a command has told of its own
        if sys.stdout.isatty():
            total = max_steps if max_steps > 0 else None
            self._bar = tqdm(total=total, bar_format="{desc}{bar}", file=sys.stdout, leave=False)

    @property
    def step(self) -> int:
        """The inner step that every region has reached; of those that were lost, only if there are no others."""
        steps = self._steps()
        return min([steps[index] for index in self._present()] or steps)

    def lose(self, region: int, line: str) -> None:
        """Show `line`, and from now on nothing of a lost region, except what it writes when it is back."""
        self._lost.add(self._regions.index(region))
        self.say(line)

    def update(self) -> None:
        """Read the new events of all journals and show them."""
        for index in range(len(self._journals)):
            self._read(index)
        if self._statuses:
            statuses = [heard(status) for status in self._statuses]
            for index, each in enumerate(statuses):
                self._say_news(index, each.get("news", []))
            self._told = [
                {} if index in self._lost or each.get("doing") in (LEFT, TOO_LATE) else each
                for index, each in enumerate(statuses)
            ]
        self._max_steps = max([self._max_steps, *(report.get("max_steps", 0) for report in self._told)])
        phase = self._phase()
        if self._bar is not None:
            self._bar.n, self._bar.total = self.step, self._max_steps if self._max_steps > 0 else None
            if phase:
                self._bar.n, self._bar.total = phase, len(PHASES)
            self._bar.ncols = shutil.get_terminal_size().columns - 1
            # the bar takes what the words leave; on a narrow terminal the last words are cut
            self._bar.set_description_str(self._words(losses=self._short_losses()) + "  ", refresh=False)
            self._bar.refresh()
        elif phase > self._shown_phase:
            self._shown_phase = phase
            print(phase_in_words(phase), flush=True)
        elif self._is_line_due():
            self._printed_step, self._printed_at = self.step, self._clock()
            print(self._words(losses=self._losses()), flush=True)

    def _phase(self) -> int:
        """The phase of the start that no region has left yet; 0 once one trains."""
        for index, told in enumerate(self._told):
            self._phases[index] = max(self._phases[index], phase_of(told.get("doing")))
        self._has_begun = self._has_begun or any("step" in told for told in self._told)
        return 0 if self._has_begun else min([self._phases[index] for index in self._present()], default=0)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.close()

    def _read(self, index: int) -> None:
        is_first = not self._positions[index]
        events, earlier = self._new_events(index), 0
        if (self._resumed or self._joins) and is_first:
            begun = [place for place, event in enumerate(events) if self._begins_now(event)]
            earlier = begun[-1] if begun else len(events)
        for place, event in enumerate(events):
            is_history = place < earlier
            if event["kind"] in ("log", "send", "land", "void"):
                self._last[index].update({"step": event["step"]} if is_history else event)
            if event["kind"] in ("land", "void"):
                self._landed[index] = event["step"]
            if event["kind"] in BEGINNINGS and not is_history:
                self.has_trained = self.has_trained or index == 0
                self._notes[index] = []
                self._start_step = event["step"] if index == 0 else self._start_step
            if event["kind"] == "epoch" and not is_history:
                self._say_members(event)
            if event["kind"] == "note" and not is_history:
                self._notes[index].append(event["message"])
            if event["kind"] == "evaluate" and index == self._speaker() and not is_history:
                self._say_evaluation(event)
        if self._resumed and len(events) > earlier and index == 0 and self._start_step is not None:
            self.say(f"resumed from step {self._start_step}" if self._start_step else _FROM_THE_START)
            self._start_step = None
        while self._notes[index]:
            self.say(self._notes[index].pop(0))

    def _begins_now(self, event: dict[str, Any]) -> bool:
        """Whether a line begins the part of a run that is shown here, and not an earlier one."""
        return event["kind"] in BEGINNINGS and (event.get("at") or 0.0) >= self._made_at

    def _new_events(self, index: int) -> list[dict[str, Any]]:
        """The events of a journal since the last call. What a damaged line says is not shown."""
        journal = self._journals[index]
        if not journal.is_file():
            return []
        with journal.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._positions[index]:
                self._positions[index] = 0  # somebody has deleted the file
            file.seek(self._positions[index])
            whole, newline, _ = file.read().rpartition(b"\n")
        self._positions[index] += len(whole) + len(newline)
        return [each for _, each in lines_of(whole) if isinstance(each, dict) and wrong_with(each) is None]

    def _is_line_due(self) -> bool:
        """Whether a minute has passed since the last line, or a tenth of the run if there is a loss to show."""
        next_step = self._printed_step + max(1, self._max_steps // 10)
        is_far = self.step >= next_step and any("loss" in last for last in self._last)
        return is_far or self._clock() >= self._printed_at + LINE_S

    def _present(self) -> list[int]:
        """The places of the regions that were not lost, and have not left."""
        return [
            index
            for index, region in enumerate(self._regions)
            if index not in self._lost and (self._members is None or region in self._members)
        ]

    def _speaker(self) -> int:
        """The place of the region whose evaluations are shown: all members have the same global params."""
        return min(self._present(), default=0)

    def _steps(self) -> list[int]:
        """The inner step of each region; while it trains, by its own words."""
        both = zip(self._told, self._last, strict=True)
        return [int(status.get("step", last.get("step", 0))) for status, last in both]

    def _words(self, losses: str) -> str:
        """The line to show."""
        words = []
        if self.step or any("loss" in last for last in self._last):
            words.append(f"step {self.step}" + (f"/{self._max_steps}" if self._max_steps > 0 else ""))
            words.append(losses)
        return "  ".join([*words, *self._rates(), *self._landings(), *self._doings()]) or "starting"

    def _rates(self) -> list[str]:
        """Tokens per second of all regions shown, time to the end, and the share of the time in which nothing held it."""
        moving = [status for status in self._told if status.get("steps_made") and status.get("trained_s")]
        if not moving:
            return []
        words = []
        tokens = sum(t["steps_made"] * t["tokens_per_step"] / t["trained_s"] for t in moving)
        words.append(f"{tokens:.0f} tokens/s")
        left_s = max((t["max_steps"] - t["step"]) * t["trained_s"] / t["steps_made"] for t in moving)
        words.append(f"ETA {tqdm.format_interval(max(left_s, 0))}")
        share = min(1 - t["blocked_s"] / t["trained_s"] for t in moving)
        words.append(f"utilization {100 * max(share, 0):.0f} %")
        return words

    def _landings(self) -> list[str]:
        """The inner step of each region's last landing; once if they are equal."""
        steps = [self._landed[index] for index in self._present()]
        if not any(steps):
            return []
        shown = steps[:1] if len(set(steps)) == 1 else steps
        return ["last landing at step " + ", ".join("-" if step is None else str(step) for step in shown)]

    def _doings(self) -> list[str]:
        """What regions do that do not train, and for which region they wait."""
        words, now = [], self._clock()
        for region, status in zip(self._regions, self._told, strict=True):
            doing, since = status.get("doing"), status.get("stepped_at", status.get("since", now))
            if doing == "training" and "awaits" not in status:
                continue  # it has only just begun
            if doing == "training":
                doing = (
                    "at this step" if status["awaits"] is None else f"waiting for region {status['awaits']}"
                )
            # a region that trains is worth a word only if it pauses for long
            if doing is not None and ("stepped_at" not in status or now - since >= LONG_S):
                words.append(f"region {region}: {doing} for {tqdm.format_interval(max(now - since, 0))}")
        return words

    def _short_losses(self) -> str:
        losses = (self._last[index].get("loss") for index in self._present())
        return "loss " + ", ".join("-" if loss is None else f"{loss:.3f}" for loss in losses)

    def _losses(self) -> str:
        return "loss " + ", ".join(
            f"region {region}: {last['loss']:.3f}" if last.get("loss") is not None else f"region {region}: -"
            for region, last in ((self._regions[index], self._last[index]) for index in self._present())
        )

    def _say_news(self, index: int, news: Sequence[str]) -> None:
        """Say what a region has said since the last call."""
        for each in news[self._num_news[index] :]:
            self.say(f"region {self._regions[index]} {each}")
        self._num_news[index] = len(news)

    def _say_members(self, event: dict[str, Any]) -> None:
        """Say a change of the members once, although the journal of each of them has it."""
        members, before = event["members"], self._members
        if before is not None and event["epoch"] <= self._epoch:
            return
        if event["epoch"]:
            why = f" ({short(event['why'], _LONGEST_WHY)})" if event.get("why") else ""
            who = "only region" if len(members) == 1 else f"{len(members)} regions:"
            self.say(f"step {event['step']}: from here on {who} {', '.join(map(str, members))}{why}")
        elsewhere = set(before or ()).difference(members, self._regions)
        losses = event.get("losses", self._num_losses)
        if elsewhere and losses > self._num_losses:
            self.say(_WAY_BACK)
        self._epoch, self._members, self._num_losses = event["epoch"], members, losses

    def _say_evaluation(self, event: dict[str, Any]) -> None:
        shown = ", ".join(
            f"{name.removeprefix('eval_')} {event[name]:.3f}"
            for name in ("eval_loss", "eval_perplexity", "eval_accuracy")
            if event.get(name) is not None
        )
        self.say(f"step {event['step']}: held out, {event.get('weights', 'global')} weights: {shown}")

    def say(self, line: str) -> None:
        """Show a line above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)
