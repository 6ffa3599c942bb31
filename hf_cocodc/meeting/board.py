"""The board at a store: every process that waits there says which region of which run it is, and that it is alive."""

import contextlib
import json
import platform
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch.distributed as dist

from ..errors import MeetingError
from .heard import MOST
from .store import SteadyStore, peek
from .values import foreign, number_of, read_json

TICKETS = "hf_cocodc/tickets"
"""The key of a number that each process takes one higher."""
SIGN_S = 0.5
STALE_S = 5.0
"""A process that has not signed the board for so long no longer exists: ten signs are missing."""
_LONGEST = 1000
LOOK_BACK = 24
"""How many earlier tickets a process looks at: enough for the regions of a few runs."""
_MOST_TICKETS = 1000
"""How many of the newest tickets it looks at: whoever reaches a store without a secret can write any count."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a waiting process writes on the board.

    Attributes:
        run: name of its run.
        region: the region that it says it is.
        count: number of regions of its run.
        host: name of its machine.
        signs: how often it has signed; a process that is alive signs every SIGN_S seconds.
        left: whether it waits no longer, because it has failed.
        because_of: the ticket of the process from which it differs; 0 if it has not failed for such a reason.
    """

    run: str
    region: int
    count: int
    host: str
    signs: int = 0
    left: bool = False
    because_of: int = 0


class Sighting:
    """A process seen on the board."""

    def __init__(self, ticket: int, entry: Entry) -> None:
        self.ticket, self.entry = ticket, entry
        self.alive = False
        """Whether it has done something since it was first seen, or came after this process."""
        self.compared = False
        self._changed_at = time.monotonic()

    @property
    def stale(self) -> bool:
        """Whether it has done nothing for so long that it no longer exists."""
        return time.monotonic() - self._changed_at > STALE_S

    def update(self, entry: Entry) -> None:
        if entry != self.entry:
            self.entry, self.alive, self._changed_at = entry, True, time.monotonic()


class Board:
    """One process's view of the board.

    Args:
        store: shared by all regions and all runs.
        run: name of this process's run.
        region: this region.
        count: number of regions.
        hello: what this region tells the others.
    """

    def __init__(self, store: dist.Store, run: str, region: int, count: int, hello: dict[str, Any]) -> None:
        self._store = store
        self._entry = Entry(run=run, region=region, count=count, host=platform.node())
        self._signed_at = 0.0
        self.ticket = take_ticket(store)
        """Number of this process; no other process at this store ever has it."""
        self.seen: dict[int, Sighting] = {}
        self._to_look_at: deque[int] = deque()
        self._began_at = time.monotonic()
        store.set(f"hf_cocodc/hello/{self.ticket}", json.dumps(hello))
        self.sign()

    def sign(self) -> None:
        """Show that this process is alive, if it is time to do so again."""
        if time.monotonic() - self._signed_at >= SIGN_S:
            self._entry = replace(self._entry, signs=self._entry.signs + 1)
            self._write()

    def look(self, ticket: int) -> Sighting | None:
        """The process with this ticket as it is now; None if it is no longer on the board."""
        text = peek(self._store, f"hf_cocodc/waiting/{ticket}")
        if not text:
            self.seen.pop(ticket, None)
            return None
        entry = _read_entry(text)
        if ticket not in self.seen:
            self.seen[ticket] = Sighting(ticket, entry)
            self.seen[ticket].alive = ticket > self.ticket or entry.because_of == self.ticket
        self.seen[ticket].update(entry)
        return self.seen[ticket]

    def look_around(self, seconds: float) -> Iterator[Sighting]:
        """Look at other processes on the board for some seconds, at one at least. Further calls continue with the next."""
        deadline = time.monotonic() + seconds
        if not self._to_look_at:
            newest = newest_ticket(self._store)
            # a process that has just taken its ticket is not on the board yet
            first = self.ticket - LOOK_BACK if time.monotonic() - self._began_at < STALE_S else self.ticket
            tickets = range(max(first, newest - _MOST_TICKETS + 1, 1), newest + 1)
            others = self.seen.keys() | set(tickets) - {self.ticket}
            self._to_look_at.extend(sorted(others, reverse=True))
        while self._to_look_at:
            found = None
            with contextlib.suppress(MeetingError):  # a run of another version may write otherwise
                found = self.look(self._to_look_at.popleft())
            if found is not None and found.entry.left and found.stale:  # all that are here have compared it
                self.remove(found.ticket)
            elif found is not None:
                yield found
            if time.monotonic() > deadline:
                return

    def hello_of(self, ticket: int) -> dict[str, Any] | None:
        """What a process tells the others; None if it is no longer on the board."""
        key = f"hf_cocodc/hello/{ticket}"
        text = peek(self._store, key)
        said = read_json(text, key) if text else None
        if said is not None and not isinstance(said, dict):
            raise foreign(key, said)
        return said

    def remove(self, ticket: int) -> None:
        """Take a process that no longer waits off the board."""
        self._store.delete_key(f"hf_cocodc/waiting/{ticket}")
        self._store.delete_key(f"hf_cocodc/hello/{ticket}")

    def leave(self, because_of: int) -> None:
        """Say that this process has failed. Its hello stays: the others may not have compared it with theirs yet."""
        with contextlib.suppress(RuntimeError):  # there may be no store any more
            self._entry = replace(self._entry, left=True, because_of=because_of)
            self._write()

    def _write(self) -> None:
        self._store.set(f"hf_cocodc/waiting/{self.ticket}", json.dumps(asdict(self._entry)))
        self._signed_at = time.monotonic()


def take_ticket(store: dist.Store) -> int:
    """A number that no other process at the store has. Raises MeetingError if what the store counts is no number."""
    newest_ticket(store)  # a store closes the connection of a process that adds to what is no number
    return store.add(TICKETS, 1)


def newest_ticket(store: dist.Store | SteadyStore) -> int:
    """The number of the newest process at the store. Raises like `take_ticket`."""
    text = store.peek(TICKETS) if isinstance(store, SteadyStore) else peek(store, TICKETS)
    return number_of(text, TICKETS)


def _read_entry(text: bytes) -> Entry:
    content = read_json(text, "hf_cocodc/waiting")
    kinds = {field.name: field.type for field in fields(Entry)}
    if not isinstance(content, dict) or not all(
        _fits(content.get(name), kind) for name, kind in kinds.items()
    ):
        raise foreign("hf_cocodc/waiting", text)
    return Entry(**{name: content[name] for name in kinds})


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of its field's type, and no longer or larger than a region writes it."""
    if type(value) is not kind:
        return False
    return not isinstance(value, int) or 0 <= value <= MOST if kind is not str else len(value) <= _LONGEST
