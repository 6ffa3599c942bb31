"""The rules of a member: losses, changes, newcomers and fixed runs, without sockets, threads or clocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from hf_cocodc.coordinator.messages import (
    Announce,
    Ask,
    Back,
    Beat,
    Change,
    Decided,
    Decision,
    Generation,
    Gone,
    Hears,
    Here,
    Paired,
    Place,
    Refuse,
    Report,
    Resumed,
    Suspect,
    Terms,
    Waiting,
    Welcome,
)
from hf_cocodc.errors import LeftBehind, LinkError, RegionLostError, RunOver
from hf_cocodc.link.part import Call, Part, Standing, back, beat, enter
from hf_cocodc.link.rules import (
    LATE,
    Abandon,
    Again,
    AllHeld,
    Away,
    Begin,
    Complete,
    Connect,
    Connected,
    Disconnect,
    Drop,
    Effect,
    Event,
    Fail,
    Followed,
    HangUp,
    HeardFrom,
    Held,
    Landed,
    Led,
    Made,
    Marked,
    Missed,
    NoMoreCalls,
    NotConnected,
    Switched,
    Tell,
    Ticked,
    Waited,
    step,
    why_lost,
)
from hf_cocodc.net.members import Member
from tests.listening import lanes

A, B, C, NEW = Member(0, 1), Member(1, 2), Member(2, 3), Member(3, 4)
ALL = (A, B, C)
FIRST, FOURTH = Generation(1, "first"), Generation(4, "fourth")


class Process:
    """A process, and what its rules have asked for since it was last looked at."""

    def __init__(
        self, elastic: bool = True, me: Member = A, standing: Standing = Standing.MEMBER, changes: int = 0
    ) -> None:
        roster = ALL if standing is Standing.MEMBER else ()
        terms = Terms(count=3, wait_s=3600.0 * elastic)
        self.part = Part(
            me=me,
            terms=terms,
            standing=standing,
            roster=roster,
            changes=changes,
            generation=FIRST,
            lanes=dict.fromkeys((*ALL, me), lanes()),
        )

    def do(self, *events: Event) -> list[Effect]:
        """What follows from these events."""
        effects: list[Effect] = []
        for event in events:
            self.part, found = step(self.part, event)
            effects += found
        return effects

    def land(self, what: str = "mean") -> None:
        """Make a call that completes in all members."""
        number, losses = self.part.submitted + 1, self.part.losses
        *_, last = self.do(Made(what), Held(number, losses), AllHeld(number, losses))
        assert isinstance(last, Complete)


def call(number: int, what: str, losses: int = 0, parties: tuple[Member, ...] = ALL, **more: bool) -> Call:
    return Call(
        number=number,
        what=what,
        members=ALL,
        changes=0,
        losses=losses,
        parties=parties,
        **{"begun": True, **more},
    )


def report(number: int = 0, done: int = 0, has: bool = False, **more: object) -> Tell:
    """What A says."""
    told = {"member": A, "first": 1, "members": ALL, **more}
    return Tell(Report(number=number, done=done, has=has, **told))  # type: ignore[arg-type]


def report_of(process: Process) -> Report:
    """What it says when the coordinator asks."""
    *_, send = process.do(asked(process.part.losses))
    assert isinstance(send, Tell) and isinstance(send.message, Report)
    return send.message


def asked(number: int) -> HeardFrom:
    return HeardFrom(Ask(number=number))


def decided(number: int, done: int, *lost: Member) -> HeardFrom:
    members = tuple(each for each in ALL if each not in lost)
    decision = Decision(number=number, members=members, lost=lost, done=done)
    return HeardFrom(Decided(generation=FIRST, decision=decision, whys=("it is cut off",) * len(lost)))


def change(number: int, kind: str, member: Member) -> HeardFrom:
    return HeardFrom(Announce(generation=FIRST, change=Change(number=number, kind=kind, member=member)))


# ---- calls


def test_one_call_is_in_hand_at_a_time() -> None:
    """Whoever holds a result waits until all say that they do; then the next call begins."""
    process = Process()
    assert process.do(Made("one"), Made("two")) == [Begin(1, 0, ALL)]
    assert process.do(Held(1, 0)) == []
    assert process.do(AllHeld(1, 0)) == [Complete(call(1, "one", has=True)), Begin(2, 0, ALL)]
    assert (process.part.submitted, process.part.done) == (2, 1)


def test_words_of_another_attempt_change_nothing() -> None:
    """Nor does it complete what this process does not hold itself, though all others do."""
    process = Process()
    process.do(Made("one"), Made("two"))
    before = process.part
    for event in (
        Held(2, 0),
        Held(1, 1),
        AllHeld(1, 0),
        AllHeld(2, 0),
        Missed(1, 1, B, ""),
        Missed(1, 0, NEW, ""),
    ):
        assert process.do(event) == []
    assert process.part == before


# ---- losses


def test_a_member_that_misses_another_freezes_and_reports() -> None:
    """Nothing completes before the decision, neither what it holds nor what comes later."""
    process = Process()
    process.do(Made("one"), Held(1, 0))
    told = report(has=True, lost=(B,), whys=("it is cut off",))
    assert process.do(Missed(1, 0, B, "it is cut off")) == [Abandon(), told]
    assert process.do(AllHeld(1, 0), Made("two")) == []
    assert process.part.frozen and process.part.done == 0


def test_who_is_asked_freezes_and_reports() -> None:
    """Each time; but not to a question that is decided already."""
    process = Process()
    process.land()
    process.do(Made("two"), Held(2, 0))
    assert process.do(asked(0)) == [Abandon(), report(done=1, has=True)]
    assert process.do(asked(0)) == [report(done=1, has=True)]
    process.do(decided(0, 2, B))
    assert process.do(asked(0)) == []
    assert process.do(asked(1)) == [report(number=1, done=2, members=(A, C))]


def test_a_call_that_stands_completes_without_the_lost() -> None:
    """With those who took part in it; the next one begins with those who go on."""
    process = Process()
    process.do(Made("one"), Made("two"), Held(1, 0), asked(0))
    effects = process.do(decided(0, 1, B))
    stands = call(1, "one", has=True, stands=True)
    assert effects == [Drop(B, "it is cut off"), Complete(stands), Begin(2, 1, (A, C))]
    assert process.part.members == (A, C) and not process.part.frozen


def test_a_void_call_is_made_again_from_its_start() -> None:
    """What was held does not count; later calls have not begun, and are not made again."""
    process = Process()
    process.do(Made("one"), Made("two"), Held(1, 0), asked(0))
    dropped, again, begin = process.do(decided(0, 0, B))
    assert dropped == Drop(B, "it is cut off")
    assert again == Again(call(1, "one", begun=False))
    assert begin == Begin(1, 1, (A, C))
    assert process.do(Held(1, 0), AllHeld(1, 0)) == [], "the void attempt"
    assert process.do(Held(1, 1)) == []
    completed, _ = process.do(AllHeld(1, 1))
    assert completed == Complete(call(1, "one", losses=1, parties=(A, C), has=True))


def test_a_decision_can_come_without_a_question() -> None:
    """To a process whose connection to the coordinator had gone meanwhile."""
    process = Process()
    process.do(Made("one"))
    assert process.do(decided(0, 0, B, C)) == [
        Abandon(),
        Drop(B, "it is cut off"),
        Drop(C, "it is cut off"),
        Again(call(1, "one", begun=False)),
        Begin(1, 1, (A,)),
    ]
    before = process.part
    assert process.do(decided(0, 0, B, C)) == [] and process.part == before, "it is told twice"


def test_others_have_gone_on_without_this_process() -> None:
    """Because they say so, because it has missed a decision, or because it does not hold what stands."""
    for event, why in (
        (decided(0, 0, A), LATE),
        (decided(1, 0, B), "it has missed a decision of the others"),
        (decided(0, 1, B), "they hold a result that it does not hold"),
    ):
        process = Process()
        process.do(Made("one"))
        assert process.do(event)[-1] == Fail(LeftBehind, why)
        assert process.part.standing is Standing.OUT and process.part.frozen


def test_who_is_missed_twice_is_named_once() -> None:
    """A member that is lost by a decision is no longer missed; another one still is."""
    process = Process()
    process.do(Made("one"), Missed(1, 0, B, "it is cut off"), decided(0, 0, B))
    [abandon, told] = process.do(Missed(1, 1, C, "it is silent"))
    assert abandon == Abandon()
    assert told == report(number=1, lost=(C,), whys=("it is silent",), members=(A, C))


# ---- regions that come and go


def test_changes_are_known_without_gaps() -> None:
    """What comes twice, or too early, is not counted."""
    process = Process()
    process.do(change(2, "join", NEW))
    assert process.part.knows == 0
    process.do(change(1, "join", NEW), change(1, "join", NEW), change(2, "leave", B))
    assert process.part.knows == 2 and process.part.changes == 0


def test_a_change_counts_from_the_step_after_a_landing_that_all_know_it_by() -> None:
    """Calls that were made before have the members of before, also if they end later."""
    process = Process()
    process.do(change(1, "join", NEW), change(2, "leave", C))
    process.do(Made("before"))
    assert process.do(Ticked()) == [], "nobody has said that he knows it"
    assert process.do(Landed(known=1, changes=0)) == []
    assert process.part.members == ALL
    assert process.do(Ticked()) == [Switched((NEW,), ())]
    assert process.part.members == (*ALL, NEW) and process.part.changes == 1
    process.do(Made("after"), Held(1, 0))
    assert process.do(AllHeld(1, 0))[1:] == [Begin(2, 0, (*ALL, NEW))]
    assert process.do(Landed(known=2, changes=1), Ticked()) == [Switched((), (C,))]
    assert process.part.members == (A, B, NEW) and process.part.knows == 2


def test_a_landing_counts_for_the_changes_of_its_sending() -> None:
    """A transfer of before a change was sent without the new member: its trailers say nothing of what that one knows."""
    process = Process()
    process.do(change(1, "join", NEW), Landed(known=1, changes=0), Ticked(), change(2, "leave", B))
    assert process.do(Landed(known=2, changes=0), Ticked()) == []
    assert process.do(Landed(known=2, changes=1), Ticked()) == [Switched((), (B,))]


def test_a_change_that_this_process_does_not_know_does_not_count() -> None:
    """Trailers can say no more than the least of all, so this is what a faulty peer would say."""
    process = Process()
    assert process.do(Landed(known=7, changes=0), Ticked()) == []
    assert process.do(change(1, "join", NEW), Ticked()) == []


def test_who_leaves_takes_part_in_no_later_call() -> None:
    """It says so in its reports, and calls of before go on with it."""
    process = Process()
    process.do(change(1, "leave", A), Made("last"))
    assert not process.part.is_leaving
    process.do(Landed(known=1, changes=0))
    assert process.part.is_leaving
    assert process.do(Ticked()) == [Switched((), (A,))]
    assert process.part.last == 1
    told = report_of(process)
    assert told.last == 1 and told.takes_part_in(1) and not told.takes_part_in(2)


def test_who_makes_no_further_call_says_so() -> None:
    process = Process()
    process.land()
    process.do(NoMoreCalls())
    assert process.do(asked(0)) == [report(done=1, last=1)]


def test_calls_that_a_leader_has_made_alone_lie_behind_all_ranks() -> None:
    """The next call of a rank without them has the same number in all lanes."""
    rank = Process()
    assert rank.do(Led(3)) == []
    assert (rank.part.submitted, rank.part.done) == (3, 3)
    assert rank.do(Made("x")) == [Begin(4, 0, ALL)]
    assert rank.do(Led(9)) == [] and rank.part.submitted == 4, "not while a call is in hand"


def test_a_lost_member_does_not_come_back_with_a_change() -> None:
    process = Process()
    process.do(Made("one"), decided(0, 0, B), change(1, "join", NEW))
    process.do(Landed(known=1, changes=0), Ticked())
    assert process.part.members == (A, C, NEW)
    assert process.part.roster == (A, C, NEW)


# ---- newcomers


def newcomer() -> Process:
    process = Process(me=NEW, standing=Standing.JOINING)
    process.do(Followed())
    assert process.part.standing is Standing.FOLLOWING
    return process


def test_a_newcomers_calls_wait_and_it_reports_that_it_takes_part_in_none() -> None:
    process = newcomer()
    assert process.do(Made("one"), Ticked(), Landed(known=1, changes=0)) == []
    told = report_of(process)
    assert told.first == 0 and told.members == () and not told.takes_part_in(1)


def test_a_marker_says_who_takes_part() -> None:
    """Until it is in, a newcomer is no member; from there on it makes calls with the others' numbers."""
    process = newcomer()
    process.do(change(1, "join", NEW), change(2, "leave", C), *map(Connected, ALL))
    mark = Marked(submitted=4, changes=0, losses=0, lost=(), members=ALL, is_in=False)
    assert process.do(mark) == []
    assert process.part.roster == ALL and process.part.standing is Standing.FOLLOWING
    assert process.do(replace(mark, submitted=6, changes=1, members=(*ALL, NEW), is_in=True)) == []
    part = process.part
    assert part.standing is Standing.MEMBER and (part.first, part.done, part.submitted) == (7, 6, 6)
    assert part.knows == 2 and part.changes == 1 and part.members == (*ALL, NEW)
    assert process.do(Made("mine")) == [Begin(7, 0, (*ALL, NEW))]
    assert process.do(Landed(known=2, changes=1), Ticked()) == [Switched((), (C,))]


