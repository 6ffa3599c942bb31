"""What a region is doing now, how far it has come, and the error that ended it, told to the command that started the region.

The command names a file in the environment (`ENV_STATUS`), in a folder that holds nothing else. The region replaces the file
whenever something in it changes; all that a command shows is in it (`run.progress` says what). The file is no record: the
journal is.
"""

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENV_STATUS = "HF_COCODC_STATUS"
ENV_LOG = "HF_COCODC_LOG"
"""The log of the first region that a split launch has on this machine: its launcher writes there."""
LEFT = "has left the run"
"""The last word of a region that has left while the others train on."""
TOO_LATE = "has come too late"
"""The last word of a region whose run has finished before it came in, or back; `over` says so in a sentence."""

PHASES = (
    "loading the libraries",
    "checking the recipe",
    "loading the model",
    "packing the text",
    "waiting to train",
)
"""Of a start, until the regions train."""
_PHASE_OF = {each: place for place, each in enumerate(PHASES, 1)}
_PHASE_OF |= {"loading the text": 4, "packing the held-out text": 4, "meeting the other regions": 5}

_MOST_LINES = 30
_turn = threading.Lock()
_told: dict[str, dict[str, Any]] = defaultdict(lambda: {"doing": "", "since": 0.0, "lines": []})
"""By file: what it holds."""
_numbers = itertools.count(time.time_ns())
"""Of lines; a process that is started again goes on with larger ones."""


def phase_of(doing: str | None) -> int:
    """The number of a region's phase, from 1; 0 if what it does is none."""
    return _PHASE_OF.get(doing or "", 0)


def phase_in_words(number: int) -> str:
    """A line about a phase of a start."""
    return f"[{number}/{len(PHASES)}] {PHASES[number - 1]}"


def is_heard() -> bool:
    """Whether a command listens to this process: to one rank of each machine."""
    return ENV_STATUS in os.environ and os.environ.get("LOCAL_RANK", "0") == "0"


def tell(doing: str = "", **facts: Any) -> None:
    """Tell what this region is doing, for example "packing the text", and figures for JSON, if a command listens. What earlier
    calls have told, and this one does not, stays. An error is the last word.
    """
    _write(doing, facts)


def say(line: str, **about: Any) -> None:
    """Tell a line that the command shows. `about`: figures for JSON. Lines with the same `once` are shown once, whichever region
    says them; lines `by` "one" are shown if no region before it takes part.
    """
    _write("", {}, {"line": line, **about})


@contextlib.contextmanager
def during(doing: str) -> Iterator[None]:
    """Inside the block, this region is doing something else."""
    before = _told[os.environ[ENV_STATUS]]["doing"] if is_heard() else ""
    tell(doing)
    try:
        yield
    finally:
        tell(before)


def _write(doing: str, facts: dict[str, Any], line: dict[str, Any] | None = None) -> None:
    if not is_heard():
        return
    with _turn, contextlib.suppress(OSError, KeyError):  # progress is not worth the end of a run
        path = os.environ[ENV_STATUS]
        told = _told[path]
        if "error" in told:
            return
        if doing and doing != told["doing"]:
            told |= {"doing": doing, "since": time.time()}
        if line is not None:
            told["lines"] = [*told["lines"], {"number": next(_numbers), **line}][-_MOST_LINES:]
        told |= facts
        half = Path(f"{path}.half")
        half.write_text(json.dumps(told), encoding="utf-8")
        os.replace(half, path)


def forget() -> None:
    """Remove the file, and the folder with the last file: the command is gone. From now on nothing is told."""
    with _turn, contextlib.suppress(OSError, KeyError):
        path = Path(os.environ.pop(ENV_STATUS))
        for each in (path, Path(f"{path}.half")):
            each.unlink(missing_ok=True)
        path.parent.rmdir()


def speak_for(region: int) -> None:
    """From now on, tell and print as this region. A command that has started one launch for several has named the file and the
    log of the first of them; those of the others are beside it.
    """
    name = f"region-{region}"
    if ENV_STATUS in os.environ:
        os.environ[ENV_STATUS] = str(Path(os.environ[ENV_STATUS]).with_name(f"{name}.json"))
    if ENV_LOG in os.environ:
        path = Path(os.environ.pop(ENV_LOG))
        with open(path.parent.with_name(name) / path.name, "ab") as log:
            for number, stream in enumerate((sys.stdout, sys.stderr), 1):
                stream.flush()
                os.dup2(log.fileno(), number)


def heard(path: Path) -> dict[str, Any]:
    """What a region has told; empty if it has not told anything yet."""
    with contextlib.suppress(OSError, json.JSONDecodeError):
        return json.loads(path.read_text(encoding="utf-8"))
    return {}
