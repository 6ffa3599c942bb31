from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from hf_cocodc.coordinator import rules
from hf_cocodc.coordinator.messages import (
    Back,
    Beat,
    Generation,
    Gone,
    Hears,
    Hello,
    Here,
    Leave,
    Paired,
    Post,
    Ready,
    Refuse,
    Report,
    Resumed,
    Suspect,
    Terms,
    Waiting,
    Welcome,
)
from hf_cocodc.coordinator.rules import (
    CALL_S,
    HERE_S,
    VOID_S,
    Came,
    CloseConnection,
    Ended,
    Event,
    Run,
    SendTo,
    StoodStill,
    Tick,
    restarted,
    step,
)
from hf_cocodc.coordinator.state import revived
from hf_cocodc.net.members import Member
from tests.listening import lanes


def hello(region: int, elastic: bool = False, join: bool = False, count: int = 2) -> Hello:
    terms = Terms(count=count, most=count, wait_s=3600.0 * elastic)
    token = f"token{region}"
    return Hello(region=region, join=join, lanes=lanes(), machine="m", token=token, terms=terms, compared={})


class World:
    """One run, and what each connection was sent."""

    def __init__(self) -> None:
        self.state, self.now = Run(name="run"), 0.0
        self.sent: dict[int, list[object]] = {}

    def do(self, event: Event) -> None:
        self.state, effects = step(self.state, event, self.now)
        for effect in effects:
            if isinstance(effect, SendTo):
                self.sent.setdefault(effect.to, []).append(effect.message)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.do(Tick())

    def last(self, who: int) -> object:
        return self.sent[who][-1]

    def starts_again(self, name: str = "b", has_copies: bool = True, **silent_s: float) -> None:
        """The coordinator is started again, with its file. `silent_s`: for which regions stood still, as `region0`."""
        silent = {each: silent_s.get(f"region{each.region}", 0.0) for each in self.state.members}
        self.state = restarted(revived(self.state, name), self.now, has_copies, silent)

    def of(self, count: int, **terms: Any) -> list[Member]:
        """A run of so many regions begins; their connections are 1, 2 and so on."""
        for region in range(count):
            said = hello(region, elastic=True, count=count)
            self.do(
                Came(
                    region + 1,
                    structs.replace(said, terms=structs.replace(said.terms, most=count + 1, **terms)),
                )
            )
        return list(self.state.members)

    def reports(self, who: int, *lost: Member, **what: Any) -> None:
        me, members = self.state.seats[who].member, self.state.members
        said = Report(number=0, member=me, first=1, done=0, has=False, lost=lost, members=members)
        self.do(Came(who, structs.replace(said, **what)))

    def meet(self, elastic: bool) -> None:
        self.do(Came(1, hello(0, elastic)))
        self.do(Came(2, hello(1, elastic)))

    def back(self, who: int) -> Back:
        welcome = next(each for each in self.sent[who] if isinstance(each, Welcome))
        return Back(
            run=welcome.run,
            member=welcome.me,
            token=welcome.token,
            generation=welcome.generation,
            losses=0,
            changes=0,
        )


def test_members_may_come_back_after_the_network_to_the_coordinator_was_down_for_a_minute() -> None:
    for elastic in (False, True):
        world = World()
        world.meet(elastic)
        for who in (1, 2):
            world.do(Ended(who))
        world.later(1.0)
        world.later(60.0)
        world.do(Came(3, world.back(1)))
        assert world.last(3) == Resumed(generation=world.state.generation)


def test_all_hear_which_connections_have_ended_and_who_has_called_again() -> None:
    world = World()
    world.meet(elastic=True)
    back = world.back(1)
    world.do(Ended(1))
    assert world.last(2) == Hears(member=back.member, hears=False)
    world.do(Came(3, back))
    assert world.last(2) == Hears(member=back.member, hears=True)
    world.later(0.1)
    world.do(Came(4, back))  # before the coordinator knows that the earlier connection has ended
    world.do(Ended(3))
    assert world.last(2) == Hears(member=back.member, hears=True)
    world.do(Ended(2))
    world.do(Came(5, world.back(1)))  # it hears who is away
    assert Hears(member=world.back(2).member, hears=False) in world.sent[5]