def test_a_newcomer_learns_losses_from_decisions_or_from_the_log() -> None:
    """Whichever comes first; what stands in the log is older than what it was told."""
    mark = Marked(submitted=4, changes=0, losses=1, lost=(B.ticket,), members=(A, C), is_in=False)
    told, read = newcomer(), newcomer()
    assert told.do(decided(0, 3, B)) == [Drop(B, "it is cut off")]
    told.do(replace(mark, losses=0, lost=(), members=ALL))
    read.do(mark)
    for process in (told, read):
        assert process.part.losses == 1 and process.part.lost == {B.ticket}
        assert process.part.without_lost(process.part.roster) == (A, C)
    assert newcomer().do(decided(3, 5, B))[-1] == Drop(B, "it is cut off"), "older ones are in its base"


def test_a_newcomer_that_was_asked_goes_on_once_the_log_has_the_decision() -> None:
    process = newcomer()
    process.do(asked(0))
    assert process.part.frozen
    mark = Marked(submitted=4, changes=0, losses=0, lost=(), members=ALL, is_in=False)
    process.do(mark)
    assert process.part.frozen
    process.do(replace(mark, losses=1, lost=(B.ticket,), members=(A, C)))
    assert not process.part.frozen


def test_a_newcomer_that_is_let_in_without_a_connection_is_left_behind() -> None:
    """Its first transfer would fail, and cost the others a decision."""
    process = newcomer()
    process.do(Connected(A), Connected(B), NotConnected(C, "its router refuses"))
    mark = Marked(submitted=4, changes=1, losses=0, lost=(), members=(*ALL, NEW), is_in=False)
    assert process.do(mark) == []
    [fails] = process.do(replace(mark, is_in=True))
    assert fails == Fail(LeftBehind, "it has no connection to region 2: its router refuses")


