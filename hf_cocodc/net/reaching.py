"""Two processes find a connection between them: each tries to reach the other one, and the first way that works counts.

Where neither is reached for a while, they meet in the storage, if the run has one.
"""

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import short
from .addresses import is_url, named
from .mailbox import mailbox
from .pipe import MEND, SIZES, SWALLOWED
from .port import dial, tuned

REACH_S = 30.0
"""If nobody has been reached after so many seconds, no way exists. An end that cannot call may wait for one that begins later."""
_DIAL_S = 10.0
_HEAD_START_S = 0.5
"""The region with the higher number tries so much later: the other one's way is as good."""
_STORAGE_S = 3.0
"""The storage is tried so much later: a way of their own is better. One that a firewall swallows without a word is no way."""
_STAGGER_S = 0.25
"""Each further address is called so much later, while the earlier ones have not answered (RFC 8305)."""
_FIRST_AGAIN_S = 0.05
_AGAIN_S = 0.5
"""Seconds until an address is called again: at first, and at most."""
_EXPECTED_S = 3.0
"""A region whose port has closed a call without a word within so many seconds does not expect this one yet."""
_ASK, _HERE = b"?", b"."
_LARGE = SIZES[0]
"""Random bytes with which an end asks, and agrees, once small words have passed."""
_LARGE_S = 10.0
"""Seconds for these, after which large packets vanish on this way."""


class Found(NamedTuple):
    """A connection (it blocks) on which both ends have agreed.

    `address`: where this end called; None if the other one did. In a storage, both have. `words`: random bytes, of this
    connection alone, that both ends know; others may have heard them.
    """

    connection: socket.socket
    address: tuple[str, int] | None
    words: bytes


class NotReached(Exception):
    """Neither end reaches the other one."""