def test_new_regions_of_a_run_that_has_died_begin_anew() -> None:
    world = World()
    world.meet(elastic=True)
    old = world.state.run
    for who in (1, 2):
        world.do(Ended(who))
    world.later(VOID_S)
    for who in (3, 4):
        world.do(Came(who, structs.replace(hello(who - 3, elastic=True), token=f"new{who}")))
    assert isinstance(world.last(3), Welcome) and isinstance(world.last(4), Welcome)
    assert world.state.run != old and world.state.generation.number == 2
    world.do(Came(5, structs.replace(world.back(1), run=old)))
    assert isinstance(world.last(5), Refuse) and world.last(5).error == "RunOver"


def test_a_second_run_of_a_name_does_not_push_out_a_fixed_one_that_trains() -> None:
    world = World()
    world.meet(elastic=False)
    run = world.state.run
    for who in (3, 4):
        world.do(Came(who, hello(who - 3)))
        assert isinstance(world.last(who), Waiting) and "trains here already" in world.last(who).why
    assert world.state.run == run
    assert isinstance(world.last(4), Waiting) and "trains here already" in world.last(4).why
    for who in (1, 2):
        world.do(Ended(who))
    assert isinstance(world.last(3), Welcome) and isinstance(world.last(4), Welcome)


def test_all_regions_of_a_run_that_has_died_are_started_again_at_once_also_one_that_had_left() -> None:
    """It came in as a newcomer of the dead run, and the others waited for it in vain."""
    world = World()
    world.meet(elastic=True)
    world.state = replace(world.state, members=world.state.members[:1])  # region 1 has left
    for who in (1, 2):
        world.do(Ended(who))
    for who in (3, 4):
        world.do(Came(who, structs.replace(hello(who - 3, elastic=True), token=f"new{who}")))
    assert isinstance(world.last(4), Waiting)
    world.later(VOID_S)
    for who in (3, 4):
        welcome = world.last(who)
        assert isinstance(welcome, Welcome) and not welcome.joins


def test_a_newcomer_that_came_before_all_members_died_makes_room_for_the_new_run() -> None:
    """It held its number, and the others waited for it until regions.start_timeout_s."""
    world = World()
    world.meet(elastic=True)
    gone = world.state.members[1]
    world.state = replace(
        world.state, members=world.state.members[:1]
    )  # region 1 was lost, and is started again
    world.do(Ended(2))
    world.do(Came(3, structs.replace(hello(1, elastic=True), token="again")))
    assert isinstance(world.last(3), Welcome) and world.last(3).joins
    world.do(Ended(1))
    world.do(Came(4, structs.replace(hello(0, elastic=True), token="anew")))
    assert not isinstance(world.last(3), Refuse), "region 0 may only be on its way back"
    world.later(VOID_S)
    assert isinstance(world.last(3), Refuse) and world.last(3).error == "RunOver"
    assert "Start region 1 again, too." in world.last(3).why
    world.do(Ended(3))
    world.do(Came(5, structs.replace(hello(1, elastic=True), token="once more")))
    welcome = world.last(4)
    assert (
        isinstance(welcome, Welcome)
        and not welcome.joins
        and gone not in [each.member for each in welcome.members]
    )


def newcomer(world: World, who: int, region: int = 2) -> Member:
    """A newcomer that is announced: it is ready, and connected to all."""
    world.do(Came(who, structs.replace(hello(region, elastic=True, join=True, count=2), token=f"token{who}")))
    welcome = world.last(who)
    assert isinstance(welcome, Welcome) and welcome.joins
    for other, each in list(world.state.seats.items()):
        if other != who:
            world.do(Came(who, Paired(member=each.member)))
            world.do(Came(other, Paired(member=welcome.me)))
    world.do(Came(who, Ready()))
    assert world.state.announced[-1].member == welcome.me
    return welcome.me


def of_three() -> World:
    world = World()
    world.meet(elastic=True)
    world.state = replace(world.state, terms=structs.replace(world.state.terms, most=3))
    return world


