"""A world in which runs train, and in which things go wrong: processes, coordinators, a network, and a plan of faults."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from hf_cocodc.coordinator.messages import Decision, Terms
from hf_cocodc.coordinator.rules import CALL_S, Run
from hf_cocodc.net.members import Member

from .checks import Checks, Violation
from .coordinating import COORDINATOR, Coordinator, SoleFile
from .network import Actor, Connection, Network
from .process import START_S, Process
from .shell import WAIT_S, Shell

PAIR_S = 8.0
"""Seconds for which two processes try to connect."""
CALM_S = 25.0
"""Seconds after which nothing of a fault is to be noticed any more: a time-out, and the patience with those who call late."""
AFTER_S = 30.0
"""Seconds after the last fault from which on nobody is kept out again and again."""
BOUND_S = 300.0
"""Seconds after the last fault within which every process must have ended."""
STILL_S, GONE_S, LINGERS_S = 10.0, 3.0, 5.0
"""In a storage, another one serves so long after the last one stood still, or has died on the machine of one that stands by;
and one whose region has ended serves for so long.
"""
JOIN_S = 75.0
"""Seconds after the last fault within which every newcomer must have come in, if the others still train then."""


class Fault(NamedTuple):
    """Something that goes wrong, or that somebody wants.

    Attributes:
        at: when, in seconds.
        kind: a method of `Faults`.
        region, other: which; -1 for none, and for the coordinator as `other`.
        seconds: for how long.
        way: for cuts: 0 both ways, 1 from `region` to `other` only, 2 the other way only; for processes: 1 to join;
            for coordinators: 1 without the file, 2 with a copy of it from the moment of the fault before this one.
    """

    at: float
    kind: str
    region: int = -1
    other: int = -1
    seconds: float = 0.0
    way: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run and its faults.

    Attributes:
        seed: of all delays.
        regions: with which the run begins.
        elastic: whether it goes on without a lost region.
        most: `regions.max`.
        lanes: runs side by side, whose processes of a region end together.
        steps, interval, fragments, overlap: of the schedule of transfers.
        step_s: seconds of an inner step, about.
        storage: whether regions meet in a storage: one of them serves as coordinator, and the others stand by.
    """

    seed: int
    regions: int = 3
    elastic: bool = True
    most: int = 6
    lanes: int = 1
    steps: int = 12
    interval: int = 3
    fragments: int = 1
    overlap: int = 1
    step_s: float = 1.0
    grace_s: float | None = None
    grace_is_auto: bool = False
    storage: bool = False
    faults: tuple[Fault, ...] = ()

    @property
    def loses_nobody(self) -> bool:
        """Whether regions only leave and stop: then nobody is ever lost."""
        return self.grace_s is None and all(each.kind in ("leave", "stop") for each in self.faults)

    @property
    def loses_no_way(self) -> bool:
        """Whether processes only end and start: network and coordinator are there all the time."""
        kinds = "kill", "start", "leave", "stop"
        return not self.storage and all(each.kind in kinds for each in self.faults)

    @property
    def loses_file(self) -> bool:
        """Whether a coordinator is started without the file, or several with copies: it may decide nothing for some members."""
        return not self.storage and any(
            each.kind in ("second_coordinator", "twins") or (each.kind == "kill_coordinator" and each.way)
            for each in self.faults
        )

    def sends(self, fragment: int, step: int) -> bool:
        """Whether a fragment is sent at an inner step."""
        offset = fragment * self.interval // self.fragments
        return step > 0 and (step - offset) % self.interval == 0