# ---- connections


def here(member: Member) -> HeardFrom:
    return HeardFrom(Here(place=Place(member, lanes())))


def test_who_enters_connects_to_all() -> None:
    places = tuple(Place(each, lanes()) for each in ALL)
    welcome = Welcome(run="r", generation=FOURTH, me=NEW, joins=True, members=places, losses=2)
    part = enter(welcome, Terms(count=3, wait_s=3600.0))
    assert (part.standing, part.roster, part.losses) == (Standing.JOINING, (), 2)
    assert part.meeting == {*ALL} and part.generation == FOURTH and part.members == (NEW,)
    assert enter(structs.replace(welcome, me=A, joins=False), part.terms).roster == ALL


def test_a_newcomer_is_connected_once_and_told_again_of_it() -> None:
    """The coordinator repeats itself; a connection under way is not begun a second time."""
    process = Process()
    assert process.do(here(NEW), here(NEW)) == [Connect(NEW)]
    assert process.do(Connected(NEW)) == [Tell(Paired(member=NEW))]
    assert process.do(here(NEW)) == [Tell(Paired(member=NEW))]
    assert process.do(here(A)) == [], "this is the process itself"


def test_a_connection_that_fails_is_tried_again_while_it_is_wanted() -> None:
    process = Process()
    process.do(here(NEW))
    assert process.do(NotConnected(NEW, "a cut")) == [Connect(NEW, again=True)]
    assert process.do(Connected(NEW)) == [Tell(Paired(member=NEW))] and not process.part.unpaired
    process.do(HeardFrom(Gone(member=NEW)))
    assert process.do(NotConnected(NEW, "it has gone")) == []
    assert process.do(here(NEW)) == [], "who has gone does not come back under the same ticket"


