"""Broken connections to a region come back. The region is lost if its process has ended, or is not reached again in time."""

import logging
import math
import threading
import time
from collections.abc import Callable

from ..threads import NativeThread
from .connection import Connection, ConnectionLost
from .pipe import CLOSED

logger = logging.getLogger(__name__)

_AGAIN_S = 0.1
_STREAM_S = 10.0
"""A stream comes back within so many seconds of the control connection, or never."""


class Denied(ConnectionLost):
    """Who answers for the other end says that its process is not there, or that it does not know the connection."""


class NotBack(ConnectionLost):
    """No connection to the other end has come about in time."""


def stream_verdict(
    now: float, broken_at: float, whole_since: float, has_control: bool
) -> ConnectionLost | None:
    """The error if a broken stream is over; None while it may come back. It says nothing of the process at the other end.

    An end that has closed a stream may not have been able to say so. While the control connection is whole since `whole_since`
    (infinite if it is not), the other end would have called again by now. `has_control`: whether that has not ended.
    """
    is_over = not has_control or now - max(broken_at, whole_since) > _STREAM_S
    return ConnectionLost(CLOSED) if is_over else None


Judge = Callable[[float, bool], ConnectionLost | None]
"""From the moment at which a connection broke, and whether the other end's machine denies it: the error if it is lost."""


class Recovery:
    """Brings connections of a pair back, each in a thread of its own.

    Args:
        call: calls the other end for a connection. If the other end calls, it only looks whether its port is there. Raises
            Denied if it is not, and any other error if nobody knows.
        lost: called with the error once a connection is lost.
    """

    def __init__(
        self,
        call: Callable[[Connection], None],
        judge: Judge,
        lost: Callable[[ConnectionLost], object] = lambda error: None,
    ) -> None:
        self._call, self._judge, self._lost = call, judge, lost
        self._under_way: set[Connection] = set()
        self._lock = threading.Lock()

    def begin(self, connection: Connection) -> None:
        """A connection has lost its socket."""
        with self._lock:
            if connection in self._under_way:
                return
            self._under_way.add(connection)
        NativeThread(self._bring_back, "hf_cocodc-connect", (connection,)).start()

    def _bring_back(self, connection: Connection) -> None:
        while not self._is_over(connection):
            broken_at, is_denied = connection.broken_at, False
            try:
                self._call(connection)
            except Denied:
                is_denied = True
            except Exception as error:  # whatever it is, nobody must wait for ever
                logger.debug("a connection does not come back yet: %r", error)
            if math.isinf(connection.broken_at) or connection.lost_at < math.inf:
                continue
            lost = self._judge(broken_at, is_denied)
            if lost is not None:
                self._lost(lost)
                connection.end(lost)  # its pair may not know it yet
            time.sleep(_AGAIN_S)

    def _is_over(self, connection: Connection) -> bool:
        with self._lock:
            is_over = connection.broken_at == math.inf or connection.lost_at < math.inf
            if is_over:
                self._under_way.discard(connection)
            return is_over
