"""A newcomer takes a base and follows the log, until the members admit it: from then on it is one of them."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from hf_cocodc.errors import LeftBehind, LinkError
from hf_cocodc.links.elastic import ElasticLink
from hf_cocodc.links.log import Log, Marker
from hf_cocodc.links.terms import State
from hf_cocodc.links.trailer import Trailer
from hf_cocodc.meeting.presence import Member
from hf_cocodc.meeting.verdict import Decision
from tests.links.memory import PATIENCE_S, Died, FakePresence, Fault, Regions, wait_until
from tests.links.training import METHODS, Trained, check, method_of

STEPS = 20


@dataclass
class Base:
    """What a donor gives."""

    state: dict[str, Any]
    log: Log


@dataclass
class Desk:
    """Where a newcomer asks for a base, and a donor leaves it."""

    wanted: threading.Event = field(default_factory=threading.Event)
    given: threading.Event = field(default_factory=threading.Event)
    base: Base | None = None

    def serve(self, trained: Trained) -> None:
        """At the end of an inner step of the donor."""
        if self.wanted.is_set() and not self.given.is_set():
            state = copy.deepcopy(trained.sync.state_dict())
            self.base = Base(state, Log(1 << 20))
            trained.link.log_to(self.base.log)
            self.given.set()

    def ask(self) -> Base:
        self.wanted.set()
        assert self.given.wait(PATIENCE_S)
        if self.base is None:
            raise LinkError("the donor has died")
        return self.base


def connects(presence: FakePresence, members: list[Member]) -> bool:
    """Whether the members let a newcomer connect. They do not before they know that the region's last process is lost."""
    try:
        presence.connect(members)
    except LinkError as error:
        if "try again" not in str(error):
            raise
        return False
    return True


def come_in(
    regions: Regions, link: ElasticLink, name: str, desk: Desk, own: Trained | None = None
) -> Trained:
    """Join the run: returns when the members have admitted this region. `own`: of a process that comes back."""
    gone = {member for decision in regions.hub.decisions for member in decision.lost}
    members = [
        member for member in regions.first if member.ticket not in regions.hub.dead and member not in gone
    ]
    presence = regions.hub.presences[link._life.me]
    wait_until(lambda: connects(presence, members))
    link.pair_with(members)
    base = desk.ask()
    if own is None:
        trained = Trained(link, method_of(name), base.state)
        trained.sync.take_over()
    else:
        trained = own
        trained.sent, trained.digests, trained.epochs = {}, {}, []  # as those of a new one
        trained.sync.catch_up(base.state, keep=True)
        assert trained.sync.inner_step == base.state["inner_step"]
    link.follow(base.log)
    while True:
        marker = link.next_marker(PATIENCE_S)
        assert marker is not None
        while trained.sync.inner_step < marker.step:
            trained.train(link.region, trains=False)
        if link.apply(marker):
            return trained
        if link.strangers:  # one that has died, and the others do not know it yet
            wait_until(lambda: not link.strangers)
            link.apply(marker)


def train_with_newcomer(name: str, faults: list[Fault] | None = None) -> tuple[Regions, dict[int, Any]]:
    """Two regions train; a third one comes in."""
    regions, desk = Regions(2, faults or []), Desk()
    late = regions.newcomer(2)
    regions.links.append(late)

    hub = regions.hub

    def has_died(link: ElasticLink) -> bool:
        return link._life.me.ticket in hub.dead

    def body(region: int, link: ElasticLink) -> tuple[Trained, int]:
        try:
            return live(region, link)
        except LinkError as error:  # without its donor it would ask another one
            if link is not late or not hub.dead or link.state is State.MEMBER:
                raise AssertionError(f"region {region}: {error}") from error
            hub.kill(link._life.me)
            raise Died from None

    def live(region: int, link: ElasticLink) -> tuple[Trained, int]:
        trained = come_in(regions, link, name, desk) if link is late else Trained(link, method_of(name))
        for _ in range(trained.sync.inner_step, STEPS):
            trained.train(region)
            if link is not late and trained.sync.inner_step >= 3:
                wait_until(lambda: desk.wanted.is_set() or has_died(late))
                if region == 0:
                    desk.serve(trained)
                if trained.sync.inner_step >= 6:
                    wait_until(lambda: link.admits or 2 in link.members or has_died(late) or has_died(link))
        return trained, trained.finish()

    def end_log() -> None:
        """The log ends with its donor."""
        if desk.base is not None:
            desk.base.log.close()
        desk.given.set()

    hub.when_dead[regions.first[0]] = end_log
    return regions, regions.run(body)


@pytest.mark.parametrize("name", METHODS)
def test_a_newcomer_becomes_a_member(name: str) -> None:
    """Its global params equal the members' from its base on, and its outer gradients count from its admission on."""
    _, found = train_with_newcomer(name)
    assert found.keys() == {0, 1, 2}
    newcomer = found[2][0]
    assert newcomer.link.state is State.MEMBER
    assert newcomer.link.members == found[0][0].link.members == (0, 1, 2)
    check(name, found)
    last = [sent.arrival for sent in newcomer.sent.values() if sent.arrival][-1]
    assert last.members == (0, 1, 2)
    kinds = [kind for kind, _ in found[0][0].link.events]
    assert kinds == ["join", "epoch"]


@pytest.mark.parametrize("struck", [0, 1, 2], ids=["donor", "member", "newcomer"])
@pytest.mark.parametrize("name", ["streaming", "dilocox"])
def test_a_region_dies_while_a_newcomer_comes_in(name: str, struck: int) -> None:
    """At any point: the others train on, and whoever comes to the end is equal to them."""
    _check_deaths(name, struck, every=25)