class World:
    """Args:
    plan: what happens.
    say: takes a line about what happens; None for none.
    """

    def __init__(self, plan: Plan, say: Callable[[str], None] | None = None) -> None:
        self.plan, self._say = plan, say
        self.network = Network(plan.seed)
        self.terms = Terms(
            count=plan.regions,
            least=1 if plan.elastic else plan.regions,
            most=max(plan.most, plan.regions) if plan.elastic else plan.regions,
            wait_s=WAIT_S if plan.elastic else 0.0,
            timeout_s=8.0,
            stuck_timeout_s=60.0,
            grace_s=plan.grace_s,
            grace_is_auto=plan.grace_is_auto,
        )
        self.checks = Checks()
        self._number = 0
        self.file: dict[str, Run] = SoleFile() if plan.storage else {}
        self.old_file: dict[str, Run] = {}
        self.coordinators: list[Coordinator] = []
        self.processes: list[Process] = []
        self._meeting: dict[tuple[Any, ...], dict[Member, Shell]] = {}
        if not plan.storage:
            self._starts_coordinator(self.file)
        for region in range(plan.regions):
            self.starts(region, join=False)
        self._served_at = 0.0
        if plan.storage:
            self._stand_by()
        faults = Faults(self)
        for fault in plan.faults:
            self.network.at(fault.at, None, partial(faults.happen, fault))
        self.last_fault_at = max((fault.at + fault.seconds for fault in plan.faults), default=0.0)
        self.network.at(self.last_fault_at + JOIN_S, None, self._look_at_newcomers)

    def run(self) -> None:
        """Let the plan happen.

        Raises:
            Violation: something holds no more; or a process hangs.
        """
        until = self.last_fault_at + BOUND_S
        self.network.run(
            until, lambda: any(each.how is None for each in self.processes) or self._more_to_come()
        )
        hanging = [each for each in self.processes if each.how is None]
        if hanging:
            raise Violation("hangs: " + "; ".join(self._shown(each) for each in hanging))
        self.checks.ended(self.processes)

    def _more_to_come(self) -> bool:
        return self.network.now <= self.last_fault_at + 1.0

    def tell(self, actor: Any, what: str) -> None:
        if self._say is not None:
            name = tuple(actor.me) if hasattr(actor, "me") else getattr(actor, "region", actor)
            self._say(f"{self.network.now:8.3f}  {name} {what}")

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def _look_at_newcomers(self) -> None:
        """Long after the last fault, nobody waits to come in while others train."""
        plan = self.plan
        # a change counts after a transfer that was sent, and has landed, since it was announced
        enough_s = JOIN_S / 2 + 2 * (plan.interval + plan.overlap) * plan.step_s
        waiting = [
            each
            for each in self.processes
            if each.how is None
            and not each.takes_part
            and self.network.now - each.met_at > enough_s
            # of two processes of a region, one waits, and rightly
            and len(self.of_region(each.region)) == self.plan.lanes
        ]
        training = [each for each in self.processes if each.how is None and each.takes_part]
        # with a grace, slow steps throw out who has just come in
        if (
            waiting
            and training
            and self.plan.grace_s is None
            and not self.plan.loses_file
            and all(each.step < self.plan.steps - 2 for each in training)
        ):
            raise Violation("not let in: " + "; ".join(self._shown(each) for each in waiting))
        self.network.at(self.network.now + JOIN_S / 2, None, self._look_at_newcomers)

    def kept_out(self, process: Process) -> None:
        """A newcomer begins once more, because nobody lets it in. Once may be; not again and again after the last fault."""
        process.times_kept_out += self.network.now > self.last_fault_at + AFTER_S
        if process.times_kept_out > 1 and self.plan.grace_s is None and not self.plan.loses_file:
            raise Violation(f"not let in, again and again: {self._shown(process)}")

    # ---- processes ------------------------------------------------------------------------------------------------------

    def starts(self, region: int, join: bool) -> None:
        """Somebody starts a region: one process for each lane."""
        ranks: list[Process] = []
        for _ in range(self.plan.lanes):
            self.processes.append(Process(self, region, join, ranks))

    def of_region(self, region: int) -> list[Process]:
        """The processes of a region that run."""
        return [each for each in self.processes if each.region == region and each.how is None]

    def process_of(self, member: Member) -> Process | None:
        for each in self.processes:
            if each.how is None and getattr(each, "me", None) == member and each.has_started:
                return each
        return None

    def refuses(self, caller: Shell, other: Member) -> bool:
        """Whether the machine of a process says that it is not there."""
        is_cut = {(caller.region, other.region), (other.region, caller.region)} & self.network.cuts
        return not is_cut and self.process_of(other) is None

    def has_ended(self, process: Process) -> None:
        """The ranks of a region end with any of them that fails."""
        takes_part = all(rank.takes_part for rank in process.ranks)
        if process.how == "failed" and process.is_well and takes_part:
            raise Violation(f"region {process.region} fails, and nothing was wrong with it: {process.why}")
        if process.how in ("failed", "over", "undecided"):
            for other in process.ranks:
                if other is not process and other.how is None:
                    other.later(0.2, partial(other.end, "over", "a rank of its region has failed"))

    def connect_soon(self, process: Shell, other: Member) -> None:
        """A process wants a connection to another one; it comes once both want it, and reach each other and the coordinator."""
        assert process.welcome is not None
        key = (process.lane, process.welcome.run, *sorted((process.me, other)))
        ends = self._meeting.setdefault(key, {})
        ends[process.me] = process
        until = self.network.now + PAIR_S
        if len(ends) == 2:
            delay_s = 0.5 * self.network.random.random()
            self.network.at(self.network.now + delay_s, None, lambda: self._connect(key, until))
        else:
            self.network.at(until, None, lambda: self._give_up(key))

    def _connect(self, key: tuple[Any, ...], until: float) -> None:
        ends = self._meeting.get(key, {})
        if len(ends) < 2 or any(each.how is not None or each.me != member for member, each in ends.items()):
            self._give_up(key)
            return
        (one, first), (other, second) = ends.items()
        if not self.network.reaches(first, second) or None in (
            first.ranks[0].connection,
            second.ranks[0].connection,
        ):
            if self.network.now > until:
                self._give_up(key)
            else:
                self.network.at(self.network.now + 0.5, None, lambda: self._connect(key, until))
            return
        del self._meeting[key]
        pair = Connection("pair", first, second, {first: one, second: other})
        first.connected(other, pair)
        second.connected(one, pair)

    def _give_up(self, key: tuple[Any, ...]) -> None:
        ends = self._meeting.pop(key, {})
        for member, shell in ends.items():
            other = next(each for each in key[2:] if each != member)
            shell.later(0.0, partial(shell.not_connected, member, other))

    # ---- coordinators -----------------------------------------------------------------------------------------------------

    def _starts_coordinator(self, file: dict[str, Run]) -> None:
        self.coordinators.append(Coordinator(self.network, file, self._heard))

    def _stand_by(self) -> None:
        """Let a process serve that reaches the storage, once nobody has served for a while: `coordinator/standby.py`."""
        now, draw = self.network.now, self.network.chances.random
        self.network.at(now + 1.0, None, self._stand_by)
        serving = self.coordinators[-1:]
        for each in serving:
            host = each.host
            has_ended = host is not None and host.how is not None and draw() < 1 / LINGERS_S
            if host is not None and (not host.is_alive or self._is_cut_off(host) or has_ended):
                each.kill()
            if each.is_alive and not each.is_frozen:
                self._served_at = now
                return
        host = serving[0].host if serving else None
        has_died = host is not None and not host.is_alive and draw() < 0.5
        if not serving or now - self._served_at >= (GONE_S if has_died else STILL_S):
            self.take_over(CALL_S if has_died else now - self._served_at)

    def take_over(self, still_s: float = 0.0) -> None:
        """A process serves in the storage, after the one that served has stood still for so long."""
        here = [
            each
            for each in self.processes
            if each.how is None and not each.is_frozen and not self._is_cut_off(each)
        ]
        if not here:
            return
        last = self.coordinators[-1].host if self.coordinators else None
        silent = {last.me: still_s} if last is not None and hasattr(last, "me") else {}
        host = self.network.chances.choice(here)
        self.tell(COORDINATOR, f"is in region {host.region}; {silent} stood still")
        self._served_at = self.network.now
        self.coordinators.append(Coordinator(self.network, self.file, self._heard, host, silent))

    def _is_cut_off(self, process: Process) -> bool:
        """Whether a process does not reach the storage."""
        return bool({(process.region, COORDINATOR), (COORDINATOR, process.region)} & self.network.cuts)

    def hosted(self, processes: Iterable[Process]) -> list[Coordinator]:
        """The coordinators that live in these processes."""
        return [each for each in self.coordinators if each.is_alive and each.host in list(processes)]

    def _heard(self, name: str, before: Run, after: Run, effects: tuple[Any, ...]) -> None:
        if self._say is not None and after.losses != before.losses and after.decisions:
            self.tell(COORDINATOR, f"decides {after.decisions[-1].decision}")
        if after.losses > before.losses:
            self._look_at_lost(after.decisions[-1].decision)
        if self._say is not None and after.changes > before.changes:
            self.tell(COORDINATOR, f"announces {after.announced[-1:]}")

    def restart_coordinator(self, file: dict[str, Run], copies: int = 0) -> None:
        """Kill all coordinators and start one, and more with copies of its file."""
        for each in self.coordinators:
            each.kill()
        self.file = file
        files = [self.file, *(dict(self.file) for _ in range(copies))]
        for file in files:
            self._starts_coordinator(file)

    def reachable(self, process: Actor) -> Coordinator | None:
        """A coordinator that answers a process."""
        answering = [each for each in self.coordinators if self.network.reaches(process, each)]
        return self.network.random.choice(answering) if answering else None

    def misses(self, shell: Shell, other: Member, why: str) -> None:
        """A process misses another one. Who has only ended is not waited for until the time-out."""
        if why == "unreachable" and self.plan.loses_no_way:
            raise Violation(f"{shell.me} has waited {self.terms.timeout_s:g} s for {other}, which has ended")

    def _look_at_lost(self, decision: Decision) -> None:
        """A member that is well, and that all who go on reach, stays a member."""
        if self.plan.grace_s is not None or self.plan.loses_file:
            return
        on = [process for process in map(self.process_of, decision.members) if process is not None]
        for lost in filter(None, map(self.process_of, decision.lost)):
            # what a fault has done may be noticed a time-out later, and decided by the next one that serves
            calm_s = CALM_S + STILL_S * self.plan.storage
            is_calm = all(self.network.now - each.disturbed_until > calm_s for each in (lost, *on))
            if is_calm and lost.takes_part and all(self.network.reaches(lost, each) for each in on):
                raise Violation(f"{lost.me} is lost, and all of {decision.members} reach it")

    def not_met(self, process: Process) -> None:
        """A process has waited for `START_S` to take part. It knows why, or the others are not there."""
        if self.network.now - self.last_fault_at < START_S + CALM_S or self.plan.loses_file:
            return
        here = {each.region for each in self.processes if each.how is None and not each.join}
        absent = None if process.told is None else set(process.told.absent)
        if absent is None or not (absent - here or process.told.why):  # type: ignore[union-attr]
            raise Violation(f"region {process.region} does not begin, and hears {process.told}")
        if not process.join and here >= set(range(self.plan.regions)):
            training = [each for each in self.processes if each.how is None and each.takes_part]
            if not training:
                raise Violation(f"region {process.region} does not begin, and all are there: {process.told}")

    def _shown(self, process: Process) -> str:
        part = getattr(process, "part", None)
        return f"region {process.region}, step {process.step}, {part}, failure {process.failure!r}, over {process.over}"


