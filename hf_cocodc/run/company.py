"""How a region's leader is in an elastic run: it meets the others or joins them, and newcomers get what they need from it."""

import logging
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..errors import DonorLost, LeftBehind, LinkError
from ..links.elastic import ElasticLink
from ..links.log import Marker
from ..links.terms import Reach, State, Terms
from ..meeting import live
from ..meeting.board import take_ticket
from ..meeting.presence import Member
from ..meeting.values import number_of, text_of
from .asking import Asking
from .base import Base, Received
from .donor import Donation
from .place import Agreeing, Place, connected, find_again, say_why_it_waits

logger = logging.getLogger(__name__)

_AGAIN_S = 2.0
_POLL_S = 0.1
_SHARE = 4
"""A base and its log have this part of the rate limit."""


class Company:
    """The leader's side of an elastic run.

    Args:
        place: of this region.
        run: unique to the run.
        reach: how this process reaches the others.
        addresses: where the presence of the other members listens.

    Attributes:
        link: reaches the other regions.
        presence: of this process; another one after the region has come back.
        wants: newcomers that want a base of this region.
        leaves: why this region was asked to leave; empty if it was not.
    """

    def __init__(self, place: Place, run: str, reach: Reach, addresses: Mapping[Member, str]) -> None:
        self.place, self.run = place, run
        regions = place.regions
        terms = Terms(place.store, run, regions.max, regions.grace_s)
        self.link = ElasticLink(reach, terms, timeout_s=regions.timeout_s, pin_memory=place.pin_memory)
        self.wants: deque[Member] = deque()
        self.leaves = ""
        self.max_steps: int | None = None
        self.landed: tuple[int, float] | None = None
        self._gifts: dict[Member, Donation] = {}
        self._from: tuple[Member, Base] | None = None
        self._failures: Counter[Member] = Counter()
        self._take(reach, addresses)
        self._moved = 0, time.monotonic()
        self._publisher = live.Publisher(
            place.steady_store(),
            place.name,
            lambda: (self.run, self.presence.me.ticket),
            self._record,
            self._asked_to_leave,
        )

    @classmethod
    def met(cls, place: Place, run: str) -> "Company":
        """Connect to all regions that have met at the start.

        Raises:
            LinkError: a region cannot be reached.
        """
        regions, store = place.regions, place.store()
        assert regions.count is not None
        presence = place.presence(run, Member(place.region, take_ticket(store)))
        store.set(f"{run}/presence/{place.region}", f"{presence.me.ticket} {presence.address}")
        addresses = {}
        for region in range(regions.count):
            said = store.get(key := f"{run}/presence/{region}")
            addresses[Member(region, number_of(said, key))] = text_of(said, key).partition(" ")[2]
        presence.connect(addresses, time.monotonic() + regions.timeout_s)
        reach = place.reach(run, presence, tuple(sorted(addresses)))
        reach.wire.connect_all(regions.count, f"{run}/wire", store)
        return cls(place, run, reach, addresses)

    @classmethod
    def joined(cls, place: Place, record: live.Record) -> "Company":
        """Connect to the members of a run that trains, as a newcomer.

        Raises:
            HandshakeError: this region differs from them.
            MeetingError: they refuse it.
            LinkError: one cannot be reached.
        """
        presence, addresses, record = connected(place, record)
        reach = place.reach(record.run, presence, None, record.losses)
        company = cls(place, record.run, reach, addresses)
        company._pair(addresses)
        return company

    def come_back(self) -> None:
        """Be a newcomer, after the others have gone on without this process, or it no longer knows whether they have.

        Raises:
            LinkError: there is no run to come back to, or it cannot be reached.
        """
        self._drop_gifts()
        self._pair(self._reach_again())

    def _reach_again(self) -> Mapping[Member, str]:
        """Leave, and be connected to the members as another newcomer. Returns their addresses."""
        self.link.part()
        presence, addresses, record = connected(self.place, find_again(self.place, self.run))
        reach = self.place.reach(self.run, presence, None, record.losses)
        self._take(reach, addresses)
        self.link.begin_again(reach)
        return addresses

    def _pair(self, members: Collection[Member]) -> None:
        """Make the connections for transfers with all members. One of them may be lost meanwhile: then it begins again."""
        until = time.monotonic() + self.place.regions.start_timeout_s
        while True:
            try:
                self.link.pair_with(members)
                return
            except LinkError as error:
                left_s = until - time.monotonic()
                if left_s < 0:
                    raise
                say_why_it_waits(self.place.region, str(error), left_s)
                members = self._reach_again()

    def _meet(self) -> None:
        """Connect to members that have come in since this newcomer asked. Those that are lost meanwhile are no strangers.

        Raises:
            LeftBehind: one cannot be reached, keeps refusing this newcomer, or is lost while they connect.
        """
        deadline, last = time.monotonic() + self.place.regions.timeout_s, ""
        store = self.place.steady_store()
        while missing := [each for each in self.link.strangers if each not in self.presence.members]:
            if time.monotonic() > deadline:
                raise LeftBehind(
                    f"region {missing[0].region} came in a moment ago, and cannot be reached{last}."
                )
            pause_s = _POLL_S
            try:
                record = live.read(store, self.place.name)
                found = {Member(m.region, m.ticket): m.address for m in record.members} if record else {}
                wanted = {member: found[member] for member in missing if member in found}
                self.presence.connect(wanted, min(deadline, time.monotonic() + _AGAIN_S), {})
                self._addresses |= wanted
            except LinkError as error:  # it is lost, refuses this newcomer for now, or the store is away
                last, pause_s = f" ({str(error).rstrip('.')})", _AGAIN_S / 4
            time.sleep(pause_s)
        try:
            self.link.pair_with(self.link.strangers)
        except LinkError as error:  # a second try needs another ticket: the key at the store is used
            raise LeftBehind(str(error)) from error

    def get_base(self, folder: Path) -> Received:
        """Get a base from some member. The next member is asked if one is lost meanwhile, or falls silent.

        Raises:
            LinkError: no member gives one in time.
            CheckpointError: what comes is no base, or the disk refuses.
        """
        own, failures = self.place.region, self._failures
        if self._from is not None:  # the log after this base has ended too soon
            member, base = self._from
            base.close()
            failures[member] += 1
        until, last = time.monotonic() + self.place.regions.start_timeout_s, ""
        while time.monotonic() < until:
            for member in sorted(
                self.presence.members, key=lambda each: (failures[each], each.region < own, each)
            ):
                try:
                    base = self._asking.base_of(member, self._addresses.get(member, ""), folder)
                except DonorLost as error:
                    logger.warning("no base from region %d: %s", member.region, error)
                    failures[member], last = failures[member] + 1, f" The last one: {error}"
                    continue
                self._from = member, base
                return base.received
            # they are lost, or have ended, or miss this process, which stood still
            if not self.presence.members:
                logger.warning(
                    "region %d has lost all regions that it had reached. It looks for the run again.", own
                )
                self._pair(self._reach_again())
            time.sleep(_POLL_S)
        raise LinkError(
            f"no region gave a base to region {self.place.region} within {self.place.regions.start_timeout_s:g} s "
            f"(regions.start_timeout_s).{last}"
        )

    def follow(self) -> None:
        """Answer calls from the log of the region that gave the base, which is loaded."""
        assert self._from is not None
        self.link.follow(self._from[1].items)

    def applies(self, marker: Marker) -> bool:
        """All inner steps up to this marker are made. Returns whether this process is a member now."""
        is_member = self.link.apply(marker)
        if self.link.strangers:  # a member has none
            self._meet()
            is_member = self.link.apply(marker)
        return is_member

    @property
    def came_from(self) -> dict[str, int]:
        """The region that gave the base from which this one has begun, and the base's inner step."""
        if self._from is None:
            return {}
        received = self._from[1].received
        return {"donor": received.donor, "base": received.step}

    def forget_base(self) -> None:
        """The base is loaded: its files are needed no more."""
        if self._from is not None:
            self._from[1].remove()

    def has_followed(self) -> None:
        """Nothing of the log is needed any more."""
        if self._from is not None:
            member, base = self._from
            self.presence.tell(member, "enough")
            base.close()
            self._from = None

    def give(self, member: Member, folder: Path, step: int, about: Mapping[str, Any]) -> None:
        """Send a newcomer the base in `folder`, and from now on the log."""
        rate = None if self.place.rate is None else self.place.rate / _SHARE
        to = f"region {member.region}", rate, self.place.prove
        gift = Donation(folder, self.place.host, step, about, *to)
        self.link.log_to(gift.log)
        self._gifts[member] = gift
        self._say_doing()
        self.presence.tell(member, "offer", **gift.offer._asdict())

    def refuse_base(self, member: Member, why: str) -> None:
        """Tell a newcomer that it gets no base here."""
        self.presence.tell(member, "no_base", why=why)

    def reap(self) -> None:
        """Forget newcomers that need nothing more."""
        for member, gift in list(self._gifts.items()):
            if gift.over:
                self.link.stop_log(gift.log)
                del self._gifts[member]
        self._say_doing()

    def close(self, has_ended: bool, has_stopped: bool) -> None:
        """Before the link is closed; `has_ended`: all steps of the run are made; `has_stopped`: all regions stop here."""
        for gift in self._gifts.values():
            if has_ended:
                gift.close("over", "all steps are made")
        self._drop_gifts()
        if self._from is not None:
            self._from[1].close()
        self._publisher.close(ended=has_ended or has_stopped)

    def _drop_gifts(self) -> None:
        for gift in self._gifts.values():
            self.link.stop_log(gift.log)
            gift.close()
            gift.join(_AGAIN_S)
        self._gifts.clear()

    def _say_doing(self) -> None:
        """Let the others, and `hf-cocodc status`, know what this region does besides training."""
        gifts = ", ".join(f"region {each.region}" for each in self._gifts)
        self.presence.doing = "leaves" if self.leaves else f"sends a base to {gifts}" if gifts else ""

    def _take(self, reach: Reach, addresses: Mapping[Member, str]) -> None:
        """Reach the others in this way."""
        self.presence = presence = reach.presence
        assert isinstance(reach.agree, Agreeing)
        self._agreeing = reach.agree
        self._addresses = {**addresses, presence.me: presence.address}
        self._asking = Asking(self.place, presence)
        presence.on("connected", self._connected)
        presence.on("base", lambda member, content: self.wants.append(member))
        presence.on("enough", self._has_enough)

    def _connected(self, member: Member, hello: Mapping[str, Any]) -> None:
        if isinstance(hello.get("address"), str):
            self._addresses[member] = hello["address"]

    def _has_enough(self, member: Member, content: Mapping[str, Any]) -> None:
        gift = self._gifts.get(member)
        if gift is not None:
            gift.close("in", "it is in the run")

    def _asked_to_leave(self, why: str) -> None:
        self.leaves = why or "it was asked to leave"

    def _record(self) -> live.Record | None:
        """What this run says of itself."""
        link, regions, changes = self.link, self.place.regions, self._agreeing.changes
        if changes is None:  # it comes back, and is about to have them
            return None
        changes.refill()
        epoch = link.epoch
        if link.state is not State.MEMBER:
            return None
        newest = {member.region: member for member in sorted(self._addresses)}
        members = [self._standing(newest[region]) for region in epoch.members if region in newest]
        step, at = self.landed or (None, 0.0)
        return live.Record(
            run=self.run,
            name=self.place.name,
            epoch=epoch.number,
            losses=changes.number,
            members=tuple(members),
            count=regions.count or 1,
            least=regions.min or 1,
            most=regions.max or 1,
            max_steps=self.max_steps,
            landed_at=step,
            landed_s=time.monotonic() - at if step is not None else 0.0,
            hello=dict(self.place.hello),
        )

    def _standing(self, member: Member) -> live.Standing:
        presence, seen = self.presence, self.presence.seen(member.region)
        known: dict[str, Any] = {}
        if member == presence.me:
            step, now = presence.inner_step, time.monotonic()
            self._moved = self._moved if step == self._moved[0] else (step, now)
            known = {"step": step, "moved_s": now - self._moved[1]}
            known |= {"awaits": presence.awaits, "doing": presence.doing}
        elif seen is not None:
            names = ("behind", "moved_s", "awaits", "doing")
            known = {"step": seen.inner_step, **{name: getattr(seen, name) for name in names}}
        address = self._addresses[member]
        return live.Standing(region=member.region, ticket=member.ticket, address=address, **known)
