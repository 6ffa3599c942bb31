"""How a region comes into a run that trains: with a base from a member, and the log of what has landed since.

It makes the inner steps of the others without training until it is a member. A region that was left behind does the same, and
comes back in the same process.
"""

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from torch import nn

from ..errors import DonorLost, LeftBehind, RunOver
from ..link.base import Link
from ..link.log import Marker, from_plain
from ..link.rules import Standing
from ..link.within import main_says, wait_for_ranks
from ..snapshot import checkpoint as disk
from ..snapshot import local_weights
from ..snapshot.checkpoint import Saved
from ..snapshot.donor import Inner
from ..snapshot.receive import Received, received_in
from ..status import tell
from .session import RegionSession, session_of

if TYPE_CHECKING:
    from .outer_optimizer import OuterOptimizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MARKER_S = 1.0
MAX_MISSED = 8
"""A region that has missed more rounds than these gives up what it has trained and the others do not have."""


class Say(Protocol):
    """Calls a function on the region's leader; all ranks get what it returns or raises. The result travels as JSON, from which
    `read` makes what it was.
    """

    def __call__(
        self, call: Callable[[RegionSession], T], what: str, read: Callable[[Any], T] = ...
    ) -> T: ...


def joins(link: Link, accelerator: Accelerator) -> bool:
    """Whether this region is a newcomer without a base. All ranks of the region call this together."""
    if not link.is_elastic:
        return False

    def is_joining() -> bool:
        session = session_of(link)
        assert session is not None
        return session.link.standing is Standing.JOINING

    return main_says(link, accelerator, is_joining, "whether this region joins")


def get_base(link: Link, accelerator: Accelerator, folder: Path) -> Received:
    """Get a base from a member of the run, into `folder`. All ranks of the region call this together.

    Raises:
        LinkError: no member gives one.
        CheckpointError: what comes is no base, or the disk refuses.
    """

    def get() -> Received:
        session = session_of(link)
        assert session is not None
        return session.get_base(folder)

    return main_says(link, accelerator, get, "a base from another region", received_in)


def place_for_bases(link: Link, accelerator: Accelerator, journal: str | Path | None) -> Path:
    """A folder for bases that all ranks of the region reach: beside the journal, if there is one."""
    if journal is not None or not link.is_elastic:
        return Path(journal or ".").absolute().parent
    return Path(
        main_says(link, accelerator, lambda: tempfile.mkdtemp(prefix="hf_cocodc-"), "a folder for bases")
    )


def inner_of(accelerator: Accelerator) -> Inner:
    """What a plain loop shows of the rest of its training: what Accelerate has prepared."""
    states = {}
    for name, parts in _prepared(accelerator).items():
        for index, part in enumerate(parts):
            states[_file(name, index)] = part.state_dict()
    return Inner(states)


def load_inner(accelerator: Accelerator, base: Path) -> None:
    """Let a plain loop continue from a base, which lacks objects registered for checkpointing: they travel only as pickles."""
    for name, parts in _prepared(accelerator).items():
        for index, part in enumerate(parts):
            path = base / _file(name, index)
            if path.is_file():
                part.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
            else:
                logger.warning(
                    "the base of the other region has no %s: this region begins with a fresh one.", path.name
                )
    if accelerator._custom_objects:
        logger.warning(
            "objects that were registered for checkpointing do not come from another region: they begin as they are."
        )


def read_base(link: Link, accelerator: Accelerator, model: nn.Module, folder: Path) -> tuple[Saved, int]:
    """Get a base for a plain loop, which continues from it: the engine's state, and the run's number. Raises like
    `get_base`.
    """
    received = get_base(link, accelerator, folder)
    base = received.folder
    saved = disk.read_own(link, base)
    load_inner(accelerator, base)
    # global params come with the engine: this is what is not trained, such as buffers
    local_weights.restore(model, base / local_weights.weights_file(link.lane), ())
    return saved, received.run


def advance(accelerator: Accelerator, before: int, after: int, is_new: bool) -> None:
    """Step the learning rate schedules of a plain loop to inner step `after`, to which this region has jumped.

    Only schedules that are stepped once for each inner step: by their own count, they are at `before`, or one step behind if
    the loop steps them after `outer.step()`. `is_new`: the loop has yet to begin; else it is inside `outer.step()`.
    """
    for schedule in accelerator._schedulers:
        plain, often = _plain(schedule, accelerator)
        count = int(getattr(plain, "last_epoch", -1))
        if count not in (often * before, often * (before - 1)):
            logger.warning(
                "%s is at %d after %d inner steps: it is not stepped once for each, and stays as it is.",
                *(type(plain).__name__, count, before),
            )
            continue
        for _ in range(often * after - count if is_new else often * (after - before)):
            plain.step()


def _plain(schedule: Any, accelerator: Accelerator) -> tuple[Any, int]:
    """A schedule without Accelerate's wrapper, and how often that steps it each time."""
    if not isinstance(schedule, AcceleratedScheduler):
        return schedule, 1
    once = schedule.split_batches or not schedule.step_with_optimizer
    return schedule.scheduler, 1 if once else accelerator.num_processes


def _prepared(accelerator: Accelerator) -> dict[str, Sequence[Any]]:
    scaler = accelerator.scaler
    return {
        "optimizer": accelerator._optimizers,
        "scheduler": accelerator._schedulers,
        "scaler": [] if scaler is None else [scaler],
    }


