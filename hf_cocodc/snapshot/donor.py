"""A member gives a newcomer a base, and from then on the log of what happens after it.

The base is what a region needs for a take-over: the engine's state, the inner optimizer's, and what is not trained. The
training thread writes it to the disk at the end of an inner step. Another thread sends it, and then the log as it comes, over a
stream of the pair, which survives broken sockets: JSON objects, and bytes that such an object announces (`Frames`).
"""

import hashlib
import json
import logging
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

from ..errors import LinkError
from ..link.log import Log, to_plain
from ..net.awake import awake_s
from ..net.connection import Connection, ConnectionLost, Operation
from ..net.pairs import STREAMS
from ..net.view import Throttle
from ..threads import NativeThread
from ..validation import Count
from . import checkpoint as disk
from . import local_weights
from .checkpoint import Saved, put_together, take_apart
from .files import files_in, join_shards, write_state
from .manifest import FOLDER, saving

logger = logging.getLogger(__name__)

_CALLED_WITHIN_S = 60.0
_LONG_S = 86_400.0
_LEAST_LOG_BYTES = 64 << 20
_BASES_IN_LOG = 4
"""The log may grow to this many times the bytes of the base: a newcomer that is further behind will not catch up."""
HEARTBEAT_S = 1.0
"""Seconds after which a donor that has nothing to send gives a heartbeat."""
_TAKEN_WITHIN_S = 2.0
"""A newcomer that takes nothing for so long after the log has ended is frozen, or has ended itself."""
_GONE = "gone", "the region that sends the base has left the run"

_CHUNK = 1 << 17
"""Most bytes of a message other than an object: on a slow link it must come long before the other end gives up."""
_LONGEST = 1 << 22
"""Bytes of the longest message."""
_POLL_S = 0.5
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_FLOATS, *_INTEGERS)}


OpenStream = Callable[[int, float, Callable[[], object]], Connection]
"""Opens a stream by its number, within some seconds, during which it calls a function that may raise."""


class Inner(NamedTuple):
    """The rest of a region's training, for a newcomer: states of inner optimizers, schedules and scalers, by their names in a
    checkpoint of Trainer; and a function that writes further files into the folder of a base.
    """

    states: Mapping[str, Any]
    files: Callable[[Path], object] = lambda folder: None


class Offer(NamedTuple):
    """How a newcomer gets its base: the number of the stream, and the base's inner step."""

    number: Annotated[int, Meta(ge=STREAMS[0], le=STREAMS[1])]
    step: Count


def offered(content: Mapping[str, Any]) -> Offer:
    """The offer in a member's message. Raises KeyError or ValueError if it is none."""
    return msgspec.convert([content[name] for name in Offer._fields], Offer)


def write_base(
    folder: Path,
    saved: Saved,
    lane: int,
    model: nn.Module,
    inner: Inner,
    together: Callable[[Callable[[], None]], None] = lambda part: part(),
) -> None:
    """Write a base into `folder`, whose old content is deleted. Of `model`, which is unwrapped, only what is not trained is
    written: a newcomer starts from the global params. Raises CheckpointError if the disk refuses, or another region could not
    load a state.

    `together`: makes a part of it in all ranks that have a lane each, which call this together.
    """

    def begin() -> None:
        if not lane:
            shutil.rmtree(folder, ignore_errors=True)
            with saving(folder):
                (folder / FOLDER).mkdir(parents=True)

    def write() -> None:
        with saving(folder):
            disk.write(folder, saved, lane)
            kept = local_weights.kept(model, saved.synchronized)
            rest = {name: tensor for name, tensor in kept.items() if name not in saved.synchronized}
            local_weights.write(model, folder, rest, lane)
            if not lane:
                for name, state in inner.states.items():
                    write_state(state, folder / name)

    def write_files() -> None:
        with saving(folder):
            inner.files(folder)

    def join() -> None:
        if not lane:
            with saving(folder):
                join_shards(folder, folder)

    for part in (begin, write, write_files, join):
        together(part)


class _Part(NamedTuple):
    """A tensor of a value."""

    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 48)]], Meta(max_length=8)]


_Parts = Annotated[dict[str, _Part], Meta(max_length=1024)]


