"""What a coordinator keeps of its decisions: JSON lines, each the newest durable state of one run, in a file or in a storage."""

import contextlib
import fcntl
import hashlib
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import Struct

from ..errors import InputError, LinkError, expanded, short
from ..net.channel import line_of, object_of
from ..net.keys import Keys
from ..net.members import Member
from ..net.storage import Storage, StorageError
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

_FOLDER = "state"
"""Where states are in a storage."""
_KEPT_STATES, _KEPT_S = 50, 3600.0
"""In a storage: a state is deleted if there are so many newer ones, and one of them for so long. No list is that late."""
_READS, _AGAIN_S = 4, 0.5
"""A storage may be late to show what was written: it is read so often, so many seconds apart."""
_NONCE_BYTES = 12

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


class State(ABC):
    """What a coordinator keeps. `named`: where, for people.

    Attributes:
        runs: what was read: (id of the secret, state). Those that have not ended have a higher generation than before.
        news: what there is to say about it, in words.
        has_copies: whether two coordinators may go on from one state, and never hear of each other.
    """

    has_copies = True

    def __init__(self, named: str) -> None:
        self._named = named
        self._newest: dict[tuple[str, str], Run] = {}
        self._compared: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.news: list[str] = []
        self.runs: list[tuple[str, Run]] = []

    def write(self, key: str, state: Run) -> None:
        """Write a state. Once this returns, it survives; if it raises OSError, it may not."""
        self._newest.pop((key, state.name), None)
        self._newest[key, state.name] = state
        self._keep(key, state)

    @abstractmethod
    def _keep(self, key: str, state: Run) -> None:
        """Let a state survive, which is the newest of its run. Raises OSError."""

    def silent(self, run: Run) -> dict[Member, float]:
        """For how many seconds processes of a run are known to have stood still."""
        return {}

    @abstractmethod
    def close(self) -> None: ...

    def _go_on_from(self, lines: Iterable[bytes]) -> None:
        """Read what an earlier coordinator has kept. Raises InputError if it is damaged."""
        name = secrets.token_hex(6)
        self._newest = {which: revived(state, name) for which, state in self._read(lines).items()}
        self.runs = [(key, state) for (key, _), state in self._newest.items()]
        if self.runs:
            names = ", ".join(repr(state.name) for _, state in self.runs if state.ended is None)
            self.news.append(
                f"remembered {len(self.runs)} runs from {self._named}; not ended: {names or 'none'}"
            )

    def _all_lines(self) -> Iterator[bytes]:
        """All that is to be kept, to begin with."""
        self._newest = dict(list(self._newest.items())[-_MOST_RUNS:])
        self._compared.clear()
        yield line_of(_HEAD)
        for (key, _), state in self._newest.items():
            yield self._line(key, state)

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

    def _read(self, lines: Iterable[bytes]) -> dict[tuple[str, str], Run]:
        """The newest state of each run."""
        states: dict[tuple[str, str], Run] = {}
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):  # it was never finished, so nobody has heard of what it says
                self.news.append(f"ignored the unfinished line {number} of {self._named}")
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
                f"{short(self._named, 200)} is not a state of a coordinator. Name another place; a new one is made."
            )
        if content != _HEAD:
            raise InputError(
                f"{short(self._named, 200)} is of another version of this package (protocol "
                f"{short(content['protocol'])}, here {PROTOCOL}). Name another place, or install that version."
            )

    def _damaged(self, number: int, why: object) -> InputError:
        return InputError(
            f"line {number} of {short(self._named, 200)} is damaged ({short(why, 200)}). {_WAY_OUT}."
        )