def test_the_newest_process_of_a_region_takes_the_place_of_the_one_before() -> None:
    process, again = Process(), Member(B.region, 9)
    process.do(Connected(B))
    assert process.do(here(again)) == [Disconnect(B), Connect(again)]
    assert process.part.wants(again) and not process.part.wants(B)
    process.do(Connected(again))
    assert process.do(HeardFrom(Gone(member=B))) == [], "its connections have been closed"
    assert process.part.is_paired(again)


def test_connections_of_the_start_and_of_a_newcomer_that_came_meanwhile_both_count() -> None:
    """A newcomer was announced, and then lost at its first transfer."""
    process = Process()
    process.do(here(NEW), Connected(NEW), Connected(B), Connected(C))
    assert process.part.paired == {1: B, 2: C, 3: NEW}


def test_who_is_lost_is_disconnected() -> None:
    process = Process()
    process.do(Connected(B))
    assert process.do(decided(0, 0, B)) == [Disconnect(B), Drop(B, "it is cut off")]
    assert not process.part.wants(B)


# ---- the coordinator


def test_an_older_coordinator_is_not_heeded() -> None:
    process = Process()
    process.do(HeardFrom(Resumed(generation=Generation(3, ""))))
    [hangs_up] = process.do(decided(0, 0, B))
    assert isinstance(hangs_up, HangUp) and process.part.losses == 0


