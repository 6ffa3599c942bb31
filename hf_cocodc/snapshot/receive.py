"""A newcomer gets a base and the log after it from a region that is in the run (see `donor`)."""

import hashlib
import logging
import queue
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import nn

from ..errors import CheckpointError, DonorLost, LinkError, RunFinished, RunOver, short
from ..link.log import Item, from_plain
from ..net.awake import awake_s
from ..net.connection import Connection
from ..net.members import Member
from ..status import say, tell
from ..validation import Count
from .donor import HEARTBEAT_S, Frames, Offer, OpenStream, offered
from .files import check_files, make_own
from .folders import PREFIX
from .manifest import saving

logger = logging.getLogger(__name__)

NAME = ".base"
"""End of the name of a received base's folder, which lies beside the checkpoints but is none of them."""
_ITEM_MARGIN = 64 << 20
"""An item of the log has at most twice the bytes of the base, plus this."""
_HEARTBEATS = 4
"""A donor is given up only once it has missed so many heartbeats."""
_BYTES_OF_A_VALUE = 64
"""Most bytes of a base per value of the model: global and outer state, transfers in flight, inner optimizer."""
_BASE_MARGIN = 1 << 30
_CONNECT_S = 20.0
_LONGEST_WHY = 400

_POLL_S = 0.1
_AGAIN_S = 10.0
"""Seconds after which a member is asked again: what travels while the coordinator is away is lost."""


class Received(NamedTuple):
    """What all ranks of a region know of a base: its folder, a checkpoint without a list of its files; the region that wrote
    it; its inner step; the number of the run; and what the regions of the run agreed on before step 1.
    """

    folder: Path
    donor: int
    step: int
    run: int
    started: dict[str, Any]


class Base:
    """A received base. `items`, the log after it, raises DonorLost if nothing more comes, RunOver if the run has ended."""

    def __init__(self, received: Received, offer: Offer, frames: Frames, num_bytes: int) -> None:
        self.received, self.offer = received, offer
        self.items = _items(frames, received.donor, 2 * num_bytes + _ITEM_MARGIN)
        self._frames = frames

    def remove(self) -> None:
        """Delete the folder, which is needed no more once it is loaded."""
        shutil.rmtree(self.received.folder, ignore_errors=True)

    def close(self) -> None:
        """Receive nothing more."""
        self._frames.close()


def receive(
    offer: Offer,
    open_stream: OpenStream,
    folder: Path,
    region: int,
    donor: int,
    alive: Callable[[], object],
    timeout_s: float,
    most: int = 1 << 50,
) -> Base:
    """Get the base that a donor offers into `folder`, where other regions may put theirs, too.

    Args:
        timeout_s: seconds without a message after which the donor is given up; an idle one sends heartbeats.
        most: bytes of the largest base that this region's model can have.

    Raises:
        DonorLost: the donor, or the connection to it, is gone.
        CheckpointError: what comes is no base, or the disk refuses.
    """
    ours = f".region-{region}{NAME}"
    for old in folder.glob(f"{PREFIX}*{ours}"):
        shutil.rmtree(old, ignore_errors=True)
    base = folder / f"{PREFIX}{offer.step}{ours}"
    try:
        stream = open_stream(offer.number, _CONNECT_S, alive)
    except (RunOver, DonorLost):
        raise
    except LinkError as error:
        lost = DonorLost(f"region {donor} has offered a base, and is not reached: {error}")
        lost.is_unreached = True
        raise lost from error
    frames = Frames(
        stream,
        alive,
        patience_s=max(timeout_s, _HEARTBEATS * HEARTBEAT_S),
    )
    try:
        with _losing(f"region {donor} sends its base no more"):
            about, num_bytes = _receive_files(frames, base, donor, most)
        run, started = _told(about)
        make_own(base)
    except BaseException:
        frames.close()
        shutil.rmtree(base, ignore_errors=True)
        raise
    logger.info("a base of step %d has come from region %d.", offer.step, donor)
    return Base(Received(base, donor, offer.step, run, started), offer, frames, num_bytes)


def receive_log(
    offer: Offer,
    open_stream: OpenStream,
    received: Received,
    alive: Callable[[], object],
    timeout_s: float,
    most: int,
) -> Base:
    """The log after a base that the leader of this region has `received`, from the same rank of the region that gave it. Raises
    DonorLost if that, or the connection to it, is gone.
    """
    donor = received.donor
    with _losing(f"region {donor} sends this rank no log"):
        stream = open_stream(offer.number, _CONNECT_S, alive)
        patience_s = max(timeout_s, _HEARTBEATS * HEARTBEAT_S)
        frames = Frames(stream, alive, patience_s=patience_s)
        try:
            frames.receive()
        except BaseException:
            frames.close()
            raise
    return Base(received, offer, frames, most)


