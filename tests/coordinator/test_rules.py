from dataclasses import replace

from hf_cocodc.coordinator.messages import (
    Back,
    Beat,
    Hello,
    Place,
    Refuse,
    Resumed,
    Suspect,
    Terms,
    Waiting,
    Welcome,
)
from hf_cocodc.coordinator.rules import VOID_S, Came, Ended, Event, Run, Send, Tick, step


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
            if isinstance(effect, Send):
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


def test_new_regions_of_a_run_that_has_died_begin_anew() -> None:
    world = World()
    world.meet(elastic=True)
    old = world.state.run
    for who in (1, 2):
        world.do(Ended(who))
    world.later(VOID_S)
    for who in (3, 4):
        world.do(Came(who, replace(hello(who - 3, elastic=True), token=f"new{who}")))
    assert isinstance(world.last(3), Welcome) and isinstance(world.last(4), Welcome)
    assert world.state.run != old and world.state.generation == 2
    world.do(Came(5, replace(world.back(1), run=old)))
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
        world.do(Came(who, replace(hello(who - 3, elastic=True), token=f"new{who}")))
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
    world.do(Came(3, replace(hello(1, elastic=True), token="again")))
    assert isinstance(world.last(3), Welcome) and world.last(3).joins
    world.do(Ended(1))
    world.do(Came(4, replace(hello(0, elastic=True), token="anew")))
    assert not isinstance(world.last(3), Refuse), "region 0 may only be on its way back"
    world.later(VOID_S)
    assert isinstance(world.last(3), Refuse) and world.last(3).error == "RunOver"
    assert "Start region 1 again, too." in world.last(3).why
    world.do(Ended(3))
    world.do(Came(5, replace(hello(1, elastic=True), token="once more")))
    welcome = world.last(4)
    assert (
        isinstance(welcome, Welcome)
        and not welcome.joins
        and gone not in [each.member for each in welcome.members]
    )


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
