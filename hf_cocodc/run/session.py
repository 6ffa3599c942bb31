"""A region's leader in a run: how it meets the others or joins them, and what it does for newcomers."""

import logging
import math
import platform
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import structs

from ..coordinator.caller import error_of
from ..coordinator.client import Client
from ..coordinator.messages import (
    Bye,
    Decided,
    Gone,
    Heard,
    Hello,
    Leave,
    LeaveNow,
    Over,
    Posted,
    Refuse,
    Resumed,
    Terms,
    ToRegion,
    Waiting,
    Wanted,
)
from ..coordinator.rules import end_in_words
from ..errors import CocodcError, DonorLost, LeftBehind, LinkError, RunOver
from ..link.backends import payloads_of
from ..link.base import Link
from ..link.log import Marker
from ..link.speaking import AnyClient
from ..link.tcp import TcpLink
from ..net.addresses import Unreachable, is_url, own_address
from ..net.keys import Keys
from ..net.mailbox import mailbox
from ..net.members import Member, Whereabouts
from ..net.pairs import STREAMS
from ..net.wire import Wire
from ..parts.tensors.memory import HOST
from ..settings import RegionConfig
from ..snapshot.donor import Donation, Offer
from ..snapshot.receive import Base, Donors, Received, receive_log
from ..status import say, tell

FIRST_S = 10.0
"""Seconds after which a region says for whom it waits."""
AGAIN_S = 60.0

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_SHARE = 4
"""A base and its log have this part of the rate limit."""
_DONATION_END_S = 2.0
_LET_IN_S = 60.0
"""A newcomer that is ready is announced at once, where all members are connected to it. One that is not begins once more."""
_LEAVE_WAIT_S = 30.0
"""How long a region that is to leave waits for a coordinator that is away."""
AUTO_GRACE_S = 5.0
"""With grace "auto", a member may be late for so many seconds after training has begun to wait for it."""
_PERIOD_S, _GRACE_PERIODS = 1.0, 3
"""Seconds between two heartbeats, where they cost next to nothing. Where they are rarer, nobody is late, or has to answer, before
so many of them.
"""
_NO_NEARER_S = 30.0
"""A newcomer that comes no nearer for so long is let in as it is: the link carries its log no faster than the others make it."""


class WaitingWords:
    """Says for whom a region waits: to the command that started it at once, in the log after 10 s and then every minute.

    `wait_s` is `regions.start_timeout_s`; `news` is what the coordinator has told last.
    """

    def __init__(self, region: int, run: str, coordinator: str, wait_s: float) -> None:
        self._where = f"run {run!r} at the coordinator {coordinator}"
        self._region, self._wait_s = region, wait_s
        self._began = time.monotonic()
        self._says_at = self._began + FIRST_S
        self._told: Waiting | None = None
        self.news: Waiting | None = None

    def look(self) -> None:
        """Call it often."""
        news = self.news
        if news is None:
            return
        whom = " and ".join(f"region {region}" for region in news.absent)
        if news != self._told:
            stage = f"waiting for {whom}" if whom else "waiting for its place"
            if news.why and (self._told is None or news.why != self._told.why):
                self._tell_why(stage, news.why)
            elif whom:
                tell(stage)
            self._told = news
        self._say(f" for {whom}" if whom else f": {news.why}")

    def _tell_why(self, stage: str, why: str) -> None:
        left_s = max(self._wait_s - (time.monotonic() - self._began), 0.0)
        logger.warning("region %d waits, for %.0f s at most: %s", self._region, left_s, why)
        tell(stage)
        say(f"region {self._region} waits for {left_s:.0f} s at most: {why}")

    def _say(self, what: str) -> None:
        """Log for whom it waits, or why, if it is time to."""
        now = time.monotonic()
        if now < self._says_at:
            return
        self._says_at = now + AGAIN_S
        waited_s = now - self._began
        logger.warning(
            "region %d has waited %.0f s%s (%s). It waits %.0f s more (regions.start_timeout_s).",
            *(self._region, waited_s, what, self._where, max(self._wait_s - waited_s, 0.0)),
        )


