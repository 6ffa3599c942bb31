"""How a process of a region ends when its script does."""

from __future__ import annotations

import atexit
import ctypes
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

from hf_cocodc import OuterConfig, RegionConfig
from hf_cocodc.run.connect import connect
from tests.processes.forks import fork, rank_env, torch_master
from tests.processes.launching import environment
from tests.toys import llama

RANKS = 2


def end_with_a_collective(kept: list[object]) -> None:
    """A rank whose script ends while gloo's thread waits for the interpreter, to let go of a tensor."""
    atexit._clear()  # the test's own would give gloo's threads the time that they need
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(llama())
    kept.append(model)  # as a script's own variables, which outlive all that runs at exit
    connect(
        accelerator, accelerator.unwrap_model(model), OuterConfig(), RegionConfig(region=0, count=1), None
    )
    dist.barrier()
    sys.setswitchinterval(60)
    dist.all_reduce(torch.zeros(1), async_op=True)
    done = time.perf_counter() + 0.5
    while time.perf_counter() < done:
        pass  # with the interpreter to itself
    ctypes.pythonapi.Py_Exit(0)


def test_no_thread_of_gloo_outlives_the_interpreter(tmp_path: Path) -> None:
    """One that asks for the interpreter when that is gone would abort the process: a run that went well would fail."""
    log, master = tmp_path / "log.txt", torch_master()
    ranks = [
        fork(end_with_a_collective, [], log=log, **rank_env(master, rank, RANKS)) for rank in range(RANKS)
    ]
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0] * RANKS, log.read_text()


IN_A_CALL = """
    import threading, time
    from datetime import timedelta
    import torch.distributed as dist
    from hf_cocodc.threads import NativeThread

    class SlowToGo:
        "Keeps the interpreter busy with its own end."
        def __del__(self, sleep=time.sleep):
            sleep(2)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    inside = threading.Event()

    def call():
        inside.set()
        try:
            store.wait(["a key that nobody sets"], timedelta(seconds=1))
        except RuntimeError:
            pass

    NativeThread(call, "call").start()
    inside.wait()
    kept = SlowToGo()
"""
AT_REST = """
    import threading
    from hf_cocodc import threads

    threads._EXIT_S = 3600
    resting = threading.Event()

    def rest():
        with threads.at_rest():
            resting.set()
            threading.Event().wait()

    threads.NativeThread(rest, "rest").start()
    resting.wait()
"""


@pytest.mark.parametrize("script", [IN_A_CALL, AT_REST], ids=["in_a_call", "at_rest"])
def test_a_script_ends_well_whatever_its_threads_do(script: str) -> None:
    """A call that returns while the interpreter ends would abort it; and a thread without work keeps nobody from the end."""
    ended = subprocess.run(
        [sys.executable, "-c", dedent(script)], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr


UNCAUGHT = """
    import sys
    from hf_cocodc import RunLeft, RunStopped
    from hf_cocodc.errors import RunFinished, spare_traceback

    sys.excepthook = lambda kind, error, trace: print("another hook has", error)
    spare_traceback()
    spare_traceback()
    raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("RunStopped('all regions stopped')", 3, ("", "all regions stopped\n")),
        ("RunLeft('this region has left')", 0, ("", "this region has left\n")),
        ("RunFinished('the run has finished')", 0, ("", "the run has finished\n")),
        ("ValueError('a mistake')", 1, ("another hook has a mistake\n", "")),
    ],
)
def test_a_script_that_is_stopped_ends_without_a_traceback(
    error: str, code: int, said: tuple[str, str]
) -> None:
    """With the message and the exit code of the error; the hook of others has the rest."""
    script = dedent(UNCAUGHT.format(error=error))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, (ended.stdout, ended.stderr)) == (code, said)


SIGNALED = """
    import os, signal, torch
    from accelerate import Accelerator
    from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig, RunStopped

    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    config = OuterConfig(sync_interval=5, outer_lr=1.0, outer_momentum=0.0)
    with OuterOptimizer(accelerator, model, optimizer, config, RegionConfig(count=1), max_steps=50) as outer:
        signal.signal(signal.SIGTERM, lambda *_: outer.ask_to_stop("SIGTERM"))
        while not outer.should_stop:
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            outer.step()
            if outer.inner_step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
{end}
"""
ENDS = {
    "inside the block": ("        raise RunStopped(outer.verdict)", "stop\n"),
    "behind it": ("        verdict = outer.verdict\n    raise RunStopped(verdict)", "stop\n"),
    "nowhere": ("", "inside the with block, and resume from there later.\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", ENDS)
def test_a_plain_loop_that_sigterm_stops_ends_with_a_sentence(where: str) -> None:
    """As the documentation shows it, and if the script does not notice."""
    end, said = ENDS[where]
    ended = subprocess.run(
        [sys.executable, "-c", dedent(SIGNALED.format(end=end))],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 3, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.endswith(said), ended.stderr


ABORTS = """
    import threading, time
    from datetime import timedelta
    import torch.distributed as dist
    from hf_cocodc import threads

    threads._EXIT_S = 0.5

    class SlowToGo:
        "Keeps the interpreter busy with its own end."
        def __del__(self, sleep=time.sleep):
            sleep(3)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    inside = threading.Event()

    def call():
        inside.set()
        try:
            store.wait(["a key that nobody sets"], timedelta(seconds=2))
        except RuntimeError:
            pass

    threads.NativeThread(call, "call").start()
    inside.wait()
    kept = SlowToGo()
    raise SystemExit(7)
"""


@pytest.mark.slow
def test_a_call_that_outlasts_the_patience_of_the_interpreter_does_not_abort_it() -> None:
    """It returns while the interpreter ends: the exit code is still the script's, and nothing is said of `terminate`."""
    ended = subprocess.run(
        [sys.executable, "-c", dedent(ABORTS)], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 7, ended.stderr
    assert "terminate" not in ended.stderr


MAIN_ABORTS = """
    import ctypes, sys, threading
    from hf_cocodc import threads

    threads._EXIT_S, threads._LONGEST_EXIT_S = 0.1, 1

    class Aborts:
        def __del__(self, terminate=ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev):
            terminate()

    threads.NativeThread(threading.Event().wait, "call").start()
    sys.kept = Aborts()
    raise SystemExit(7)
"""


def test_a_main_thread_that_cpp_stops_does_not_sleep_for_ever() -> None:
    """It shares the terminate handler with the threads that may sleep."""
    ended = subprocess.run(
        [sys.executable, "-c", dedent(MAIN_ABORTS)], env=environment(), capture_output=True, timeout=60
    )
    assert ended.returncode == -signal.SIGALRM, ended.stderr
