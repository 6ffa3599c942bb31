"""How a region comes into a run that trains: with a base from a member, and the log of what has landed since.

It makes the inner steps of the others without training until it is a member. A region that was left behind does the same, and
comes back in the same process.
"""

import logging
from pathlib import Path

from ..errors import DonorLost, LeftBehind, RunFinished, RunOver
from ..link.group import ranks_of_region, wait_for_ranks
from ..link.lanes import LaneLink
from ..link.log import Marker
from ..link.ranks import SharedLink
from ..link.tcp import TcpLink
from ..snapshot import checkpoint as disk
from ..status import say, tell
from .connect import meet_again
from .progress import announce
from .resuming import get_base
from .session import RegionSession, Source
from .training import Training

logger = logging.getLogger(__name__)

_MARKER_S = 1.0
MAX_MISSED = 8
"""A region that has missed more rounds than these gives up what it has trained and the others do not have."""


class JoiningRank:
    """One rank's part in it. Bases lie in `folder`, the same for all ranks."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._folder = training, folder
        self._admitted_at: int | None = None
        self._owes = False  # what the loops do together after the present step, such as an evaluation

    def begin(self) -> Marker:
        """Come into the run for the first time, once the base is loaded. See `_follow`."""
        self._forget_base()
        try:
            self._follow_log()
        except DonorLost as error:  # it left while this region waited for its first batch
            self._begin_anew(error, keep=False)
        return self._follow(self._training.inner_step, is_new=True)

    def _follow(self, before: int, is_new: bool) -> Marker:
        """Make the inner steps of the others without training until this region is a member; returns the marker of that step.

        The loop goes along from the inner step `before`. What a region that is not new has trained is kept. Raises LinkError if
        the run has ended, or no member helps.
        """
        training, is_first = self._training, True
        while True:
            try:
                marker = training.say(
                    lambda session: session.link.next_marker(_MARKER_S), "the others' progress", Marker | None
                )
                if marker is None:
                    continue
                tell(f"joining: catching up, step {training.inner_step} of {marker.step}")
                self._go_along(marker, is_open=is_first or marker.held)
                is_first = False
                if training.endings.verdict is not None:
                    over = RunFinished if training.endings.verdict == "finish" else RunOver
                    raise over(
                        f"{training.endings.why}: the run ends before this region has caught up with it."
                    )
                link = training.link
                assert isinstance(link, SharedLink | LaneLink | TcpLink)
                if link.apply(marker):
                    break
                steps = training.round_steps
                training.say(lambda session, m=marker, n=steps: session.ask_in(m, n), "the way in")  # type: ignore[misc]
            except (DonorLost, LeftBehind) as error:
                self._begin_anew(error, keep=not is_new)
                is_first = True
        self._admitted_at = training.inner_step
        came = {} if training.session is None else training.session.came_from
        training.journal.write(
            "join", step=training.inner_step, epoch=marker.number, region=training.link.region, **came
        )
        training.journal.write_earlier()
        if training.inner_step < before:
            logger.warning(
                "region %d was at step %d, and is in the run at step %d: its learning rate schedule is as many steps ahead.",
                *(training.link.region, before, training.inner_step),
            )
        training.loop.jump(before, training.inner_step, is_new)
        line = f"region {training.link.region} is in the run, from step {training.inner_step} on"
        announce(line)
        say(line)
        tell("training")
        return marker

    def _go_along(self, marker: Marker, is_open: bool) -> None:
        """Make the inner steps up to a marker. `is_open`: it is from before what the loops do together after its step."""
        training = self._training
        while True:
            if training.inner_step < marker.step or not is_open:
                self.stand_in()
            if training.inner_step >= marker.step or training.endings.verdict is not None:
                return
            training.step(trained=False)
            self._owes = True

    def stand_in(self) -> None:
        """Do what the loops do together after the present step, unless this region has done so."""
        if self._owes:
            self._owes = False
            self._training.loop.stand_in()

    def come_back(self, error: LeftBehind, held_s: float = 0.0) -> Marker:
        """Be a newcomer, after the others have gone on without this region, and keep what it has trained. See `_follow`."""
        training, before = self._training, self._training.inner_step
        training.journal.write("away", step=before, held_s=round(held_s, 3), why=str(error))
        logger.warning(
            "region %d comes back, in this process, with what it has trained: %s", training.link.region, error
        )
        self._begin_again(keep=True)
        marker = self._follow(before, is_new=False)
        training.journal.write(
            "note", step=training.inner_step, message=f"came back; it was left behind at step {before}"
        )
        return marker

    def after_step(self) -> None:
        """End the log, once no transfer in flight is from before this region came in."""
        since = self._admitted_at
        if since is None:
            return
        flying = (each.in_flight_since for each in self._training.engine.facts)
        if all(sent_at is None or sent_at > since for sent_at in flying):
            self._admitted_at = None
            if self._training.lane is not None:
                self._training.lane.has_followed()

    def _begin_anew(self, error: DonorLost | LeftBehind, keep: bool) -> None:
        logger.warning(
            "region %d: %s It begins once more with another base.", self._training.link.region, error
        )
        self._begin_again(keep)

    def _begin_again(self, keep: bool) -> None:
        """Be another newcomer, with a new base: members may have let the old one in, and wait for it."""
        link, lane = self._training.link, self._training.lane
        if isinstance(link, LaneLink) and lane is not None:
            meet_again(ranks_of_region(), lane)
            link.begin_again()
        else:
            self._training.say(RegionSession.come_back, "the way back")
        self._load_base(keep)
        self._follow_log()

    def _follow_log(self) -> None:
        """Answer calls from the log of the region that gave the base; each lane from that of its own rank there."""
        training, lane = self._training, self._training.lane
        training.say(RegionSession.follow, "the log of another region")
        self._owes = True  # bases are given before it
        if training.link.num_lanes > 1:
            assert lane is not None
            source = training.say(lambda session: session.source, "whose log it is", Source)
            follows = training.session is None
            ranks_of_region().together(
                lambda: lane.follow_lane(source) if follows else None, "the logs of all ranks"
            )

    def _load_base(self, keep: bool) -> None:
        training = self._training
        base = get_base(training.link, training.accelerator, self._folder)
        saved = disk.read_own(training.link, base.folder)
        rounds = (saved.facts.step - training.inner_step) / training.round_steps
        if keep and rounds > MAX_MISSED:
            logger.warning(
                "region %d has missed %d rounds: it gives up what it has trained since its last send.",
                *(training.link.region, rounds),
            )
        training.engine.catch_up(saved.state, keep and rounds <= MAX_MISSED)
        training.loop.take_over(base.folder)
        self._forget_base()

    def _forget_base(self) -> None:
        wait_for_ranks(self._training.accelerator, "the base, which all ranks read")
        self._training.say(RegionSession.forget_base, "the end of the base")
