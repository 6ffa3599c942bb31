"""Callers that have not yet proven that they have a secret of the coordinator. What they may cost together is bounded."""

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..errors import short
from ..net.channel import keep_from_forks, line_of, object_of
from ..net.keys import Keys, identity
from ..settings.environment import ENV_SECRET
from .messages import PROTOCOL

logger = logging.getLogger(__name__)

HERE = {"kind": "here"}
"""The coordinator's first message on a connection with a secret: the caller has proven itself, too."""
LONGEST_LINE = 8 << 20
"""Bytes of a line for the coordinator: what regions compare may name each parameter of a model."""
LINE_BYTES, _READS = 4 << 10, 16
"""Of a caller's only line before it has proven itself, and of what is read of it at a time; how often it is read."""
PROOF_S = 5.0
"""Seconds until a caller must have proven itself."""
MOST_CALLERS = 512
_FAREWELL_S = 1.0
_GIVE = f"give every region and the coordinator the same (regions.secret_file, --secret-file, {ENV_SECRET})"


@dataclass(eq=False)
class _Caller:
    """A connection that has not proven itself. `key`: id of its secret, after a valid first line; `leaves`: it was refused."""

    socket: socket.socket
    address: str
    until: float
    key: str = ""
    leaves: bool = False


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
    """Hands callers that have proven themselves to `adopt`, with the id of their secret. No `secrets`: they must have none.

    Args:
        adopt: serves a connection until it ends.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        secrets: Mapping[str, Keys],
        adopt: Callable[[asyncio.StreamReader, asyncio.StreamWriter, str], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        self._loop, self._listener, self._secrets = loop, listener, secrets
        self._adopt, self._say = adopt, say
        self._callers: dict[_Caller, asyncio.Task[None]] = {}  # in the order in which they came
        self._num_turned_away: Counter[str] = Counter()
        self._said_at = -1.0
        self._accepting = loop.create_task(self._accept())

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

    async def _accept(self) -> None:
        while True:
            try:
                connection, address = await self._loop.sock_accept(self._listener)
            except ConnectionAbortedError:
                continue
            except OSError:  # too many files are open: the listener would wake us again at once
                await asyncio.sleep(0.2)
                continue
            keep_from_forks(connection)
            self._make_room()
            caller = _Caller(connection, address[0], self._loop.time() + PROOF_S)
            self._callers[caller] = self._loop.create_task(self._serve(caller))
            self._callers[caller].add_done_callback(lambda _, over=connection: over.close())  # type: ignore[misc]
            await asyncio.sleep(0)  # others have their turn

    def _make_room(self) -> None:
        """If there are too many, close one: of the address with the most callers, the oldest that has said nothing valid."""
        if len(self._callers) < MOST_CALLERS:
            return
        counts = Counter(caller.address for caller in self._callers)
        most = max(counts.values())
        theirs = [caller for caller in self._callers if counts[caller.address] == most]
        self._turn_away(min(theirs, key=lambda caller: bool(caller.key)))

    async def _serve(self, caller: _Caller) -> None:
        """Let a caller prove itself, and serve it."""
        with contextlib.suppress(OSError):
            if await self._is_welcome(caller):
                reader = asyncio.StreamReader(LONGEST_LINE)
                protocol = asyncio.StreamReaderProtocol(reader)
                proof = identity(self._secrets[caller.key]) if caller.key else None
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: protocol, caller.socket, ssl=None if proof is None else proof.contexts[True]
                )
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                certificate = transport.get_extra_info("ssl_object")
                if proof is None or certificate.getpeercert(True) == proof.certificate:
                    if proof is not None:
                        writer.write(line_of(HERE))
                    del self._callers[caller]
                    await self._adopt(reader, writer, caller.key)
                transport.abort()
        if caller in self._callers:
            self._turn_away(caller)

    async def _is_welcome(self, caller: _Caller) -> bool:
        """Hear the first line of a caller, and answer it. The form of both never changes."""
        said = b""
        for _ in range(_READS):
            chunk = await self._loop.sock_recv(caller.socket, LINE_BYTES)
            said += chunk
            if not chunk or b"\n" in chunk or len(said) > LINE_BYTES:
                break
        message = object_of(said) if said.find(b"\n") == len(said) - 1 else None
        if message is None or len(said) > LINE_BYTES:
            return False
        why = self._reason_to_refuse(message)
        if why is not None:
            await self._refuse(caller, why)
            return False
        caller.key = message.get("key") or ""
        await self._loop.sock_sendall(caller.socket, line_of(versions()))
        return True

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

    async def _refuse(self, caller: _Caller, why: str) -> None:
        """Tell a caller why, and close the connection a moment later."""
        now = self._loop.time()
        if now >= self._said_at + 1.0:
            self._said_at = now
            self._say(f"refused a caller from {caller.address}: {why}")
        caller.leaves, caller.until = True, now + _FAREWELL_S
        await self._loop.sock_sendall(caller.socket, line_of({**versions(), "refused": why}))
        caller.socket.shutdown(socket.SHUT_WR)
        await asyncio.sleep(_FAREWELL_S)

    def _turn_away(self, caller: _Caller) -> None:
        if not caller.leaves:
            self._num_turned_away[caller.address] += 1
        self._callers.pop(caller).cancel()
