"""The file in which a coordinator keeps what it has decided: JSON lines, each the newest durable state of one run."""

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from ..errors import InputError, LinkError, expanded, short
from ..net.channel import line_of, object_of
from ..net.members import Member
from ..settings.regions import HOW_LONG, MOST_REGIONS
from .messages import (
    PROTOCOL,
    Bye,
    Change,
    Decided,
    Generation,
    Place,
    Several,
    Terms,
    Text,
    Whole,
    from_line,
)
from .rules import DURABLE, Run

_MOST_RUNS = 1000
_KEPT_GENERATIONS = 64
_TICKETS = 1000
"""So many tickets may have been given out since a copy of the file was made: they are never used again."""
_LEAST_FULL = 64 << 20
"""From so many bytes on, the file is rewritten whenever it has doubled."""
_WAY_OUT = (
    "Move the file away, and start the coordinator: its regions train on; once a loss is to be decided, they "
    f"wait for that, then end ({HOW_LONG}). Start all of them again with --resume"
)

_HEAD = {"hf_cocodc state": 2, "protocol": PROTOCOL}


def default_path(port: int) -> Path:
    """The file of a coordinator that listens on a port of this machine, for a user who names none. Makes its folder."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or expanded("~/.local/state"), "hf_cocodc")
    with contextlib.suppress(OSError):  # then the file cannot be opened either
        folder.mkdir(parents=True, exist_ok=True)
    return folder / f"coordinator-{port}.state"


class SavedRun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `rules.DURABLE` names; `compared` only if it has changed since the line before. `key` is the id of the secret."""

    key: Text
    name: Text
    run: Text
    generations: Several[Generation]
    earlier: Several[Text]
    terms: Terms
    members: Several[Member]
    lanes: Several[Place]
    tokens: Several[tuple[Member, Text]]
    losses: Whole
    lost: Several[Whole]
    decisions: Several[Decided]
    changes: Whole
    applied: Whole
    announced: Several[Change]
    tickets: Whole
    ended: Bye | None
    compared: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(SavedRun)


class StateFile:
    """The file of a coordinator, made if it does not exist. It is rewritten now and then, with one line for each run.

    Attributes:
        runs: what was read: (id of the secret, state). Those that have not ended have a higher generation than before.
        news: what there is to say about it, in words.

    Raises:
        InputError: the file cannot be used: another coordinator does, it is damaged, or the system refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._newest: dict[tuple[str, str], Run] = {}
        self._full_bytes = _LEAST_FULL
        self._compared: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.news: list[str] = []
        try:
            with _locked(path) as old:
                name = secrets.token_hex(6)
                self._newest = {which: revived(state, name) for which, state in self._read(old).items()}
                self._file = self._rewrite()
        except OSError as error:
            raise InputError(
                f"--state {short(path, 200)} cannot be used: {error.strerror or error}."
            ) from error
        self.runs = [(key, state) for (key, _), state in self._newest.items()]
        if self.runs:
            names = ", ".join(repr(state.name) for _, state in self.runs if state.ended is None)
            self.news.append(f"remembered {len(self.runs)} runs from {path}; not ended: {names or 'none'}")

    def write(self, key: str, state: Run) -> None:
        """Write a state. Once this returns, it survives; if it raises OSError, it may not."""
        self._newest.pop((key, state.name), None)
        self._newest[key, state.name] = state
        self._file.write(self._line(key, state))
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._file.tell() > self._full_bytes:
            old, self._full_bytes = self._file, 2 * self._full_bytes
            with contextlib.suppress(OSError):  # the state is on the disk in any case
                self._file = self._rewrite()
                old.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a line that could not be written is tried again
            self._file.close()

    def _line(self, key: str, state: Run) -> bytes:
        compared = state.compared
        is_new = self._compared.get((key, state.name)) is not compared
        self._compared[key, state.name] = compared
        fields = {name: getattr(state, name) for name in DURABLE}
        for name in ("lanes", "tokens"):
            fields[name] = tuple(fields[name].items())
        fields["lost"] = tuple(sorted(state.lost)[-MOST_REGIONS:])
        fields["compared"] = dict(compared) if is_new else None
        text = line_of(SavedRun(key=key, **fields), 1 << 40)
        return _digest(text) + b" " + text

    def _read(self, file: BinaryIO) -> dict[tuple[str, str], Run]:
        """The newest state of each run."""
        states: dict[tuple[str, str], Run] = {}
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # it was never finished, so nobody has heard of what it says
                self.news.append(f"ignored the unfinished line {number} of {self._path}")
                break
            try:
                if number == 1:
                    self._check_head(object_of(line))
                    continue
                digest, _, text = line.partition(b" ")
                if digest != _digest(text):
                    raise LinkError("it is not what was written")
                saved: SavedRun = from_line(text, _decoder)
            except LinkError as error:
                raise self._damaged(number, error) from error
            before = states.pop((saved.key, saved.name), None)
            if before is None and saved.compared is None:
                raise self._damaged(number, "an earlier line of this run is missing")
            states[saved.key, saved.name] = _state_of(saved, before)
        return states

    def _check_head(self, content: dict[str, Any] | None) -> None:
        if content is None or content.keys() != _HEAD.keys():
            raise InputError(
                f"--state {short(self._path, 200)} is not a file of a coordinator. Name another file; a new one is made."
            )
        if content != _HEAD:
            raise InputError(
                f"--state {short(self._path, 200)} is of another version of this package (protocol "
                f"{short(content['protocol'])}, here {PROTOCOL}). Name another file, or install that version."
            )

    def _damaged(self, number: int, why: object) -> InputError:
        return InputError(
            f"line {number} of --state {short(self._path, 200)} is damaged ({short(why, 200)}). {_WAY_OUT}."
        )

    def _rewrite(self) -> BinaryIO:
        """Put a file with one line for each run in place of the old one, at once, and keep it locked."""
        self._newest = dict(list(self._newest.items())[-_MOST_RUNS:])
        self._compared.clear()
        new = self._path.with_name(f"{self._path.name}.new")
        file = new.open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(line_of(_HEAD))
            for (key, _), state in self._newest.items():
                file.write(self._line(key, state))
            file.flush()
            self._full_bytes = max(_LEAST_FULL, 2 * file.tell())
            os.fsync(file.fileno())
            os.replace(new, self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except BaseException:
            file.close()
            raise
        return file


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()


@contextlib.contextmanager
def _locked(path: Path) -> Any:
    """The file, which nobody else uses. Raises InputError if another process does."""
    while True:
        with path.open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(
                    f"another coordinator uses --state {short(path, 200)}. Two of them must not decide about the same runs: end "
                    "it, or name another file."
                ) from error
            # another one may have put a new file in its place before we had the lock of the old one
            if path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                file.seek(0)
                yield file
                return


def _state_of(saved: SavedRun, before: Run | None) -> Run:
    fields = {name: getattr(saved, name) for name in DURABLE}
    for name in ("lanes", "tokens"):
        fields[name] = dict(fields[name])
    fields["lost"] = frozenset(saved.lost)
    if before is not None and saved.compared is None:
        fields["compared"] = before.compared
    return Run(**fields)


def revived(state: Run, name: str) -> Run:
    """A run as a coordinator goes on with it that has read it. `name`: of its generation."""
    if state.ended is not None:
        return state
    generation = Generation(state.generation.number + 1, name)
    return replace(
        state,
        generations=(*state.generations, generation)[-_KEPT_GENERATIONS:],
        tickets=state.tickets + _TICKETS,
    )