def test_an_announced_newcomer_that_calls_again_is_still_announced() -> None:
    """The members may count it already: that it has gone is a loss, and nothing that they hear without a decision."""
    world = of_three()
    me = newcomer(world, 3)
    world.do(Ended(3))
    world.do(Came(4, world.back(3)))
    world.do(Ended(4))
    assert not any(isinstance(each, Gone) for who in (1, 2) for each in world.sent[who])
    assert me in world.state.expected


def test_nobody_is_introduced_to_one_that_has_left() -> None:
    """It may still be connected for a moment."""
    world = of_three()
    gone = world.state.members[1]
    world.do(Came(2, Leave()))
    world.do(Came(1, Beat(changes=1, members=world.state.members[:1])))
    world.do(Came(3, hello(2, elastic=True, join=True, count=2)))
    world.later(2 * HERE_S)
    assert [each.place.member.region for each in world.sent[3] if isinstance(each, Here)] == [0]
    assert not any(isinstance(each, Here) and each.place.member == gone for each in world.sent[3])


def test_who_has_left_is_no_member_by_its_own_last_sign_of_life() -> None:
    world = of_three()
    world.do(Came(2, Leave()))
    members = world.state.members
    world.do(Came(2, Beat(changes=1, members=members)))  # it has made the step, and counts itself
    assert world.state.members == members[:1] and world.state.applied == 1
    world.do(Ended(2))
    newcomer(world, 3)


def test_who_writes_to_one_that_has_left_hears_that_it_has_gone() -> None:
    """A newcomer asks another member for its base then, and not this one until regions.start_timeout_s."""
    world = of_three()
    gone = world.state.members[1]
    world.do(Came(2, Leave()))
    world.do(Came(1, Beat(changes=1, members=world.state.members[:1])))
    world.do(Ended(2))
    world.do(Came(1, Post(to=gone, topic="base", content={})))
    assert world.last(1) == Gone(member=gone)


def test_a_sign_of_life_makes_nobody_a_member_of_whom_nobody_has_heard() -> None:
    """Else nobody could be told how to reach all members, and the rules would fail at every newcomer."""
    world = of_three()
    members = world.state.members
    world.do(Came(1, Beat(changes=7, members=(*members, Member(3, 99)))))
    assert world.state.members == members
    assert newcomer(world, 9, region=3) in world.state.newcomers


def test_a_region_that_was_lost_is_no_member_when_it_calls_again() -> None:
    world = of_three()
    world.state = replace(world.state, lost=frozenset([world.state.members[1].ticket]))
    world.do(Ended(2))
    world.do(Came(4, world.back(2)))
    assert isinstance(world.last(4), Refuse) and world.last(4).error == "LeftBehind"
    assert 4 not in world.state.seats


def test_connections_of_processes_that_nobody_knows_are_not_kept() -> None:
    world = of_three()
    for ticket in range(1000):
        world.do(Came(1, Paired(member=Member(2, 100 + ticket))))
    assert not world.state.pairs
    newcomer(world, 3)
    assert world.state.pairs
    world.do(Came(1, Beat(changes=1, members=tuple(world.state.expected))))
    world.do(Came(2, Leave()))
    world.do(Came(1, Beat(changes=2, members=(world.state.members[0], world.state.members[2]))))
    assert len(world.state.pairs) == 2


def test_members_have_time_to_find_a_coordinator_that_was_started_again() -> None:
    """One of them may notice it 15 s later than another one, which reports a loss at once."""
    world = World()
    for who, region in ((1, 0), (2, 1), (3, 2)):
        world.do(Came(who, hello(region, elastic=True, count=3)))
    backs = {who: world.back(who) for who in (1, 2, 3)}
    lost = backs[3].member
    world.starts_again()
    world.do(Came(4, backs[1]))
    report = Report(
        number=0,
        member=backs[1].member,
        first=1,
        done=0,
        has=False,
        lost=(lost,),
        members=world.state.members,
    )
    world.do(Came(4, report))
    world.later(14.0)
    assert world.state.losses == 0
    world.do(Came(5, backs[2]))
    world.do(Came(5, structs.replace(report, member=backs[2].member, lost=())))
    world.later(CALL_S - 14.0)
    assert world.state.losses == 1 and world.state.members == (backs[1].member, backs[2].member)


