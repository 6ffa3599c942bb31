"""The clock by which a process judges others."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hf_cocodc.net import awake
from hf_cocodc.net.awake import Clock
from tests.standing import standing


def test_it_goes_as_the_monotonic_clock_does() -> None:
    clock, began = Clock(), time.monotonic()
    for _ in range(5):
        time.sleep(0.05)
        assert clock.look() == 0.0
    assert clock.now - began == pytest.approx(time.monotonic() - began, abs=0.05)


def test_what_it_counts_of_a_gap_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    stood = standing(monkeypatch)
    clock = Clock()
    before = clock.now
    stood.s += 100.0
    assert clock.look() == pytest.approx(100.0 - awake._COUNTED_S, abs=0.1)
    assert clock.look() == 0.0
    assert clock.now - before < awake._COUNTED_S + 0.1


def test_a_process_that_is_stopped_notices_it_by_itself() -> None:
    """Also if nobody asks for the time meanwhile."""
    code = (
        "import time; from hf_cocodc.net.awake import awake_s; began = awake_s(), time.monotonic(); print(flush=True); input(); "
        "print(awake_s() - began[0], time.monotonic() - began[1], flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        awake_for, passed = map(float, process.stdout.readline().split())
    assert passed >= 1.5 and awake_for < passed - 0.9


def test_a_forked_process_has_a_thread_that_looks() -> None:
    code = (
        "import os, threading; from hf_cocodc.net.awake import awake_s; awake_s(); child = os.fork(); awake_s(); "
        "child and os.waitpid(child, 0); print([each.name for each in threading.enumerate()].count('hf_cocodc-clock'))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["1", "1"]
