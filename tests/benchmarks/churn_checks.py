"""What must hold after a run of `churn`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import torch

from hf_cocodc.run.journal import read as read_journal

from .churn_processes import Life
from .churn_region import Setting, read

GONE = (
    "LeftBehind",
    "RunOver",
    "RegionLostError",
    "MeetingError",
    "Unreachable",
    "NobodyAnswers",
    "LinkError",
)
"""Errors of a region that was lost, or that comes when nothing is left to come to."""


class Checks:
    """Notes in `wrong` what should not be.

    Args:
        folder: of the run.
        setting: of the run.
        in_storage: whether its regions meet in one.
    """

    def __init__(self, folder: Path, setting: Setting, in_storage: bool) -> None:
        self._folder, self._setting, self._in_storage = folder, setting, in_storage
        self.wrong: list[str] = []

    def ends(
        self, lives: Sequence[Life], is_elastic: bool, is_meant_to_end: bool, loses: bool, stops: bool
    ) -> None:
        """Exit codes, and what regions say of their ends.

        Args:
            lives: all of them.
            is_elastic: whether the run goes on without a lost region.
            is_meant_to_end: whether one region was never disturbed for long.
            loses, stops: whether a region was lost, or all were to stop.
        """
        for life in lives:
            may_fail = not life.is_first or "freeze" in life.done or (not is_elastic and loses)
            for rank in range(len(life.processes)):
                why = self._wrong_end(life, rank, may_fail, stops)
                if why:
                    self.wrong.append(
                        f"{life.name} ({', '.join(sorted(life.done)) or 'undisturbed'}), rank {rank}: {why}"
                    )
        ended = {code for life in lives for code in life.codes}
        # a coordinator that was started again decides no loss before most members have called: if they have died, the rest ends;
        # in a storage it does
        undecided = not self._in_storage and any(
            "waits to hear who goes on after a loss" in path.read_text()
            for path in self._folder.glob("life-*.json")
        )
        if is_elastic and is_meant_to_end and not undecided and not {0, 3} & ended:
            self.wrong.append("no region has finished or stopped")
        self.equal("")

    def _wrong_end(self, life: Life, rank: int, may_fail: bool, stops: bool) -> str:
        """Why a process should not have ended as it has; empty if it should."""
        code, end = life.processes[rank].exitcode, read(self._folder / f"{life.name}-{rank}")
        error = end.error if end is not None else ""
        said = f"exit code {code}, {error or 'no error'}: {'' if end is None else end.text[:300]}"
        if code is None or (code == -9 and life.done & {"kill", "kill one rank"}):
            return ""
        if "kill one rank" in life.done and code:
            return ""
        if code == -signal.SIGTERM and "term" in life.done:
            return ""
        if code == 0 and end is not None:
            asked = bool(life.done & {"leave", "term"})
            left = error == "RunLeft" and asked
            late = error in ("RunOver", "RunFinished")
            # a leave too near the end does not count: the region trains no more, and finishes with the others
            finished = not error and (end.step == self._setting.steps or asked)
            return "" if left or late or finished else said
        if code == 3 and error == "RunStopped" and end is not None:
            is_meant = stops or "regions.wait_s" in end.text or "leaves" in end.text
            return "" if is_meant else said
        return "" if code in (1, 2) and error in GONE and may_fail else said

    def equal(self, what: str) -> None:
        """All that have finished hold the same."""
        places = sorted(self._folder.glob(f"life{what}-*.pt"))
        ends = [
            (place.stem, end, torch.load(place)) for place in places if (end := read(place.with_suffix("")))
        ]
        for name, end, weights in ends[1:]:
            if not torch.equal(weights, ends[0][2]):
                self.wrong.append(f"{name} and {ends[0][0]} have other weights")
            if self._setting.outer["method"] != "eager" and end.digest != ends[0][1].digest:
                self.wrong.append(f"{name} and {ends[0][0]} have other digests")

    def journals(self) -> None:
        """Journals agree on each landing."""
        found: dict[tuple[object, ...], tuple[str, tuple[object, ...]]] = {}
        for path in sorted(self._folder.glob("out/region-*/cocodc/journal.jsonl")):
            run = ""
            for event in read_journal(path):
                run = event.get("run", run)
                if event["kind"] == "land":
                    key = run, event["fragment"], event["sent_at"]
                    facts = tuple(event.get("members") or ()), event.get("digest")
                    other = found.setdefault(key, (path.parts[-3], facts))
                    differs = other[1][0] != facts[0] or len({other[1][1], facts[1], None}) > 2
                    if differs:
                        self.wrong.append(f"landing {key}: {other} and {(path.parts[-3], facts)}")
