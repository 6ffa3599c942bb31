"""One connection to another region that carries messages: each is sent from memory, and received into memory.

A message has an order and a tag. The order tells the attempt of a call to which it belongs; attempts are numbered alike in all
regions, and later ones have a higher order. Both ends send and receive the messages of an order and a tag in the same sequence.
A message stays in the connection until this end asks for it; one of an attempt that is void here is passed over.

A connection outlives its socket. Each end numbers its messages, and keeps what the other end has not acknowledged. With a
socket (`attach`), the first or another one, both say how many messages they have received, and send what the other one lacks.
"""

import contextlib
import logging
import math
import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .awake import awake_s
from .keys import Altered
from .pacing import pace, set_congestion
from .pipe import CLOSED, CiphersFor, Closed, Pipe, Seen, Swallowed

logger = logging.getLogger(__name__)

_COUNT = struct.Struct(">Q")
_HEADER = struct.Struct(">QIQQ")
"""Order, tag, number of bytes, and how many messages the sender has received."""
_NO_MESSAGE, _GOODBYE, _RECEIVED = (1 << 32) - 1, (1 << 32) - 2, (1 << 32) - 3
"""Tags of headers that no message follows; the last one asks how much has been received."""
_SKIPPED = 1 << 20
_DUE_MESSAGES, DUE_BYTES = 16, 256 << 10
"""What this end receives at most before it acknowledges it."""
_ASK_S = 0.5
ANSWER_S = 2.0
"""Seconds in which the other end says how much it has received."""


class ConnectionLost(Exception):
    """The connection has ended, or was closed."""


