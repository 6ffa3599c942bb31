"""What a run that goes on without lost regions says of itself at the store: for those who join it, and for those who look.

The lowest member writes it every two seconds; the next one does while it does not change, because the lowest is frozen, or does
not reach the store. Readers take a run for alive only if its record changes while they look: no clocks of two machines are
compared. A store that comes back empty is filled again by that. Each member also looks there for what people ask of it.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any
from urllib.parse import quote

from ..errors import LinkError, MeetingError, short
from .board import TICKETS, newest_ticket
from .heard import MOST, MOST_MEMBERS, host_and_port, whole
from .sealed import mark, mark_again
from .store import SteadyStore, StoreAwayError
from .values import Reader, foreign, read_json, text_of

BEAT_S = 2.0
ALIVE_S = 8.0
"""A record that does not change for so long is of a run that no longer exists: four beats are missing."""
_NAMES = "hf_cocodc/runs"
_MOST_BYTES = 1 << 16
_LONGEST = 200
_APART = 1000
"""A store that has come back empty counts tickets on from so far behind the newest member's: no newcomer had a higher one."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A member, as the writer of the record sees it.

    Attributes:
        region: its number.
        ticket: which process of the region it is.
        address: where its presence listens, HOST:PORT.
        step: inner steps that it had made when the writer heard of it last.
        behind: inner steps by which the writer was ahead then (see `signs.Seen`).
        moved_s: seconds since its last inner step.
        awaits: the region that it waits for; None if there is none.
        doing: what it does besides training, in words; empty if nothing.
    """

    region: int
    ticket: int
    address: str
    step: int = 0
    behind: int = 0
    moved_s: float = 0.0
    awaits: int | None = None
    doing: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run that trains.

    Attributes:
        run: unique to the run.
        name: its name (`regions.run`).
        epoch: how often its members have changed.
        losses: how many decisions on losses there were.
        members: who takes part.
        count, least, most: `regions.count`, `regions.min` and `regions.max`.
        max_steps: inner steps of the run; None if unknown.
        landed_at: inner step of the last landing; None if there was none.
        landed_s: seconds since then.
        hello: what a newcomer is compared with.
        beat: how often the record was written.
    """

    run: str
    name: str
    epoch: int
    losses: int
    members: tuple[Standing, ...]
    count: int
    least: int
    most: int
    max_steps: int | None = None
    landed_at: int | None = None
    landed_s: float = 0.0
    hello: dict[str, Any]
    beat: int = 0

    @property
    def regions(self) -> tuple[int, ...]:
        """The numbers of the members."""
        return tuple(member.region for member in self.members)


