"""The ranks of a region wait for their leader without a time-out.

Accelerate's process group ends a collective call after 10 or 30 minutes. A leader may have to wait longer for another region,
which is late but alive. The other ranks must not spend that time inside a collective call. They wait at a store of the
region's own until the leader is ready, and only then all ranks enter the collective call.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import CocodcError, LinkError, MeetingError
from .sealed import check
from .secret import Keys
from .store import connect_store
from .values import foreign, pause, read_json

T = TypeVar("T")

_CONNECT_S = 60.0
_LAST_MOMENT_S = 2.0


class RegionStore:
    """One rank's side of the store that a region has for itself; its leader (rank 0) serves it.

    Args:
        address: HOST:PORT of the store.
        rank: this rank in its region.
        num_ranks: ranks of the region.
        server: the store itself, on the leader. It lives as long as this object.
        keys: of this store alone, and equal in all ranks: what was recorded at another store is worth nothing here. None
            without a secret.

    Attributes:
        heard: what the leader has told with its last call.

    Raises:
        LinkError: the store cannot be reached.
        MeetingError: the ranks do not have the same secret.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        num_ranks: int,
        server: dist.TCPStore | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._address, self._server = address, server
        self._keys = keys
        self._store = self.connect()
        check(self._store)
        self._turn = 0
        self.heard: Any = None

    def connect(self) -> dist.Store:
        """Another connection, for another thread: a call that waits on a connection keeps all other calls on it waiting."""
        return connect_store(self._address, _CONNECT_S, self._keys)

    def lead(
        self, call: Callable[[], T], what: str, news: Callable[[T], Any] = lambda result: None
    ) -> T | None:
        """Run `call` on the leader, while the other ranks wait until it has ended; they return None.

        All ranks make the same calls in the same order. What the leader tells with it is in `heard` of every rank afterwards.

        Args:
            call: may wait for other regions for as long as it wants.
            what: names the call in messages.
            news: (result of the call) -> what the leader tells the other ranks; JSON.

        Raises:
            CocodcError: `call` has failed on the leader; or the leader has died.
        """
        self._turn += 1
        if self.rank:
            self._await(what)
            return None
        try:
            result = call()
            self.heard = news(result)
        except BaseException as error:
            self._tell({"failure": failure_of(error)})
            raise
        self._tell({"news": self.heard})
        return result

    def _tell(self, said: dict[str, Any]) -> None:
        """Tell the other ranks that the leader's call has ended. After a failure, give them a moment to hear of it."""
        key, began = f"ended/{self._turn}", time.monotonic()
        self._store.set(key, json.dumps(said))
        while "failure" in said and self._store.check([key]) and time.monotonic() < began + _LAST_MOMENT_S:
            pause(began)

    def _await(self, what: str) -> None:
        """Wait until the leader's call has ended; raise what it raised."""
        key, since = f"ended/{self._turn}", time.monotonic()
        try:
            while not self._store.check([key]):
                pause(since)
            said = _said_in(self._store.get(key), key)
            if self._store.add(f"heard/{self._turn}", 1) == self.num_ranks - 1:
                for done in (key, f"heard/{self._turn}"):
                    self._store.delete_key(done)
        except MeetingError:
            raise
        except RuntimeError as error:
            raise LinkError(
                f"the leader (rank 0) of this region has ended while rank {self.rank} waited for {what}. Look at its last output."
            ) from error
        failure, self.heard = said.get("failure"), said.get("news")
        if failure:
            raise error_of(failure)


def failure_of(error: BaseException) -> dict[str, str]:
    """An error that another rank raises as `error_of`."""
    kind = type(error).__name__
    message = str(error) if isinstance(error, CocodcError) else f"{kind}: {error}"
    return {"kind": kind, "message": message}


def error_of(failure: dict[str, str]) -> CocodcError:
    """The failure of the leader, in another rank: of its kind if that is ours and takes a message, else a LinkError."""
    kinds = {kind.__name__: kind for kind in _kinds(CocodcError) if "__init__" not in vars(kind)}
    return kinds.get(failure["kind"], LinkError)(failure["message"])


def _kinds(kind: type[CocodcError]) -> Iterator[type[CocodcError]]:
    """A kind of error, and all that are of it."""
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)


def _said_in(found: bytes, key: str) -> dict[str, Any]:
    """What the leader has told. Raises MeetingError if it is not the leader's."""
    said = read_json(found, key)
    failure = said.get("failure", {}) if isinstance(said, dict) else None
    if not isinstance(failure, dict) or (failure and set(map(type, failure.values())) != {str}):
        raise foreign(key, found)
    if failure and failure.keys() != {"kind", "message"}:
        raise foreign(key, found)
    return said
