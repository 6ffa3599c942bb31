"""A blocking connection to the coordinator."""

import errno
import math
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from ..errors import (
    CocodcError,
    HandshakeError,
    InputError,
    LeftBehind,
    LinkError,
    MeetingError,
    MeetingRefused,
    RunFinished,
    RunOver,
    short,
)
from ..net.addresses import Unreachable, is_loopback, resolve
from ..net.channel import Channel, line_of, object_of
from ..net.keys import Keys, identity
from .entrance import HERE, key_id, other_version, versions
from .messages import FromCommand, FromRegion, Refuse, from_line

CONNECT_S = 10.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 2.0
"""Seconds between two attempts to connect."""
LONGEST_LINE = 8 << 20
"""Bytes of a line for the coordinator: what regions compare may name each parameter of a model."""
_LONGEST_ANSWER = 256 << 20
"""Bytes of a line of the coordinator, which is trusted: it may hold what every region compares."""
_EACH_S = 3.0
"""Seconds for each address of a host that has several, but the last."""
_LOOK_S = 0.2
_LONGEST_TURN_S = 3.0
"""If more time passes between two looks at the clock, this process stood still."""
FLUSH_S = 1.0
_ERRORS: dict[str, type[CocodcError]] = {
    each.__name__: each
    for each in (HandshakeError, InputError, LeftBehind, LinkError, MeetingError, RunOver, RunFinished)
}


class ConnectionEnded(LinkError):
    """The coordinator has closed a connection, or the connection has failed."""


class NobodyAnswers(MeetingError):
    """No coordinator answers."""


class _TryAgain(Exception):
    """No coordinator answers yet."""


def error_of(refusal: Refuse) -> CocodcError:
    """The error that a refusal names."""
    return _ERRORS.get(refusal.error, MeetingError)(refusal.why)


class _Patience:
    """Seconds left to wait, less those in which this process stood still. Ask at least every `LONGEST_WAIT_S`."""

    def __init__(self, seconds: float) -> None:
        self._left_s, self._asked_at = seconds, time.monotonic()

    @property
    def left_s(self) -> float:
        now = time.monotonic()
        self._left_s -= min(now - self._asked_at, _LONGEST_TURN_S)
        self._asked_at = now
        return self._left_s


