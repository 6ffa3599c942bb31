"""What a training loop does, beside its inner steps, in a run whose regions come and go.

At the end of an inner step, after its events: newcomers get a base; a region that was asked to leave does so; and regions that
are too few wait for more. A newcomer makes the inner steps of the others without training until it is a member (`follow`). So
does a region that was left behind, when it comes back.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from accelerate import Accelerator

from ..engine.saving import wait_for_transfers
from ..engine.synchronizer import Synchronizer
from ..errors import CheckpointError, LeftBehind
from ..links.spreading import gather
from ..links.trailer import Ending, Words
from ..meeting.presence import Member
from ..settings import RegionConfig
from .base import DonorLost, RunOver
from .checkpoint import Saved, read
from .company import Company
from .donor import Inner, write_base
from .endings import Endings
from .saving import Savable, facts_of
from .shelf import main_says
from .status import tell

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ROLL_CALL_S = 1.0
_SAY_S = 60.0
_MARKER_S = 1.0
MAX_MISSED = 8
"""A region that has missed more rounds than these gives up what it has trained and the others do not have."""


class Runner(Savable, Protocol):
    """An outer optimizer, as far as it takes part in an elastic run.

    Attributes:
        synchronizer: its engine.
        endings: how it ends early.
        inner: returns the rest of its training, for newcomers.
        started: what the regions agreed on before step 1, for newcomers; JSON-able.
        has_jumped: called with the inner step before and after, where steps were made without training.
    """

    synchronizer: Synchronizer
    endings: Endings
    inner: Callable[[], Inner]
    started: dict[str, Any]
    has_jumped: Callable[[int, int], object]

    @property
    def should_stop(self) -> bool: ...

    @property
    def is_at_the_end(self) -> bool:
        """Whether every region is known to end at this step."""
        ...

    def coast_one(self, alone: bool = False) -> None:
        """Make an inner step without training; `alone`: without what comes after it (`Elastic.guard`)."""
        ...


class News(NamedTuple):
    """What all ranks of a region do together, because its leader has heard of it.

    Attributes:
        wants: newcomers that want a base.
        leaves: why the region was asked to leave; empty if it was not.
    """

    wants: tuple[Member, ...] = ()
    leaves: str = ""


class Patience(NamedTuple):
    """Whether a region has waited long enough for more regions."""

    is_over: bool


class Elastic:
    """One rank's part in it.

    Args:
        outer: of this rank.
        accelerator: of this region.
        company: the leader's side; None on other ranks.
        regions: resolved.
        folder: where bases lie for a while; the same for all ranks of the region.
    """

    def __init__(
        self,
        outer: Runner,
        accelerator: Accelerator,
        company: Company | None,
        regions: RegionConfig,
        folder: Path,
    ) -> None:
        self._outer, self._accelerator, self._company = outer, accelerator, company
        self._least, self._wait_s, self._folder = regions.min or 1, regions.wait_s or 0.0, folder
        self._is_leaving = self._has_left = False
        self._admitted_at: int | None = None
        outer.journal.earlier = self._events

    def begin(self, joined: Callable[[int, int], object] | None = None) -> None:
        """Training begins: with the regions that have met; or where they are by then, and `joined` is called (see `follow`)."""
        if joined is not None:
            self._say(Company.forget_base, "the end of the base")
            self._say(Company.follow, "the log of another region")
            self.follow(joined)
            return
        link, journal = self._outer.link, self._outer.journal
        number = 0 if self._company is None else self._company.link.epoch.number
        members = list(link.members)
        journal.write("epoch", step=self._outer.inner_step, epoch=number, members=members, why="")

    def guard(self, step: Callable[[], Words | None]) -> None:
        """Make an inner step, and do what comes after it. If the others have gone on without this region, it comes back."""
        try:
            self._after(step())
        except LeftBehind as error:
            if self._is_leaving:
                self._outer.endings.end("leave", f"the others have gone on without this region: {error}")
                return
            self._come_back(error)

    def follow(self, jumped: Callable[[int, int], object], keep: bool = False) -> None:
        """Make the inner steps of the others without training until this newcomer is a member. Its base is loaded.

        `jumped` is called with the inner step before and after. `keep`: what this region has trained is kept.

        Raises:
            LinkError: the run has ended, or no member helps it.
        """
        outer, before = self._outer, self._outer.inner_step
        while True:
            try:
                marker = self._say(
                    lambda company: company.link.next_marker(_MARKER_S), "the others' progress"
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
                if self._say(lambda company, marker=marker: company.applies(marker), "the way in"):  # type: ignore[misc]
                    break
            except (DonorLost, LeftBehind) as error:
                logger.warning(
                    "region %d: %s It begins once more with another base.", outer.link.region, error
                )
                jumped(before, outer.inner_step)
                self._begin_again(keep)
                before = outer.inner_step
        self._admitted_at = outer.inner_step
        came = {} if self._company is None else self._company.came_from
        came = {"epoch": marker.number, "region": outer.link.region, **came}
        outer.journal.write("join", step=outer.inner_step, **came)
        self._outer.journal.write_earlier()
        jumped(before, outer.inner_step)
        logger.info("region %d is in the run, at step %d", outer.link.region, outer.inner_step)
        tell("training")
        if marker.held and len(marker.members) < self._least:
            self._hold()

    def close(self) -> None:
        """Before the link is closed."""
        self._outer.journal.write_earlier()
        if self._company is not None:
            self._company.close(self._outer.finished)

    def _after(self, words: Words | None) -> None:
        """What comes after the events of an inner step, which have landed `words`."""
        outer, region = self._outer, self._outer.link.region
        self._outer.journal.write_earlier()
        self._end_following()
        if words is not None:
            self._has_left = region in words and words[region].ending is Ending.LEAVING
            if self._company is not None:
                self._company.landed = outer.inner_step, time.monotonic()
        if outer.should_stop or outer.is_at_the_end:
            return
        if words is not None or self._accelerator.num_processes == 1:
            self._act_on_news()
        if words is not None and len(words) < self._least and not outer.should_stop:
            self._hold()

    def _act_on_news(self) -> None:
        news = self._say(self._news, "what newcomers want")
        for member in news.wants:
            self._give_base(member)
        if news.leaves and not self._is_leaving:
            self._leave(news.leaves)

    def _news(self, company: Company) -> News:
        company.reap()
        wants = []
        while company.wants:
            wants.append(company.wants.popleft())
        return News(tuple(wants), company.leaves or self._outer.endings.leaves)

    def _give_base(self, member: Member) -> None:
        """Let a newcomer have a base of this moment, and the log from now on. A collective call of the region's ranks."""
        outer, company = self._outer, self._company
        logger.info(
            "region %d gives region %d a base of step %d", outer.link.region, member.region, outer.inner_step
        )
        facts = facts_of(outer)
        saved = Saved(outer.synchronizer.state_dict(), facts)
        if company is None:
            return
        folder = self._folder / f"base-{member.ticket}"
        try:
            write_base(folder, saved, outer.link.lane, outer.model, outer.inner(), outer.started)
        except CheckpointError as error:
            logger.warning("region %d gets no base here: %s", member.region, error)
            company.refuse_base(member, str(error))
            return
        company.give(member, folder, outer.inner_step, {"run": outer.started.get("run", 0)})

    def _hold(self) -> None:
        """Wait for more regions: there are fewer than `regions.min`."""
        outer, began, said = self._outer, time.monotonic(), -_SAY_S
        step, least = outer.inner_step, self._least
        while True:
            waited_s = time.monotonic() - began
            told = gather(
                outer.link, Patience(waited_s > self._wait_s), f"who waits for more regions at step {step}"
            )
            self._outer.journal.write_earlier()
            if any(each.is_over for each in told.values()):
                outer.endings.end(
                    "stop",
                    f"only {len(told)} of at least {least} regions (regions.min) take part, and no other came within "
                    f"{self._wait_s:g} s (regions.wait_s)",
                )
                return
            if waited_s - said >= _SAY_S:
                said = waited_s
                logger.warning(
                    "only %d of at least %d regions (regions.min) take part: training waits at step %d for more, up to %g s "
                    "(regions.wait_s).",
                    *(len(told), least, step, self._wait_s),
                )
                tell(f"waiting for more regions: {len(told)} of {least}")
            members = self._say(lambda company: company.link.roll_call(), "the roll call")
            self._outer.journal.write_earlier()
            if len(members) >= least:
                tell("training")
                return
            self._act_on_news()
            time.sleep(_ROLL_CALL_S)

    def _leave(self, why: str) -> None:
        """Leave the run in good order: what this region has trained reaches the others first."""
        outer, endings = self._outer, self._outer.endings
        self._is_leaving, since = True, outer.inner_step
        logger.warning("region %d leaves (%s): the others train on.", outer.link.region, why)
        if outer.link.num_regions == 1:
            endings.tell(ending=Ending.INTERRUPTED)
            outer.link.leave_note(why)
            return

        def may_go_on() -> bool:
            return not outer.should_stop and not outer.is_at_the_end

        while may_go_on() and any(each.sent_at <= since for each in outer.synchronizer.fragments):
            outer.coast_one()
        endings.tell(ending=Ending.LEAVING)
        while may_go_on() and not self._has_left:
            outer.coast_one()
        if self._has_left and not outer.should_stop:
            wait_for_transfers(outer.synchronizer.fragments)
            outer.link.tick(outer.inner_step + 1)
            endings.end("leave", why)

    def _come_back(self, error: LeftBehind) -> None:
        """The others have gone on without this region: be a newcomer, and keep what it has trained."""
        outer, before = self._outer, self._outer.inner_step
        logger.warning("region %d: %s It comes back.", outer.link.region, error)
        self._begin_again(keep=True)
        self.follow(outer.has_jumped, keep=True)
        outer.journal.write(
            "note", step=outer.inner_step, message=f"came back; it was left behind at step {before}"
        )

    def _begin_again(self, keep: bool) -> None:
        """Be another newcomer, with a new base: members may have let the old one in, and wait for it."""
        self._say(Company.come_back, "the way back")
        self._load_base(keep)
        self._say(Company.follow, "the log of another region")

    def _load_base(self, keep: bool) -> None:
        outer = self._outer
        before = outer.inner_step
        base = self._say(lambda company: company.get_base(self._folder), "a base from another region")
        saved = read(base.folder, outer.link.lane)
        rounds = (saved.facts.step - before) / outer.settings["sync_interval"]
        if keep and rounds > MAX_MISSED:
            logger.warning(
                "region %d has missed %d rounds: it gives up what it has trained since its last send.",
                *(outer.link.region, rounds),
            )
        outer.synchronizer.catch_up(saved.state, keep and rounds <= MAX_MISSED)
        outer.has_jumped(before, outer.inner_step)
        self._say(Company.forget_base, "the end of the base")

    def _end_following(self) -> None:
        """Once no transfer in flight is from before this region came in, it needs no log."""
        since = self._admitted_at
        flying = (
            each.sent_at for fragment in self._outer.synchronizer.fragments for each in fragment.in_flight
        )
        if since is not None and all(sent_at > since for sent_at in flying):
            self._admitted_at = None
            if self._company is not None:
                self._company.has_followed()

    def _events(self) -> list[tuple[str, dict[str, Any]]]:
        """What has happened to the run, for the journal."""
        events, found = () if self._company is None else self._company.link.events, []
        while events:
            kind, facts = events.popleft()
            found.append((kind, {"step": self._outer.inner_step, **facts}))
        return found

    def _say(self, call: Callable[[Company], T], what: str) -> T:
        """What `call` returns on the leader, in all ranks."""

        def on_the_leader() -> T:
            assert self._company is not None
            return call(self._company)

        return main_says(self._outer.link, self._accelerator, on_the_leader, what)
