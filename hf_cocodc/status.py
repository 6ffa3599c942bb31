"""What a region is doing now, and the error that ended it, told to the command that started the region.

The command names a file in the environment (`ENV_STATUS`), in a folder that holds nothing else. The region replaces the file
whenever it begins something else. The file is no record: the journal is.
"""

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

ENV_STATUS = "HF_COCODC_STATUS"
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

_turn = threading.Lock()
_has_ended: set[str] = set()
"""Files that hold the error of this process: nothing is told after it."""
_news: list[str] = []


def phase_of(doing: str | None) -> int:
    """The number of a region's phase, from 1; 0 if what it does is none."""
    return _PHASE_OF.get(doing or "", 0)


def phase_in_words(number: int) -> str:
    """A line about a phase of a start."""
    return f"[{number}/{len(PHASES)}] {PHASES[number - 1]}"


def tell(doing: str, news: str = "", **facts: Any) -> None:
    """Tell what this region is doing, for example "packing the text", if a command listens; an error is the last word.

    Only one rank of a machine does. `news` deserves a line of its own, and later calls repeat it; `facts` are figures for JSON.
    """
    path = os.environ.get(ENV_STATUS)
    if path is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    half = Path(f"{path}.half")
    with _turn, contextlib.suppress(OSError):  # progress is not worth the end of a run
        if path in _has_ended:
            return
        if "error" in facts:
            _has_ended.add(path)
        if news:
            _news.append(news)
        line = {"doing": doing, "since": time.time(), "news": _news, **facts}
        half.write_text(json.dumps(line), encoding="utf-8")
        os.replace(half, path)


def forget() -> None:
    """Remove the file, and the folder with the last file: the command is gone. From now on `tell` does nothing."""
    with _turn, contextlib.suppress(OSError, KeyError):
        path = Path(os.environ.pop(ENV_STATUS))
        for each in (path, Path(f"{path}.half")):
            each.unlink(missing_ok=True)
        path.parent.rmdir()


def heard(path: Path) -> dict[str, Any]:
    """What a region has told last; empty if it has not told anything yet."""
    with contextlib.suppress(OSError, json.JSONDecodeError):
        return json.loads(path.read_text(encoding="utf-8"))
    return {}
