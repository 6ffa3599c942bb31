"""Finds among those that call a donor the one that it waits for. The others keep nobody waiting.

Without a secret of the run, that one says a secret of the offer, once. With one, it proves that it knows both (see `Proof`).
"""

import hmac
import json
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..meeting.channel import keep_from_forks
from ..meeting.proof import Proof, Refused

GREET_S = 5.0
"""Seconds in which a caller says its first line."""
FIRST_LINE = 4 << 10
"""Bytes of that line at most."""
MOST = 64
"""Callers at most: for one more, the oldest that was not answered is closed."""
_POLL_S = 0.2


@dataclass
class _Caller:
    until: float
    proof: Proof | None
    is_answered: bool = False
    said: bytearray = field(default_factory=bytearray)


def who_knows(
    listener: socket.socket,
    secret: str,
    goes_on: Callable[[], bool],
    prove: Callable[[], Proof | None] = lambda: None,
) -> tuple[socket.socket, Proof | None] | None:
    """The first connection of somebody who knows the secret; None if nobody has called while `goes_on` returned True.

    Args:
        listener: listens; left open.
        secret: the line that is waited for is {"secret": secret}, with other names or not; not if there is a proof.
        goes_on: called several times a second.
        prove: makes this end of a conversation in which both prove themselves; it returns None without a secret of the run.

    Returns:
        The connection, and the complete conversation.
    """
    callers: dict[socket.socket, _Caller] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def end(connection: socket.socket) -> None:
            del callers[connection]
            selector.unregister(connection)
            connection.close()

        try:
            while goes_on():
                for key, _ in selector.select(_POLL_S):
                    if key.fileobj is listener:
                        for connection in _accepted(listener):
                            if len(callers) >= MOST:
                                end(min(callers, key=lambda each: callers[each].is_answered))
                            callers[connection] = _Caller(time.monotonic() + GREET_S, prove())
                            selector.register(connection, selectors.EVENT_READ)
                        continue
                    connection = key.fileobj  # type: ignore[assignment]  # we register nothing else
                    caller = callers.get(connection)
                    if caller is None:  # closed a moment ago
                        continue
                    is_over = _hear(connection, caller)
                    if not is_over:
                        continue
                    line = _line_in(caller.said)
                    if line is not None and caller.proof is not None and not caller.is_answered:
                        if not _answer(connection, caller, line):
                            end(connection)
                    elif line is not None and _knows(caller.proof, line, secret):
                        del callers[connection]
                        selector.unregister(connection)
                        return connection, caller.proof
                    else:
                        end(connection)
                for connection, caller in list(callers.items()):
                    if time.monotonic() > caller.until:
                        end(connection)
            return None
        finally:
            for connection in callers:
                connection.close()


def _accepted(listener: socket.socket) -> list[socket.socket]:
    """All that have called since the last time."""
    found: list[socket.socket] = []
    while len(found) < MOST:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            break
        except OSError:  # too many files are open: select would return at once
            time.sleep(_POLL_S)
            break
        connection.setblocking(False)
        keep_from_forks(connection)
        found.append(connection)
    return found


def _hear(connection: socket.socket, caller: _Caller) -> bool:
    """Read on; returns whether there is nothing more to wait for."""
    try:
        chunk = connection.recv(FIRST_LINE + 1 - len(caller.said))
    except BlockingIOError:
        return False
    except OSError:
        return True
    caller.said += chunk
    return not chunk or b"\n" in caller.said or len(caller.said) > FIRST_LINE


def _line_in(said: bytearray) -> dict[str, Any] | None:
    """The one line that somebody has said, if it is one of ours."""
    line, newline, rest = said.partition(b"\n")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if newline and not rest and isinstance(found, dict) else None


def _answer(connection: socket.socket, caller: _Caller, line: dict[str, Any]) -> bool:
    """Answer the first message of a conversation. Returns whether it goes on."""
    assert caller.proof is not None
    try:
        caller.proof.hear(line)
        connection.send(json.dumps(caller.proof.say({"kind": "here"})).encode() + b"\n")
    except (Refused, OSError):
        return False
    caller.is_answered, caller.said = True, bytearray()
    return True


def _knows(proof: Proof | None, line: dict[str, Any], secret: str) -> bool:
    """Whether somebody says the secret, or the last message of a conversation."""
    if proof is None:
        return hmac.compare_digest(str(line.get("secret")).encode(errors="replace"), secret.encode())
    try:
        proof.hear(line)
    except Refused:
        return False
    return True