def own_address_of(regions: RegionConfig, run: str) -> str:
    """The address at which the others reach this machine. Raises like `own_address`.

    It waits for the name of the coordinator, and for a way there, as long as regions wait for each other.
    """
    assert regions.coordinator is not None and regions.region is not None
    wait_s = regions.start_timeout_s
    words, until = WaitingWords(regions.region, run, regions.coordinator, wait_s), time.monotonic() + wait_s
    while True:
        try:
            return own_address(regions.coordinator, regions.interface)
        except Unreachable as error:
            if time.monotonic() > until:
                raise
            words.news = Waiting(why=f"{error} It tries again.")
            words.look()
            time.sleep(min(_POLL_S, wait_s))


@dataclass(frozen=True, kw_only=True)
class RegionContext:
    """What stays as it is, however often a region comes back.

    Attributes:
        regions: its settings, resolved.
        name: of the run.
        compared: what this region tells the others of itself.
        host: address of this machine that the others reach.
        keys: of the run's secret; None if there is none.
        largest_base: bytes that a base of this model has at most.
        num_lanes: lanes of this region, which share the rate limit.
        is_one_voice: whether its ranks share their decisions (see `TcpLink`).
        lane, device: of this process, and of its model.
    """

    region: int
    regions: RegionConfig
    name: str
    compared: Mapping[str, Any]
    host: str
    keys: Keys | None = None
    largest_base: int = 1 << 50
    num_lanes: int = 1
    is_one_voice: bool = False
    lane: int = 0
    device: torch.device = HOST

    @property
    def rate(self) -> float | None:
        """Bytes per second to send at most."""
        limit = self.regions.rate_limit
        return None if limit is None else limit * 1e6 / 8 / self.num_lanes

    @property
    def period_s(self) -> float:
        """Seconds between two heartbeats at most. Raises InputError if no storage has the coordinator's URL."""
        address = self.regions.coordinator
        return mailbox(address).period_s if address is not None and is_url(address) else _PERIOD_S

    @property
    def terms(self) -> Terms:
        """What the coordinator needs to know of the run."""
        regions = self.regions
        assert regions.count is not None
        grace_s = AUTO_GRACE_S if regions.grace_s == "auto" else regions.grace_s
        assert not isinstance(grace_s, str)
        if grace_s is not None and self.period_s > _PERIOD_S:
            grace_s = max(grace_s, _GRACE_PERIODS * self.period_s)
        return Terms(
            count=regions.count,
            least=regions.least,
            most=regions.max or regions.count,
            wait_s=regions.wait_s or 0.0,
            timeout_s=regions.timeout_s,
            stuck_timeout_s=regions.stuck_timeout_s,
            grace_s=grace_s,
            grace_is_auto=regions.grace_s == "auto",
        )

    def meet(self, join: bool, wire: Wire, lanes: Sequence[Whereabouts] = ()) -> Client:
        """Meet the other regions at the coordinator, or join the run that trains there. Raises like `Client.meet`.

        Args:
            wire: closed if this fails.
            lanes: where the wires of all ranks listen; by default there is this one.
        """
        regions = self.regions
        assert regions.coordinator is not None
        period_s = min(regions.timeout_s / 4, self.period_s)
        client = Client(regions.coordinator, self.name, self.keys, period_s)
        wait_s = regions.start_timeout_s
        words = WaitingWords(self.region, self.name, regions.coordinator, wait_s)

        def waiting(news: Waiting) -> None:
            words.news = news

        hello = Hello(
            region=self.region,
            join=join,
            lanes=tuple(lanes) or (wire.whereabouts,),
            machine=platform.node(),
            token=secrets.token_hex(16),
            terms=self.terms,
            compared=dict(self.compared),
        )
        try:
            client.meet(hello, wait_s, waiting, words.look)
        except BaseException:
            wire.close()
            raise
        return client

    def wire(self) -> Wire:
        """Connections for transfers, to nobody yet. Raises InputError if this machine cannot listen."""
        regions, asked = self.regions, self.regions.connections
        return Wire(
            self.region,
            asked if isinstance(asked, int) else None,
            self.host,
            regions.timeout_s,
            self.rate,
            self.num_lanes,
            congestion=regions.congestion,
            keys=self.keys,
            port=0 if regions.port is None else regions.port + self.lane,
            announce=partial(regions.addresses, lane=self.lane) if regions.announces else None,
            call_from=self.host if regions.interface else "",
            most_regions=self.terms.most,
        )

    def link(self, client: AnyClient, wire: Wire) -> TcpLink:
        """The link of a process that has met the others. Raises LinkError if a region cannot be reached."""
        return TcpLink(
            client,
            self.terms,
            wire,
            timeout_s=self.regions.timeout_s,
            lane=self.lane,
            num_lanes=self.num_lanes,
            is_one_voice=self.is_one_voice,
            payloads=payloads_of(self.regions, self.keys is not None, self.device, self.host),
        )


