"""Two ends of a connection, for tests."""

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from hf_cocodc.net.connection import Connection, ConnectionLost
from hf_cocodc.net.keys import Ciphers, Keys, ciphers
from hf_cocodc.net.pipe import CLOSED, CiphersFor
from tests.link.memory import at_once


def sealing(keys: Keys | None, is_first: bool) -> CiphersFor | None:
    """As a pair has it."""
    if keys is None:
        return None

    def make(own: bytes, theirs: bytes) -> Ciphers:
        both = (own, theirs) if is_first else (theirs, own)
        return ciphers(keys.of(*(each.hex() for each in both)), is_first)

    return make


def end_with_it(connection: Connection) -> None:
    """A socket has failed: end the connection, too."""
    connection.end(ConnectionLost(CLOSED))


def ends_on(
    sockets: tuple[socket.socket, socket.socket],
    keys: tuple[Keys | None, Keys | None] = (None, None),
    broken: Callable[[Connection], None] = end_with_it,
    **more: Any,
) -> list[Connection]:
    """Both ends, on connected sockets."""
    made = [
        Connection(name, broken, ciphers_for=sealing(each, is_first), **more)
        for name, each, is_first in zip("ab", keys, (True, False), strict=True)
    ]
    at_once(*(partial(end.attach, each) for end, each in zip(made, sockets, strict=True)))
    return made
