"""Callers that have not yet proven that they have a secret of the coordinator. What they may cost together is bounded."""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import __version__
from ..errors import short
from ..net.channel import Channel, line_of, object_of
from ..net.keys import Keys, identity
from ..settings import ENV_SECRET
from .messages import PROTOCOL

logger = logging.getLogger(__name__)

HERE = {"kind": "here"}
"""The coordinator's first message on a connection with a secret: the caller has proven itself, too."""
_FAREWELL_S = 1.0
_AT_ONCE = 32
"""Callers that are accepted before others have their turn."""
_GIVE = f"give every region and the coordinator the same (regions.secret_file, --secret-file, {ENV_SECRET})"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What callers may cost before they have proven anything.

    Attributes:
        line_bytes: of a caller's only line, and of what is read of it at a time.
        reads: how often a caller is read for that line, and then for the TLS handshake.
        proof_s: seconds until a caller must have proven itself.
    """

    line_bytes: int = 4 << 10
    reads: int = 16
    proof_s: float = 5.0
    callers: int = 512


@dataclass(eq=False)
class _Caller:
    """A connection that has not proven itself. `key`: id of its secret, after a valid first line; `leaves`: it was refused."""

    channel: Channel
    address: str
    until: float
    key: str = ""
    leaves: bool = False
    num_reads: int = field(default=0)


def key_id(keys: Keys | None) -> str:
    """A name of a secret, which does not reveal it; "" for none."""
    return "" if keys is None else keys.of("id").raw[:8].hex()


def versions() -> dict[str, Any]:
    """What the first line of either end says of itself. This form never changes."""
    return {"hf_cocodc": PROTOCOL, "version": __version__}


def other_version(first_line: Mapping[str, Any], they: str, we: str) -> str | None:
    """Why two ends do not understand each other; None if they do."""
    if first_line.get("hf_cocodc") == PROTOCOL:
        return None
    theirs = (
        f"{short(first_line.get('version', '?'), 30)} (protocol {short(first_line.get('hf_cocodc'), 30)})"
    )
    return (
        f"{they} runs hf-cocodc {theirs}, {we} hf-cocodc {__version__} (protocol {PROTOCOL}): install the same version "
        "everywhere"
    )


class Entrance:
    """Hands callers that have proven themselves to `adopt`, with the id of their secret. No `secrets`: they must have none."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        secrets: Mapping[str, Keys],
        limits: Limits,
        adopt: Callable[[Channel, str], None],
        say: Callable[[str], None],
    ) -> None:
        self._loop, self._listener, self._secrets, self._limits = loop, listener, secrets, limits
        self._adopt, self._say = adopt, say
        self._callers: dict[_Caller, None] = {}  # in the order in which they came
        self._num_turned_away: Counter[str] = Counter()
        self._said_at = -1.0
        self._listen()

    def look_after(self) -> None:
        """Close callers whose time is up, and say how many were turned away. Call this several times a second."""
        now = self._loop.time()
        for caller in [each for each in self._callers if each.until <= now]:
            self._turn_away(caller)
        if self._num_turned_away and now >= self._said_at + 1.0:
            self._said_at = now
            total = self._num_turned_away.total()
            most = self._num_turned_away.most_common(1)[0][0]
            self._num_turned_away.clear()
            self._say(f"closed {total} connections that proved nothing, most of them from {most}")

    def close(self) -> None:
        for caller in list(self._callers):
            self._end(caller)
        self._loop.remove_reader(self._listener)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # too many files are open: the listener would wake us again at once
                self._loop.remove_reader(self._listener)
                self._loop.call_later(0.2, self._listen)
                return
            self._make_room()
            caller = _Caller(Channel(connection), address[0], self._loop.time() + self._limits.proof_s)
            caller.channel.longest = self._limits.line_bytes
            self._callers[caller] = None
            self._loop.add_reader(connection, self._read, caller)

    def _make_room(self) -> None:
        """If there are too many, close one: of the address with the most callers, the oldest that has said nothing valid."""
        if len(self._callers) < self._limits.callers:
            return
        counts = Counter(caller.address for caller in self._callers)
        most = max(counts.values())
        theirs = [caller for caller in self._callers if counts[caller.address] == most]
        self._turn_away(min(theirs, key=lambda caller: bool(caller.key)))

    def _read(self, caller: _Caller) -> None:
        channel = caller.channel
        channel.receive(self._limits.line_bytes)
        caller.num_reads += 1
        if caller.key:
            if channel.is_protected:
                channel.write(line_of(HERE))
                self._let_in(caller)
            elif channel.ended or caller.num_reads >= self._limits.reads:
                self._turn_away(caller)
        elif channel.has_skipped or channel.num_lines > 1:
            self._turn_away(caller)
        elif channel.num_lines:
            caller.num_reads = 0
            message = object_of(channel.take_line())
            if message is None:
                self._turn_away(caller)
            else:
                self._hear(caller, message)
        elif channel.ended or caller.num_reads >= self._limits.reads:
            self._turn_away(caller)

    def _hear(self, caller: _Caller, message: dict[str, Any]) -> None:
        """The first line of a caller. Its form never changes."""
        why = self._reason_to_refuse(message)
        if why is not None:
            self._refuse(caller, why)
            return
        caller.key = message.get("key") or ""
        self._write(caller, versions())
        if caller not in self._callers:
            return
        if caller.key:
            caller.channel.protect(identity(self._secrets[caller.key]), is_server=True)
        else:
            self._let_in(caller)

    def _reason_to_refuse(self, message: dict[str, Any]) -> str | None:
        if "hf_cocodc" not in message:
            return "it is no region or command of hf-cocodc"
        wrong = other_version(message, "the caller", "the coordinator")
        if wrong is not None:
            return wrong
        key = message.get("key")
        if key is None and self._secrets:
            return f"the coordinator has a secret, and the caller has none: {_GIVE}"
        if key is not None and not self._secrets:
            return f"the caller has a secret, and the coordinator has none: {_GIVE}"
        if key is not None and (not isinstance(key, str) or key not in self._secrets):
            return f"the caller has another secret than the coordinator: {_GIVE}"
        return None

    def _let_in(self, caller: _Caller) -> None:
        self._loop.remove_reader(caller.channel.socket)
        del self._callers[caller]
        self._adopt(caller.channel, caller.key)

    def _refuse(self, caller: _Caller, why: str) -> None:
        """Tell a caller why, and close the connection a moment later."""
        now = self._loop.time()
        if now >= self._said_at + 1.0:
            self._said_at = now
            self._say(f"refused a caller from {caller.address}: {why}")
        self._write(caller, {**versions(), "refused": why})
        if caller in self._callers:
            self._loop.remove_reader(caller.channel.socket)
            caller.channel.finish()
            caller.leaves, caller.until = True, now + _FAREWELL_S

    def _write(self, caller: _Caller, message: dict[str, Any]) -> None:
        caller.channel.write(line_of(message))
        if caller.channel.ended or caller.channel.unsent_since is not None:  # a new connection takes one line
            self._turn_away(caller)

    def _turn_away(self, caller: _Caller) -> None:
        if not caller.leaves:
            self._num_turned_away[caller.address] += 1
        self._end(caller)

    def _end(self, caller: _Caller) -> None:
        del self._callers[caller]
        self._loop.remove_reader(caller.channel.socket)
        caller.channel.close()