class Faults:
    """What may go wrong. Each method is a kind of fault."""

    def __init__(self, world: World) -> None:
        self._world, self._network = world, world.network

    def happen(self, fault: Fault) -> None:
        self._world.tell("FAULT", f"{fault}")
        old = dict(self._world.file)
        getattr(self, fault.kind)(fault)
        self._world.old_file = old

    def _disturb(self, processes: Iterable[Process], seconds: float) -> None:
        for process in processes:
            process.is_well = False
            process.disturbed_until = max(process.disturbed_until, self._network.now + seconds)

    def kill(self, fault: Fault) -> None:
        _kill(self._world.hosted(self._world.of_region(fault.region)))
        for process in self._world.of_region(fault.region):
            process.is_well = False
            process.kill()

    def crash(self, fault: Fault) -> None:
        """All processes are killed; the regions with which the run began are started again, `seconds` later."""
        _kill(self._world.hosted(self._world.processes))
        for process in self._world.processes:
            process.is_well = False
            process.kill()
        self._after(
            fault, lambda: [self._world.starts(each, False) for each in range(self._world.plan.regions)]
        )

    def start(self, fault: Fault) -> None:
        """A process of a region starts, also if another one runs."""
        self._world.starts(fault.region, join=fault.way == 1)

    def freeze(self, fault: Fault) -> None:
        processes = self._world.of_region(fault.region)
        self._disturb(processes, fault.seconds)
        frozen = [*processes, *self._world.hosted(processes)]
        for each in frozen:
            each.freeze()
        self._after(fault, partial(_thaw, frozen))

    def leave(self, fault: Fault) -> None:
        for process in self._world.of_region(fault.region):
            process.asks_to_leave = True

    def stop(self, fault: Fault) -> None:
        for process in self._world.of_region(fault.region):
            process.asks_to_stop = True

    def cut(self, fault: Fault) -> None:
        one: Any = fault.region
        other: Any = COORDINATOR if fault.other < 0 else fault.other
        ways = [(one, other), (other, one)]
        chosen = ways if fault.way == 0 else [ways[fault.way - 1]]
        for way in chosen:
            self._network.cut(*way)
        self._disturb(
            (*self._world.of_region(fault.region), *self._world.of_region(fault.other)), fault.seconds
        )
        self._after(fault, lambda: self._heal(chosen))

    def split(self, fault: Fault) -> None:
        """The connections between two regions break for good, in one lane."""
        for process in self._world.of_region(fault.region):
            process.is_well = False
            if process.lane == fault.way % len(process.ranks):
                for other in [each for each in process.pairs if each.region == fault.other]:
                    process.pairs[other].break_down()
        for process in self._world.of_region(fault.other):
            process.is_well = False

    def kill_coordinator(self, fault: Fault) -> None:
        for each in self._world.coordinators:
            each.kill()
        if not self._world.plan.storage:
            files = self._world.file, {}, dict(self._world.old_file)
            self._after(fault, lambda: self._world.restart_coordinator(files[fault.way]))

    def freeze_coordinator(self, fault: Fault) -> None:
        frozen = [each for each in self._world.coordinators if each.is_alive]
        for each in frozen:
            each.freeze()
        self._after(fault, partial(_thaw, frozen))

    def second_coordinator(self, fault: Fault) -> None:
        """The coordinator freezes, another one with a copy of its file takes its address; later the first one thaws.

        In a storage, another one goes on with the states, while the first one does not know.
        """
        old = [each for each in self._world.coordinators if each.is_alive]
        for process in self._world.processes:
            process.is_well = False  # members of both may wait for each other
        for each in old:
            each.freeze()
        if self._world.plan.storage:
            self._world.take_over()
            self._network.at(self._network.now + fault.seconds / 2, None, partial(_thaw, old))
            return
        copy = {} if fault.way == 1 else dict(self._world.file)
        self._world.file = copy
        self._world.coordinators.append(Coordinator(self._network, copy, self._world._heard))
        self._network.at(
            self._network.now + fault.seconds / 2,
            None,
            partial(_thaw, old),
        )
        self._after(fault, partial(_kill, old))

    def twins(self, fault: Fault) -> None:
        """The coordinator is killed, and two are started with copies of its file; later one of them is killed.

        In a storage, two go on with the states, one after the other, while the first two do not know.
        """
        if self._world.plan.storage:
            self._world.take_over()
            self._world.take_over()
            return
        self._disturb(self._world.processes, 0.0)
        self._world.restart_coordinator(self._world.file, copies=1)
        self._after(fault, partial(_kill, self._world.coordinators[-2:][fault.way % 2 :][:1]))

    def _heal(self, ways: list[tuple[Any, Any]]) -> None:
        for way in ways:
            self._network.heal(*way)

    def _after(self, fault: Fault, call: Callable[[], None]) -> None:
        self._network.at(self._network.now + fault.seconds, None, call)


def _thaw(actors: Iterable[Actor]) -> None:
    for actor in actors:
        if actor.is_alive:
            actor.thaw()


def _kill(actors: Iterable[Actor]) -> None:
    for actor in actors:
        actor.kill()