class CoordinatorConnection:
    """A blocking connection to the coordinator at `address` (HOST:PORT).

    Args:
        purpose: "region", "command", "status" or "doctor".
        timeout_s: how long to keep trying while the coordinator does not answer.
        look: called several times a second meanwhile; what it raises goes to the caller.

    Raises:
        Unreachable: the host name is unknown, or no way leads there.
        MeetingError: nobody answers; MeetingRefused if what answers has another secret, another version, or is no coordinator.
    """

    def __init__(
        self,
        address: str,
        run: str,
        purpose: str,
        keys: Keys | None,
        timeout_s: float = CONNECT_S,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.address, self._keys, self._look = address, keys, look
        host, _, port = address.rpartition(":")
        patience, wait_s = _Patience(timeout_s), FIRST_WAIT_S
        while True:
            try:
                self.channel = self._connect(patience)
                break
            except (_TryAgain, Unreachable) as error:
                if wait_s > patience.left_s:
                    if isinstance(error, Unreachable):
                        raise
                    raise self._nobody(host.strip("[]"), port, str(error)) from error
            self._pause(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        self.send_plain({"run": run, "for": purpose})

    def send(self, message: FromRegion | FromCommand) -> None:
        """Send a message, or as much of it as the coordinator takes now; `receive` and `close` send the rest."""
        self.send_plain(message)

    def send_plain(self, message: Any) -> None:
        try:
            self.channel.write(line_of(message, LONGEST_LINE))
        except ValueError as error:
            raise InputError(f"the coordinator at {self.address} cannot be told: {error}.") from error

    def receive(self, timeout_s: float) -> Any | None:
        """The next message; None if none comes in time. Raises ConnectionEnded, or LinkError if what comes is no message."""
        line = self.receive_line(timeout_s)
        return None if line is None else from_line(line)

    def receive_line(self, timeout_s: float) -> bytes | None:
        until = time.monotonic() + timeout_s
        while True:
            if self.channel.num_lines:
                return self.channel.take_line()
            if self.channel.ended:
                raise ConnectionEnded(f"the coordinator at {self.address} has closed the connection")
            left_s = until - time.monotonic()
            if left_s < 0:
                return None
            _wait(self.channel, left_s)

    def close(self) -> None:
        """Close the connection once the coordinator has taken all, or after a second."""
        until = time.monotonic() + FLUSH_S
        self.channel.finish()
        # it closes its end when it has read all
        while not self.channel.ended and time.monotonic() < until:
            _wait(self.channel, until - time.monotonic())
            while self.channel.num_lines:
                self.channel.take_line()
        self.channel.close()

    def _connect(self, patience: _Patience) -> Channel:
        """Connect once, and prove both ends. Raises _TryAgain if that may succeed later."""
        addresses = resolve(self.address, socket.SOCK_STREAM)
        why = "it has no address"
        for number, (family, kind, _, _, where) in enumerate(addresses, start=1):
            try:
                channel = Channel(socket.socket(family, kind))
            except OSError as error:  # this kernel does not speak IPv6
                why = error.strerror or str(error)
                continue
            try:
                why = self._reach(channel.socket, where, patience, number < len(addresses))
                if not why:
                    channel.longest = _LONGEST_ANSWER
                    self._prove(channel, patience)
                    return channel
            except BaseException:
                channel.close()
                raise
            channel.close()
        raise _TryAgain(why)

    def _reach(self, connection: socket.socket, where: Any, patience: _Patience, has_another: bool) -> str:
        """Connect; return why that failed, or nothing. An address that drops packets must leave time for the next one."""
        failed = connection.connect_ex(where)
        until = time.monotonic() + _EACH_S if has_another else math.inf
        while failed in (errno.EINPROGRESS, errno.EALREADY):
            left_s = min(patience.left_s, until - time.monotonic())
            if left_s <= 0:
                return "it does not answer"
            if _poll(connection, select.POLLOUT, min(_LOOK_S, left_s)):
                failed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                break
            self._look()
        return os.strerror(failed) if failed else ""

    def _prove(self, channel: Channel, patience: _Patience) -> None:
        """Say who this is, and hear that it is the coordinator."""
        channel.write(line_of({**versions(), "key": key_id(self._keys) or None}))
        answer = self._answer(channel, patience)
        if answer is None or "hf_cocodc" not in answer:
            raise MeetingRefused(
                f"what listens at {self.address} is not a coordinator. Correct the address (regions.coordinator, --coordinator), "
                "or start one there with `hf-cocodc coordinator`."
            )
        why = other_version(answer, f"the coordinator at {self.address}", "this process")
        if why is None and "refused" in answer:
            why = f"the coordinator at {self.address} refuses this process: {short(answer['refused'], 1000)}"
        if why is not None:
            raise MeetingRefused(f"{why}.")
        if self._keys is not None:
            channel.protect(identity(self._keys), is_server=False)
            if self._answer(channel, patience) != HERE:
                raise MeetingRefused(f"the coordinator at {self.address} says what no coordinator says.")

    def _answer(self, channel: Channel, patience: _Patience) -> dict[str, Any] | None:
        """The next line. Raises _TryAgain if none comes."""
        while not channel.num_lines:
            if channel.is_denied:
                raise MeetingRefused(
                    f"what listens at {self.address} does not prove that it has the secret of the run: it is another one, or "
                    "somebody between here and there alters what is said."
                )
            if channel.ended:
                raise _TryAgain("it has closed the connection without an answer")
            if patience.left_s <= 0:
                raise _TryAgain("what listens there does not answer as a coordinator does")
            self._look()
            _wait(channel, _LOOK_S)
        return object_of(channel.take_line())

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._look()
            time.sleep(min(left_s, _LOOK_S))

    def _nobody(self, host: str, port: str, why: str) -> NobodyAnswers:
        secret = "" if is_loopback(host) else " --secret-file FILE"
        return NobodyAnswers(
            f"no coordinator answers at {self.address} ({why}). Start one there with `hf-cocodc coordinator --host {host} --port "
            f"{port}{secret}`, and check that no firewall keeps a region from it."
        )


def _wait(channel: Channel, timeout_s: float) -> None:
    """Wait until something comes or can be sent, and take or send it."""
    writes = select.POLLOUT if channel.unsent_since is not None else 0
    events = _poll(channel.socket, select.POLLIN | writes, timeout_s)
    if events & select.POLLOUT:
        channel.flush()
    if events & ~select.POLLOUT:
        channel.receive()


def _poll(connection: socket.socket, events: int, timeout_s: float) -> int:
    """What has happened to a socket; 0 if nothing has. (`select.select` takes only small file numbers.)"""
    poller = select.poll()
    poller.register(connection, events)
    return next((happened for _, happened in poller.poll(1000 * max(timeout_s, 0.0))), 0)
