"""What a training loop does, beside its inner steps, in a run whose regions come and go.

After the events of an inner step, newcomers get a base, a region that was asked to leave does so, and regions that are too few
wait for more. How a region comes in is in `newcomer`.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError, LeftBehind
from ..link.group import ranks_of_region, wait_for_ranks
from ..link.log import Marker
from ..link.records import Ending, Words
from ..link.spreading import gather
from ..net.members import Member
from ..settings import RegionConfig
from ..snapshot.checkpoint import Saved
from ..snapshot.donor import Offer, write_base
from ..status import tell
from .newcomer import JoiningRank
from .session import RegionSession
from .training import Training

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0
_SAY_S = 60.0


class News(NamedTuple):
    """What a leader has heard for all its ranks: newcomers that want a base, and why the region is to leave (or empty)."""

    wants: tuple[Member, ...] = ()
    leaves: str = ""


class TooFew(NamedTuple):
    """What a region tells the others while they are too few: whether `regions.wait_s` is over, its ending, and `Link.knows`."""

    has_waited: bool
    ending: Ending
    knows: int


class Elastic:
    """One rank's part in it.

    Args:
        folder: of bases, the same for all ranks.
        coast: makes an inner step without training, and finishes with the others if they do.
        end: ends the run here: all its inner steps are made.
    """

    def __init__(
        self,
        training: Training,
        regions: RegionConfig,
        folder: Path,
        coast: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self._training, self._coast, self._end = training, coast, end
        self._least, self._wait_s, self._folder = regions.least, regions.wait_s or 0.0, folder
        self._leaves = ""  # why it does; empty if it does not
        self._has_left = False
        self._left_behind: LeftBehind | None = None
        self._newcomer = JoiningRank(training, folder)

    def begin(self, is_new: bool) -> None:
        """Begin training with the regions that have met; a new one where they are by then."""
        if is_new:
            self._is_in(self._newcomer.begin())
            return
        training, session = self._training, self._training.session
        number = 0 if session is None else session.link.epoch.number
        members = list(training.link.members)
        training.journal.write(
            "epoch", step=training.inner_step, epoch=number, losses=0, members=members, why=""
        )

    def guard(self, step: Callable[[], Words | None]) -> None:
        """Make an inner step and do what comes after it; come back if the others have gone on without this region."""
        began = self._training.link.clock()
        try:
            words = step()
            if self._left_behind is not None:
                raise self._left_behind
            self._after(words)
        except LeftBehind as error:
            if self._leaves:
                self._training.endings.end("leave", f"the others have gone on without this region: {error}")
                return
            self.come_back(error, self._training.link.clock() - began)

    def come_back(self, error: LeftBehind, held_s: float = 0.0) -> None:
        """Be a member again after the others have gone on without this region, `held_s` seconds after it last trained. Raises
        LinkError if there is no run any more.
        """
        self._is_in(self._newcomer.come_back(error, held_s))

    @contextlib.contextmanager
    def spare(self, what: str) -> Iterator[None]:
        """Around what a region can do without: if the others have gone on without it, it comes back at its next inner step."""
        try:
            yield
        except LeftBehind as error:
            self._left_behind = error
            sentence = f"region {self._training.link.region} goes without {what}, and comes back at its next inner step: {error}"
            logger.warning(sentence)
            self._training.journal.write("note", step=self._training.inner_step, message=sentence)

    def close(self) -> None:
        """Call before the link is closed."""
        self._training.journal.write_earlier()

    def _after(self, words: Words | None) -> None:
        """Do what comes after the events of an inner step, which have landed `words`."""
        training, region = self._training, self._training.link.region
        self._training.journal.write_earlier()
        self._newcomer.after_step()
        if words is not None:
            has_said = region in words and words[region].ending is Ending.LEAVING
            self._has_left = has_said and self._training.say(
                lambda session: session.link.is_leaving, "who leaves"
            )
        if training.is_over or training.is_at_the_end:
            return
        is_to_leave = False
        if words is not None or self._training.accelerator.num_processes == 1:
            is_to_leave = self._act_on_news()
        if words is not None and len(words) < self._least:  # the others wait here: a region leaves from there
            self._hold()
        elif is_to_leave:
            self._leave()

    def _is_in(self, marker: Marker) -> None:
        """Become a member at a step at which the others may wait for more regions; come back if they go on without this one."""
        while True:
            self._left_behind = None
            try:
                if marker.held and len(marker.members) < self._least:
                    self._hold()
                self._newcomer.stand_in()  # the others, who have waited, go on with it
                return
            except LeftBehind as error:
                marker = self._newcomer.come_back(error)

    def _act_on_news(self) -> bool:
        """Give newcomers a base; returns whether this region is to leave now."""
        news = self._training.say(self._news, "what newcomers want", News)
        if self._training.lane is not None and self._training.session is None:
            self._training.lane.reap()
        for member in news.wants:
            self._give_base(member)
        if not news.leaves or self._leaves:
            return False
        self._say_that_it_leaves(news.leaves)
        return True

    def _news(self, session: RegionSession) -> News:
        return News(session.newcomers(), session.leaves or self._training.endings.leaves)

    def _give_base(self, member: Member) -> None:
        """Let a newcomer have a base of this moment, and the log from now on. A collective call of the region's ranks."""
        training, session = self._training, self._training.session
        logger.info(
            "region %d gives region %d a base of step %d",
            training.link.region,
            member.region,
            training.inner_step,
        )
        saved, link, lane = Saved(training.engine.state_dict(), training.facts), training.link, training.lane
        if lane is None:
            return
        folder = self._folder / f"base-{member.ticket}"

        def together(part: Callable[[], None]) -> None:
            if link.num_lanes == 1:
                part()
            else:
                ranks_of_region().together(part, f"the base for region {member.region}")

        try:
            write_base(folder, saved, link.lane, training.model, training.loop.inner(), together)
        except CheckpointError as error:
            if session is not None:
                logger.warning("region %d gets no base here: %s", member.region, error)
                session.link.post(member, "no_base", why=str(error))
            return
        about = {"run": training.started.get("run", 0), "started": training.started}

        def offered(session: RegionSession) -> Offer:
            return Offer(next(session.numbers), training.inner_step)

        if link.num_lanes == 1:
            lane.give(member, folder, offered(lane), about)
            return
        offer = training.say(offered, "the offer", Offer)
        if session is None:  # first, before a newcomer knows of it
            lane.give(member, folder, offer, about)
        wait_for_ranks(training.accelerator, "the log for a newcomer")
        if session is not None:
            session.give(member, folder, offer, about)

    def _hold(self) -> None:
        """Wait for more regions: there are fewer than `regions.min`. A region that is to end says so here: no transfer would."""
        training, began, warned_at = self._training, time.monotonic(), -_SAY_S
        step, least = training.inner_step, self._least
        while True:
            waited_s = time.monotonic() - began
            ending = Ending.LEAVING if self._leaves else training.endings.word.ending
            own = TooFew(waited_s > self._wait_s, ending, training.link.knows)
            if training.link.num_lanes > 1:  # the clocks of all ranks differ
                own = training.say(lambda session, own=own: own, "how long it waits", TooFew)  # type: ignore[misc]
            answers = gather(training.link, own, f"who waits for more regions at step {step}")
            self._training.journal.write_earlier()
            training.endings.hear({region: each.ending for region, each in answers.items()}, step)
            if training.is_over:
                return
            if any(each.has_waited for each in answers.values()):
                training.endings.end(
                    "stop",
                    f"only {len(answers)} of at least {least} regions (regions.min) take part, and no other came within "
                    f"{self._wait_s:g} s (regions.wait_s)",
                )
                return
            if len(answers) < least and waited_s - warned_at >= _SAY_S:
                warned_at = waited_s
                logger.warning(
                    "only %d of at least %d regions (regions.min) take part: training waits at step %d for more, up to %g s "
                    "(regions.wait_s).",
                    *(len(answers), least, step, self._wait_s),
                )
                tell(f"waiting for more regions: {len(answers)} of {least}")
            known = min(each.knows for each in answers.values())
            members = training.link.regroup(known)  # type: ignore[attr-defined]
            is_cut_off = training.say(lambda session: session.is_cut_off, "whether the coordinator answers")
            self._training.journal.write_earlier()
            # it has left, or cannot tell that it leaves
            if training.link.region not in members or is_cut_off:
                since = min(each.sent_at for each in training.engine.facts)
                if since < step:
                    logger.warning(
                        "the others get nothing of what this region has trained since step %d.", since
                    )
                training.engine.wait_for_transfers()
                training.endings.end("leave", self._leaves)
                return
            if len(members) >= least:
                tell("training")
                return
            if self._act_on_news() and training.session is not None:
                training.session.leave()
            time.sleep(_AGAIN_S)

    def _say_that_it_leaves(self, why: str) -> None:
        training = self._training
        self._leaves = why
        training.link.leave_note(why)
        if self._training.session is not None:
            self._training.session.leaves = why
            self._training.session.say_doing()
        if training.link.num_regions > 1:
            sentence = f"region {training.link.region} leaves ({why}): the others go on without it."
            logger.warning(sentence)
            training.journal.write("note", step=training.inner_step, message=sentence)

    def _leave(self) -> None:
        """Leave in good order: what this region has trained reaches the others first. The last region stops the run; one whose
        run ends before it has left ends with the others.
        """
        training, endings, since = self._training, self._training.endings, self._training.inner_step
        if training.link.num_regions == 1:
            endings.tell(ending=Ending.INTERRUPTED)
            return

        def may_go_on() -> bool:
            return not training.is_over and not training.is_at_the_end

        training.loop.stand_in()  # the loop comes no more to what is due at this step
        while may_go_on() and any(each.sent_at <= since for each in training.engine.facts):
            self._coast()
        endings.tell(ending=Ending.LEAVING)
        if self._training.session is not None:
            self._training.session.leave()
        is_cut_off = False
        while may_go_on() and not self._has_left and not is_cut_off:
            self._coast()
            is_cut_off = self._training.say(
                lambda session: session.is_cut_off, "whether the coordinator answers"
            )
        if training.is_over:
            return
        if training.is_at_the_end:  # a change counts from the next step on, and there is none
            endings.tell(ending=Ending.NO)
            self._end()
        elif self._has_left:
            training.engine.wait_for_transfers()
            training.link.tick(training.inner_step + 1)
            endings.end("leave", self._leaves)
        else:
            endings.end(
                "leave", f"{self._leaves}; the coordinator does not answer: the others will miss this region"
            )
