"""The file in which a coordinator keeps what it has decided: JSON lines, each the newest durable state of one run."""

import contextlib
import fcntl
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from ..errors import InputError, LinkError, short
from ..net.channel import line_of, object_of
from ..net.letters import Member
from ..settings.regions import MOST_REGIONS
from .messages import PROTOCOL, Bye, Change, Decided, Place, Several, Terms, Text, Whole, from_line
from .rules import DURABLE, RETURN_S, VOID_S, Run

_RETURN_S = 20.0
"""How long the members of a run that was read have to call: they notice within 15 s that the coordinator was away."""
_MOST_RUNS = 1000
_LEAST_FULL = 64 << 20
"""From so many bytes on, the file is rewritten whenever it has doubled."""
_WAY_OUT = (
    "Put back a good copy of the file, or move the file away and start the coordinator without what it held: it then decides "
    "nothing about a run before all its members have called, or are declared lost (--assume-lost)"
)

_HEAD = {"hf_cocodc state": 1, "protocol": PROTOCOL}


class SavedRun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `rules.DURABLE` names, and `compared` if it has changed since the line before. `key` is the id of the secret."""

    key: Text
    name: Text
    run: Text
    generation: Whole
    terms: Terms
    members: Several[Member]
    hosts: Several[Place]
    losses: Whole
    lost: Several[Whole]
    decisions: Several[Decided]
    changes: Whole
    applied: Whole
    announced: Several[Change]
    tickets: Whole
    ended: Bye | None
    recovers: bool
    known: Several[Member]
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
                self._newest = {which: _revived(state) for which, state in self._read(old).items()}
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
        fields["hosts"] = tuple(Place(member, host) for member, host in state.hosts.items())
        fields["lost"] = tuple(sorted(state.lost)[-MOST_REGIONS:])
        fields["known"] = tuple(sorted(state.known))
        saved = SavedRun(key=key, **fields, compared=dict(compared) if is_new else None)
        return line_of(saved, 1 << 40)

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
                saved: SavedRun = from_line(line, _decoder)
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
    compared = saved.compared if saved.compared is not None else (before.compared if before else {})
    fields = {name: getattr(saved, name) for name in DURABLE}
    fields["hosts"] = {place.member: place.host for place in saved.hosts}
    fields["lost"], fields["known"] = frozenset(saved.lost), frozenset(saved.known)
    return Run(**fields, compared=compared)


def _revived(state: Run) -> Run:
    """A run as a coordinator goes on with it that has read it."""
    return state if state.ended is not None else replace(state, generation=state.generation + 1)


def with_time_to_return(state: Run, now: float) -> Run:
    """The state with more time for its members to call than a run has whose members have all gone."""
    away = dict.fromkeys(state.expected, now + _RETURN_S - RETURN_S)
    return replace(state, alone_since=now + _RETURN_S - VOID_S, away=away)
