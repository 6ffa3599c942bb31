"""Daemon threads that call C++ code: operations of gloo, stores, tensors, and the destructors of all of these.

If such a call returns while the interpreter ends, CPython before 3.14 ends the thread by unwinding its stack, which C++
forbids: the process aborts, and a run that went well has exit code -6. The interpreter therefore ends after these threads. One
that is still in a call after some seconds, because another region holds its end of a connection, sleeps when it returns.
"""

import atexit
import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_EXIT_S = 5.0
"""How long the end of the interpreter waits for them."""
_EXIT_POLL_S = 0.02
_LONGEST_EXIT_S = 600
"""How long the rest of the interpreter's end may take, once a thread may sleep in it. Whole seconds."""


class NativeThread(threading.Thread):
    """A daemon thread that calls C++ code. It must end, or be `at_rest`, soon after all links are closed."""

    def __init__(self, target: Callable[..., Any], name: str, args: tuple = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self.at_rest = False


@contextlib.contextmanager
def at_rest() -> Iterator[None]:
    """Inside the block, the present thread waits for work, and calls no C++ code: the interpreter may end."""
    thread = threading.current_thread()
    assert isinstance(thread, NativeThread)
    thread.at_rest = True
    try:
        yield
    finally:
        thread.at_rest = False


def side_by_side(calls: Iterable[Callable[[], T]], threads: int) -> list[T]:
    """The results of calls that wait for other regions, in order, made in at most so many threads.

    The threads are daemons, so that a region which does not answer keeps no process from its end. The first error of a call is
    raised as soon as it occurs; threads may still be waiting, but take no other call.
    """
    todo = list(enumerate(calls))
    results: dict[int, T] = {}
    failures: list[BaseException] = []
    changed = threading.Condition()
    left = len(todo)
    todo.reverse()

    def work() -> None:
        nonlocal left
        while True:
            with changed:
                if not todo or failures:
                    return
                index, call = todo.pop()
            try:
                results[index] = call()
            except BaseException as error:  # raised in the calling thread
                with changed:
                    failures.append(error)
                    changed.notify()
                return
            with changed:
                left -= 1
                changed.notify()

    for _ in range(min(threads, left)):
        NativeThread(work, "hf_cocodc-connect").start()
    with changed:
        changed.wait_for(lambda: failures or not left)
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(results))]


@atexit.register
def _let_them_end() -> None:
    until = time.monotonic() + _EXIT_S
    threads = [thread for thread in threading.enumerate() if isinstance(thread, NativeThread)]
    while any(thread.is_alive() and not thread.at_rest for thread in threads):
        if time.monotonic() > until:
            _sleep_instead_of_aborting()
            return
        time.sleep(_EXIT_POLL_S)


def _sleep_instead_of_aborting() -> None:
    """A thread whose unwinding C++ stops calls the terminate handler, which is `abort`: let it be `pause` from now on.

    All threads share this handler: the alarm ends the process if it is the main thread that sleeps.
    """
    with contextlib.suppress(OSError, AttributeError):  # not the C++ library of GCC
        pause = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p)
        ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(pause)
        signal.alarm(_LONGEST_EXIT_S)
