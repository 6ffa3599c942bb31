"""Processes whose threads run in virtual time, one at a time: code that waits, and asks a storage, is played as it is.

A thread gives way where it sleeps, waits or asks. Which one goes on then follows from a seed. A process can be frozen for a
while, or killed, at any of these moments.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeVar

T = TypeVar("T")


class Killed(BaseException):
    """The process of this thread lives no more."""


class Machine:
    """A process.

    Attributes:
        frozen_until: when it goes on; what it waits for happens meanwhile.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive, self.frozen_until = True, 0.0


class Thread:
    """A thread of a machine; with what `threading.Thread` offers."""

    def __init__(self, machines: Machines, machine: Machine, work: Callable[[], object]) -> None:
        self._machines, self.machine, self._work = machines, machine, work
        self.ticket, self.go, self._ended = 0, threading.Semaphore(0), Event(machines)
        self.real = threading.Thread(target=self._live, daemon=True)

    def start(self) -> None:
        self.real.start()
        self._machines.wake(self, self.ticket)

    def join(self, timeout_s: float | None = None) -> None:
        self._ended.wait(timeout_s)

    def end(self) -> None:
        """Let it end at once, whatever it waits for."""
        self.go.release()
        self.real.join()

    def _live(self) -> None:
        self.go.acquire()
        try:
            if not self._machines.is_over:
                self._work()
        except Killed:
            pass
        except BaseException:
            self._machines.failures.append(f"{self.machine.name}: {traceback.format_exc()}")
        self._machines.ends(self)
        if not self._machines.is_over:
            self._ended.set()
            self._machines.go_on()


class Event:
    """What `threading.Event` is, in virtual time."""

    def __init__(self, machines: Machines) -> None:
        self._machines, self._is_set = machines, False
        self._waiting: list[tuple[Thread, int]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self.notify()

    def notify(self) -> None:
        """Wake up whoever waits, whether it is set or not."""
        waiting, self._waiting = self._waiting, []
        for thread, ticket in waiting:
            self._machines.wake(thread, ticket)

    def wait(self, timeout_s: float | None = None) -> bool:
        if not self._is_set:
            thread = self._machines.current
            thread.ticket += 1
            self._waiting.append((thread, thread.ticket))
            if timeout_s is not None:
                self._machines.wake(thread, thread.ticket, timeout_s)
            self._machines.block()
        return self._is_set


class Machines:
    """All processes. `random` draws whatever is left to chance."""

    def __init__(self, seed: int) -> None:
        self.random, self.now, self.is_over = random.Random(seed), 0.0, False
        self.failures: list[str] = []
        self._current: Thread | None = None
        self._threads: dict[Thread, None] = {}
        self._real_threads: set[threading.Thread] = set()
        self._until, self._back = 0.0, threading.Semaphore(0)
        self._queue: list[tuple[float, int, Thread | None, Any]] = []
        self._numbers = count()

    @property
    def current(self) -> Thread:
        assert self._current is not None, "no thread of a machine runs"
        return self._current

    def start(self, machine: Machine, work: Callable[[], object]) -> Thread:
        thread = Thread(self, machine, work)
        self._threads[thread] = None
        self._real_threads.add(thread.real)
        thread.start()
        return thread

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call at a time, in no process."""
        heapq.heappush(self._queue, (time, next(self._numbers), None, call))

    def wake(self, thread: Thread, ticket: int, in_s: float = 0.0) -> None:
        """Let a thread go on soon, unless it has gone on since it took this ticket."""
        heapq.heappush(self._queue, (self.now + in_s, next(self._numbers), thread, ticket))

    def sleep(self, seconds: float) -> None:
        thread = self.current
        thread.ticket += 1
        self.wake(thread, thread.ticket, seconds)
        self.block()

    def block(self) -> None:
        """Wait to be woken."""
        if self.is_over:
            raise Killed
        thread = self.current
        if self.go_on() is not thread:
            thread.go.acquire()
        if self.is_over:
            raise Killed

    def go_on(self) -> Thread | None:
        """Hand over to the thread that is next."""
        before, self._current = self._current, self._next()
        if self._current is None:
            self._back.release()
        elif self._current is not before:
            self._current.go.release()
        return self._current

    def ends(self, thread: Thread) -> None:
        thread.ticket += 1  # a time-out of what it has waited for may still come
        self._threads.pop(thread, None)

    def run(self, until: float) -> None:
        """Let things happen until a time. Raises AssertionError if a thread has failed."""
        self._until = until
        if self.go_on() is None:
            self._back.acquire()
        else:
            self._back.acquire()
        self.now = until
        assert not self.failures, self.failures[0]

    def close(self) -> None:
        """End all threads."""
        self.is_over = True
        for thread in list(self._threads):
            thread.end()

    def _next(self) -> Thread | None:
        while self._queue and self._queue[0][0] <= self._until and not self.failures:
            self.now, _, thread, what = heapq.heappop(self._queue)
            if thread is None:
                what()
            elif thread.machine.is_alive and what == thread.ticket:
                if thread.machine.frozen_until <= self.now:
                    return thread
                self.wake(thread, what, thread.machine.frozen_until - self.now)
        return None

    # -- what stands in for modules, and functions; for threads of machines only: those of earlier tests may still run

    def ours(self, stands_in: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        """Calls one or the other one, whichever this thread is to have."""

        def call(*args: Any, **named: Any) -> Any:
            is_ours = threading.current_thread() in self._real_threads
            return (stands_in if is_ours else real)(*args, **named)

        return call

    def chance(self) -> SimpleNamespace:
        """What draws for our threads alone: others that earlier tests have left make requests, too."""
        return SimpleNamespace(uniform=self.ours(self.random.uniform, random.uniform))

    def time(self) -> SimpleNamespace:
        return SimpleNamespace(
            monotonic=self.ours(lambda: self.now, time.monotonic), sleep=self.ours(self.sleep, time.sleep)
        )

    def threading(self) -> SimpleNamespace:
        def thread(target: Callable[..., object], args: Iterable[Any] = (), **named: Any) -> Any:
            begun: list[Thread] = []
            return SimpleNamespace(
                start=lambda: begun.append(self.start(self.current.machine, lambda: target(*args))),
                join=lambda: begun[0].join(),
            )

        return SimpleNamespace(
            Thread=self.ours(thread, threading.Thread),
            Lock=threading.Lock,
            Event=self.ours(lambda: Event(self), threading.Event),
        )

    def together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """See `storage.together`."""
        if len(calls) == 1:
            return [calls[0]()]
        done = Event(self)
        results: dict[int, T] = {}
        errors: list[Exception] = []

        def work(place: int, call: Callable[[], T]) -> None:
            try:
                results[place] = call()
            except Exception as error:
                errors.append(error)
            done.notify()

        for place, call in enumerate(calls):
            self.start(self.current.machine, lambda place=place, call=call: work(place, call))
        while len(results) < len(calls) and not errors:
            done.wait()
        if errors:
            raise errors[0]
        return [results[place] for place in range(len(calls))]
