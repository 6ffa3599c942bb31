"""Processes that begin with the libraries of a region loaded: children of multiprocessing's fork server."""

import atexit
import contextlib
import fcntl
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from types import ModuleType

from ..errors import CocodcError
from .region import end

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a command to end: Ctrl-C, a scheduler, a terminal that is closed."""


_LONGEST_FOLDER = 70
"""A socket's path has at most 107 bytes; multiprocessing adds "/pymp-12345678/listener-12345678" to the temporary folder."""


def can_load_ahead() -> bool:
    """Whether there can be such a server here."""
    return len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER


def load_ahead() -> None:
    """Let the server begin to import the libraries, beside this process."""
    forkserver.set_forkserver_preload([f"{__package__}.libraries"])
    # the server lives as long as a process of its own does: what a terminal or Slurm sends to all is not for it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with _silent():
            resource_tracker.ensure_running()  # it lets two of the signals through again
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_until_loaded() -> None:
    """Wait until the server can fork regions. A signal may interrupt this, as it must not interrupt the start of a region."""
    load_ahead()
    _start(multiprocessing.get_context("forkserver").Process(target=int))


def _start(process: BaseProcess) -> None:
    try:
        with _without_main():
            process.start()
    except (EOFError, OSError) as error:
        raise CocodcError(
            "the process that loads the libraries for all regions here was killed. Has this machine too little memory?"
        ) from error


class Fork:
    """A process that trains one region of a recipe, as `python -m hf_cocodc.train ARGUMENTS` does; else like `subprocess.Popen`.
    It has a process group of its own. `env`: its whole environment; `log`: the file for what it prints.
    """

    def __init__(self, env: Mapping[str, str], log: str, arguments: Sequence[str]) -> None:
        load_ahead()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_live, args=(env, log, arguments))
        _start(self._process)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int | None:
        self._process.join()
        return self.returncode


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Inside the block, a new process inherits no output of this one: it would keep a pipe open when this one is gone."""
    kept = {}
    for stream in (1, 2):
        with contextlib.suppress(OSError):  # it is closed; a copy must not take its number
            kept[stream] = fcntl.fcntl(stream, fcntl.F_DUPFD_CLOEXEC, 3)
    try:
        with open(os.devnull, "wb") as nowhere:
            for stream in kept:
                os.dup2(nowhere.fileno(), stream)
        yield
    finally:
        for stream, copy in kept.items():
            os.dup2(copy, stream)
            os.close(copy)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Inside the block, multiprocessing finds no main module that a child would import once more."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _live(env: Mapping[str, str], log: str, arguments: Sequence[str]) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _draw_anew()
    # a number of the command's, not the user's: OpenMP has read the user's when it was loaded
    threads, loaded_with = (each.get("OMP_NUM_THREADS", "") for each in (env, os.environ))
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["hf_cocodc.train", *arguments]
    sys.path.insert(0, os.getcwd())
    with open(os.devnull, "rb") as nothing, open(log, "ab") as out:
        os.dup2(nothing.fileno(), 0)
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    import torch

    from .train import main

    if threads != loaded_with:
        torch.set_num_threads(int(threads))
    try:
        end(main(arguments))
    finally:  # multiprocessing leaves out what ends any other Python process
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _draw_anew() -> None:
    """Give generators of random numbers states of this process's own, as Python does with `random` alone."""
    numpy, fingerprint = (sys.modules.get(name) for name in ("numpy", "datasets.fingerprint"))
    if numpy is not None:
        numpy.random.seed()
    if fingerprint is not None:  # it names files in a cache that processes share
        fingerprint.fingerprint_rng.seed()