def test_a_member_that_goes_in_the_middle_of_a_transfer_is_suspected() -> None:
    """Whoever waits for it is not late, but nothing moves: its connections may stay open without it."""
    world = World()
    world.meet(elastic=True)
    me, other = (world.state.seats[who].member for who in (1, 2))
    world.do(Ended(2))
    timeout_s = int(world.state.terms.timeout_s)
    for idle_s in range(timeout_s + 2):
        world.do(Came(1, Beat(op=3, awaits=other.region, idle_s=float(idle_s), members=(me, other))))
        assert not any(isinstance(each, Suspect) for each in world.sent[1]) or idle_s > timeout_s
        world.later(1.0)
    assert any(isinstance(each, Suspect) and each.member == other for each in world.sent[1])


def test_a_member_that_others_miss_has_time_to_call_a_coordinator_that_was_started_again() -> None:
    """Region 0 is faulty: it misses 1, and 2 misses it. Region 1 calls a moment later than both."""
    world = World()
    faulty, late, other = world.of(3)
    backs = {who: world.back(who) for who in (1, 2, 3)}
    world.starts_again()
    world.do(Came(4, backs[1]))
    world.do(Came(6, backs[3]))
    world.reports(4, late)
    world.reports(6, faulty)
    world.later(1.5)
    assert world.state.losses == 0
    world.do(Came(5, backs[2]))
    world.reports(5, faulty)
    assert world.state.members == (late, other)


def test_a_killed_process_costs_no_time() -> None:
    world = World()
    first, gone, last = world.of(3)
    world.do(Ended(2))
    world.reports(1, gone)
    world.reports(3, gone)
    assert world.state.members == (first, last)


def test_a_report_counts_while_its_reporter_is_connected() -> None:
    """Region 3 stands still, 2 is killed, and 0 and 1 are killed once they have reported."""
    world = World()
    *_, gone, frozen = world.of(4)
    world.do(Ended(3))
    for who in (1, 2):
        world.reports(who, gone)
    for who in (1, 2):
        world.do(Ended(who))
    assert world.state.asked_at is None
    world.later(16.0)
    world.reports(4, gone)
    world.later(6.0)
    assert world.state.members == (frozen,)


@pytest.mark.parametrize("is_missed", [False, True])
def test_a_connected_member_has_its_time_out_for_its_report(is_missed: bool) -> None:
    world = World()
    first, busy, gone = world.of(3, timeout_s=60.0)
    world.do(Ended(3))
    world.reports(1, gone, *([busy] if is_missed else []))
    world.later(50.0)
    world.do(Came(2, Beat()))
    assert world.state.losses == 0
    world.later(11.0)
    assert world.state.members == (first,)


def test_a_member_that_has_been_silent_for_its_time_out_is_not_waited_for_once_more() -> None:
    world = World()
    first, silent = world.of(2, timeout_s=60.0)
    world.later(61.0)
    world.reports(1, silent)
    assert world.state.members == (first,)


def test_all_that_are_stuck_are_lost_at_once() -> None:
    world = World()
    first, *stuck = world.of(4, timeout_s=60.0, stuck_timeout_s=1200.0)
    for at in range(0, 1240, 30):
        world.now = float(at)
        for who in (2, 3, 4):
            world.do(Came(who, Beat(step=7)))
        world.do(Came(1, Beat(step=9, op=3, awaits=1, waited_s=float(at), idle_s=1.0)))
    suspect = world.last(1)
    assert isinstance(suspect, Suspect) and suspect.how == "stuck"
    world.reports(1, suspect.member)
    world.reports(2)
    assert world.state.members == (first,) and "stuck" in " ".join(world.state.decisions[-1].whys)


@pytest.mark.parametrize("is_auto", [False, True])
def test_a_member_that_may_have_come_meanwhile_is_not_missed_with_another_one(is_auto: bool) -> None:
    """Where heartbeats take long, as through a storage, the last one of a member is from before the transfer."""
    for seen_at, is_missed in ((12.0, False), (15.5, True)):
        world = World()
        _, late, third = world.of(3, grace_s=5.0, grace_is_auto=is_auto)
        world.now = seen_at
        world.do(Came(3, Beat(step=9, op=2)))
        world.now = 16.0
        world.do(Came(1, Beat(step=9, op=3, awaits=1, waited_s=6.0, blocked_s=6.0)))
        world.reports(1, late)
        assert [each.decision.lost for each in world.state.decisions] == [(late, third)] * is_missed


