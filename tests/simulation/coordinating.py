"""A coordinator process over the real rules: what server, runs and state file do, without sockets, clock and disk."""

from collections.abc import Callable
from functools import partial
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

from .network import RESET, Actor, Connection, Network

COORDINATOR = "coordinator"
_TICK_S, _FAREWELL_S = 0.5, 1.0
STOOD_S = 4.0
"""A coordinator that stood still for longer may have lost its members to another one (`runs._STOOD_S`)."""


class Coordinator(Actor):
    """Args:
    file: the newest states of runs on its disk, which it writes.
    heard: called with each step of the rules: name, state before, state after, effects.
    """

    def __init__(
        self,
        network: Network,
        file: dict[str, Run],
        heard: Callable[[str, Run, Run, tuple[Any, ...]], None] = lambda *step: None,
    ) -> None:
        super().__init__(network, COORDINATOR)
        self.file, self._heard = file, heard
        self.runs: dict[str, Run] = {}
        self._by_number: dict[int, Connection] = {}
        self._numbers: dict[Connection, int] = {}
        self._next = 0
        self._stood_still_s, self._frozen_at = network.now, 0.0
        random_name = f"{network.random.getrandbits(32):x}"
        for name, state in file.items():
            file[name] = revived(state, random_name)
            self.runs[name] = rules.restarted(file[name], self.time)
        self._tick()

    @property
    def time(self) -> float:
        return self.network.now - self._stood_still_s

    def freeze(self) -> None:
        if not self.is_frozen:
            self._frozen_at = self.network.now
        super().freeze()

    def thaw(self) -> None:
        if self.is_frozen:
            frozen_s = self.network.now - self._frozen_at
            self._stood_still_s += frozen_s
            for name in self.runs if frozen_s > STOOD_S else ():
                self._step(name, StoodStill())
        super().thaw()

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