def test_a_coordinator_that_is_back_hears_all_that_it_may_have_forgotten() -> None:
    process = Process()
    process.do(Connected(B), Made("one"), Missed(1, 0, C, "silent"), Away())
    assert not process.part.answers
    paired, told = process.do(HeardFrom(Resumed(generation=FIRST)))
    assert paired == Tell(Paired(member=B)) and told == report(lost=(C,), whys=("silent",))
    assert process.part.answers


@pytest.mark.parametrize(
    ("broken_s", "is_refused", "closed_at", "why"),
    [
        (0.0, False, None, None),
        # a router, proxy or restarting NAT refuses for a while
        (29.0, True, None, None),
        # killed: it has closed its connection to the coordinator, too
        (0.0, True, 100.0, "died"),
        (4.5, False, 100.0, None),  # it may call the coordinator again
        (6.0, False, 100.0, "died"),  # a killed region whose port nobody can look at
        (6.0, False, 101.5, None),
        # the coordinator lost it long ago, and heard it again
        (2.0, True, 90.0, None),
        (29.0, False, None, None),
        (31.0, True, None, "unreachable"),
        (31.0, False, None, "unreachable"),
    ],
)
def test_why_a_process_is_lost_whose_connections_broke(
    broken_s: float, is_refused: bool, closed_at: float | None, why: str | None
) -> None:
    process = Process()
    process.part = replace(process.part, terms=Terms(count=3, wait_s=3600.0, timeout_s=30.0))
    if closed_at is not None:
        process.do(HeardFrom(Hears(member=B, hears=False), now=closed_at))
    for is_closed in (False, True):
        assert why_lost(process.part, B, 100.0, is_refused, is_closed, 100.0 + broken_s) == why


@pytest.mark.parametrize(
    ("broken_s", "is_refused", "is_closed", "cut_at", "why"),
    [
        # killed with unread bytes: the coordinator's connection is reset, another one closed in good order
        (0.0, True, True, 100.0, "died"),
        (0.0, True, True, 99.0, "died"),
        # a router that restarts resets all connections, and refuses for a while
        (29.0, True, False, 100.0, None),
        # nobody can look at its port
        (29.0, False, True, 100.0, None),
        # the coordinator heard it again since
        (2.0, True, True, 90.0, None),
        (31.0, True, False, 100.0, "unreachable"),
    ],
)
def test_why_a_process_is_lost_whose_connection_to_the_coordinator_was_reset(
    broken_s: float, is_refused: bool, is_closed: bool, cut_at: float, why: str | None
) -> None:
    process = Process()
    process.part = replace(process.part, terms=Terms(count=3, wait_s=3600.0, timeout_s=30.0))
    process.do(HeardFrom(Hears(member=B, hears=False, cut=True), now=cut_at))
    assert why_lost(process.part, B, 100.0, is_refused, is_closed, 100.0 + broken_s) == why


def test_who_is_cut_off_from_the_coordinator_has_closed_nothing() -> None:
    process = Process()
    process.do(HeardFrom(Hears(member=B, hears=False, cut=True), now=100.0))
    assert not process.part.closed and process.part.cut == {B: 100.0}
    process.do(HeardFrom(Hears(member=B, hears=False), now=100.0))
    assert not process.part.cut and process.part.closed == {B: 100.0}
    process.do(HeardFrom(Hears(member=B, hears=True)))
    assert not process.part.closed
    process.do(HeardFrom(Hears(member=B, hears=False, cut=True)), HeardFrom(Hears(member=B, hears=True)))
    assert not process.part.cut