class Frames:
    """Sends and receives frames, for one thread at a time; methods raise LinkError if the stream has ended, or has no frame.

    Args:
        alive: called now and then while the other end sends or takes nothing; raises if there is nothing to wait for.
        rate: bytes per second to send at most; None for no limit.
        patience_s: seconds without a message after which the other end counts as gone, while this end waits for it.
    """

    def __init__(
        self,
        stream: Connection,
        alive: Callable[[], object] = lambda: None,
        rate: float | None = None,
        patience_s: float = math.inf,
    ) -> None:
        self._connection = stream
        self._alive, self._throttle, self._patience_s = alive, Throttle(rate), patience_s
        # the other end must never wait longer for the next chunk than it takes to send it
        self._most = _CHUNK if rate is None else max(min(int(rate * _POLL_S), _CHUNK), 1)

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
        self._connection.drain(awake_s() + timeout_s)

    def close(self) -> None:
        self._connection.close()

    def _send(self, data: bytes | memoryview) -> None:
        self._throttle.wait(len(data))
        operation = Operation(0, 0, torch.frombuffer(bytearray(data), dtype=torch.uint8), is_own=True)
        self._wait(self._connection.send, operation, math.inf)

    def _receive(self) -> bytes:
        operation = Operation(0, 0, torch.empty(0, dtype=torch.uint8, device="cpu"), most=_LONGEST)
        self._wait(self._connection.receive, operation, self._patience_s)
        return operation.memory.numpy().tobytes()

    def _wait(self, start: Callable[[Operation], object], operation: Operation, patience_s: float) -> None:
        """Start to send or to receive a message, and wait until it is done."""
        began = awake_s()
        try:
            start(operation)
            while True:
                try:
                    operation.wait(_POLL_S)
                    return
                except TimeoutError:
                    self._alive()
                if awake_s() - began >= patience_s:
                    raise LinkError(f"the other end has sent nothing for {patience_s:.1f} s.")
        except ConnectionLost as error:
            raise LinkError(f"{error}.") from error


class Donation:
    """What one newcomer gets of this region: a base, then a log of what happens after it; `over` once nothing more is sent.

    Args:
        folder: of the base; deleted at the end.
        has_base: whether the base is sent; else the log alone, to a rank that is not the leader of its region.
        about: sent with the base; JSON-able.
        rate: bytes per second to send at most; None for no limit.
    """

    def __init__(
        self,
        folder: Path,
        offer: Offer,
        open_stream: OpenStream,
        about: Mapping[str, Any],
        to: str,
        rate: float | None,
        has_base: bool = True,
    ) -> None:
        self._folder, self._about, self._to, self._rate = folder, dict(about), to, rate
        files = files_in(folder)
        num_bytes = sum(path.stat().st_size for path in files.values())
        self.has_base, self._files = has_base, files if has_base else {}
        self.log = Log(max(_BASES_IN_LOG * num_bytes, _LEAST_LOG_BYTES))
        self.offer, self._open_stream = offer, open_stream
        self.over = False
        self._ended = threading.Event()
        self._last, self._until = _GONE, math.inf
        self._thread = NativeThread(self._serve, "hf_cocodc-donor")
        if has_base:
            logger.info("a base of step %d for %s: %.1f MB.", offer.step, to, num_bytes / 1e6)
        self._thread.start()

    def close(self, kind: str = _GONE[0], why: str = _GONE[1]) -> None:
        """End after what is in the log: because the newcomer is in the run ("in"), the run is over ("over"), or else. The first
        reason counts.
        """
        if not self._ended.is_set():
            self._last = kind, why
        self._ended.set()
        self.log.close()

    @property
    def is_ending(self) -> bool:
        """Whether it has been told to end, and has yet to."""
        return self._ended.is_set() and not self.over

    def join(self, timeout_s: float) -> None:
        """Wait until all is sent, for at most `timeout_s`."""
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        frames = None
        try:
            # a rank without a base is called once that has come; if it does not, this ends with the others' donation
            within_s = _CALLED_WITHIN_S if self.has_base else _LONG_S
            stream = self._open_stream(self.offer.number, within_s, self._look)
            frames = Frames(stream, self._newcomer_waits, self._rate)
            self._send(frames)
            frames.drain(_TAKEN_WITHIN_S)
        except (LinkError, OSError) as error:
            if not self._ended.is_set():
                logger.warning("%s gets nothing more from this region: %s", self._to, error)
        finally:
            self.log.close()
            if frames is not None:
                frames.close()
            if self.has_base:
                shutil.rmtree(self._folder, ignore_errors=True)
            self.over = True  # from now on, the folder may have another base

    def _look(self) -> None:
        if self._ended.is_set():
            raise LinkError(f"{self._last[1]}.")

    def _newcomer_waits(self) -> None:
        """The newcomer takes nothing for now: it may be busy while the log grows, but not once that has ended."""
        if self.log.overflowed or self._ended.is_set():
            self._until = min(self._until, awake_s() + _TAKEN_WITHIN_S)
        if awake_s() > self._until:
            raise LinkError("it does not take what it is sent, and the log has ended.")

    def _send(self, frames: Frames) -> None:
        sizes = {name: path.stat().st_size for name, path in self._files.items()}
        frames.send("base", **self._about, files=sizes)
        for path in self._files.values():
            sha = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    if self._ended.is_set():  # without the log, the base is of no use
                        raise LinkError(f"{self._last[1]}.")
                    sha.update(chunk)
                    frames.send_bytes(chunk)
            frames.send("sha256", value=sha.hexdigest())
        if self.has_base:
            shutil.rmtree(self._folder, ignore_errors=True)
        for item in self.log.items(HEARTBEAT_S):
            if item is None:
                frames.send("alive")
            else:
                frames.send_tree("item", to_plain(item))
        if self.log.overflowed:
            logger.warning(
                "%s is so far behind that the log for it has outgrown its bound: it begins once more with a new base.",
                self._to,
            )
            frames.send("end", how="outgrown", why="the log has outgrown its bound")
        else:
            how, why = self._last
            frames.send("end", how=how, why=why)
