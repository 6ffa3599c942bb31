"""Processes forked from this one. They need not import again what takes seconds to import.

This process may only have imported the libraries: whatever they start when they are used (threads, caches, connections) is of no
use behind a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import CocodcError, InputError

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a command to end: Ctrl-C, a scheduler, a terminal that is closed."""


def load_libraries() -> None:
    """Import what every region imports."""
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Trainer  # noqa: F401

    from ..trainer import callback  # noqa: F401


def call(function: Callable[[], T]) -> T:
    """What `function` returns or raises, in a process of its own: what it loads and starts ends with it.

    Raises:
        CocodcError, OSError: what the function has raised.
        RuntimeError: the function has raised another error; its text is the traceback.
        InputError: the process was killed.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def answer() -> None:
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # Ctrl-C reaches this process, too, and the other one ends it
        outcome: tuple[Any, Exception | None]
        try:
            outcome = function(), None
        except (CocodcError, OSError) as error:
            outcome = None, error
        except Exception:
            outcome = None, RuntimeError(traceback.format_exc())
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            sender.send(outcome)

    pid = _fork(answer)
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        result, error = None, None
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        receiver.close()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if error is not None:
        raise error
    if code < 0:
        raise InputError(
            f"the process that checked the recipe was killed (exit code {code}), before any region was started. If this machine "
            "has too little memory, take a smaller model."
        )
    if code:
        raise RuntimeError(f"the process that checked the recipe has ended with exit code {code}")
    return result


class Fork:
    """A process that waits until it is told to `begin`, and then runs `work` on what it is given; else like `subprocess.Popen`.

    It ends if nobody can tell it any more. It has a process group of its own.
    """

    def __init__(self, work: Callable[[Any], None]) -> None:
        receiver, self._sender = multiprocessing.Pipe(duplex=False)

        def wait() -> None:
            os.setsid()
            self._sender.close()
            try:
                job = receiver.recv()
            except EOFError:
                return
            receiver.close()
            try:
                work(job)
            finally:  # as at the end of any Python process
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()

        self.pid = _fork(wait)
        self.returncode: int | None = None
        receiver.close()

    def begin(self, job: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed: `poll` tells of it
            self._sender.send(job)
        self._sender.close()

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _fork(run: Callable[[], None]) -> int:
    """The number of a new process, which ends after `run`, or with a traceback. It handles signals as any new process does."""
    sys.stdout.flush()
    sys.stderr.flush()
    if (
        signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    ):  # as some supervisors leave it: exit codes would be lost
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with warnings.catch_warnings():
            # libraries have threads of their own, which know of forks
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            for number in SIGNALS:
                usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup
                    signal.signal(number, usual)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            gc.freeze()  # the collector would copy the pages that the processes share
            _draw_anew()
            run()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _draw_anew() -> None:
    """Give generators of random numbers states of this process's own, as Python does with `random` alone."""
    numpy, fingerprint = (sys.modules.get(name) for name in ("numpy", "datasets.fingerprint"))
    if numpy is not None:
        numpy.random.seed()
    if fingerprint is not None:  # it names files in a cache that processes share
        fingerprint.fingerprint_rng.seed()
