"""A region that is in the run gives a newcomer a base, and from then on the log of what happens after it.

The base has what a region needs that takes over a checkpoint: the engine's state, the inner optimizer's, and what is not
trained. The training thread writes it to the disk at the end of an inner step. A thread of its own sends it over a TCP
connection of its own, and then the log, as it comes.
"""

import hashlib
import json
import logging
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..errors import LinkError
from ..links.log import Log, to_plain
from ..meeting.heard import host_and_port, whole
from ..meeting.proof import Proof
from ..threads import NativeThread
from . import checkpoint as disk
from . import local_weights
from .checkpoint import Saved
from .frames import CHUNK, Frames
from .greeting import who_knows
from .parcel import TREES, files_in, write_tree

logger = logging.getLogger(__name__)

_CALLED_WITHIN_S = 60.0
_LEAST_LOG_BYTES = 64 << 20
SIGN_S = 1.0
"""Seconds after which a donor that has nothing to send gives a sign of life."""
_BASES_IN_LOG = 4
"""The log may wait with so many times the bytes of the base: a newcomer that is so far behind will not catch up."""
STARTED = f"{disk.FOLDER}/start.json"
"""File in a base: what the regions agreed on before step 1."""


class Inner(NamedTuple):
    """The rest of a region's training, as a newcomer continues from it.

    Attributes:
        states: of inner optimizers, schedules and scalers, by their names in a checkpoint of Trainer.
        files: writes further files into the folder of a base.
    """

    states: Mapping[str, Any]
    files: Callable[[Path], object] = lambda folder: None


class Offer(NamedTuple):
    """Where a newcomer gets its base.

    Attributes:
        host: of the donor.
        port: where it listens for this newcomer alone.
        secret: what the newcomer says first.
        step: inner step of the base.
    """

    host: str
    port: int
    secret: str
    step: int


def offered(said: Mapping[str, Any], address: str) -> Offer:
    """The offer of a member whose presence listens at `address`: it sends its base from the same machine.

    Raises:
        KeyError, ValueError: it is none.
    """
    secret = said["secret"]
    if not isinstance(secret, str) or len(secret) > 100:
        raise ValueError(f"{str(secret)[:40]!r} is no secret")
    offer = Offer(str(said["host"])[:100], whole(said["port"], 1, 65535), secret, whole(said["step"]))
    if offer.host != host_and_port(address)[0]:
        raise ValueError(f"it offers a base at {offer.host}, and is at {address}")
    return offer


def write_base(
    folder: Path, saved: Saved, lane: int, model: nn.Module, inner: Inner, started: Mapping[str, Any]
) -> None:
    """Write a base. What lies in the folder is deleted.

    Args:
        folder: of the base alone.
        saved: the engine's state, and the facts of the run.
        lane: of this rank.
        model: unwrapped; of its weights only what is not trained is written: a newcomer starts from the global params.
        inner: the rest of the training.
        started: what the regions agreed on before step 1.

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
        about: told with the base; JSON-able.
        to: names the newcomer in the log.
        rate: bytes per second to send at most; None for no limit.
        prove: makes this region's end of the conversation in which it and the newcomer prove themselves; it returns None without
            a secret of the run.

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
        prove: Callable[[Offer], Proof | None] = lambda offer: None,
    ) -> None:
        self._prove = prove
        self._folder, self._about, self._to, self._rate = folder, dict(about), to, rate
        self._files = files_in(folder)
        num_bytes = sum(path.stat().st_size for path in self._files.values())
        self.log = Log(max(_BASES_IN_LOG * num_bytes, _LEAST_LOG_BYTES))
        self._listener = socket.create_server((host, 0), family=_family(host))
        self.offer = Offer(host, self._listener.getsockname()[1], secrets.token_hex(16), step)
        self.over = False
        self._ended = threading.Event()
        self._last = "gone", "the region that sends the base has left the run"
        self._thread = NativeThread(self._serve, "hf_cocodc-donor")
        logger.info("a base of step %d for %s: %.1f MB.", step, to, num_bytes / 1e6)
        self._thread.start()

    def close(self, kind: str = "gone", why: str = "the region that sends the base has left the run") -> None:
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
            self.over = True
            self.log.close()
            self._listener.close()
            if frames is not None:
                frames.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> Frames | None:
        """The newcomer's connection; None if it has not called in time."""
        deadline = time.monotonic() + _CALLED_WITHIN_S

        def goes_on() -> bool:
            return time.monotonic() < deadline and not self._ended.is_set()

        found = who_knows(self._listener, self.offer.secret, goes_on, partial(self._prove, self.offer))
        if found is None:
            return None
        connection, proof = found
        frames = Frames(connection, rate=self._rate)
        frames.seal(None if proof is None else proof.ciphers())
        return frames

    def _send(self, frames: Frames) -> None:
        sizes = {name: path.stat().st_size for name, path in self._files.items()}
        frames.send("base", **self._about, files=sizes)
        for path in self._files.values():
            sha = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
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


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
