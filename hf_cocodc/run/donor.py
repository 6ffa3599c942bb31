"""A region that is in the run gives a newcomer a base, and from then on the log of what happens after it.

The base has what a region needs that takes over a checkpoint: the engine's state, the inner optimizer's, and what is not
trained. The training thread writes it to the disk at the end of an inner step. A thread of its own sends it over a TCP
connection of its own, and then the log, as it comes.

The offer travels over the coordinator, to which both ends have proven themselves. With a secret of the run, its token gives
that connection keys of its own, and the first record that they seal proves the newcomer; without one, it says the token.
"""

import hashlib
import hmac
import json
import logging
import math
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..coordinator.channel import keep_from_forks
from ..coordinator.cipher import AesGcm, Altered, Cipher, Tagged
from ..coordinator.secret import Keys
from ..coordinator.validation import whole
from ..errors import LinkError, short
from ..links.log import Log, to_plain
from ..threads import NativeThread
from . import checkpoint as disk
from . import local_weights
from .checkpoint import Saved
from .frames import CHUNK, LENGTH, Ciphers, Frames
from .parcel import TREES, files_in, write_tree

logger = logging.getLogger(__name__)

_CALLED_WITHIN_S = 60.0
_MOST_CALLERS = 16
"""For one more, the oldest is closed."""
_GREETED_WITHIN_S = 5.0
_POLL_S = 0.2
_LEAST_LOG_BYTES = 64 << 20
_BASES_IN_LOG = 4
"""The log may wait with so many times the bytes of the base: a newcomer that is so far behind will not catch up."""
SIGN_S = 1.0
"""Seconds after which a donor that has nothing to send gives a sign of life."""
_TAKEN_WITHIN_S = 2.0
"""Once the log has ended, a newcomer that takes nothing for so long is frozen, or has ended itself."""
_GONE = "gone", "the region that sends the base has left the run"
STARTED = f"{disk.FOLDER}/start.json"
"""File in a base: what the regions agreed on before step 1."""


class Inner(NamedTuple):
    """The rest of a region's training, as a newcomer continues from it: the states of inner optimizers, schedules and scalers, by
    their names in a checkpoint of Trainer; and what writes further files into the folder of a base."""

    states: Mapping[str, Any]
    files: Callable[[Path], object] = lambda folder: None


class Offer(NamedTuple):
    """Where a newcomer gets its base: the donor's host and port, a token for this one connection, and the base's inner step."""

    host: str
    port: int
    token: str
    step: int

    @property
    def greeting(self) -> bytes:
        """What the newcomer says first."""
        return json.dumps({"token": self.token}).encode() + b"\n"

    def ciphers(self, keys: Keys | None, encrypt: bool) -> tuple[Ciphers | None, Ciphers | None]:
        """What seals and opens at the donor's end, and at the newcomer's. Nothing without a secret of the run."""
        if keys is None:
            return None, None
        own = keys.of("base", self.token)
        donor, newcomer = own.of("donor"), own.of("newcomer")

        def cipher(one_way: Keys) -> Cipher:
            return (AesGcm if encrypt else Tagged)(one_way, in_order=True)

        return (cipher(donor), cipher(newcomer)), (cipher(newcomer), cipher(donor))


def offered(said: Mapping[str, Any], host: str) -> Offer:
    """The offer of a member at `host`: it sends its base from the same machine.

    Raises:
        KeyError, ValueError: it is none.
    """
    token = said["token"]
    if not isinstance(token, str) or not re.fullmatch("[0-9a-f]{64}", token):
        raise ValueError("it has no token")
    if said["host"] != host:
        raise ValueError(f"it offers a base at {short(said['host'])}, and is at {host}")
    return Offer(host, whole(said["port"], 1, 65535), token, whole(said["step"]))


