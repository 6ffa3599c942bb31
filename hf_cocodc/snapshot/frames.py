"""One end of a TCP connection that carries frames: a line of JSON, and bytes whose number the line tells. Never a pickle."""

import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import LinkError
from ..net.channel import keep_from_forks
from ..net.keys import Ciphers
from ..net.validation import whole
from .checkpoint import put_together, take_apart

CHUNK = 1 << 20
_MAX_LINE = 1 << 22
"""Bytes of the longest line."""
_MOST_TENSORS = 1024
"""Tensors of one value."""
_MOST_DIMS = 8
_LONGEST_DIM = 1 << 48
_RECORD = 64 << 10
"""Bytes of a sealed record at most, unsealed."""
_LENGTH = 4
"""Bytes before a sealed record that tell its length."""
_POLL_S = 0.5
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
} | {"int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool}


class Frames:
    """Sends and receives frames; for one thread at a time.

    Args:
        ciphers: seal the whole connection; None without a secret of the run.
        alive: called now and then while the other end sends nothing, or takes nothing; raises if there is nothing to wait for.
        rate: bytes per second to send at most; None for no limit.
        patience_s: seconds without a byte after which the other end counts as gone, while this end waits for it.

    All methods raise LinkError if the connection has ended, or if what comes is no frame.
    """

    def __init__(
        self,
        connection: socket.socket,
        ciphers: Ciphers | None = None,
        alive: Callable[[], object] = lambda: None,
        rate: float | None = None,
        patience_s: float = math.inf,
    ) -> None:
        connection.settimeout(_POLL_S)
        keep_from_forks(connection)
        self._socket, self._alive, self._rate, self._patience_s = connection, alive, rate, patience_s
        self._ciphers = ciphers
        # the other end must never wait longer for the next byte than it takes to send so many
        self._most = CHUNK if rate is None else max(int(rate * _POLL_S), 1)
        self._free_at = time.monotonic()
        self._received = bytearray()

    def send(self, kind: str, **content: Any) -> None:
        """Send a line."""
        self.send_bytes(json.dumps({"kind": kind, **content}).encode() + b"\n")

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send bytes, which a line has announced."""
        rest = memoryview(data).cast("B")
        if self._ciphers is None:
            self._send(rest)
            return
        for start in range(0, len(rest), _RECORD):
            sealed = self._ciphers[0].seal(rest[start : start + _RECORD])
            self._send(memoryview(len(sealed).to_bytes(_LENGTH, "big") + sealed))

    def _send(self, rest: memoryview) -> None:
        while rest:
            pause_s = self._free_at - time.monotonic()
            if pause_s > 0:
                time.sleep(min(pause_s, _POLL_S))
                continue
            try:
                sent = self._socket.send(rest[: self._most])
            except TimeoutError:
                self._alive()
                continue
            except OSError as error:
                raise LinkError(f"the connection has ended ({error.strerror or error}).") from error
            rest = rest[sent:]
            if self._rate is not None:
                self._free_at = max(self._free_at, time.monotonic()) + sent / self._rate

    def receive(self) -> dict[str, Any]:
        """The next line."""
        looked_at = 0
        while (end := self._received.find(b"\n", looked_at)) < 0:
            looked_at = len(self._received)
            if looked_at > _MAX_LINE:
                raise LinkError(f"the other end sent more than {_MAX_LINE} bytes that are no line.")
            self._received += self._next()
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LinkError(f"the other end sent a line that is no JSON ({error}).") from error
        if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
            raise LinkError("the other end sent a line without a kind.")
        return found

    def receive_bytes(self, size: int) -> Iterator[bytes]:
        """The bytes that a line has announced, in chunks."""
        while size:
            chunk = bytes(self._received) or self._next()
            self._received = bytearray(chunk[size:])
            chunk = chunk[:size]
            size -= len(chunk)
            yield chunk

    def send_tree(self, kind: str, value: Any) -> None:
        """Send a nested value of dicts, lists, texts, numbers and tensors."""
        tree, tensors = take_apart(value)
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        shapes = {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in whole.items()
        }
        self.send(kind, tree=tree, tensors=shapes)
        for tensor in whole.values():
            if tensor.numel():
                self.send_bytes(memoryview(tensor.flatten().view(torch.uint8).numpy()))

    def receive_tree(self, line: dict[str, Any], limit: int) -> Any:
        """The value that `send_tree` announced with `line`; its tensors have at most `limit` bytes."""
        try:
            if len(line["tensors"]) > _MOST_TENSORS:
                raise ValueError(f"it has {len(line['tensors'])} tensors")
            shapes = {
                str(name): (_DTYPES[dtype], _shape(shape)) for name, (dtype, shape) in line["tensors"].items()
            }
            tree = line["tree"]
            tensors: dict[str, Tensor] = {}
            for name, (dtype, shape) in shapes.items():
                size = dtype.itemsize
                for length in shape:
                    size *= length
                if size > limit:
                    raise ValueError(f"a tensor has {size} bytes, more than the {limit} that may come")
                limit -= size
                content = bytearray()
                for chunk in self.receive_bytes(size):
                    content += chunk
                flat = torch.frombuffer(content, dtype=dtype) if size else torch.empty(0, dtype=dtype)
                tensors[name] = flat.view(shape)
            return put_together(tree, tensors)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise LinkError(f"the other end sent what is no value of ours ({repr(error)[:200]}).") from error

    def close(self) -> None:
        self._socket.close()

    def _next(self) -> bytes:
        """Some bytes more, as they were sent."""
        if self._ciphers is None:
            return self._take(CHUNK)
        length = int.from_bytes(self._exactly(_LENGTH), "big")
        if length > _RECORD + self._ciphers[1].overhead:
            raise LinkError(f"the other end sent a record of {length} bytes.")
        return self._ciphers[1].open(self._exactly(length))

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            found += self._take(size - len(found))
        return bytes(found)

    def _take(self, most: int) -> bytes:
        """Some bytes, as they come: at least one."""
        silent_s = 0.0
        while True:
            try:
                found = self._socket.recv(most)
            except TimeoutError:
                self._alive()
                silent_s += _POLL_S  # not by a clock: this process may have stood still itself
                if silent_s >= self._patience_s:
                    raise LinkError(f"the other end has sent nothing for {silent_s:.1f} s.") from None
                continue
            except OSError as error:
                raise LinkError(f"the connection has ended ({error.strerror or error}).") from error
            if not found:
                raise LinkError("the other end has closed the connection.")
            return found


def _shape(lengths: Any) -> tuple[int, ...]:
    if not isinstance(lengths, list) or len(lengths) > _MOST_DIMS:
        raise ValueError(f"{str(lengths)[:80]} is no shape")
    return tuple(whole(length, most=_LONGEST_DIM) for length in lengths)