def _file(name: str, index: int) -> str:
    return f"{name}_{index}.pt" if index else f"{name}.pt"


def _marker_in(plain: Any) -> Marker | None:
    if plain is None:
        return None
    marker = from_plain({"marker": plain})
    assert isinstance(marker, Marker)
    return marker


class JoiningRank:
    """One rank's part in it. `session` is the leader's side, None elsewhere; bases lie in `folder`, the same for all ranks."""

    def __init__(
        self,
        outer: "OuterOptimizer",
        accelerator: Accelerator,
        session: RegionSession | None,
        folder: Path,
        say: Say,
    ) -> None:
        self._outer, self._accelerator, self._session = outer, accelerator, session
        self._folder, self._say = folder, say
        self._admitted_at: int | None = None

    def begin(self, joined: Callable[[int, int], object]) -> Marker:
        """Come into the run for the first time, once the base is loaded. See `follow`."""
        self._forget_base()
        self._say(RegionSession.follow, "the log of another region")
        return self.follow(joined)

    def follow(
        self, jumped: Callable[[int, int], object], keep: bool = False, since: int | None = None
    ) -> Marker:
        """Make the inner steps of the others without training until this region is a member; returns the marker of that step.

        `jumped` is called once, with the inner step `since` (by default that of now) and the one after. `keep`: what this
        region has trained is kept. Raises LinkError if the run has ended, or no member helps.
        """
        outer = self._outer
        before = outer.inner_step if since is None else since
        while True:
            try:
                marker = self._say(
                    lambda session: session.link.next_marker(_MARKER_S), "the others' progress", _marker_in
                )
                if marker is None:
                    continue
                tell(f"joining: catching up, step {outer.inner_step} of {marker.step}")
                while outer.inner_step < marker.step and outer.endings.verdict is None:
                    outer.coast_one(alone=True)
                if outer.endings.verdict is not None:
                    raise RunOver(
                        f"{outer.endings.why}: the run ends before this region has caught up with it."
                    )
                steps = round_steps(outer)
                if self._say(lambda session, m=marker, n=steps: session.applies(m, n), "the way in"):  # type: ignore[misc]
                    break
            except (DonorLost, LeftBehind) as error:
                logger.warning(
                    "region %d: %s It begins once more with another base.", outer.link.region, error
                )
                self._begin_again(keep)
        self._admitted_at = outer.inner_step
        came = {} if self._session is None else self._session.came_from
        outer.journal.write(
            "join", step=outer.inner_step, epoch=marker.number, region=outer.link.region, **came
        )
        outer.journal.write_earlier()
        if outer.inner_step < before:
            logger.warning(
                "region %d was at step %d, and is in the run at step %d: its learning rate schedule is as many steps ahead.",
                *(outer.link.region, before, outer.inner_step),
            )
        jumped(before, outer.inner_step)
        words = f"is in the run, from step {outer.inner_step} on"
        logger.info("region %d %s", outer.link.region, words)
        tell("training", news=words)
        return marker

    def come_back(self, error: LeftBehind) -> Marker:
        """Be a newcomer, after the others have gone on without this region, and keep what it has trained. See `follow`."""
        outer, before = self._outer, self._outer.inner_step
        logger.warning("region %d: %s It comes back.", outer.link.region, error)
        self._begin_again(keep=True)
        marker = self.follow(outer.has_jumped, keep=True, since=before)
        outer.journal.write(
            "note", step=outer.inner_step, message=f"came back; it was left behind at step {before}"
        )
        return marker

    def after_step(self) -> None:
        """End the log, once no transfer in flight is from before this region came in."""
        since = self._admitted_at
        if since is None:
            return
        flying = (each.in_flight_since for each in self._outer.synchronizer.facts)
        if all(sent_at is None or sent_at > since for sent_at in flying):
            self._admitted_at = None
            if self._session is not None:
                self._session.has_followed()

    def _begin_again(self, keep: bool) -> None:
        """Be another newcomer, with a new base: members may have let the old one in, and wait for it."""
        self._say(RegionSession.come_back, "the way back")
        self._load_base(keep)
        self._say(RegionSession.follow, "the log of another region")

    def _load_base(self, keep: bool) -> None:
        outer = self._outer
        base = self._say(
            lambda session: session.get_base(self._folder), "a base from another region", received_in
        )
        saved = disk.read_own(outer.link, base.folder)
        rounds = (saved.facts.step - outer.inner_step) / round_steps(outer)
        if keep and rounds > MAX_MISSED:
            logger.warning(
                "region %d has missed %d rounds: it gives up what it has trained since its last send.",
                *(outer.link.region, rounds),
            )
        outer.synchronizer.catch_up(saved.state, keep and rounds <= MAX_MISSED)
        outer.takes_over(base.folder)
        self._forget_base()

    def _forget_base(self) -> None:
        wait_for_ranks(self._accelerator, "the base, which all ranks read")
        self._say(RegionSession.forget_base, "the end of the base")


def round_steps(outer: "OuterOptimizer") -> float:
    """Inner steps of a round: the method's sync_interval, or the mean so far for a user's own method without one."""
    interval = outer.settings.get("sync_interval")
    if isinstance(interval, int | float) and interval > 0:
        return float(interval)
    synchronizer = outer.synchronizer
    landings = max(synchronizer.totals.landings, 1)
    return max(1.0, synchronizer.inner_step * len(synchronizer.facts) / landings)