def write_base(
    folder: Path, saved: Saved, lane: int, model: nn.Module, inner: Inner, started: Mapping[str, Any]
) -> None:
    """Write a base into a folder of its own; what lies there is deleted. Of the weights of `model`, which is unwrapped, only what
    is not trained is written: a newcomer starts from the global params. `started`: see `STARTED`.

    Raises:
        CheckpointError: the disk refuses, or a state cannot be written without a pickle.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with disk.saving(folder):
        (folder / disk.FOLDER).mkdir(parents=True)
        (folder / TREES).mkdir()
        disk.write(folder, saved, lane)
        kept = local_weights.kept(model, saved.synchronised)
        rest = {name: tensor for name, tensor in kept.items() if name not in saved.synchronised}
        unsaved = local_weights.unsaved_buffers(model)
        local_weights.write(folder / local_weights.weights_file(lane), rest, unsaved)
        for name, state in inner.states.items():
            write_tree(state, folder / TREES / name)
        (folder / STARTED).write_text(json.dumps(started), encoding="utf-8")
        inner.files(folder)


class Donation:
    """What one newcomer gets of this region: a base, which is on the disk, and a log, which grows.

    Args:
        folder: of the base; deleted at the end.
        host: address of this machine that the newcomer reaches.
        step: inner step of the base.
        about: told with the base; JSON-able.
        to: names the newcomer in messages.
        rate: bytes per second to send at most; None for no limit.
        keys: of the run's secret; None if there is none.
        encrypt: whether others can read nothing of what travels; with keys, nobody can alter it.

    Attributes:
        offer: where the newcomer gets it.
        log: takes what happens after the base.
        over: whether nothing more is sent.
    """

    def __init__(
        self,
        folder: Path,
        host: str,
        step: int,
        about: Mapping[str, Any],
        to: str,
        rate: float | None,
        keys: Keys | None = None,
        encrypt: bool = False,
    ) -> None:
        self._folder, self._about, self._to, self._rate = folder, dict(about), to, rate
        self._keys, self._encrypt = keys, encrypt
        self._files = files_in(folder)
        num_bytes = sum(path.stat().st_size for path in self._files.values())
        self.log = Log(max(_BASES_IN_LOG * num_bytes, _LEAST_LOG_BYTES))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        keep_from_forks(self._listener)
        self.offer = Offer(host, self._listener.getsockname()[1], secrets.token_hex(32), step)
        self.over = False
        self._ended = threading.Event()
        self._last, self._until = _GONE, math.inf
        self._thread = NativeThread(self._serve, "hf_cocodc-donor")
        logger.info("a base of step %d for %s: %.1f MB.", step, to, num_bytes / 1e6)
        self._thread.start()

    def close(self, kind: str = _GONE[0], why: str = _GONE[1]) -> None:
        """End after what is in the log: because the newcomer is in the run ("in"), the run is over ("over"), or else. The first
        reason counts."""
        if not self._ended.is_set():
            self._last = kind, why
        self._ended.set()
        self.log.close()

    def join(self, timeout_s: float) -> None:
        """Wait until all is sent, for a while."""
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        frames = None
        try:
            frames = self._accept()
            if frames is not None:
                self._send(frames)
        except (LinkError, OSError) as error:
            if not self._ended.is_set():
                logger.warning("%s gets nothing more from this region: %s", self._to, error)
        finally:
            self.log.close()
            self._listener.close()
            if frames is not None:
                frames.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self.over = True  # from now on, the folder may have another base

    def _accept(self) -> Frames | None:
        """The newcomer's connection; None if it has not called in time. Strangers keep nobody waiting."""
        until = time.monotonic() + _CALLED_WITHIN_S
        callers: list[_Caller] = []
        self._listener.setblocking(False)
        try:
            while time.monotonic() < until and not self._ended.is_set():
                ready = wait([self._listener, *(each.connection for each in callers)], _POLL_S)
                for caller in [each for each in callers if each.connection in ready]:
                    if caller.knows():
                        callers.remove(caller)
                        return Frames(caller.connection, caller.ciphers, self._newcomer_waits, self._rate)
                if self._listener in ready:
                    try:
                        connection, _ = self._listener.accept()
                        callers.append(_Caller(connection, self.offer, self._keys, self._encrypt))
                    except OSError:  # too many files are open: the next wait would return at once
                        time.sleep(_POLL_S)
                now = time.monotonic()
                kept = [each for each in callers if not each.is_over and now < each.until][-_MOST_CALLERS:]
                for caller in set(callers) - set(kept):
                    caller.connection.close()
                callers = kept
            return None
        finally:
            for caller in callers:
                caller.connection.close()

    def _newcomer_waits(self) -> None:
        """The newcomer takes nothing for now. It may be busy while the log grows, but not once that has ended."""
        if self.log.overflowed or self._ended.is_set():
            self._until = min(self._until, time.monotonic() + _TAKEN_WITHIN_S)
        if time.monotonic() > self._until:
            raise LinkError("it does not take what it is sent, and the log has ended.")

    def _send(self, frames: Frames) -> None:
        sizes = {name: path.stat().st_size for name, path in self._files.items()}
        frames.send("base", **self._about, files=sizes)
        for path in self._files.values():
            sha = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    if self._ended.is_set():  # without the log, the base is of no use
                        raise LinkError(f"{self._last[1]}.")
                    sha.update(chunk)
                    frames.send_bytes(chunk)
            frames.send("sha256", value=sha.hexdigest())
        shutil.rmtree(self._folder, ignore_errors=True)
        for item in self.log.items(SIGN_S):
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


class _Caller:
    """Somebody who has called a donor: the newcomer, or a stranger."""

    def __init__(self, connection: socket.socket, offer: Offer, keys: Keys | None, encrypt: bool) -> None:
        connection.setblocking(False)
        keep_from_forks(connection)
        self.connection, self.until = connection, time.monotonic() + _GREETED_WITHIN_S
        self.ciphers, _ = offer.ciphers(keys, encrypt)
        self.is_over = False
        self._greeting, self._said = offer.greeting, bytearray()
        self._size = len(self._greeting)
        if self.ciphers is not None:
            self._size += LENGTH + self.ciphers[1].overhead

    def knows(self) -> bool:
        """Read as much as the greeting takes, and no more; returns whether it is that."""
        try:
            chunk = self.connection.recv(self._size - len(self._said))
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        self._said += chunk
        if len(self._said) < self._size:
            self.is_over = not chunk
            return False
        self.is_over, said = True, bytes(self._said)
        try:
            first = said if self.ciphers is None else self.ciphers[1].open(said[LENGTH:])
        except Altered:
            return False
        return hmac.compare_digest(first, self._greeting)