def test_who_has_not_called_a_coordinator_that_is_back_was_not_cut_off() -> None:
    """It says so of all that have not called yet. What broke this connection may have broken theirs."""
    process = Process()
    cut = HeardFrom(Hears(member=B, hears=False, cut=True), now=100.0)
    process.do(cut, Away())
    assert not process.part.cut
    process.do(cut)
    assert not process.part.cut
    process.do(HeardFrom(Resumed(generation=FIRST)), cut)
    assert process.part.cut == {B: 100.0}


def test_a_suspect_is_missed_only_while_it_is_awaited() -> None:
    process = Process()
    process.do(Made("one"))
    suspect = Suspect(member=B, op=1, how="late", why="it is late")
    for message, awaits in ((suspect, None), (suspect, 2), (structs.replace(suspect, op=2), 1)):
        assert process.do(HeardFrom(message, awaits)) == []
    assert process.do(HeardFrom(suspect, 1)) == [Abandon(), report(lost=(B,), whys=("it is late",))]
    assert process.do(decided(0, 0, B))[0] == Drop(B, "it is cut off", is_late=True)


def test_a_refusal_ends_a_part_unless_a_fixed_run_needs_no_coordinator() -> None:
    over, late = Refuse(error="RunOver", why="it has ended"), Refuse(error="LeftBehind", why="lost")
    assert Process().do(HeardFrom(over)) == [Fail(RunOver, "it has ended")]
    for elastic in (True, False):
        assert Process(elastic).do(HeardFrom(late)) == [Fail(LeftBehind, "lost")]
    process = Process(elastic=False)
    assert process.do(HeardFrom(over)) == [] and process.part.undecided == "it has ended"
    process.do(Made("one"), Held(1, 0), AllHeld(1, 0))
    assert process.part.done == 1


@pytest.mark.parametrize(
    ("elastic", "limit"), [(True, "regions.wait_s=600"), (False, "regions.timeout_s=120")]
)
def test_a_loss_that_nobody_decides_ends_in_the_end(elastic: bool, limit: str) -> None:
    """Only without a coordinator: one that answers has its own times."""
    process = Process(elastic)
    process.part = replace(process.part, terms=Terms(count=3, wait_s=600.0 * elastic))
    process.do(Made("one"), Missed(1, 0, B, "it is silent. Look at it."))
    assert process.do(Waited(None, 0.0, 900.0, 900.0)) == []
    process.do(Away())
    undecided_s = 601.0 if elastic else 1.0
    assert process.do(Waited(None, 0.0, undecided_s - 2, 1.0 if elastic else 119.0)) == []
    [fails] = process.do(Waited(None, 0.0, undecided_s, 2.0 if elastic else 901.0))
    assert isinstance(fails, Fail) and fails.error is RegionLostError and fails.member == B
    assert "region 1 is lost (it is silent. Look at it)" in fails.why and limit in fails.why


def test_a_coordinator_that_decides_nothing_is_named_with_its_reason() -> None:
    process = Process()
    process.do(Made("one"), HeardFrom(Ask(number=0)), HeardFrom(Waiting(why="it has not heard of region 1.")))
    [fails] = process.do(Waited(None, 0.0, 3601.0, 3601.0))
    assert isinstance(fails, Fail) and "has not decided for 3601 s" in fails.why and fails.error is LinkError
    assert fails.why.endswith(": it has not heard of region 1. Start all regions again with --resume.")


@pytest.mark.parametrize("elastic", [True, False])
def test_without_a_coordinator_a_region_that_is_stuck_is_missed_in_the_end(elastic: bool) -> None:
    process = Process(elastic)
    process.do(Made("one"), Away())
    limit = process.part.terms.stuck_timeout_s
    assert process.do(Waited(1, limit, 0.0, limit)) == []
    assert process.do(Waited(1, limit + 1, 0.0, limit))[0] == Abandon()
    assert list(process.part.missed) == [B]


def test_what_a_process_says_of_itself() -> None:
    process = Process()
    process.do(Made("one"))
    said = beat(process.part, Beat(step=5, awaits=1, waited_s=2.0))
    assert (said.op, said.awaits, said.members, said.step) == (1, 1, ALL, 5)
    process.do(Held(1, 0), AllHeld(1, 0))
    assert beat(process.part, Beat(awaits=1)).awaits is None, "no attempt is in hand"
    told = back(process.part)
    assert isinstance(told, Back) and told.member == A and told.generation == FIRST
