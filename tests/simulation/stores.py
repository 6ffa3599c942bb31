"""A storage in virtual time whose lists are old, whose reads are old or torn, and whose writes fail, come late or get lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hf_cocodc.net import storage

from .machines import Machines

T = TypeVar("T")

RACE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Shares of requests with which something goes wrong.

    Attributes:
        fails: before the request is carried out; as often after that.
        torn, old: reads that find a part, or what was there up to `old_s` seconds ago.
        lists: that show what was there then.
        late: acknowledged writes that nobody sees for up to `old_s` seconds.
        lost: acknowledged writes that are gone, at once or after some seconds.
        winners: creations that succeed although another one has less than `RACE_S` seconds ago.
        latency_s: seconds of a request at most.
    """

    fails: float = 0.0
    torn: float = 0.0
    old: float = 0.0
    lists: float = 0.0
    late: float = 0.0
    lost: float = 0.0
    winners: float = 0.0
    old_s: float = 10.0
    latency_s: float = 0.3


@dataclass
class _Version:
    """What was written: when, and from when on it is seen."""

    at: float
    seen_at: float
    content: bytes | None


class Store:
    """The objects, with all that they were."""

    def __init__(self, machines: Machines, faults: Faults) -> None:
        self.machines, self.faults = machines, faults
        self._versions: dict[str, list[_Version]] = {}

    def heal(self) -> None:
        """From now on it does what it should."""
        self.faults = Faults(latency_s=self.faults.latency_s)
        for versions in self._versions.values():
            for version in versions:
                version.seen_at = min(version.seen_at, self.machines.now)

    def newest(self, name: str) -> bytes | None:
        versions = self._versions.get(name)
        return versions[-1].content if versions else None

    def there(self) -> list[str]:
        """The names of all objects."""
        return [name for name in self._versions if self.newest(name) is not None]

    def draws(self, share: float) -> bool:
        return share > 0 and self.machines.random.random() < share

    def write(self, name: str, content: bytes | None) -> None:
        now, draw = self.machines.now, self.machines.random.random
        if content is not None and self.draws(self.faults.lost):
            if draw() < 0.5:
                return
            version = self._add(name, _Version(now, now, content))
            self.machines.at(now + 20 * draw(), lambda: self._lose(name, version))
            return
        late_s = self.faults.old_s * draw() if self.draws(self.faults.late) else 0.0
        self._add(name, _Version(now, now + late_s, content))

    def create(self, name: str, content: bytes) -> bool:
        if self.newest(name) is not None:
            is_race = self._versions[name][-1].at > self.machines.now - RACE_S
            if not is_race or not self.draws(self.faults.winners):
                return False
        self.write(name, content)
        return True

    def read(self, name: str) -> bytes:
        at = self._moment(self.faults.old)
        content = self._seen(name, at)
        if content is None:
            raise FileNotFoundError(name)
        return (
            content[: self.machines.random.randrange(len(content))]
            if self.draws(self.faults.torn)
            else content
        )

    def names(self, folder: str) -> list[str]:
        return self._listed(folder, self._moment(self.faults.lists))

    def _moment(self, share: float) -> float:
        """That a request looks at."""
        now, draw = self.machines.now, self.machines.random.random
        return now - self.faults.old_s * draw() if self.draws(share) else now

    def _add(self, name: str, version: _Version) -> _Version:
        self._versions.setdefault(name, []).append(version)
        return version

    def _lose(self, name: str, version: _Version) -> None:
        self._versions[name].remove(version)

    def _seen(self, name: str, at: float) -> bytes | None:
        versions = self._versions.get(name, [])
        return next((each.content for each in reversed(versions) if max(each.at, each.seen_at) <= at), None)

    def _listed(self, folder: str, at: float) -> list[str]:
        names = [name for name in self._versions if name.rpartition("/")[0] == folder]
        return [name.rpartition("/")[2] for name in names if self._seen(name, at) is not None]


class Reached:
    """A store as a process reaches it: requests take time, and may fail. See `storage._Backend`."""

    def __init__(self, store: Store) -> None:
        self._store, self._machines = store, store.machines

    def write(self, name: str, content: bytes) -> None:
        self._ask(lambda: self._store.write(name, content))

    def create(self, name: str, content: bytes) -> bool:
        return self._ask(lambda: self._store.create(name, content)) or storage._is_there(self, name, content)

    def read(self, name: str) -> bytes:
        return self._ask(lambda: self._store.read(name))

    def delete(self, names: Sequence[str]) -> None:
        [name] = names
        self._ask(lambda: self._store.write(name, None))

    def names(self, folder: str) -> list[str]:
        return self._ask(lambda: self._store.names(folder))

    def _ask(self, request: Callable[[], T]) -> T:
        store, machines = self._store, self._machines
        seconds, draw = store.faults.latency_s * machines.random.random(), machines.random.random
        found: list[Any] = []

        def happen() -> None:
            try:
                found.append(request())
            except FileNotFoundError as error:
                found.append(error)

        if store.draws(store.faults.fails):
            machines.sleep(seconds)
            raise OSError("503 Slow Down, before the request")
        machines.at(machines.now + seconds * draw(), happen)
        machines.sleep(seconds)
        if store.draws(store.faults.fails):
            raise OSError("503 Slow Down, after the request")
        [answer] = found
        if isinstance(answer, FileNotFoundError):
            raise answer
        return answer  # type: ignore[no-any-return]


class Settling(Reached):
    """A store without a creation that only one of two can make."""

    def create(self, name: str, content: bytes) -> bool:
        return storage._create_and_look(self, name, content)
