"""The ranks of a region wait for their leader without a time-out.

Accelerate's process group ends a collective call after 10 or 30 minutes. A leader may have to wait longer for another region,
which is late but alive. The other ranks must not spend that time inside a collective call. They wait at a store of the
region's own until the leader is ready, and only then all ranks enter the collective call.
"""

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from .. import errors
from ..errors import CocodcError, LinkError
from .store import connect_store

T = TypeVar("T")

_LONGEST_POLL_S = 0.02
_CONNECT_S = 60.0
_LAST_MOMENT_S = 2.0


class RegionStore:
    """One rank's side of the store that a region has for itself; its leader (rank 0) serves it.

    Args:
        address: HOST:PORT of the store.
        rank: this rank in its region.
        num_ranks: ranks of the region.
        server: the store itself, on the leader. It lives as long as this object.

    Attributes:
        heard: what the leader has told with its last call.

    Raises:
        LinkError: the store cannot be reached.
    """

    def __init__(self, address: str, rank: int, num_ranks: int, server: dist.TCPStore | None = None) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._address, self._server = address, server
        self._store = self.connect()
        self._turn = 0
        self.heard: Any = None

    def connect(self) -> dist.TCPStore:
        """Another connection, for another thread: a call that waits on a connection keeps all other calls on it waiting."""
        return connect_store(self._address, _CONNECT_S)

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
            kind = type(error).__name__
            message = str(error) if isinstance(error, CocodcError) else f"{kind}: {error}"
            self._tell({"failure": {"kind": kind, "message": message}})
            raise
        self._tell({"news": self.heard})
        return result

    def _tell(self, said: dict[str, Any]) -> None:
        """Tell the other ranks that the leader's call has ended. After a failure, give them a moment to hear of it."""
        key, until = f"ended/{self._turn}", time.monotonic() + _LAST_MOMENT_S
        self._store.set(key, json.dumps(said))
        while "failure" in said and self._store.check([key]) and time.monotonic() < until:
            time.sleep(_LONGEST_POLL_S)

    def _await(self, what: str) -> None:
        """Wait until the leader's call has ended; raise what it raised."""
        key, since = f"ended/{self._turn}", time.monotonic()
        try:
            while not self._store.check([key]):
                # a short wait is ended in time, and a long one costs nothing
                time.sleep(min((time.monotonic() - since) / 16 + 1e-4, _LONGEST_POLL_S))
            said = json.loads(self._store.get(key))
            if self._store.add(f"heard/{self._turn}", 1) == self.num_ranks - 1:
                for done in (key, f"heard/{self._turn}"):
                    self._store.delete_key(done)
        except RuntimeError as error:
            raise LinkError(
                f"the leader (rank 0) of this region has ended while rank {self.rank} waited for {what}. Look at its last output."
            ) from error
        failure, self.heard = said.get("failure"), said.get("news")
        if failure:
            kind = getattr(errors, failure["kind"], LinkError)
            raise (kind if kind in _WITH_A_MESSAGE else LinkError)(failure["message"])


_WITH_A_MESSAGE = (
    errors.InputError,
    errors.HandshakeError,
    errors.CheckpointError,
    errors.MeetingError,
    errors.LeftBehind,
    errors.DonorLost,
)
"""Errors that a rank raises as its leader did; any other failure of the leader is a LinkError."""
