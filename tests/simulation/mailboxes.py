"""Two processes talk through a storage that misbehaves, over and over; they stand still, die and begin again.

The code of `net/mailbox.py` and `net/storage.py` runs as it is, with pipes of its own in the place of sockets.
"""

from __future__ import annotations

import random
import select
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hf_cocodc.errors import LinkError
from hf_cocodc.net import mailbox, storage
from hf_cocodc.net.mailbox import Mailbox

from .machines import Event, Machine, Machines
from .stores import Faults, Reached, Store

URL = "simulated://store"
_RECORD = struct.Struct("<II")
"""What is said: the number of the talk, and of the record in it."""
_HOLDS = 4000
"""Bytes that a pipe holds."""


class Pipe:
    """One end of a pair; with what `mailbox` asks of a socket. What one end sends, the other one receives."""

    def __init__(self, machines: Machines) -> None:
        self.other: Pipe = self
        self.heard, self.changed = bytearray(), Event(machines)
        self.has_ended = self.is_shut = self.is_closed = self.is_reset = self.resets = False

    @classmethod
    def pair(cls, machines: Machines) -> tuple[Pipe, Pipe]:
        one, other = cls(machines), cls(machines)
        one.other, other.other = other, one
        return one, other

    def is_ready(self, event: int) -> bool:
        if self.is_closed:
            raise OSError("closed")
        if self.is_reset:
            return True
        if event == select.POLLIN:
            return bool(self.heard) or self.has_ended or self.is_shut
        return len(self.other.heard) < _HOLDS

    def recv(self, most: int) -> bytes:
        self._check()
        said = bytes(self.heard[:most])
        del self.heard[:most]
        self._tell()
        return said

    def send(self, said: Any) -> int:
        self._check()
        part = bytes(said[: _HOLDS - len(self.other.heard)])
        self.other.heard += part
        self._tell()
        return len(part)

    def shutdown(self, how: int) -> None:
        self._check()
        if how == mailbox.socket.SHUT_WR:
            self.other.has_ended = True
        else:
            self.is_shut = True
        self._tell()

    def setsockopt(self, *how: Any) -> None:
        self.resets = True

    def setblocking(self, blocks: bool) -> None:
        """It does."""

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.other.is_reset |= self.resets or bool(self.heard) or not self.other.has_ended
            self._tell()

    def _check(self) -> None:
        if self.is_reset:
            raise ConnectionResetError("reset")

    def _tell(self) -> None:
        self.changed.notify()
        self.other.changed.notify()


def is_ready(pipe: Pipe, event: int, timeout_s: float | None = None) -> bool:
    """See `mailbox._is_ready`."""
    machines = pipe.changed._machines
    until = None if timeout_s is None else machines.now + timeout_s
    while not pipe.is_ready(event):
        if until is not None and machines.now >= until:
            return False
        pipe.changed.wait(None if until is None else until - machines.now)
    return True


@dataclass(eq=False)
class Talk:
    """What one process says and hears on one socket.

    Attributes:
        how: "whole", or how it has broken; empty while it goes on.
        heard: the talk of the other end that was heard, and how many records of it.
    """

    number: int
    who: Machine
    records: int
    began_at: float
    said: int = 0
    says_all: bool = False
    heard: tuple[int, int] = (-1, 0)
    heard_all: bool = False
    how: str = ""


