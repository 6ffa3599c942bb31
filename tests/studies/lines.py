"""The results of runs in a file: one JSON line a run, which is there whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_cocodc.errors import InputError

FORMAT = 1
"""Raise it when the programs change so that the same settings give other numbers."""
Result = dict[str, Any]


def key_of(settings: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    """What names a run: a hash of all that decides its result.

    Args:
        settings: of the run.
        made: what else decides the result: versions, and a checksum of the text.
    """
    told = json.dumps({"format": FORMAT, "settings": settings, "made": made}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(told.encode()).hexdigest()[:20]


def _line(content: Mapping[str, Any]) -> bytes:
    told = json.dumps(content, allow_nan=False)
    return f'{{"crc": "{zlib.crc32(told.encode()):08x}", "run": {told}}}\n'.encode()


def _read(line: bytes) -> tuple[str, Result] | None:
    """The key and the result that a line holds; None if it is damaged."""
    try:
        content = json.loads(line)["run"]
        sound = _line(content) == line + b"\n" and content["key"] == key_of(
            content["settings"], content["made"]
        )
        return (content["key"], content["result"]) if sound else None
    except (ValueError, TypeError, LookupError):
        return None


class Lines:
    """The results in a file, by key; the file is created with the first one.

    Damaged lines and a half one at the end are dropped, with a word, and the file is written anew without them.

    Args:
        path: the file.
        say: takes the word.

    Raises:
        InputError: another program writes this file now.
    """

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise InputError(
                f"{path}: another study writes this file now. Wait for it, or give --output."
            ) from error
        self._results: dict[str, Result] = {}
        self._file.seek(0)
        sound, dropped = [], []
        for number, line in enumerate(self._file.read().split(b"\n"), 1):
            found = _read(line)
            if found is not None:
                self._results[found[0]] = found[1]
                sound.append(line + b"\n")
            elif line:
                dropped.append(str(number))
        if dropped:
            say(
                f"{path.name}: line {', '.join(dropped)} is damaged or not whole: dropped. Its run is made again."
            )
            self._file.truncate(0)
            self._write(b"".join(sound))

    def __contains__(self, key: str) -> bool:
        return key in self._results

    def __getitem__(self, key: str) -> Result:
        return self._results[key]

    def add(self, settings: Mapping[str, Any], made: Mapping[str, Any], result: Result) -> None:
        """Keep the result of a run; it is on the disk when this returns."""
        key = key_of(settings, made)
        # through JSON, so that a result is the same now and when it is read again
        self._results[key] = json.loads(json.dumps(result, allow_nan=False))
        self._write(_line({"key": key, "settings": settings, "made": made, "result": result}))

    def close(self) -> None:
        """Let others write the file."""
        self._file.close()

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._file.flush()
        os.fsync(self._file.fileno())