@pytest.mark.slow
@pytest.mark.parametrize("struck", [0, 1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_a_region_dies_at_more_points_while_a_newcomer_comes_in(name: str, struck: int) -> None:
    _check_deaths(name, struck, every=9)


@pytest.mark.parametrize(
    "at", [pytest.param(30, marks=pytest.mark.slow), 40, pytest.param(51, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("keeps", [False, True], ids=["anew", "with its own steps"])
@pytest.mark.parametrize("name", METHODS)
def test_a_region_without_which_the_others_went_on_comes_back(name: str, keeps: bool, at: int) -> None:
    """It was frozen; on waking up it hears that it was left behind, follows the log, and takes part again.

    Its engine is a new one, or goes on with what it has trained and the others do not have.
    """
    regions, desk = Regions(3, [Fault(1, at, "freezes")]), Desk()
    hub = regions.hub

    def wake_up() -> None:
        wait_until(lambda: hub.ended or all(regions.links[other].members == (0, 2) for other in (0, 2)))
        hub.thaw(1)

    threading.Thread(target=wake_up, daemon=True).start()

    def body(region: int, link: ElasticLink) -> tuple[Trained, int]:
        trained = Trained(link, method_of(name))
        while trained.sync.inner_step < 2 * STEPS:
            try:
                trained.train(region)
            except LeftBehind:
                assert region == 1 and link.state is State.OUT
                with pytest.raises(LeftBehind):
                    link.gather(Trailer(), "anything")
                regions.come_back(link)
                trained = come_in(regions, link, name, desk, trained if keeps else None)
            if region == 0:
                desk.serve(trained)
                if trained.sync.inner_step >= STEPS:
                    wait_until(lambda: hub.decisions)
                    wait_until(lambda: desk.given.is_set() or desk.wanted.is_set())
                    desk.serve(trained)
                    wait_until(lambda: link.admits or link.members == (0, 1, 2))
        return trained, trained.finish()

    found = regions.run(body)
    assert found.keys() == {0, 1, 2}
    assert all(trained.link.members == (0, 1, 2) for trained, _ in found.values())
    check(name, found)
    kinds = {
        region: [kind for kind, _ in found[region][0].link.events if kind != "retry"] for region in (0, 2)
    }
    assert any("late" in each for each in kinds.values())
    for each in kinds.values():
        assert [kind for kind in each if kind != "late"] == ["epoch", "join", "epoch"]


def _check_deaths(name: str, struck: int, every: int) -> None:
    regions, _ = train_with_newcomer(name)
    for at in range(1, regions.hub.points[struck] + 1, every):
        _, found = train_with_newcomer(name, [Fault(struck, at)])
        try:
            assert {0, 1} - {struck} <= found.keys()
            check(name, found)
        except AssertionError as error:
            raise AssertionError(f"{name}, region {struck} at point {at}: {error}") from error


def test_a_newcomer_connects_anew_to_a_member_that_was_restarted() -> None:
    """Its connections to the process before do not count: over them it would wait for the new one for ever."""
    regions = Regions(2)
    late, again = regions.newcomer(2), regions.newcomer(1)
    me, restarted = late._life.me, again._life.me
    presence = regions.hub.presences[me]
    presence.connect(regions.first)
    late.pair_with(regions.first)
    late.follow(Log(1 << 20))
    members = (regions.first[0], restarted)
    presence.meet(regions.hub.presences[restarted])
    wait_until(lambda: restarted in presence.members)
    assert not late.apply(Marker(0, 0, 2, 0, members, (), ()))
    assert late.strangers == [restarted]
    late.pair_with(late.strangers)
    assert late.strangers == []
    assert late._life.wire._pairs[1].members == {me.ticket, restarted.ticket}  # type: ignore[attr-defined]
    regions.hub.end()


def test_a_newcomer_that_hears_of_a_loss_from_the_log_first_goes_on() -> None:
    """It has frozen until the decision. The log tells it the same, and the decision comes when it is a member already."""
    regions = Regions(2)
    late = regions.newcomer(2)
    life, lost = late._life, tuple(regions.first)
    decision = Decision(number=0, members=(life.me,), lost=lost, done=6)
    regions.hub.decisions.append(decision)
    late.follow(Log(1 << 20))
    life._freeze()
    tickets = tuple(member.ticket for member in lost)
    assert late.apply(Marker(4, 6, 2, 1, (life.me,), tickets, (life.me.ticket,)))
    life._decided(decision)
    found: list[Any] = []
    threading.Thread(target=lambda: found.append(late.gather(Trailer(), "who is there")), daemon=True).start()
    wait_until(lambda: found)
    assert len(found[0]) == 1
    regions.hub.end()


def test_a_newcomer_that_is_lost_before_it_knows_that_it_is_in_begins_again() -> None:
    """Members have let it in, and missed it at once; it still has inner steps to make up to the marker that lets it in."""
    regions = Regions(2)
    late = regions.newcomer(2)
    life = late._life
    late.follow(Log(1 << 20))
    members = (*regions.first, life.me)
    life._decided(Decision(number=0, members=tuple(regions.first), lost=(life.me,), done=6))
    with pytest.raises(LeftBehind, match="have gone on without region 2"):
        late.apply(Marker(4, 6, 1, 0, members, (), (life.me.ticket,)))
    assert life.state is State.OUT
    regions.hub.end()