class Search:
    """The search of one end. One end asks for agreement on each connection (`asks`); the other one agrees to one of them.

    `timeout_s`: seconds for the other end to agree, once a connection is there. `own`: the address to call from; empty for any.
    `storage`: the URL of the one in which the two may meet; empty if there is none.
    """

    def __init__(self, asks: bool, timeout_s: float, own: str = "", storage: str = "") -> None:
        self._asks, self._timeout_s, self._own = asks, timeout_s, own
        self._storage = ((storage, 0),) if storage else ()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._found: Found | None = None
        self._candidates: set[socket.socket] = set()
        self._failures: dict[tuple[str, int], str] = {}
        self._is_swallowed = False
        self._closed_at = -math.inf

    def take(self, connection: socket.socket, number: int) -> None:
        """The other end has called, perhaps before `run`."""
        self._begin(self._consider, connection, None)

    def _begin(self, work: Callable[..., None], *about: Any) -> None:
        threading.Thread(target=work, args=about, name="hf_cocodc-connect", daemon=True).start()

    def run(
        self,
        addresses: Sequence[tuple[str, int]],
        token: bytes,
        name: bytes = b"",
        look: Callable[[], object] = lambda: None,
    ) -> Found:
        """Search until both ends have agreed.

        Args:
            addresses: of the other end, where it expects `token`.
            name: under which they meet in the storage, the same at both ends.
            look: called several times a second; what it raises goes to the caller.

        Raises NotReached if they have not agreed; its text says what was tried from here.
        """
        began = time.monotonic()
        first_s = 0.0 if self._asks else _HEAD_START_S
        for place, address in enumerate(addresses):
            self._begin(self._look_up, address, token, first_s + place * _STAGGER_S)
        for address in self._storage:
            self._failures[address] = "the other end has not come"
            self._begin(self._call, address, address, name, _STORAGE_S if addresses else 0.0)
        while not self._over.wait(0.1):
            look()
            now = time.monotonic()
            is_there = self._candidates or now - self._closed_at < _EXPECTED_S
            is_hopeful = is_there and not self._is_swallowed
            if now - began > (self._timeout_s if is_hopeful else min(REACH_S, self._timeout_s)):
                break
        chosen = self._stop()
        if chosen is None:
            tried = self._tried((*addresses, *self._storage))
            raise NotReached(f"{SWALLOWED}: {MEND} ({tried})" if self._is_swallowed else tried)
        chosen.connection.settimeout(None)
        return chosen

    def close(self) -> None:
        """Nobody needs what was found, or would be."""
        chosen = self._stop()
        if chosen is not None:
            _end(chosen.connection)

    def _stop(self) -> Found | None:
        """Search no more. Returns what was found; the caller has it now."""
        with self._lock:
            self._over.set()
            others, chosen = list(self._candidates), self._found
            self._found = None
        for each in others:
            _end(each)
        return chosen

    def _tried(self, addresses: Sequence[tuple[str, int]]) -> str:
        return " and ".join(
            f"{named(*each)} ({self._failures.get(each, self._disagrees(*each))})" for each in addresses
        )

    def _disagrees(self, host: str, port: int) -> str:
        """Why a connection was not enough."""
        if is_url(host):
            return f"the other end has come, and has not answered within {self._timeout_s:g} s, regions.timeout_s"
        return "what answers there is not that region"

    def _look_up(self, announced: tuple[str, int], token: bytes, wait_s: float) -> None:
        """Call the other end at every address that this one has, all at once but for a moment between them."""
        self._over.wait(wait_s)
        while not self._over.is_set():
            try:
                found = socket.getaddrinfo(*announced, type=socket.SOCK_STREAM)
                break
            except (OSError, UnicodeError) as error:
                self._failures[announced] = short(getattr(error, "strerror", None) or error, 200)
            self._over.wait(_AGAIN_S)
        else:
            return
        for place, where in enumerate(dict.fromkeys(each[-1][:2] for each in found)):
            self._begin(self._call, announced, where, token, place * _STAGGER_S)

    def call(
        self,
        address: tuple[str, int],
        token: bytes,
        number: int,
        timeout_s: float,
        look: Callable[[], object] = lambda: None,
    ) -> socket.socket:
        """A connection to the other end's port, on which token and number were said; or one through a storage, where the other
        end calls likewise, and `look` is called now and then. Raises OSError if nobody answers there, or the other end does not
        come.
        """
        host, port = address
        if is_url(host):
            return tuned(mailbox(host).meet((token + bytes([number])).hex(), self._asks, timeout_s, look))
        return dial(host, port, token, number, timeout_s, self._own)

    def _call(
        self, announced: tuple[str, int], address: tuple[str, int], token: bytes, wait_s: float
    ) -> None:
        """Try to reach the other end at one address of those that it has `announced`."""
        self._over.wait(wait_s)
        again_s = _FIRST_AGAIN_S
        while not self._over.is_set():
            try:
                connection = self.call(address, token, 0, min(REACH_S, _DIAL_S))
            except OSError as error:
                self._failures[announced] = short(error.strerror or error, 200)
            else:
                self._failures.pop(announced, None)
                self._consider(connection, address)
            self._over.wait(again_s)
            again_s = min(2 * again_s, _AGAIN_S)

    def _consider(self, connection: socket.socket, address: tuple[str, int] | None) -> None:
        """Let both ends agree on a connection, or close it."""
        with self._lock:
            if self._over.is_set():
                _end(connection)
                return
            self._candidates.add(connection)
        own, theirs = os.urandom(_LARGE), b""
        with contextlib.suppress(OSError):
            was_called = address is not None and not is_url(address[0])
            theirs = self._words_of_other(connection, own, was_called)
        with self._lock:
            self._candidates.discard(connection)
            if theirs and not self._over.is_set():
                with contextlib.suppress(OSError):
                    if not self._asks:
                        connection.sendall(own)
                    self._found = Found(connection, address, own + theirs if self._asks else theirs + own)
                    self._over.set()
                    return
        _end(connection)

    def _words_of_other(self, connection: socket.socket, own: bytes, was_called: bool) -> bytes:
        """With what the other end asks for agreement on a connection, or agrees; empty if it does not. Raises OSError if it says
        nothing.
        """
        connection.settimeout(self._timeout_s)
        first = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            if self._asks:
                connection.sendall(_ASK)
            first = connection.recv(1)
        if not first and was_called:
            self._closed_at = time.monotonic()
        if first != (_HERE if self._asks else _ASK):
            return b""
        connection.sendall(own if self._asks else _HERE)
        connection.settimeout(_LARGE_S)
        began, theirs = time.monotonic(), bytearray()
        with contextlib.suppress(TimeoutError):
            while chunk := connection.recv(_LARGE - len(theirs)):
                theirs += chunk
        if len(theirs) == _LARGE:
            return bytes(theirs)
        # the other end may have given up a moment earlier
        self._is_swallowed = self._is_swallowed or time.monotonic() - began > _LARGE_S / 2
        return b""


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
