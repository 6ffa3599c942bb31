"""Two processes find a connection between them: each tries to reach the other one, and the first way that works counts.

Where neither is reached for a while, both call the relay, if there is one.
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
from .addresses import named
from .large import MEND, SIZES, SWALLOWED
from .port import dial
from .relay import role_at_relay

REACH_S = 30.0
"""If nobody has been reached after so many seconds, no way exists. An end that cannot call may wait for one that begins later."""
_DIAL_S = 10.0
_HEAD_START_S = 0.5
"""The region with the higher number tries so much later: the other one's way is as good."""
_RELAY_S = 3.0
"""The relay is called so much later: a way of their own is better. One that a firewall swallows without a word is no way."""
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

    `address`: where this end called; None if the other one did. `words`: random bytes, of this connection alone, that both ends
    know; others may have heard them.
    """

    connection: socket.socket
    address: tuple[str, int] | None
    is_relayed: bool
    words: bytes


class NotReached(Exception):
    """Neither end reaches the other one."""


class Search:
    """The search of one end. One end asks for agreement on each connection (`asks`); the other one agrees to one of them.

    `timeout_s`: seconds for the other end to agree, once a connection is there. `own`: the address to call from; empty for any.
    """

    def __init__(
        self, asks: bool, timeout_s: float, own: str = "", relay: tuple[str, int] | None = None
    ) -> None:
        self._asks, self._timeout_s, self._own, self._relay = asks, timeout_s, own, relay
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
        ticket: bytes = b"",
        look: Callable[[], object] = lambda: None,
    ) -> Found:
        """Search until both ends have agreed.

        Args:
            addresses: of the other end, where it expects `token`.
            ticket: for the relay, the same at both ends.
            look: called several times a second; what it raises goes to the caller.

        Raises NotReached if they have not agreed; its text says what was tried from here.
        """
        began = time.monotonic()
        first_s = 0.0 if self._asks else _HEAD_START_S
        for place, address in enumerate(addresses):
            self._begin(self._look_up, address, token, first_s + place * _STAGGER_S)
        if self._relay is not None:
            self._begin(self._call, self._relay, self._relay, ticket, _RELAY_S, True)
            self._failures[self._relay] = "the other region has not come there"
        while not self._over.wait(0.1):
            look()
            now = time.monotonic()
            is_there = self._candidates or now - self._closed_at < _EXPECTED_S
            is_hopeful = is_there and not self._is_swallowed
            if now - began > (self._timeout_s if is_hopeful else min(REACH_S, self._timeout_s)):
                break
        chosen = self._stop()
        if chosen is None:
            relay = () if self._relay is None else (self._relay,)
            tried = self._tried((*addresses, *relay))
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
            f"{named(*each)} ({self._failures.get(each, 'what answers there is not that region')})"
            for each in addresses
        )

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
            self._begin(self._call, announced, where, token, place * _STAGGER_S, False)

    def _call(
        self,
        announced: tuple[str, int],
        address: tuple[str, int],
        token: bytes,
        wait_s: float,
        is_relay: bool,
    ) -> None:
        """Try to reach the other end at one address of those that it has `announced`."""
        self._over.wait(wait_s)
        role, again_s = role_at_relay(self._asks) if is_relay else b"", _FIRST_AGAIN_S
        while not self._over.is_set():
            try:
                connection = dial(*address, token, 0, min(REACH_S, _DIAL_S), self._own, role)
            except OSError as error:
                if not (is_relay and isinstance(error, TimeoutError)):
                    self._failures[announced] = short(error.strerror or error, 200)
            else:
                self._failures.pop(announced, None)
                self._consider(connection, address, is_relay)
            self._over.wait(again_s)
            again_s = min(2 * again_s, _AGAIN_S)

    def _consider(
        self, connection: socket.socket, address: tuple[str, int] | None, is_relay: bool = False
    ) -> None:
        """Let both ends agree on a connection, or close it."""
        with self._lock:
            if self._over.is_set():
                _end(connection)
                return
            self._candidates.add(connection)
        own, theirs = os.urandom(_LARGE), b""
        with contextlib.suppress(OSError):
            theirs = self._words_of_other(connection, own, address is not None and not is_relay)
        with self._lock:
            self._candidates.discard(connection)
            if theirs and not self._over.is_set():
                with contextlib.suppress(OSError):
                    if not self._asks:
                        connection.sendall(own)
                    self._found = Found(
                        connection, address, is_relay, own + theirs if self._asks else theirs + own
                    )
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