@dataclass(eq=False)
class Talks:
    """A world: see `leases.Leases`."""

    seed: int
    faults: Faults
    stills: int = 5
    still_s: float = 60.0
    calm_at: float = 120.0
    talks: list[Talk] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machines = Machines(self.seed)
        self.store = Store(self.machines, self.faults)
        self.ends: list[Machine] = []
        self.goes_on, self.is_one_machine = self.seed % 2 > 0, self.seed % 4 < 2
        self.ends_at = self.calm_at + (150.0 if self.goes_on else -10.0)
        self.boxes: dict[Machine, Mailbox] = {}
        self.ended_by_death: list[Talk] = []

    def run(self) -> None:
        """Let it happen. Raises AssertionError if a thread fails, or something holds no more."""
        with self._stand_ins():
            try:
                self._happen()
            finally:
                self.machines.close()

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        machines, time = self.machines, self.machines.time()
        names = {
            "time": time,
            "threading": machines.threading(),
            "together": machines.ours(machines.together, mailbox.together),
            "keep_from_forks": machines.ours(lambda pipe: None, mailbox.keep_from_forks),
            "_is_ready": machines.ours(is_ready, mailbox._is_ready),
            "_joined_sockets": machines.ours(lambda: Pipe.pair(machines), mailbox._joined_sockets),
            "atexit": SimpleNamespace(register=lambda call: None),
            "has_died": machines.ours(self._has_died, mailbox.has_died),
            "PIECE": 400,
        }
        bucket = machines.ours(lambda *_: Reached(self.store), storage._Bucket)
        with (
            mock.patch.multiple(
                storage, time=time, random=machines.chance(), _Bucket=bucket, together=names["together"]
            ),
            mock.patch.multiple(mailbox, **names),
        ):
            yield

    def _happen(self) -> None:
        machines, draws = self.machines, random.Random(self.seed)
        for is_first in (True, False):
            self.ends.append(self._begin(is_first))
        for _ in range(self.stills):
            machines.at(draws.uniform(1.0, self.calm_at), lambda: self._disturb(draws))
        machines.run(self.calm_at)
        self.store.heal()
        for machine in self.ends:
            machine.frozen_until = min(machine.frozen_until, machines.now)
        calm = len(self.talks)
        machines.run(machines.now + 280.0)
        for talk in self.talks:
            assert talk.how or not talk.who.is_alive, f"hangs: {talk}"
        assert not self.goes_on or any(talk.how == "whole" for talk in self.talks[calm:]), (
            "nobody talks any more"
        )
        self._check()

    def _check(self) -> None:
        """What was heard is what one talk of the other end has said, from its begin; whole if it says so."""
        heard = [talk.heard[0] for talk in self.talks if talk.heard[1]]
        assert len(heard) == len(set(heard)), "two have heard one talk"
        for talk in self.talks:
            other, records = talk.heard
            if talk.heard_all and other >= 0:
                theirs = self.talks[other]
                is_whole = theirs.says_all and records == theirs.said
                # a system ends the sockets of a process that dies
                assert is_whole or self.is_one_machine and not theirs.who.is_alive, f"{talk}, {theirs}"
                self.ended_by_death += [] if is_whole else [talk]

    def _has_died(self, process: str) -> bool:
        named = {box.process: machine for machine, box in self.boxes.items()}
        return self.is_one_machine and process in named and not named[process].is_alive

    def _disturb(self, draws: random.Random) -> None:
        place = draws.randrange(2)
        machine = self.ends[place]
        if draws.random() < 0.7:
            machine.frozen_until = (
                self.machines.now + draws.choice((3.0, 10.0, 30.0, self.still_s)) * draws.random()
            )
        else:
            machine.is_alive = False
            self.ends[place] = self._begin(place == 0)

    def _begin(self, is_first: bool) -> Machine:
        machine = Machine(f"{'first' if is_first else 'second'} {self.machines.now:.0f}")
        self.machines.start(machine, lambda: self._live(machine, is_first))
        return machine

    def _live(self, machine: Machine, is_first: bool) -> None:
        """Meet the other end, talk, and begin again."""
        while True:
            try:
                self.boxes[machine] = box = mailbox.Mailbox(URL)
                break
            except LinkError:
                self.machines.sleep(1.0)
        while self.machines.now < self.ends_at:
            self.machines.sleep(self.machines.random.choice((0.0, 10.0)))
            try:
                near = box.meet("name", is_first, 60.0)
            except (OSError, LinkError):
                self.machines.sleep(1.0)
                continue
            talk = Talk(
                len(self.talks), machine, self.machines.random.choice((1, 30, 300)), self.machines.now
            )
            self.talks.append(talk)
            saying = self.machines.start(machine, lambda talk=talk, near=near: self._say(talk, near))
            self._hear(talk, near)
            saying.join()
            near.close()
            talk.how = talk.how or "whole"

    def _say(self, talk: Talk, near: Pipe) -> None:
        try:
            while talk.said < talk.records:
                some = range(
                    talk.said, min(talk.said + self.machines.random.choice((1, 10, 200)), talk.records)
                )
                said = memoryview(b"".join(_RECORD.pack(talk.number, number) for number in some))
                talk.said = some.stop
                while said:
                    is_ready(near, select.POLLOUT)
                    said = said[near.send(said) :]
                self.machines.sleep(self.machines.random.choice((0.0, 0.1, 2.0)))
            talk.says_all = True
            near.shutdown(mailbox.socket.SHUT_WR)
        except OSError as error:
            talk.how = repr(error)

    def _hear(self, talk: Talk, near: Pipe) -> None:
        heard = b""
        try:
            while is_ready(near, select.POLLIN) and (said := near.recv(1 << 16)):
                heard += said
                while len(heard) >= _RECORD.size:
                    number, record = _RECORD.unpack(heard[: _RECORD.size])
                    heard = heard[_RECORD.size :]
                    other = number if talk.heard[0] < 0 else talk.heard[0]
                    assert (number, record) == (other, talk.heard[1]), f"{talk} hears {number}, {record}"
                    talk.heard = other, record + 1
            talk.heard_all = not heard
        except OSError as error:
            talk.how = repr(error)