class Approach:
    """How a newcomer comes nearer to the members, marker by marker. Once it is let in, they wait for it at their next landing."""

    def __init__(self) -> None:
        self._least, self._since = math.inf, 0.0

    def is_near(self, gap: int, round_steps: float, now: float) -> bool:
        """Whether it is less than a round behind, or as near as it comes; `gap`: inner steps.

        >>> approach = Approach()
        >>> [approach.is_near(gap, 20, now) for gap, now in ((90, 0), (60, 10), (60, 41), (15, 50))]
        [False, False, True, True]
        """
        if gap < self._least:
            self._least, self._since = gap, now
        return gap < round_steps or now - self._since > _NO_NEARER_S


class Source(NamedTuple):
    """From whom a newcomer has its base, and how."""

    member: Member
    offer: Offer
    received: Received


class RegionSession:
    """The leader's side of a run. `wants` has the newcomers that want a base of this region, `numbers` those of the streams of
    bases, `pulls` the callers that wait for its model, by name, `leaves` why it was asked to leave (empty if it was not).
    """

    def __init__(self, context: RegionContext, link: TcpLink) -> None:
        self.context, self.link = context, link
        self.wants: set[Member] = set()
        self.pulls: tuple[str, ...] = ()
        self.leaves = ""
        self._asks_to_leave = False
        self._answers_at = time.monotonic()
        self._over: Over | None = None
        self._donations: dict[Member, Donation] = {}
        self.numbers = cycle(range(STREAMS[0], STREAMS[1] + 1))
        self._from: tuple[Member, Base] | None = None
        self._ready_at, self._approach = math.inf, Approach()
        self._failures: Counter[Member] = Counter()
        self._donors = Donors(context.region, link.post, self._gives, link.stream)
        link.on = self._hear

    def part_with(self) -> None:
        """Be lost to the others at once, before this process comes back as another one."""
        for donation in self._donations.values():
            self.link.stop_log(donation.log)
        self._drop_donations()
        self.link.part_with()
        self._over = None

    def come_back(self) -> None:
        """Be a newcomer, after the others have gone on without this process, or it no longer knows whether they have. Raises
        LinkError if there is no run to come back to, or it cannot be reached.
        """
        self.part_with()
        wire = self.context.wire()
        self.link.begin_again(self.context.meet(True, wire), wire)

    def get_base(self, folder: Path) -> Received:
        """Get a base from some member; the next one is asked if one is lost meanwhile, or falls silent.

        Raises:
            LinkError: no member gives one in time, or the run is over.
            CheckpointError: what comes is no base, or the disk refuses.
        """
        own, failures, regions = self.context.region, self._failures, self.context.regions
        if self._from is not None:  # the log after this base has ended too soon
            member, base = self._from
            base.close()
            self.link.post(member, "enough")
            failures[member] += 1
        until, last = time.monotonic() + regions.start_timeout_s, ""
        while time.monotonic() < until:
            if self._over is not None:
                raise over_in_words(self.context.name, self._over)
            members, num_unreached = self.link.donors, 0
            for member in sorted(members, key=lambda each: (failures[each], each.region < own, each)):
                try:
                    base = self._donors.base_of(
                        member,
                        folder,
                        timeout_s=regions.timeout_s,
                        stuck_timeout_s=min(regions.stuck_timeout_s, max(until - time.monotonic(), 0.0)),
                        most=self.context.largest_base,
                    )
                except DonorLost as error:
                    logger.warning("no base from region %d: %s", member.region, error)
                    self.link.post(member, "enough")  # it may keep a log for this region
                    num_unreached += error.is_unreached
                    failures[member], last = failures[member] + 1, f" The last one: {error}"
                    continue
                self._from = member, base
                return base.received
            failure = self.link.failure
            if isinstance(failure, RunOver):
                raise failure
            # they are lost, or miss this process, which stood still; or its connections were made while the network was away
            if failure is not None or num_unreached == len(members):
                sentence = f"region {own} reaches no region of the run. It looks for the run again."
                if self.context.is_one_voice:  # all its ranks come back together
                    raise LeftBehind(sentence)
                logger.warning("%s", sentence)
                self.come_back()
            time.sleep(_POLL_S)
        raise LinkError(
            f"no region gave a base to region {own} within {regions.start_timeout_s:g} s (regions.start_timeout_s).{last}"
        )

    def follow(self) -> None:
        """Answer calls from the log of the region that gave the base, which is loaded."""
        assert self._from is not None
        self._ready_at, self._approach = math.inf, Approach()
        self.link.follow(self._from[1].items)

    @property
    def source(self) -> Source:
        """From whom this region has its base, for its other ranks."""
        assert self._from is not None
        member, base = self._from
        return Source(member, base.offer, base.received)

    def follow_lane(self, source: Source) -> None:
        """On a rank other than the leader: answer calls from the log of the same rank of the region that gave the base."""
        self.has_followed()
        member, offer, received = source

        def alive() -> None:
            if not self._gives(member):
                raise DonorLost(f"region {member.region} is lost.")

        base = receive_log(
            offer,
            partial(self.link.stream, member),
            received,
            alive,
            self.context.regions.timeout_s,
            self.context.largest_base,
        )
        self._from = member, base
        self.link.follow(base.items)

    def ask_in(self, marker: Marker, round_steps: float) -> None:
        """All inner steps up to this marker are made, and this process is no member: it asks to be let in if it is near enough.
        Raises LeftBehind if it has long been ready and nobody lets it in.
        """
        link, now = self.link, time.monotonic()
        if not self._approach.is_near(marker.newest - marker.step, round_steps, now):
            return
        link.say_ready()
        if link.is_announced or not link.has_coordinator:
            self._ready_at = math.inf
        self._ready_at = min(self._ready_at, now)
        if now - self._ready_at > _LET_IN_S:
            raise LeftBehind(f"it has been ready for {now - self._ready_at:.0f} s, and nobody lets it in.")

    @property
    def came_from(self) -> dict[str, int]:
        """The region that gave the base from which this one has begun, and the base's inner step."""
        if self._from is None:
            return {}
        received = self._from[1].received
        return {"donor": received.donor, "base": received.step}

    def forget_base(self) -> None:
        """Delete the files of the base, which is loaded."""
        if self._from is not None:
            self._from[1].remove()

    def has_followed(self) -> None:
        """End the log, of which nothing is needed any more."""
        if self._from is not None:
            member, base = self._from
            self.link.post(member, "enough")
            base.close()
            self._from = None

    def give(self, member: Member, folder: Path, offer: Offer, about: Mapping[str, Any]) -> None:
        """Send a newcomer the base in `folder`, and from now on the log; on a rank other than the leader, the log alone."""
        context = self.context
        self._end_donation(member, "gone", "it has asked again")
        donation = Donation(
            folder,
            offer,
            partial(self.link.stream, member),
            about,
            f"region {member.region}",
            None if context.rate is None else context.rate / _SHARE,
            has_base=not self.is_other_lane,
        )
        self.link.log_to(donation.log)
        self._donations[member] = donation
        self.say_doing()
        if donation.has_base:
            self.link.post(member, "offer", **offer._asdict())

    def newcomers(self) -> tuple[Member, ...]:
        """Those that want a base now. One that has not heard an earlier offer hears it again."""
        self.reap()
        new = []
        for member in sorted(self.wants.copy()):  # the client's thread may change it meanwhile
            donation = self._donations.get(member)
            if donation is not None and donation.is_ending:  # until it has ended, there is no other base
                continue
            self.wants.discard(member)
            if donation is None or donation.over:
                new.append(member)
            else:
                self.link.post(member, "offer", **donation.offer._asdict())
        return tuple(new)

    def reap(self) -> None:
        """Forget newcomers that need nothing more."""
        for member, donation in list(self._donations.items()):
            if donation.over or not self.link.is_there(member):
                self.link.stop_log(donation.log)
                donation.close()
                del self._donations[member]
        self.say_doing()

    def leave(self) -> None:
        """Ask the coordinator to announce that this region leaves, which it has said in its trailers."""
        self._asks_to_leave = True
        self._answers_at = time.monotonic()
        self.link.send(Leave())

    @property
    def is_other_lane(self) -> bool:
        """Whether this is not the leader."""
        return self.context.is_one_voice and self.context.lane > 0

    @property
    def is_cut_off(self) -> bool:
        """Whether this region has asked to leave, and the coordinator has not been there for too long to answer."""
        if self.link.has_coordinator or not self._asks_to_leave:
            self._answers_at = time.monotonic()
        return time.monotonic() - self._answers_at > _LEAVE_WAIT_S

    def say_doing(self) -> None:
        """Let `hf-cocodc status` know what this region does besides training."""
        donated = ", ".join(f"region {each.region}" for each in self._donations)
        doing = "leaves" if self.leaves else f"sends a base to {donated}" if donated else ""
        self.link.beat = structs.replace(self.link.beat, doing=doing)

    def end(self, bye: Bye) -> None:
        """Call before the link is closed in good order; the link then says `bye`."""
        self.link.ending = bye
        if bye.how == "finished":
            for donation in self._donations.values():
                donation.close("over", "all steps are made")
        self._drop_donations()
        if self._from is not None:
            self._from[1].close()

    def _drop_donations(self) -> None:
        for donation in self._donations.values():
            donation.close()
            donation.join(_DONATION_END_S)
        self._donations.clear()

    def _hear(self, message: ToRegion) -> None:
        """Take a message of the coordinator, in the thread of its client."""
        match message:
            case Posted(sender=sender, topic="base"):
                self.wants.add(sender)
            case Posted(sender=sender, topic="enough"):
                self.wants.discard(sender)  # it may have given up before this region came to it
                self._end_donation(sender, "in", "it is in the run")
            case Posted(sender=sender, topic=topic, content=content):
                self._donors.hear(sender, topic, content)
            case Gone(member=member):
                self._end_donation(member, "gone", "it has gone")
            case Decided(decision=decision):
                for member in decision.lost:
                    self._end_donation(member, "gone", "it is lost")
            case Wanted(pulls=pulls):
                self.pulls = pulls
            case LeaveNow(why=why):
                self.leaves = self.leaves or why
                self.link.send(Heard())
            case Resumed() if self._asks_to_leave:
                self.link.send(Leave())
            case Over():
                self._over = message

    def _gives(self, member: Member) -> bool:
        """Whether a base of this member is worth waiting for."""
        return self._over is None and self.link.failure is None and self.link.is_there(member)

    def _end_donation(self, member: Member, how: str, why: str) -> None:
        donation = self._donations.get(member)
        if donation is not None:
            self.link.stop_log(donation.log)
            donation.close(how, why)


def lane_of(link: Link) -> RegionSession | None:
    """The side of this rank, which has a lane of its own or is the leader; None on other ranks, and without a network."""
    return link.session


def session_of(link: Link) -> RegionSession | None:
    """The leader's side of a run over a network; None on other ranks, and without a network."""
    own = lane_of(link)
    return None if own is None or own.is_other_lane else own


def over_in_words(name: str, over: Over) -> CocodcError:
    """The error of a newcomer whose run has ended before it came in."""
    kind, why = end_in_words(name, over, "there is nothing to join")
    return error_of(Refuse(error=kind, why=why))
