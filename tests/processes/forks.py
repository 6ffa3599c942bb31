"""Processes forked from one that has imported everything: real ones, each started in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess as Process
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.processes.launching import environment

TIMEOUT_S = 90
PRELOADED = ["pytest", "tests.processes.worker"]

_context = multiprocessing.get_context("forkserver")


def fork(body: Callable[..., None], *args: Any, log: Path, **env: str) -> Process:
    """Start body(*args), which can be pickled, in a process of its own whose output goes to `log`."""
    _context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, environment(HF_HUB_DISABLE_PROGRESS_BARS="1")):
        forkserver.ensure_running()
    process = _context.Process(target=_live, args=(body, args, str(log), env), daemon=True)
    process.start()
    return process


def _live(body: Callable[..., None], args: tuple, log: str, env: dict[str, str]) -> None:
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(env)
    torch.set_num_threads(1)
    body(*args)


def wait_until(holds: Callable[[], bool], process: Process, log: Path, poll_s: float = 0.005) -> None:
    """Until `holds`, as long as the process lives and for TIMEOUT_S at most; else its output is the error."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        alive = process.is_alive()
        if (not alive and not holds()) or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"exit code {process.exitcode}: {log.read_text(errors='replace')[-4000:]}")
        time.sleep(poll_s)