def of_two_in_a_transfer(is_auto: bool) -> World:
    """Region 0 waits for region 1, which may be late by 5 s."""
    world = World()
    world.of(2, grace_s=5.0, grace_is_auto=is_auto)
    return world


def suspects(world: World) -> list[str]:
    return [each.how for each in world.sent[1] if isinstance(each, Suspect)]


@pytest.mark.parametrize("is_auto", [False, True])
def test_a_member_is_late_once_another_one_has_waited_for_it_for_the_grace(is_auto: bool) -> None:
    world = of_two_in_a_transfer(is_auto)
    for waited_s in (4.0, 5.0, 6.0):
        world.do(Came(1, Beat(step=9, op=3, awaits=1, waited_s=waited_s, blocked_s=waited_s)))
        assert suspects(world) == ["late"] * (waited_s > 5.0)


def test_the_overlap_hides_how_late_a_member_is() -> None:
    world = of_two_in_a_transfer(is_auto=True)
    for blocked_s in (None, 4.0):
        world.do(Came(1, Beat(step=9, op=3, awaits=1, waited_s=60.0, blocked_s=blocked_s)))
    assert suspects(world) == []


@pytest.mark.parametrize("is_auto", [False, True])
def test_who_has_come_to_a_transfer_is_not_late_however_long_that_takes(is_auto: bool) -> None:
    """`waited_s` is 0 then. Training waits for the link; or it has waited for another region, which is lost by now."""
    world = of_two_in_a_transfer(is_auto)
    for waited_s in (0.0, 0.5):
        world.do(Came(1, Beat(step=9, op=3, awaits=1, waited_s=waited_s, blocked_s=60.0)))
        world.later(0.2)
    assert suspects(world) == []


def test_nobody_is_late_before_training_begins() -> None:
    """One region may load a checkpoint for long that the others do not have."""
    world = of_two_in_a_transfer(is_auto=True)
    for made in (0, 1):
        world.do(Came(1, Beat(step=made, op=3, awaits=1, waited_s=60.0, blocked_s=60.0)))
        assert suspects(world) == ["late"] * made


def test_whoever_makes_steps_without_training_counts_nobody_late() -> None:
    """As a region does that leaves: it comes first to each transfer, and the others train meanwhile."""
    world = of_two_in_a_transfer(is_auto=False)
    world.do(Came(1, Beat(step=9, op=3, awaits=1, waited_s=60.0, coasts=True)))
    world.later(0.2)
    assert suspects(world) == []


@pytest.mark.parametrize("is_auto", [False, True])
def test_whoever_stands_still_itself_is_not_told_that_another_one_is_late(is_auto: bool) -> None:
    """Its heartbeats do not come: what it waits for may have come meanwhile, and lie unread."""
    world = of_two_in_a_transfer(is_auto)
    world.do(Came(1, Beat(step=9, op=3, awaits=1, waited_s=2.0, blocked_s=2.0)))
    for _ in range(20):
        world.later(1.0)
        world.do(Came(2, Beat(op=3)))
    assert suspects(world) == []


def test_regions_of_a_run_that_has_died_begin_anew_beside_a_newcomer_that_was_announced() -> None:
    world = of_three()
    newcomer(world, 3)
    for who in (1, 2):
        world.do(Ended(who))
    for who, region in ((5, 0), (6, 1)):
        world.do(Came(who, structs.replace(hello(region, elastic=True), token=f"again{region}")))
    world.later(VOID_S)
    for who in (5, 6):
        assert isinstance(world.last(who), Welcome) and not world.last(who).joins
    assert isinstance(world.last(3), Refuse)