class StateFile(State):
    """The file of a coordinator, made if it does not exist. It is rewritten now and then, with one line for each run.

    Raises:
        InputError: the file cannot be used: another coordinator does, it is damaged, or the system refuses.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(f"--state {path}")
        self._path, self._full_bytes = path, _LEAST_FULL
        try:
            with _locked(path) as old:
                self._go_on_from(old)
                self._file = self._rewrite()
        except OSError as error:
            raise InputError(
                f"--state {short(path, 200)} cannot be used: {error.strerror or error}."
            ) from error

    def _keep(self, key: str, state: Run) -> None:
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

    def _rewrite(self) -> BinaryIO:
        """Put a file with one line for each run in place of the old one, at once, and keep it locked."""
        new = self._path.with_name(f"{self._path.name}.new")
        file = new.open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.writelines(self._all_lines())
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


class StateTaken(OSError):
    """Another coordinator goes on with the state."""


def newest_state(storage: Storage) -> int:
    """The highest number of a state in a storage; 0 if no coordinator has served there. Raises StorageError."""
    return max(_numbers(storage), default=0)


def _numbers(storage: Storage) -> list[int]:
    return [int(name) for name in storage.names(_FOLDER) if name.isdecimal()]


class StateInStorage(State):
    """The state in a storage: objects that are numbered, each with all that is kept. Whoever writes the next one goes on.

    A coordinator that stood still while another one took over cannot write the number that follows the last one that it knows,
    or, if that was deleted, finds higher ones: so it never decides again.

    Args:
        keys: of a secret: with them, objects are sealed.
        number: of the newest state, as it was found before. Whoever has written another one since then lives.
        silent: see `State`; by the names of processes' mailboxes.

    Raises:
        StateTaken: another coordinator is faster.
        InputError: the newest object is damaged, of another version, or of another secret.
        StorageError: the storage refuses.
    """

    has_copies = False

    def __init__(
        self,
        storage: Storage,
        keys: Keys | None,
        number: int | None = None,
        silent: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        super().__init__(f"the coordinator's state in {storage.url}")
        self._storage, self._silent = storage, silent
        self._cipher = None if keys is None else AESGCM(keys.of("state in a storage").raw)
        number = newest_state(storage) if number is None else number
        newest = storage.get(_name(number)) if number else b""
        if newest is None:  # an empty state in its place would forget the run
            raise StorageError(
                f"{self._named}: number {number} is listed, and cannot be read yet. It is tried again."
            )
        self._newest_object, self._writes = (number, newest), newest
        self._old = deque[tuple[int, float]]()
        if newest:
            self._go_on_from(self._opened(newest).splitlines(keepends=True))
        listed, now = self._advance(), time.monotonic()
        self._old.extendleft((each, now) for each in sorted(listed, reverse=True) if each <= number)

    def _keep(self, key: str, state: Run) -> None:
        self._advance()

    def _advance(self) -> list[int]:
        """Write the next object. Returns the numbers of those that were there."""
        sealed = self._sealed(b"".join(self._all_lines()))
        number, self._writes = self._newest_object[0] + 1, sealed
        is_ours = self._storage.create(_name(number), sealed)
        listed = _numbers(self._storage)  # afterwards: this process may have stood still before
        if not is_ours or max(listed, default=0) > number:
            raise StateTaken("another coordinator has taken over")
        self._newest_object = number, sealed
        self._old.append((number, time.monotonic()))
        with contextlib.suppress(StorageError):
            self._prune()
        return listed

    def _prune(self) -> None:
        """Delete what is old; at most two objects, for somebody waits."""
        for _ in range(2):
            if len(self._old) <= _KEPT_STATES or time.monotonic() - self._old[1][1] < _KEPT_S:
                return
            self._storage.remove(_name(self._old[0][0]))
            self._old.popleft()

    @property
    def is_taken(self) -> bool:
        """Whether another coordinator has gone on; another thread may be writing. Raises StorageError."""
        newest = self._newest_object
        following = self._storage.get(_name(newest[0] + 1))
        is_taken = following not in (None, self._writes) or not self._is_there(*newest)
        return is_taken and self._newest_object is newest

    def _is_there(self, number: int, content: bytes) -> bool:
        """Whether an object still is what this coordinator knows; there is none of number 0."""
        for left in reversed(range(_READS)):
            found = self._storage.get(_name(number)) if number else content
            if found is not None or not left:
                break
            time.sleep(_AGAIN_S)
        return found == content

    def silent(self, run: Run) -> dict[Member, float]:
        return {
            member: seconds
            for member, lanes in run.lanes.items()
            for process, seconds in self._silent.items()
            if process and process in [each.process for each in lanes]
        }

    def close(self) -> None:
        """All is written."""

    def _sealed(self, content: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)  # it also tells two writers of one content apart
        return nonce + (content if self._cipher is None else self._cipher.encrypt(nonce, content, None))

    def _opened(self, sealed: bytes) -> bytes:
        nonce, content = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        if self._cipher is None:
            return content
        try:
            return self._cipher.decrypt(nonce, content, None)
        except InvalidTag:
            raise InputError(
                f"{self._named} is sealed with another secret, or was altered. Give all regions the same secret; for a new run, "
                "name an empty folder of the storage."
            ) from None


def _name(number: int) -> str:
    return f"{_FOLDER}/{number:012d}"


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
