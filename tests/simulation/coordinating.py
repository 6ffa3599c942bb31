"""A coordinator process over the real rules: what server, runs and state file do, without sockets, clock and disk."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from hf_cocodc.coordinator import rules
from hf_cocodc.coordinator.messages import Refuse
from hf_cocodc.coordinator.rules import (
    Came,
    CloseConnection,
    Ended,
    Persist,
    Run,
    SendTo,
    StoodStill,
    Tick,
    kept,
)
from hf_cocodc.coordinator.state import revived
from hf_cocodc.net.members import Member

from .network import RESET, Actor, Connection, Network

COORDINATOR = "coordinator"
_TICK_S, _FAREWELL_S, _SURE_S = 0.5, 1.0, 5.0
STOOD_S = 4.0
"""A coordinator that stood still for longer may have lost its members to another one (`runs._STOOD_S`)."""


class SoleFile(dict[str, Run]):
    """States in a storage: whoever has read them last writes them, and nobody else (`StateInStorage`, `test_leases`)."""

    writer: "Coordinator"


class Coordinator(Actor):
    """Args:
    file: the newest states of runs on its disk, which it writes.
    heard: called with each step of the rules: name, state before, state after, effects.
    host: the process that serves, in a storage; it ends with it.
    silent: see `rules.restarted`.
    """

    def __init__(
        self,
        network: Network,
        file: dict[str, Run],
        heard: Callable[[str, Run, Run, tuple[Any, ...]], None] = lambda *step: None,
        host: Actor | None = None,
        silent: Mapping[Member, float] = MappingProxyType({}),
    ) -> None:
        super().__init__(network, COORDINATOR)
        self.file, self._heard, self.host = file, heard, host
        self._has_copies = not isinstance(file, SoleFile)
        if isinstance(file, SoleFile):
            file.writer = self
            self._look_whether_beaten()
        self.runs: dict[str, Run] = {}
        self._by_number: dict[int, Connection] = {}
        self._numbers: dict[Connection, int] = {}
        self._next = 0
        self.stood_still_s = network.now
        random_name = f"{network.random.getrandbits(32):x}"
        for name, state in file.items():
            file[name] = revived(state, random_name)
            self.runs[name] = rules.restarted(file[name], self.time, self._has_copies, silent)
        self._tick()

    @property
    def is_beaten(self) -> bool:
        """Whether another one has gone on with the states."""
        return isinstance(self.file, SoleFile) and self.file.writer is not self

    def _look_whether_beaten(self) -> None:
        if self.is_beaten:
            self.kill()
        self.later(_SURE_S, self._look_whether_beaten)

    def thaw(self) -> float:
        frozen_s = super().thaw()
        for name in self.runs if frozen_s > STOOD_S else ():
            self._step(name, StoodStill(self._has_copies))
        return frozen_s

    def hear(self, connection: Connection, item: Any) -> None:
        if item in (None, RESET):
            self._end(connection, cut=item == RESET)
            return
        if connection not in self._numbers:
            self._next += 1
            self._numbers[connection] = self._next
            self._by_number[self._next] = connection
        self._step(connection.about, Came(self._numbers[connection], item))

    def _end(self, connection: Connection, cut: bool = False) -> None:
        number = self._numbers.pop(connection, None)
        connection.close(self)
        if number is not None:
            del self._by_number[number]
            self._step(connection.about, Ended(number, cut))

    def _tick(self) -> None:
        for name in list(self.runs):
            self._step(name, Tick())
        self.later(_TICK_S, self._tick)

    def _step(self, name: str, event: rules.Event) -> None:
        before = self.runs.get(name) or Run(name=name)
        after, effects = rules.step(before, event, self.time)
        if self.is_beaten and Persist() in effects:  # nobody hears of what cannot be written
            self.kill()
            return
        self.runs[name] = after
        self._heard(name, before, after, effects)
        for effect in effects:
            match effect:
                case Persist():
                    self.file[name] = kept(after)
                case CloseConnection(to) if to in self._by_number:
                    self._end(self._by_number[to])
                case SendTo(to, message) if to in self._by_number:
                    connection = self._by_number[to]
                    connection.send(self, message)
                    if isinstance(message, Refuse):
                        self.later(_FAREWELL_S, partial(self._end, connection))
