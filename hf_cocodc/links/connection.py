"""One TCP connection to another region that carries messages: each is sent from memory, and received into memory.

A message has an order and a tag. The order tells the attempt of a call to which it belongs; attempts are numbered alike in all
regions, and later ones have a higher order. Both ends send and receive the messages of an order and a tag in the same sequence.
A message stays in the connection until this end asks for it; one of an attempt that is void here is passed over.
"""

import contextlib
import math
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from torch import Tensor

from .pacing import pace

_HEADER = struct.Struct(">QIQ")
"""Order, tag, and number of bytes."""
_JOINED = 64 << 10
"""A message of at most so many bytes leaves together with its header."""
_SKIPPED = 1 << 20
_MORE = getattr(socket, "MSG_MORE", 0)


class ConnectionLost(Exception):
    """The connection has ended, or was closed."""


class Operation:
    """A message that is being sent or received, and the memory that it lies in.

    Args:
        order, tag: of the message.
        memory: its bytes (1-D uint8, contiguous). Do not touch it before the operation has ended; what is being sent may be read.
        then: called by `wait` once it has ended well.
    """

    def __init__(self, order: int, tag: int, memory: Tensor, then: Callable[[], None] | None = None) -> None:
        self.order, self.tag, self.memory, self.then = order, tag, memory, then
        self._error: Exception | None = None
        self._ended = threading.Event()

    @property
    def view(self) -> memoryview:
        return memoryview(self.memory.numpy())

    def end(self, error: Exception | None = None) -> None:
        """It has ended, with an error or well."""
        self._error = error
        self._ended.set()

    def wait(self, timeout_s: float | None) -> None:
        """Wait until it has ended.

        Raises:
            TimeoutError: it has not within `timeout_s`.
            Exception: the error with which it has ended.
        """
        if not self._ended.wait(timeout_s):
            raise TimeoutError("timed out")
        if self._error is not None:
            raise self._error
        if self.then is not None:
            self.then()


class Connection:
    """One end of it. Two threads move the bytes: they wait in the kernel, and touch the interpreter twice for each message.

    Args:
        connected: a socket that blocks.
        name: of the other end, for the names of threads.

    Attributes:
        lost_at: when it has ended, by the monotonic clock; infinite before.
    """

    def __init__(self, connected: socket.socket, name: str) -> None:
        self._socket = connected
        self._outgoing: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._asked: dict[tuple[int, int], deque[Operation]] = {}
        self._newest = 0
        self._void = -1
        self._error: Exception | None = None
        self.lost_at = math.inf
        self._changed = threading.Condition()
        self._sender, self._receiver = (
            threading.Thread(target=target, name=f"hf_cocodc-{what}-{name}", daemon=True)
            for target, what in ((self._send_all, "send"), (self._receive_all, "receive"))
        )
        self._sender.start()
        self._receiver.start()

    def send(self, operation: Operation) -> None:
        """Send its memory, after all that was given before; the operation ends once the kernel has taken it.

        Raises:
            ConnectionLost: the connection has ended.
        """
        with self._changed:
            self._check()
            self._outgoing.put(operation)

    def receive(self, operation: Operation) -> None:
        """Receive the next message of its order and tag, which has as many bytes, into its memory. No message of an earlier order
        is asked for after it.

        Raises:
            ConnectionLost: the connection has ended.
        """
        with self._changed:
            self._check()
            if operation.order <= self._void:  # whoever waits for it looks at its view first
                return
            self._asked.setdefault((operation.order, operation.tag), deque()).append(operation)
            self._newest = max(self._newest, operation.order)
            self._changed.notify_all()

    def revoke(self, order: int, error: Exception) -> None:
        """Messages up to this order are void: what waits for them ends with this error, and what was not sent yet is not sent.

        One that is under way is sent or received to its end: nobody else may use its memory.
        """
        with self._changed:
            self._void = max(self._void, order)
            self._newest = max(self._newest, order + 1)
            for key in [key for key in self._asked if key[0] <= order]:
                for operation in self._asked.pop(key):
                    operation.end(error)
            self._changed.notify_all()

    def pace(self, rate: float) -> bool:
        """Let the kernel send at most `rate` bytes per second. Returns whether it does; one that has ended sends nothing."""
        return pace(self._socket, rate) or self._error is not None

    def close(self) -> None:
        """End it, at the other end, too. What has been sent before still arrives there."""
        self._end(ConnectionLost("the connection is closed"))

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _end(self, error: Exception) -> None:
        with self._changed:
            if self._error is not None:
                return
            self._error, self.lost_at = error, time.monotonic()
            for operations in self._asked.values():
                for operation in operations:
                    operation.end(error)
            self._asked.clear()
            self._changed.notify_all()
            self._outgoing.put(None)
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    # ---- in the threads -------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        while self._send_next():
            pass

    def _send_next(self) -> bool:
        """Send what was given first; False once the connection has ended. While it waits, it holds no memory."""
        operation = self._outgoing.get()
        if operation is None:
            return False
        error = self._error
        if error is None and operation.order > self._void:
            try:
                self._send(operation)
            except Exception as failure:  # whatever it is, nobody must wait for ever
                self._end(_lost(failure))
                error = self._error
        operation.end(
            error
        )  # the other end may have all that it needs by now, and have closed the connection
        return True

    def _send(self, operation: Operation) -> None:
        header = _HEADER.pack(operation.order, operation.tag, operation.memory.numel())
        if len(header) + operation.memory.numel() <= _JOINED:
            self._socket.sendall(header + operation.view)
        else:
            self._socket.sendall(header, _MORE)
            self._socket.sendall(operation.view)

    def _receive_all(self) -> None:
        header, rest = bytearray(_HEADER.size), bytearray(_SKIPPED)
        operation = None
        try:
            while True:
                self._fill(memoryview(header))
                order, tag, size = _HEADER.unpack(header)
                operation = self._asked_for(order, tag)
                if operation is None:
                    while size:
                        size -= self._fill(memoryview(rest)[:size])
                elif operation.memory.numel() != size:
                    raise ConnectionLost(
                        f"{size} bytes have come where {operation.memory.numel()} were asked for"
                    )
                else:
                    self._fill(operation.view)
                    operation.end()
                operation = None
        except Exception as error:  # whatever it is, nobody must wait for ever
            self._end(_lost(error))
            if operation is not None:
                operation.end(self._error)
        self._sender.join()
        self._socket.close()

    def _fill(self, memory: memoryview) -> int:
        """Receive as many bytes as the memory has; returns how many these are."""
        size, filled = len(memory), 0
        while filled < size:
            came = self._socket.recv_into(memory[filled:], size - filled, socket.MSG_WAITALL)
            if not came:
                raise ConnectionLost("the other end has closed the connection")
            filled += came
        return size

    def _asked_for(self, order: int, tag: int) -> Operation | None:
        """What asks for a message, once somebody does; None if nobody will."""
        with self._changed:
            while order >= self._newest or self._error is not None:
                self._check()
                operations = self._asked.get((order, tag))
                if operations:
                    operation = operations.popleft()
                    if not operations:
                        del self._asked[order, tag]
                    return operation
                self._changed.wait()
            return None


def _lost(error: Exception) -> Exception:
    if isinstance(error, ConnectionLost):
        return error
    return ConnectionLost(getattr(error, "strerror", None) or repr(error))