class Publisher:
    """A member's thread at the store: writes the record of its run if that is its turn, and hears what people ask of it.

    Args:
        store: where newcomers look.
        name: of the run.
        process: returns the run (see `Record`) and the ticket of this process.
        content: returns the record as this member would write it; None if it is no member. Called in the thread.
        on_leave: called with the reason when somebody asks this region to leave the run; once.
    """

    def __init__(
        self,
        store: SteadyStore,
        name: str,
        process: Callable[[], tuple[str, int]],
        content: Callable[[], Record | None],
        on_leave: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._store, self._name, self._process = store, name, process
        self._content, self._on_leave = content, on_leave
        self._beat = 0
        self._found = self._written = b""
        self._changed_at = time.monotonic()
        self._reader = Reader()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hf_cocodc-live", daemon=True)
        self._thread.start()

    def close(self, ended: bool = False) -> None:
        """End the thread. Where the run has `ended`, its record goes, too; the last member says so."""
        self._closed.set()
        self._thread.join()
        if ended:
            with contextlib.suppress(StoreAwayError):
                self._store.set(_end_key(self._process()[0]), "1")
                self._store.delete_key(_key(self._name))

    def _work(self) -> None:
        while not self._closed.is_set():
            for call in (self._write, self._listen):
                try:
                    call()
                except StoreAwayError:  # training goes on without a store
                    break
                except LinkError as error:
                    self._reader.warn(error)
            self._closed.wait(BEAT_S)

    def _write(self) -> None:
        record = self._content()
        if record is None or not self._has_to_write(record):
            return
        self._beat += 1
        text = json.dumps(asdict(replace(record, beat=self._beat))).encode()
        if self._store.compare_set(_key(self._name), self._found, text) != text:
            return  # another member has written since
        if not self._found and has_ended(self._store, record.run):  # this process was frozen a moment ago
            self._store.delete_key(_key(self._name))
            return
        self._written = text
        self._note_name()
        self._count_on(max(member.ticket for member in record.members))

    def _has_to_write(self, record: Record) -> bool:
        """Whether this member is the one that writes: the lowest, or a higher one if the record has not changed for some beats.

        A process that was frozen, and does not know yet that the run has gone on without it or has ended, writes nothing.
        """
        if has_ended(self._store, record.run):
            return False
        found, now = self._store.peek(_key(self._name)), time.monotonic()
        if found != self._found:
            self._found, self._changed_at = found, now
        there = self._reader.read(_parsed, found, _key(self._name)) if found else None
        if there is not None and there.run == record.run and there.epoch > record.epoch:
            return False
        ticket = self._process()[1]
        rank = next((place for place, each in enumerate(record.members) if each.ticket == ticket), 0)
        goes_on = bool(found) and found == self._written
        return not rank or goes_on or now - self._changed_at > (1 + rank) * BEAT_S

    def _note_name(self) -> None:
        """Note the run's name, so that people find its record, and the secret of the store."""
        self._store.ask(mark_again)
        found = self._store.peek(_NAMES)
        known = self._reader.read(_names_in, found, _NAMES) or []
        if self._name not in known:
            self._store.ask(mark)  # it may have come back empty
            self._store.compare_set(_NAMES, found, "\n".join([*known, self._name]))

    def _count_on(self, newest: int) -> None:
        """Let the store count tickets on from the newest member's at least."""
        try:
            missing = newest - newest_ticket(self._store)
        except MeetingError as error:
            self._reader.warn(error)
            self._store.delete_key(TICKETS)
            missing = newest
        if missing > 0:
            self._store.add(TICKETS, missing + _APART)

    def _listen(self) -> None:
        key = _leave_key(*self._process())
        why = self._store.peek(key)
        if why:
            self._store.delete_key(key)
            self._on_leave(short(text_of(why, key), _LONGEST))


def read(store: SteadyStore, name: str) -> Record | None:
    """The record of a run as it lies at the store, perhaps of a run that no longer exists; None if there is none.

    Raises:
        StoreAwayError: the store does not answer.
        MeetingError: what lies there is not ours.
    """
    text = store.peek(_key(name))
    return _parsed(text, _key(name)) if text else None


def read_alive(store: SteadyStore, name: str, within_s: float | None = None) -> Record | None:
    """The newest record of a run that trains: one that changes within `within_s`; None if there is none. Raises like `read`."""
    found = read_all_alive(store, [name], within_s)
    return found[0] if found else None


def read_all_alive(store: SteadyStore, which: Sequence[str], within_s: float | None = None) -> list[Record]:
    """`read_alive` of several runs, which it watches at the same time; those without a record are left out."""
    first = {name: read(store, name) for name in which}
    found: dict[str, Record | None] = {name: None for name, record in first.items() if record is None}
    until = time.monotonic() + (ALIVE_S if within_s is None else within_s)
    while len(found) < len(first) and time.monotonic() < until:
        time.sleep(BEAT_S / 8)
        for name in first.keys() - found.keys():
            now = read(store, name)
            if now != first[name]:
                found[name] = now
    return [record for name in first if (record := found.get(name)) is not None]


def names(store: SteadyStore) -> list[str]:
    """The names of all runs that have written a record at the store, and have not ended in good order. Raises like `read`."""
    return [name for name in _known(store) if store.peek(_key(name))]


def ended(store: SteadyStore) -> list[str]:
    """The names of all runs that have ended in good order. Raises like `read`."""
    return [name for name in _known(store) if not store.peek(_key(name))]


def has_ended(store: SteadyStore, run: str) -> bool:
    """Whether a run has ended in good order (`Record.run`: others of its name may train since). Raises like `read`."""
    return bool(store.peek(_end_key(run)))


class Request:
    """What a member of a run is asked: to leave. Its process is meant: an old request that is put back has no effect on the next.

    Args:
        store: of the run.
        record: of the run.
        region: the member's.
    """

    def __init__(self, store: SteadyStore, record: Record, region: int) -> None:
        [ticket] = [member.ticket for member in record.members if member.region == region]
        self._store, self._key = store, _leave_key(record.run, ticket)

    def write(self, why: str) -> None:
        """The member hears of it within seconds. Raises like `read`."""
        self._store.set(self._key, why)

    @property
    def is_heard(self) -> bool:
        """Whether the member has heard it. Raises like `read`."""
        return not self._store.peek(self._key)

    def take_back(self) -> None:
        """Ask no longer. Raises like `read`."""
        self._store.delete_key(self._key)


def _known(store: SteadyStore) -> list[str]:
    return sorted(_names_in(store.peek(_NAMES), _NAMES))


def _names_in(found: bytes, key: str) -> list[str]:
    if len(found) > _MOST_BYTES:
        raise foreign(key, found)
    return [name for name in text_of(found, key).split("\n") if name]


def _key(name: str) -> str:
    return f"hf_cocodc/live/{quote(name, safe='')}"


def _end_key(run: str) -> str:
    return f"hf_cocodc/ended/{run}"


def _leave_key(run: str, ticket: int) -> str:
    return f"hf_cocodc/leave/{run}/{ticket}"


_KINDS: dict[Any, tuple[type, ...]] = {
    int: (int,),
    str: (str,),
    float: (int, float),
    int | None: (int, type(None)),
    dict[str, Any]: (dict,),
    tuple[Standing, ...]: (list,),
}


def _parsed(text: bytes, key: str) -> Record:
    content = read_json(text, key)
    try:
        content["members"] = tuple(Standing(**_checked(each, Standing)) for each in content["members"])
        record = Record(**_checked(content, Record))
    except (TypeError, KeyError, ValueError):
        raise foreign(key, text) from None
    if not 0 < len(record.members) <= MOST_MEMBERS:
        raise foreign(key, text)
    return record


def _checked(content: Any, kind: type) -> dict[str, Any]:
    """What a store holds, if each value is of the type of its field; raises TypeError or ValueError if not."""
    given = dict(content)
    for each in fields(kind):
        value = given.get(each.name)
        if each.name in given and each.name != "members" and not isinstance(value, _KINDS[each.type]):
            raise TypeError(each.name)
        if isinstance(value, int) and each.type is not float:
            whole(value, -MOST if each.name == "behind" else 0)
        elif isinstance(value, (int, float)) and not -MOST <= value <= MOST:
            raise ValueError(each.name)
        if isinstance(value, str) and each.name == "address":
            host_and_port(value)
    return given
