from dataclasses import replace

from msgspec import structs

from hf_cocodc.coordinator.messages import (
    Back,
    Beat,
    Gone,
    Hears,
    Hello,
    Leave,
    Paired,
    Place,
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
from hf_cocodc.coordinator.rules import VOID_S, Came, Ended, Event, Run, SendTo, Tick, step
from hf_cocodc.coordinator.state import with_time_to_return
from hf_cocodc.net.letters import Member


def hello(region: int, elastic: bool = False, join: bool = False, count: int = 2) -> Hello:
    terms = Terms(count=count, elastic=elastic, most=count)
    token = f"token{region}"
    return Hello(region=region, join=join, host="h", machine="m", token=token, terms=terms, compared={})


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

    def meet(self, elastic: bool) -> None:
        self.do(Came(1, hello(0, elastic)))
        self.do(Came(2, hello(1, elastic)))

    def back(self, who: int) -> Back:
        welcome = next(each for each in self.sent[who] if isinstance(each, Welcome))
        return Back(
            run=welcome.run,
            member=welcome.me,
            is_member=True,
            host="h",
            generation=welcome.generation,
            losses=0,
            changes=0,
            announced=(),
            members=tuple(Place(*each) for each in welcome.members),
            terms=self.state.terms,
            compared={},
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
        assert world.last(3) == Resumed(generation=1)


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
    assert world.state.run != old and world.state.generation == 2
    world.do(Came(5, structs.replace(world.back(1), run=old)))
    assert isinstance(world.last(5), Refuse) and world.last(5).error == "RunOver"


def test_a_second_run_of_a_name_does_not_push_out_a_fixed_one_that_trains() -> None:
    world = World()
    world.meet(elastic=False)
    run = world.state.run
    for who in (3, 4):
        world.do(Came(who, hello(who - 3)))
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
    world.do(Came(4, structs.replace(world.back(3), is_member=False)))
    world.do(Ended(4))
    assert not any(isinstance(each, Gone) for who in (1, 2) for each in world.sent[who])
    assert me in world.state.expected


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


def test_a_region_that_was_lost_is_no_member_when_it_calls_again() -> None:
    """Its own decisions may be those of a coordinator that has lost its memory."""
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
    world.state = replace(world.state, announced=(), newcomers={})
    world.do(Came(2, Leave()))
    world.do(Came(1, Beat(changes=2, members=world.state.members[:1])))
    assert not world.state.pairs


def test_members_have_time_to_find_a_coordinator_that_was_started_again() -> None:
    """One of them may notice it 15 s later than another one, which reports a loss at once."""
    world = World()
    for who, region in ((1, 0), (2, 1), (3, 2)):
        world.do(Came(who, hello(region, elastic=True, count=3)))
    backs = {who: world.back(who) for who in (1, 2, 3)}
    lost = backs[3].member
    world.state = with_time_to_return(replace(world.state, seats={}, away={}), world.now)
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