def test_a_run_that_the_same_processes_begin_anew_is_another_one() -> None:
    """The coordinator was killed before they heard that they had met: they come again, each with the token that it has."""
    world = World()
    world.meet(elastic=True)
    first = world.state
    world.starts_again()
    for who, region in ((5, 0), (6, 1)):
        world.do(Came(who, hello(region, elastic=True)))
    world.later(CALL_S + VOID_S)
    assert world.state.run not in world.state.earlier and world.state.earlier == (first.run,)
    assert world.state.generation.name != first.generation.name
    back = world.back(5)
    world.do(Ended(5))
    world.do(Came(7, back))
    assert isinstance(world.last(7), Resumed)


def test_a_coordinator_with_the_file_of_another_run_says_nothing_about_this_one() -> None:
    world = World()
    world.meet(elastic=True)
    back, earlier = world.back(1), world.back(2)
    for file in (Run(name="run"), replace(world.state, run="another", earlier=("run-0",))):
        world.state = restarted(file, world.now, True)
        world.do(Came(7, back))
        assert isinstance(world.last(7), Waiting) and not world.state.seats
    world.do(Came(8, structs.replace(earlier, run="run-0")))
    assert world.last(8) == Refuse(
        error="RunOver", why="run 'run' has been begun anew while region 1 was away."
    )


@pytest.mark.parametrize("news", [{"losses": 1}, {"changes": 1}, {"generation": Generation(2, "a")}])
def test_a_coordinator_with_an_old_file_decides_nothing(news: dict[str, Any]) -> None:
    world = World()
    world.meet(elastic=True)
    back = world.back(1)
    world.starts_again("b")
    world.do(Came(7, structs.replace(back, **news)))
    assert isinstance(world.last(7), Waiting) and not world.state.seats


def test_of_two_coordinators_with_copies_of_one_file_at_most_one_decides() -> None:
    world = World()
    members = world.of(4)
    backs, file = {who: world.back(who) for who in (1, 2, 3, 4)}, world.state
    for name, here, decides in (("x", (1, 2), True), ("y", (3, 4), False), ("z", (2, 3, 4), True)):
        world.state = file
        world.starts_again(name)
        for who in here:
            world.do(Came(who + 10, backs[who]))
            world.reports(who + 10, *(each for each in members if each.region + 1 not in here))
        world.later(CALL_S + 1.0)
        assert world.state.losses == decides
        assert decides or isinstance(world.last(here[0] + 10), Waiting)


@pytest.mark.parametrize("region", [0, 1])
def test_one_with_a_state_that_has_no_copies_decides_whoever_calls_it(region: int) -> None:
    """Where regions meet in a storage: also if the one that served was half of them, or more."""
    world = World()
    members = world.of(2)
    back = world.back(region + 1)
    world.starts_again(has_copies=False)
    world.do(Came(9, back))
    world.reports(9, members[1 - region])
    world.later(CALL_S - 1.0)
    assert world.state.losses == 0
    world.later(2.0)
    assert world.state.members == (members[region],)
    world.state, _ = step(world.state, StoodStill(False), world.now)
    world.do(Came(10, structs.replace(back, losses=1, generation=world.state.generation)))
    assert not any(isinstance(each, Waiting) for each in world.sent[10])


@pytest.mark.parametrize(("silent_s", "waits_s"), [(0.0, CALL_S), (10.0, CALL_S - 10.0), (CALL_S, 0.0)])
def test_whoever_stood_still_before_a_coordinator_began_is_waited_for_less(
    silent_s: float, waits_s: float
) -> None:
    """It served, and another one has taken over because its count did not move, or because it has died."""
    world = World()
    world.of(3)
    backs = [world.back(who) for who in (2, 3)]
    world.starts_again(has_copies=False, region0=silent_s)
    for who, back in zip((11, 12), backs, strict=True):
        world.do(Came(who, back))
    again = hello(0, elastic=True, count=3)
    world.do(Came(13, structs.replace(again, token="again", terms=world.state.terms)))
    for who in (11, 12):
        world.reports(who)
    if waits_s:
        world.later(waits_s - 1.0)
        assert world.state.losses == 0
        world.later(2.0)
        for who in (11, 12):
            world.reports(who)
    assert [each.region for each in world.state.members] == [1, 2]
    assert isinstance(world.last(13), Welcome)


