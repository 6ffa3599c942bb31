"""What a donor and a newcomer send on a stream: JSON objects, and bytes that such an object announces."""

import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from ..errors import LinkError
from ..net.connection import ConnectionLost, Operation
from ..net.keys import Cipher
from ..net.pairs import Stream
from .checkpoint import put_together, take_apart

CHUNK = 1 << 17
"""Most bytes of a message other than an object: on a slow link it must come long before the other end gives up."""
_LONGEST = 1 << 22
"""Bytes of the longest message."""
_POLL_S = 0.5
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
} | {"int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool}


class _Part(NamedTuple):
    """A tensor of a value."""

    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 48)]], Meta(max_length=8)]


_Parts = Annotated[dict[str, _Part], Meta(max_length=1024)]


class Frames:
    """Sends and receives frames, for one thread at a time; methods raise LinkError if the stream has ended, or has no frame.

    Args:
        token: with a secret of the run, what is sealed on this stream opens on no other one.
        alive: called now and then while the other end sends or takes nothing; raises if there is nothing to wait for.
        rate: bytes per second to send at most; None for no limit.
        patience_s: seconds without a message after which the other end counts as gone, while this end waits for it.
    """

    def __init__(
        self,
        stream: Stream,
        token: bytes = b"",
        alive: Callable[[], object] = lambda: None,
        rate: float | None = None,
        patience_s: float = math.inf,
    ) -> None:
        self._connection, self._ciphers = stream
        self._alive, self._rate, self._patience_s = alive, rate, patience_s
        self._token, self._num_sent, self._num_received = token, 0, 0
        # the other end must never wait longer for the next chunk than it takes to send it
        self._most = CHUNK if rate is None else max(min(int(rate * _POLL_S), CHUNK), 1)
        self._free_at = time.monotonic()

    def send(self, kind: str, **content: Any) -> None:
        """Send an object."""
        self._send(json.dumps({"kind": kind, **content}).encode())

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send bytes that an object has announced."""
        rest = memoryview(data).cast("B")
        for start in range(0, len(rest), self._most):
            self._send(rest[start : start + self._most])

    def receive(self) -> dict[str, Any]:
        """The next object."""
        try:
            message = json.loads(self._receive())
        except (ValueError, RecursionError) as error:
            raise LinkError(f"the other end sent what is no JSON ({error}).") from error
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise LinkError("the other end sent an object without a kind.")
        return message

    def receive_bytes(self, size: int) -> Iterator[bytes]:
        """The bytes that an object has announced, in chunks."""
        while size:
            chunk = self._receive()
            if not 0 < len(chunk) <= size:
                raise LinkError(f"the other end sent {len(chunk)} bytes where {size} were left.")
            size -= len(chunk)
            yield chunk

    def send_tree(self, kind: str, value: Any) -> None:
        """Send a nested value of dicts, lists, texts, numbers and tensors."""
        tree, tensors = take_apart(value)
        shapes = {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in tensors.items()
        }
        self.send(kind, tree=tree, tensors=shapes)
        for tensor in tensors.values():
            if tensor.numel():
                self.send_bytes(memoryview(tensor.flatten().view(torch.uint8).numpy()))

    def receive_tree(self, announced: dict[str, Any], limit: int) -> Any:
        """The value that `send_tree` announced; its tensors have at most `limit` bytes."""
        try:
            parts = msgspec.convert(announced["tensors"], _Parts)
            tensors: dict[str, Tensor] = {}
            for name, part in parts.items():
                dtype = _DTYPES[part.dtype]
                size = dtype.itemsize * math.prod(part.shape)
                if size > limit:
                    raise ValueError(f"a tensor has {size} bytes, more than the {limit} that may come")
                limit -= size
                content = bytearray()
                for chunk in self.receive_bytes(size):
                    content += chunk
                flat = (
                    torch.frombuffer(content, dtype=dtype)
                    if size
                    else torch.empty(0, dtype=dtype, device="cpu")
                )
                tensors[name] = flat.view(part.shape)
            return put_together(announced["tree"], tensors)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise LinkError(f"the other end sent what is no value of ours ({repr(error)[:200]}).") from error

    def drain(self, timeout_s: float) -> None:
        """Wait until the other end has taken all, for at most `timeout_s`."""
        self._connection.drain(time.monotonic() + timeout_s)

    def close(self) -> None:
        self._connection.close()

    def _send(self, data: bytes | memoryview) -> None:
        while (pause_s := self._free_at - time.monotonic()) > 0:
            time.sleep(min(pause_s, _POLL_S))
        if self._ciphers is not None:
            data = self._ciphers[0].seal(data, self._about(self._num_sent))
        self._num_sent += 1
        operation = Operation(0, 0, torch.frombuffer(bytearray(data), dtype=torch.uint8), is_own=True)
        self._wait(self._connection.send, operation, math.inf)
        if self._rate is not None:
            self._free_at = max(self._free_at, time.monotonic()) + len(data) / self._rate

    def _receive(self) -> bytes:
        overhead = 0 if self._ciphers is None else Cipher.overhead
        operation = Operation(0, 0, torch.empty(0, dtype=torch.uint8, device="cpu"), most=_LONGEST + overhead)
        self._wait(self._connection.receive, operation, self._patience_s)
        data = operation.memory.numpy().tobytes()
        about = self._about(self._num_received)
        self._num_received += 1
        return data if self._ciphers is None else self._ciphers[1].open(data, about)

    def _about(self, number: int) -> bytes:
        """What binds a message to its place on this stream."""
        return self._token + number.to_bytes(8, "big")

    def _wait(self, start: Callable[[Operation], object], operation: Operation, patience_s: float) -> None:
        """Start to send or to receive a message, and wait until it is done."""
        waited_s = 0.0
        try:
            start(operation)
            while True:
                try:
                    operation.wait(_POLL_S)
                    return
                except TimeoutError:
                    self._alive()
                waited_s += _POLL_S  # not by a clock: this process may have stood still itself
                if waited_s >= patience_s:
                    raise LinkError(f"the other end has sent nothing for {waited_s:.1f} s.")
        except ConnectionLost as error:
            raise LinkError(f"{error}.") from error
