"""Fixed regions whose store freezes or dies: it carries no sign of life and no reason to leave. Real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.meeting.test_store import store_process
from tests.processes.launching import ROOT, environment
from tests.processes.test_failures import start, wait_for_step

TIMEOUT_S = 90

REGION = """
import sys, time, torch
from hf_cocodc.links.base import Parcel
from hf_cocodc.links.gloo import GlooLink
from hf_cocodc.links.trailer import Trailer
from hf_cocodc.meeting.store import connect_store
from hf_cocodc.parts import codecs
from hf_cocodc.parts.fragments import Fragment

address, region, slow_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
link = GlooLink(connect_store(address, 10), "run", region, 2, 1, timeout_s=2.0)
codec, fragment = codecs.fp32(), Fragment(0, ("a",), ((10,),), 10)

def meet(step):
    parcel = Parcel(
        lambda: codec.converse(torch.ones(10), fragment, codec.init(fragment)), 10, Trailer, f"step {step}"
    )
    link.mean(parcel).wait()

reason = None
try:
    meet(1)
    print("met", flush=True)
    sys.stdin.readline()
    for step in range(int(slow_s * 10)):
        time.sleep(0.1)
        link.tick(step + 1)
    meet(2)
    print("met again", flush=True)
except Exception as error:
    reason = str(error)
    print("failed:", reason, flush=True)
    raise SystemExit(1)
finally:
    link.close(reason)
"""


@pytest.fixture
def store() -> Iterator[tuple[subprocess.Popen, int]]:
    with store_process() as found:
        yield found


def regions(port: int, slow_s: float) -> list[subprocess.Popen]:
    """Two that have met once; the second goes on only when told, and makes steps for `slow_s` before it meets again."""
    found = [
        subprocess.Popen(
            [sys.executable, "-c", REGION, f"127.0.0.1:{port}", str(region), str(slow_s * region)],
            env=environment(),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for region in (0, 1)
    ]
    for each in found:
        assert each.stdout is not None
        assert each.stdout.readline() == "met\n"
    return found


def go(region: subprocess.Popen) -> None:
    assert region.stdin is not None
    region.stdin.write("\n")
    region.stdin.flush()


@pytest.mark.parametrize("how", ["freezes", pytest.param("dies", marks=pytest.mark.slow)])
def test_a_region_is_lost_while_the_store_is_frozen(store: tuple[subprocess.Popen, int], how: str) -> None:
    """The other one names it and ends; it does not wait for the store to say why."""
    process, port = store
    first, second = regions(port, 0.0)
    try:
        process.send_signal(signal.SIGSTOP)
        second.send_signal(signal.SIGSTOP if how == "freezes" else signal.SIGKILL)
        go(first)
        said, _ = first.communicate(timeout=TIMEOUT_S)
    finally:
        for each in (first, second):
            each.kill()
            each.communicate()
    assert first.returncode == 1
    if how == "freezes":
        assert "failed: region 1 sent nothing for" in said
        assert "it has given no sign of life for" in said
        assert "or the network between the regions is down" in said
    else:
        assert "failed: region 1 closed its connection while region 0 waited for step 2" in said


@pytest.mark.slow
def test_a_region_is_slow_while_the_store_is_dead(store: tuple[subprocess.Popen, int]) -> None:
    """Three time-outs of lateness: the region shows that it is alive without a store, and both end well."""
    process, port = store
    first, second = regions(port, 6.0)
    process.kill()
    process.wait()
    for each in (first, second):
        go(each)
    try:
        said = [each.communicate(timeout=TIMEOUT_S)[0] for each in (first, second)]
    finally:
        for each in (first, second):
            each.kill()
    assert [each.returncode for each in (first, second)] == [0, 0], said
    assert all("met again" in each for each in said)


@pytest.mark.slow
def test_a_run_ends_well_while_its_store_is_frozen(
    store: tuple[subprocess.Popen, int], tmp_path: Path
) -> None:
    """Whole regions, each by its own command: neither training nor the end of a process waits for the store."""
    process, port = store
    arguments = [
        "--store",
        f"127.0.0.1:{port}",
        "--set",
        "training.max_steps=60",
        "--set",
        "regions.timeout_s=4",
    ]
    runs = [start(tmp_path, "--region", str(region), *arguments) for region in (0, 1)]
    try:
        wait_for_step(runs[0], tmp_path, step=10)
        process.send_signal(signal.SIGSTOP)
        said = [run.communicate(timeout=TIMEOUT_S) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], said
    assert all("60 in each of 2" in output for output, _ in said)