def test_a_coordinator_that_stood_still_begins_like_one_that_was_started_again() -> None:
    world = World()
    members = world.of(3)
    world.state, effects = step(world.state, StoodStill(True), 100.0)
    assert {each.to for each in effects if isinstance(each, CloseConnection)} == {1, 2, 3}
    assert world.state.uncalled == {*members} and not world.state.seats and world.state.losses == 0


def test_nobody_takes_the_place_of_another_process() -> None:
    world = World()
    world.meet(elastic=True)
    back = world.back(1)
    world.do(Ended(1))
    for wrong in ({"token": "guessed"}, {"generation": Generation(10**9, "x")}, {"losses": 10**9}):
        world.do(Came(7, structs.replace(back, **wrong)))
        assert world.state.seat_of(back.member) is None
    world.do(Came(8, back))
    assert world.state.seat_of(back.member) == 8


@pytest.mark.parametrize("region", [-1, 1024])
def test_a_region_that_cannot_exist_does_not_come_in(region: int) -> None:
    """The others could not read what they would hear of it."""
    world = World()
    world.meet(elastic=True)
    heard = len(world.sent[1])
    world.do(Came(3, hello(region, elastic=True, join=True)))
    refusal = world.last(3)
    assert isinstance(refusal, Refuse) and refusal.error == "InputError"
    assert f"region {region} does not exist" in refusal.why
    assert len(world.sent[1]) == heard and not world.state.newcomers and not world.state.hellos


def test_processes_that_are_not_connected_are_introduced_again() -> None:
    world = of_three()
    first, second = world.state.members
    world.do(Came(3, hello(2, elastic=True, join=True)))
    me = world.last(3).me  # type: ignore[attr-defined]
    for who, other in ((3, first), (1, me)):
        world.do(Came(who, Paired(member=other)))
    world.sent.clear()
    world.later(HERE_S)
    assert [each.place.member for each in world.sent[2]] == [me]  # type: ignore[attr-defined]
    assert [each.place.member for each in world.sent[3]] == [second]  # type: ignore[attr-defined]
    assert 1 not in world.sent


def test_regions_that_gather_are_compared_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with every message again: of many regions, that would be the square of their number."""
    compared: list[int] = []
    known = rules.first_difference

    def counted(first: int, mine: Any, second: int, theirs: Any) -> str | None:
        compared.append(second)
        return known(first, mine, second, theirs)

    monkeypatch.setattr(rules, "first_difference", counted)
    state, welcomes = Run(name="run"), 0
    for region in range(20):
        said = structs.replace(hello(region, count=20), token=f"token{region}")
        for event in (Came(region, said), Tick()):
            state, effects = rules.step(state, event, 0.0)
            welcomes += sum(isinstance(each.message, Welcome) for each in effects if isinstance(each, SendTo))
    assert compared == list(range(1, 20)) and welcomes == 20


def test_a_process_that_calls_again_takes_its_own_place() -> None:
    """The end of its first connection may not be known yet."""
    state, sent = Run(name="run"), []
    for who, region in ((0, 0), (5, 0), (1, 1)):
        state, effects = rules.step(state, Came(who, hello(region)), 0.0)
        sent += [(each.to, type(each.message)) for each in effects if isinstance(each, SendTo)]
    assert (5, Welcome) in sent and (1, Welcome) in sent and not any(kind is Refuse for _, kind in sent)


@pytest.mark.parametrize("theirs", ["waits for it", "encodes", "waits for a third"])
def test_the_network_between_two_is_down_only_if_each_waits_for_the_other(theirs: str) -> None:
    """One that encodes for longer than the time-out sends nothing, and nor does one that waits for a third region."""
    world = World()
    world.of(3, timeout_s=60.0, stuck_timeout_s=1200.0)
    awaited = {"waits for it": 0, "encodes": None, "waits for a third": 2}[theirs]
    for at in range(0, 120, 10):
        world.now = float(at)
        world.do(Came(2, Beat(op=3, awaits=awaited, idle_s=float(at))))
        world.do(Came(3, Beat(op=3, idle_s=1.0)))
        world.do(Came(1, Beat(op=3, awaits=1, idle_s=float(at))))
    cut = [each for each in world.sent[1] if isinstance(each, Suspect)]
    assert bool(cut) == (theirs == "waits for it") and all(each.how == "cut" for each in cut)