class Operation:
    """A message that is being sent or received, and the memory that it lies in.

    Args:
        memory: its bytes (1-D uint8, contiguous). Do not touch it before the operation has ended; what is sent may be read.
        is_own: whether nobody else uses the memory, also after that.
        most: the most bytes of a message whose length is unknown before it comes: memory is made for it then.
    """

    def __init__(
        self,
        order: int,
        tag: int,
        memory: Tensor,
        is_own: bool = False,
        most: int = 0,
    ) -> None:
        self.order, self.tag, self.memory, self.is_own = order, tag, memory, is_own
        self.then: Callable[[], None] | None = None
        self._most = most
        self.number = 0
        self._error: Exception | None = None
        self._ended = threading.Event()

    @property
    def view(self) -> memoryview:
        return memoryview(self.memory.numpy())

    def expect(self, size: int) -> None:
        """A message of so many bytes comes. Raises ConnectionLost if another one was asked for."""
        if 0 < size <= self._most:
            self.memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        if self.memory.numel() != size:
            asked = f"at most {self._most}" if self._most else self.memory.numel()
            raise ConnectionLost(f"{size} bytes have come where {asked} were asked for")

    def keep(self) -> None:
        """Let nobody else use its memory."""
        if not self.is_own:
            self.memory, self.is_own = self.memory.clone(), True

    def end(self, error: Exception | None = None) -> None:
        """It has ended, with an error or well."""
        self._error = error
        self._ended.set()

    def wait(self, timeout_s: float | None) -> None:
        """Wait until it has ended. Raises TimeoutError if it has not in time, else the error with which it has ended."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError("timed out")
        if self._error is not None:
            raise self._error
        if self.then is not None:
            self.then()


class Connection:
    """One end of it. Two threads move the bytes: they wait in the kernel, and touch the interpreter twice for each message.

    Args:
        broken: called, in any thread, when a socket has failed.
        congestion: TCP's congestion control; None for that of the machine.
        ciphers_for: makes the ciphers of a socket; None if nothing is sealed.
        probes: whether large packets may vanish on its sockets, which is looked at (`Pipe.open`).

    Attributes:
        broken_at: since when it has no socket, by the clock of `awake_s`; infinite while it has one.
        whole_since: when it has got its present socket, or its last one.
        lost_at: when it has ended; infinite before.
        is_closed: whether the other end has closed its last socket (`Closed`), and it has got no other one.
    """

    def __init__(
        self,
        name: str,
        broken: Callable[["Connection"], None],
        congestion: str | None = None,
        ciphers_for: CiphersFor | None = None,
        probes: bool = True,
    ) -> None:
        self._probes = probes
        self._pipe: Pipe | None = None
        self._last: Pipe | None = None
        self._seen_before = Seen()
        self._name, self._ciphers_for, self._is_said = name, ciphers_for, False
        self._broken, self._congestion, self._rate = broken, congestion, math.inf
        self._outgoing: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._sent: deque[Operation] = deque()  # and not acknowledged by the other end
        self._again: deque[Operation] = deque()  # to be sent once more
        self._num_sent = 0
        self._num_received = self._num_acknowledged = self._bytes_since = 0
        self._asked: dict[tuple[int, int], deque[Operation]] = {}
        self._newest = 0
        self._void, self._void_error = -1, Exception()
        self._error: Exception | None = None
        self.broken_at = self.whole_since = awake_s()
        self.lost_at, self.is_closed = math.inf, False
        self._reads = self._writes = self._asks = self._is_asked = False
        self._changed = threading.Condition()
        self._attaching = threading.Lock()
        self._sender, self._receiver = (
            threading.Thread(target=target, name=f"hf_cocodc-{what}-{name}", daemon=True)
            for target, what in ((self._send_all, "send"), (self._receive_all, "receive"))
        )
        self._sender.start()
        self._receiver.start()

    def send(self, operation: Operation) -> None:
        """Send its memory, after all that was given before; it ends once the kernel has taken it. Raises ConnectionLost."""
        operation.then = partial(self._let_go, operation)
        with self._changed:
            self._check()
            self._outgoing.put(operation)

    def receive(self, operation: Operation) -> None:
        """Receive the next message of its order and tag into its memory, which has as many bytes.

        No message of an earlier order may be asked for after it. Raises ConnectionLost if the connection has ended.
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
            if order > self._void:
                self._void, self._void_error = order, error
            self._newest = max(self._newest, order + 1)
            for key in [key for key in self._asked if key[0] <= order]:
                for operation in self._asked.pop(key):
                    operation.end(error)
            for operation in self._sent:  # the other end may not know yet that they are void, and lack them
                if operation.order <= order:
                    operation.keep()
            self._changed.notify_all()

    def pace(self, rate: float) -> bool:
        """Let the kernel send at most `rate` bytes per second. Returns whether it does; one that has ended sends nothing."""
        with self._changed:
            self._rate = rate
            return self._pipe is None or pace(self._pipe.socket, rate) or self._error is not None

    def attach(self, connected: socket.socket, timeout_s: float = ANSWER_S) -> None:
        """Go on with a socket, on which the other end calls `attach` too. It takes two round trips.

        Raises OSError if the other end says nothing on it, closes it, or is not the one that it should be (`Pipe.open`), and
        ConnectionLost if the connection has ended.
        """
        pipe = Pipe(connected)
        try:
            with self._attaching:
                self._check()
                pipe.open(
                    timeout_s, self._ciphers_for, self._probes
                )  # before that, nobody has proven anything
                self._break(self._pipe, ConnectionLost("another socket takes its place"))
                with self._changed:  # what has come is counted once nobody receives any more
                    self._changed.wait_for(lambda: not self._reads and not self._writes)
                    self._check()
                if self._last is not None:
                    self._seen_before = self._seen_before.plus(self._last.look()[0])
                    self._last.socket.close()
                connected.settimeout(timeout_s)
                pipe.send(_COUNT.pack(self._num_received))
                count = bytearray(_COUNT.size)
                pipe.fill(memoryview(count))
                connected.settimeout(None)
                with self._changed:
                    self._check()
                    self._acknowledge(*_COUNT.unpack(count))
                    self._again = deque(self._sent)
                    for operation in self._again:  # who waits for one may take its memory back at any time
                        operation.keep()
                    self._tune(connected)
                    self._pipe = self._last = pipe
                    self.broken_at, self.whole_since, self.is_closed = math.inf, awake_s(), False
                    self._outgoing.put(None)
                    self._changed.notify_all()
        except BaseException as error:
            connected.close()
            self._note(error)
            raise

    def look(self) -> Seen:
        """What has come and gone so far. A socket on which nothing is answered any more has broken."""
        with self._changed:
            pipe = self._pipe
            if pipe is None:
                return self._seen_before
            seen, is_dead = pipe.look()
        if is_dead:
            self._break(pipe, ConnectionLost("nothing is answered on its socket"))
        return self._seen_before.plus(seen)

    @property
    def rtt_s(self) -> float | None:
        """See `Pipe.rtt_s`."""
        with self._changed:
            return None if self._last is None else self._last.rtt_s

    def ask(self) -> None:
        """Ask the other end how much it has received, if it has not said that of all."""
        with self._changed:
            if self._sent:
                self._asks = True
                self._outgoing.put(None)

    def drain(self, until: float) -> bool:
        """Wait until the other end has received all that the kernel took. Returns whether it has, or the connection has ended.

        It waits until `until`, by the clock of `awake_s`, and on while the connection is broken.
        """
        with self._changed:
            while self._sent and self._error is None and (self._pipe is None or awake_s() < until):
                self.ask()
                self._changed.wait(_ASK_S)
            self._asks = False
            return not self._sent or self._error is not None

    def close(self) -> None:
        """End it, at the other end, too. What has been sent before still arrives there, if the socket holds so long."""
        self.end(ConnectionLost("the connection is closed"))

    def end(self, error: Exception) -> None:
        """End it: all that wait get this error."""
        with self._changed:
            if self._error is not None:
                return
            self._error, self.lost_at = error, awake_s()
            for operations in self._asked.values():
                for operation in operations:
                    operation.end(error)
            self._asked.clear()
            self._changed.notify_all()
            self._outgoing.put(None)
            with contextlib.suppress(OSError):  # the other end was faster, or takes nothing
                if not self._writes and self._pipe is not None:
                    self._pipe.send(
                        _HEADER.pack(0, _GOODBYE, 0, self._num_received), flags=socket.MSG_DONTWAIT
                    )
            with contextlib.suppress(OSError):
                if self._last is not None:
                    self._last.socket.shutdown(socket.SHUT_RDWR)

    def _tune(self, connected: socket.socket) -> None:
        if self._congestion is not None:
            set_congestion(connected, self._congestion)
        if self._rate < math.inf:
            pace(connected, self._rate)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _note(self, error: BaseException) -> None:
        """Say once why sockets do not hold where no machine is down. What was in them comes again."""
        if isinstance(error, Altered | Swallowed) and not self._is_said:
            self._is_said = True
            logger.warning(
                "connection %s: %s. If this is said often, look at what is between the regions.",
                self._name,
                error,
            )

    def _break(self, pipe: Pipe | None, error: Exception) -> None:
        """This socket has failed, or has had its time."""
        self._note(error)
        with self._changed:
            if pipe is None or self._pipe is not pipe or self._error is not None:
                return
            self._pipe, self.broken_at = None, awake_s()
            self.is_closed = isinstance(error, Closed)
            self._changed.notify_all()
            with contextlib.suppress(OSError):
                pipe.socket.shutdown(socket.SHUT_RDWR)
        self._broken(self)

    def _let_go(self, operation: Operation) -> None:
        """Somebody else is about to use its memory."""
        with self._changed:
            if self._sent and operation.number >= self._sent[0].number:
                operation.keep()

    def _acknowledge(self, count: int) -> None:
        """The other end has received so many messages. Raises ConnectionLost if that cannot be."""
        least = self._num_sent - len(self._sent)  # it has said so before
        if not least <= count <= self._num_sent:
            raise ConnectionLost(
                f"the other end says that {count} messages have come, and that cannot be: it has had {least} before, and "
                f"{self._num_sent} were sent"
            )
        while self._sent and self._sent[0].number <= count:
            self._sent.popleft()
        if self._asks:
            self._changed.notify_all()

    # ---- in the threads -------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        """While it waits, it holds no memory."""
        while self._error is None:
            self._send_next()
        with contextlib.suppress(queue.Empty):  # nobody gives anything any more
            while True:
                operation = self._outgoing.get_nowait()
                if operation is not None:
                    operation.end(self._error)

    def _send_next(self) -> None:
        """Send what was given first, after what must be sent again. None in its place: look what else there is."""
        operation = self._outgoing.get()
        is_given = False
        while not is_given:
            with self._changed:
                self._changed.wait_for(lambda: self._pipe is not None or self._error is not None)
                pipe, error = self._pipe, self._error
                if error is not None or pipe is None:
                    break
                again = self._again.popleft() if self._again else None
                is_given = again is None
                if again is None and operation is not None:
                    if operation.order <= self._void:
                        break
                    self._num_sent += 1
                    operation.number = self._num_sent
                    self._sent.append(operation)
                due = self._num_received > self._num_acknowledged or self._is_asked
                tag = _RECEIVED if self._asks else _NO_MESSAGE if due else None
                self._is_asked = False
                self._num_acknowledged, self._writes = self._num_received, True
            try:
                self._write(pipe, again or operation, tag)
            except OSError as failure:
                self._break(pipe, failure)
            except Exception as failure:  # whatever it is, nobody must wait for ever
                self.end(_lost(failure))
            with self._changed:
                self._writes = False
                self._changed.notify_all()
        if operation is not None:
            operation.end(None if is_given else self._error)

    def _write(self, pipe: Pipe, operation: Operation | None, tag: int | None) -> None:
        """Send a message; or, if there is none, a header with this tag."""
        if operation is not None:
            size = operation.memory.numel()
            pipe.send(
                _HEADER.pack(operation.order, operation.tag, size, self._num_acknowledged), operation.view
            )
        elif tag is not None:
            pipe.send(_HEADER.pack(0, tag, 0, self._num_acknowledged))

    def _receive_all(self) -> None:
        header, rest = memoryview(bytearray(_HEADER.size)), memoryview(bytearray(_SKIPPED))
        while (pipe := self._to_read()) is not None:
            try:
                while True:
                    self._receive_next(pipe, header, rest)
            except OSError as error:
                self._break(pipe, error)
            except Exception as error:  # whatever it is, nobody must wait for ever
                self.end(_lost(error))
        self._sender.join()
        if self._last is not None:
            self._last.socket.close()

    def _to_read(self) -> Pipe | None:
        """The socket, once there is one; None once the connection has ended."""
        with self._changed:
            self._reads = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._pipe is not None or self._error is not None)
            self._reads = self._error is None
            return self._pipe if self._reads else None

    def _receive_next(self, pipe: Pipe, header: memoryview, rest: memoryview) -> None:
        pipe.fill(header)
        order, tag, size, received = _HEADER.unpack(header)
        with self._changed:
            self._acknowledge(received)
            if tag == _RECEIVED:
                self._is_asked = True
                self._outgoing.put(None)
        if tag in (_NO_MESSAGE, _RECEIVED):
            return
        if tag == _GOODBYE:
            raise ConnectionLost(CLOSED)
        operation, left = self._asked_for(order, tag, pipe), size
        try:
            if operation is None:
                while left:
                    pipe.fill(rest[:left])
                    left -= len(rest[:left])
            else:
                operation.expect(size)
                pipe.fill(operation.view)
        except Exception as error:
            if operation is not None:
                self._give_back(operation, error)
            raise
        with self._changed:
            self._num_received += 1
            self._bytes_since += size
            if self._num_received - self._num_acknowledged >= _DUE_MESSAGES or self._bytes_since >= DUE_BYTES:
                self._bytes_since = 0
                self._outgoing.put(None)
        if operation is not None:
            operation.end()

    def _asked_for(self, order: int, tag: int, pipe: Pipe) -> Operation | None:
        """What asks for a message, once somebody does; None if nobody will."""
        with self._changed:
            while order >= self._newest or self._error is not None:
                self._check()
                if self._pipe is not pipe:
                    raise OSError(CLOSED)
                operations = self._asked.get((order, tag))
                if operations:
                    operation = operations.popleft()
                    if not operations:
                        del self._asked[order, tag]
                    return operation
                self._changed.wait()
            return None

    def _give_back(self, operation: Operation, error: Exception) -> None:
        """A message has come in part only: it comes again, if the connection does."""
        with self._changed:
            if operation.order <= self._void:
                operation.end(self._void_error)
            elif self._error is not None:
                operation.end(self._error)
            elif not isinstance(error, OSError):
                operation.end(_lost(error))
            else:
                self._asked.setdefault((operation.order, operation.tag), deque()).appendleft(operation)


def _lost(error: Exception) -> ConnectionLost:
    """What ends a connection that is not only broken."""
    return error if isinstance(error, ConnectionLost) else ConnectionLost(repr(error))