def largest_base(model: nn.Module) -> int:
    """Bytes of the largest base that a region of this model can send."""
    values = sum(each.numel() for each in (*model.parameters(), *model.buffers()))
    return _BYTES_OF_A_VALUE * values + _BASE_MARGIN


def _receive_files(frames: Frames, into: Path, donor: int, most: int) -> tuple[dict[str, Any], int]:
    """Write the files of a base; returns what the donor says about it, and their bytes."""
    about = frames.receive()
    sizes = check_files(about.get("files"), donor)
    num_bytes = sum(sizes.values())
    if num_bytes > most:
        raise LinkError(
            f"its files have {num_bytes} bytes, more than the {most} that a base of this model can have. If the state of the "
            f"inner optimizer has more than some {_BYTES_OF_A_VALUE // 2} bytes for each parameter, no region can join while "
            "others train: stop all regions, and resume them together."
        )
    for name, size in sizes.items():
        with saving(into):
            _receive_file(frames, into / name, size)
    return about, num_bytes


def _receive_file(frames: Frames, path: Path, size: int) -> None:
    sha = hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for chunk in frames.receive_bytes(size):
            sha.update(chunk)
            file.write(chunk)
    if frames.receive().get("value") != sha.hexdigest():
        raise LinkError(f"{path.name} has changed on its way: its SHA-256 differs.")


def _told(about: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The number of the run, and what its regions agreed on."""
    try:
        return msgspec.convert(about["run"], Count), msgspec.convert(about["started"], dict[str, Any])
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"the base that another region sent is not whole ({error!r}). Do all regions have the same version of hf_cocodc?"
        ) from error


def _items(frames: Frames, donor: int, largest: int) -> Iterator[Item]:
    """See `Base`."""
    try:
        with _losing(f"region {donor} sends its log no more"):
            while True:
                line = frames.receive()
                why = short(line.get("why", line["kind"]), _LONGEST_WHY)
                match line["kind"], line.get("how"):
                    case "item", _:
                        yield from_plain(frames.receive_tree(line, largest))
                    case "alive", _:
                        continue
                    case "end", "in":
                        return
                    case "end", "over":
                        raise RunFinished(
                            f"the run has finished before this region had caught up with it ({why}). Nothing is left to train: "
                            f"region {donor} and the others have the model."
                        )
                    case _:
                        raise LinkError(f"{why}.")
    finally:
        frames.close()


@contextmanager
def _losing(what: str) -> Iterator[None]:
    """Inside the block, an error of the stream means that the donor is lost; `what` says how."""
    try:
        yield
    except (RunOver, DonorLost):
        raise
    except LinkError as error:
        raise DonorLost(f"{what}: {error}") from error


class Donors:
    """Asks members for bases. `is_there`: whether one still takes part; `stream`: opens a stream to it (`TcpLink.stream`)."""

    def __init__(
        self,
        region: int,
        post: Callable[[Member, str], object],
        is_there: Callable[[Member], bool],
        stream: Callable[..., Connection],
    ) -> None:
        self._region, self._post, self._is_there, self._stream = region, post, is_there, stream
        self._asked: Member | None = None
        self._answers: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()

    def hear(self, sender: Member, topic: str, content: dict[str, Any]) -> None:
        """Take another process's message, if it is an answer. Any thread may call it."""
        if topic in ("offer", "no_base") and sender == self._asked:
            self._answers.put((topic, content))

    def base_of(self, member: Member, folder: Path, *, stuck_timeout_s: float, **how: Any) -> Base:
        """Get a base from a member, which has to offer it within `stuck_timeout_s`, into `folder`. For `how` see `receive`.

        Raises:
            DonorLost: it gives none.
            CheckpointError: what comes is no base, or the disk refuses.
        """

        def alive() -> None:
            if not self._is_there(member):
                raise DonorLost(f"region {member.region} is lost.")

        self._answers, self._asked = queue.SimpleQueue(), member
        began, ask_at = awake_s(), 0.0
        while True:
            alive()
            if awake_s() >= ask_at:
                self._post(member, "base")
                ask_at = awake_s() + _AGAIN_S
            try:
                topic, content = self._answers.get(timeout=_POLL_S)
                break
            except queue.Empty:
                if awake_s() > began + stuck_timeout_s:
                    raise DonorLost(
                        f"region {member.region} has offered no base for {stuck_timeout_s:.3g} s "
                        "(regions.stuck_timeout_s, or what is left of regions.start_timeout_s): does it make inner steps?"
                    ) from None
        if topic == "no_base":
            raise DonorLost(short(content.get("why"), _LONGEST_WHY))
        try:
            offer = offered(content)
        except (KeyError, ValueError) as error:
            raise DonorLost(f"region {member.region} offers what is no base ({error!r}).") from error
        say(f"region {self._region} gets a base of step {offer.step} from region {member.region}")
        tell("getting a base")
        return receive(
            offer, partial(self._stream, member), folder, self._region, member.region, alive, **how
        )
