"""Processes forked from one that has imported everything: real ones, each started in milliseconds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import runpy
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess as Process
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.commands.launch import launch_command_parser
from torch.distributed import TCPStore

from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.training.forks import SIGNALS
from tests.processes.launching import ROOT, environment, outcomes

TIMEOUT_S = 90
PRELOADED = ["pytest", "tests.processes.worker"]

_context = multiprocessing.get_context("forkserver")


def fork(body: Callable[..., None], *args: Any, log: Path, **env: str) -> Process:
    """Start body(*args), which can be pickled, in a process of its own whose output goes to `log`."""
    _context.set_forkserver_preload(PRELOADED)
    ours = environment(HF_HUB_DISABLE_PROGRESS_BARS="1")
    with mock.patch.dict(os.environ, ours):
        forkserver.ensure_running()  # a data loader of another test may have started it, with other variables
    process = _context.Process(target=_live, args=(body, args, str(log), ours | env), daemon=True)
    process.start()
    return process


def fork_regions(
    body: Callable[..., None], ranks: int | Sequence[int], arguments: list[Any], folder: Path, **env: str
) -> dict[str, dict]:
    """What `run_regions` gives of a worker's `body`, in two regions, without its launchers: quicker by far."""
    store, masters = serve_in_thread(), [torch_master() for _ in range(2)]
    sizes = [ranks] * 2 if isinstance(ranks, int) else ranks
    log = folder / "log.txt"
    processes = [
        fork(body, *arguments, log=log, **region_env(store, region), **rank_env(master, rank, size), **env)
        for region, (master, size) in enumerate(zip(masters, sizes, strict=True))
        for rank in range(size)
    ]
    for process in processes:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0, log.read_text()[-4000:]
    return outcomes(folder)


def run_recipe(
    recipe: str, flags: Sequence[str], folder: Path, change: Callable[[str], str] = lambda line: line
) -> None:
    """Run a script by the lines of its docstring, each changed by `change`, with flags of ours: what accelerate would launch."""
    text = (ROOT / recipe).read_text(encoding="utf-8")
    [exports] = re.findall(r"^    export (.+)$", text, re.MULTILINE)
    env = dict(setting.split("=") for setting in exports.split())
    assert env.pop("HF_COCODC_REGIONS") == "2" and env.pop("HF_COCODC_COORDINATOR").startswith("127.0.0.1:")
    lines = re.findall(r"^    HF_COCODC_REGION=(\d) accelerate launch (.+)$", text, re.MULTILINE)
    launches = [launch_command_parser().parse_args(shlex.split(change(line))) for _, line in lines]
    assert [region for region, _ in lines] == ["0", "1"]
    assert {each.training_script for each in launches} == {recipe}
    words = [str(ROOT / recipe), *launches[0].training_script_args, *flags]
    fork_regions(_run_script, [each.num_processes or 1 for each in launches], [words], folder, **env)


def _run_script(words: list[str]) -> None:
    os.chdir(ROOT)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def torch_master() -> TCPStore:
    """The store at which the ranks of one region meet, as a launcher serves it."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def region_env(store: Any, region: int, num_regions: int = 2) -> dict[str, str]:
    """What tells a process its region."""
    return {
        "HF_COCODC_REGION": str(region),
        "HF_COCODC_REGIONS": str(num_regions),
        "HF_COCODC_COORDINATOR": store.address,
    }


def rank_env(master: TCPStore, rank: int, num_ranks: int) -> dict[str, str]:
    """What a launcher tells the ranks of one machine, which meet at its store; nothing where there is one rank."""
    env: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
    }
    env |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": master.port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return {name: str(value) for name, value in env.items()} if num_ranks > 1 else {}


def _live(body: Callable[..., None], args: tuple, log: str, env: dict[str, str]) -> None:
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, SIGNALS
    )  # a command in a test may have started the server, which blocks them
    torch.set_num_threads(1)
    gc.freeze()  # see conftest
    try:
        body(*args)
    except Exception:  # ends as a script does: multiprocessing does not ask the hook
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def wait_until(holds: Callable[[], bool], process: Process, log: Path, poll_s: float = 0.005) -> None:
    """Until `holds`, as long as the process lives and for TIMEOUT_S at most; else its output is the error."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        alive = process.is_alive()
        if (not alive and not holds()) or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"exit code {process.exitcode}: {log.read_text(errors='replace')[-4000:]}")
        time.sleep(poll_s)
