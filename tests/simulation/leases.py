"""Several processes stand by in a storage that misbehaves. Whoever serves decides now and then; all stand still, die or begin.

The code of `coordinator/standby.py`, `coordinator/state.py`, `net/mailbox.py` and `net/storage.py` runs as it is. In the place of
the coordinator that it lets serve there is one that does nothing but decide: it writes a state, and then announces it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hf_cocodc.coordinator import standby, state
from hf_cocodc.coordinator.messages import Generation
from hf_cocodc.coordinator.rules import Run
from hf_cocodc.coordinator.state import StateInStorage
from hf_cocodc.errors import InputError
from hf_cocodc.net import mailbox, storage
from hf_cocodc.net.mailbox import Mailbox
from hf_cocodc.net.storage import StorageError
from tests.coordinator.test_state import RUN

from .machines import Machine, Machines
from .stores import Faults, Reached, Settling, Store

URL = "simulated://store"
_EVEN = "02468"
Log = tuple[str, ...]


@dataclass(frozen=True)
class Announced:
    """What a coordinator has said: all decisions that it knows, the last of which is its own."""

    who: str
    serving: int
    generation: tuple[int, str]
    log: Log


@dataclass(eq=False)
class Leases:
    """A world.

    Args:
        seed: of all that is left to chance.
        faults: of the storage, until `calm_at`.
        processes: that stand by at first.
        stills: how often a process stands still, dies or begins.
        still_s: the longest time for which one stands still.
        two_may_create: whether the storage knows no creation that only one of two can make.
    """

    seed: int
    faults: Faults
    processes: int = 3
    stills: int = 12
    still_s: float = 90.0
    calm_at: float = 150.0
    pace_s: float = 6.0
    two_may_create: bool = False
    announced: list[Announced] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machines = Machines(self.seed)
        self.store = Store(self.machines, self.faults)
        self.standing: dict[Machine, Any] = {}
        self.servings, self.state = 0, vars(state)
        self._boxes: dict[Machine, Any] = {}

    def run(self) -> None:
        """Let it happen. Raises AssertionError if a thread fails, or nobody decides at the end."""
        time, threads = self.machines.time(), self.machines.threading()
        stand_ins = {
            "mailbox": self._box,
            "has_died": self._has_died,
            "listen": lambda *where: None,
            "Served": self._serve,
        }
        ours = {name: self.machines.ours(each, getattr(standby, name)) for name, each in stand_ins.items()}
        bucket = self.machines.ours(self._reach, storage._Bucket)
        of_boxes = {
            "has_died": self.machines.ours(self._has_died, mailbox.has_died),
            "atexit": SimpleNamespace(register=lambda call: None),
        }
        together = self.machines.ours(self.machines.together, storage.together)
        with (
            mock.patch.multiple(
                storage, time=time, random=self.machines.chance(), _Bucket=bucket, together=together
            ),
            mock.patch.multiple(mailbox, time=time, threading=threads, together=together, **of_boxes),
            mock.patch.multiple(standby, time=time, threading=threads, **ours),
            mock.patch.dict(self.state, time=time),
        ):
            try:
                self._happen()
            finally:
                self.machines.close()

    def _happen(self) -> None:
        machines, draws = self.machines, random.Random(self.seed)
        for _ in range(self.processes):
            self._begin()
        for _ in range(self.stills):
            machines.at(draws.uniform(1.0, self.calm_at), lambda: self._disturb(draws))
        machines.run(self.calm_at)
        self.store.heal()
        for machine in self.standing:
            machine.frozen_until = min(machine.frozen_until, machines.now)
        machines.run(machines.now + 60.0)
        before = len(self.announced)
        machines.run(machines.now + 10 * self.pace_s + 30.0)
        assert len(self.announced) > before, "nobody decides any more"
        serving = [
            each.machine.name for each in self.standing.values() if each.machine.is_alive and each.serves
        ]
        assert len(serving) == 1, f"{serving} serve"

    def _disturb(self, draws: random.Random) -> None:
        alive = [machine for machine in self.standing if machine.is_alive]
        serving = [machine for machine in alive if self.standing[machine].serves]
        machine = draws.choice(serving if serving and draws.random() < 0.8 else alive)
        what = draws.random()
        if what < 0.7:
            machine.frozen_until = (
                self.machines.now + draws.choice((5.0, 15.0, 40.0, self.still_s)) * draws.random()
            )
        else:
            if what < 0.9:
                machine.is_alive = False
            self._begin()

    def kill_serving(self) -> None:
        """Kill the one that serves."""
        [machine] = [each for each in self.standing if each.is_alive and self.standing[each].serves]
        machine.is_alive = False

    def _has_died(self, process: str) -> bool:
        """Processes with even numbers run on one machine, the others on another one: they see which of their own have died."""
        named = {machine.name: machine for machine in self.standing}
        here, there = self.machines.current.machine, named.get(process)
        return there is not None and not there.is_alive and (here.name[-1] in _EVEN) == (process[-1] in _EVEN)

    def _begin(self) -> None:
        machine = Machine(f"process {len(self.standing)}")
        self.standing[machine] = SimpleNamespace(machine=machine, serves=False)

        def stand_by() -> None:
            while True:
                with contextlib.suppress(StorageError):  # a region tries again
                    self.standing[machine] = each = standby.Standby(URL, None)
                    break
                self.machines.sleep(1.0)
            each.machine = machine  # type: ignore[attr-defined]

        self.machines.start(machine, stand_by)

    def _box(self, url: str) -> Any:
        machine = self.machines.current.machine
        if machine not in self._boxes:
            self._boxes[machine] = box = Mailbox(url)
            box.process = machine.name
            if not self.two_may_create:
                box.storage.create_s = 0.0
        return self._boxes[machine]

    def _reach(self, url: str, scheme: str) -> Reached:
        return (Settling if self.two_may_create else Reached)(self.store)

    def _serve(
        self, listener: Any, secrets: Any, kept: StateInStorage, say: Any, fail: Any, alive_s: float
    ) -> Any:
        return Deciding(self, kept, fail)


class Deciding:
    """In the place of `Served`."""

    port, num_callers = 0, 0

    def __init__(self, world: Leases, kept: StateInStorage, fail: Callable[[InputError], None]) -> None:
        self._world, self._kept, self._fail = world, kept, fail
        world.servings += 1
        self._number, self._is_closed = world.servings, False
        began = replace(RUN, earlier=(), generations=(Generation(1, f"of {self._number}"),))
        self._run = next((run for _, run in kept.runs), began)
        self._who = world.machines.current.machine
        world.machines.start(self._who, self._decide)

    def close(self) -> None:
        self._is_closed = True

    def _decide(self) -> None:
        world = self._world
        while True:
            world.machines.sleep(world.machines.random.uniform(0.1, 2 * world.pace_s))
            if self._is_closed:
                return
            run: Run = replace(
                self._run, earlier=(*self._run.earlier, f"{len(self._run.earlier)} by {self._number}")
            )
            try:
                self._kept.write("key", run)
            except OSError as error:
                self._fail(InputError(str(error)))
                return
            if self._is_closed:
                return
            self._run = run
            newest = run.generation
            world.announced.append(
                Announced(self._who.name, self._number, (newest.number, newest.name), run.earlier)
            )


def forks(announced: list[Announced]) -> list[tuple[Announced, Announced]]:
    """Pairs that contradict each other: neither goes on from the other one."""
    logs = sorted({each.log: each for each in announced}.values(), key=lambda each: each.log)
    return [
        (one, other)
        for place, one in enumerate(logs)
        for other in logs[place + 1 :]
        if one.log != other.log[: len(one.log)] and other.log != one.log[: len(other.log)]
    ]
