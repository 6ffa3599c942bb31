"""What many regions cost their coordinator: a core's share with a heartbeat a second from each, and how long they take to meet.

python -m tests.benchmarks.many --regions 64           # a process for each region
python -m tests.benchmarks.many --regions 256 --light  # one process speaks for all: only the coordinator counts
python -m tests.benchmarks.many --regions 256 --rules  # the rules alone, without a network
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from hf_cocodc.coordinator import rules
from hf_cocodc.coordinator.caller import CONNECT_S, LoopThread, OpenCall, connect
from hf_cocodc.coordinator.client import Client, status
from hf_cocodc.coordinator.messages import Back, Beat, Hello, Terms, ToRegion, Welcome, from_line
from hf_cocodc.coordinator.rules import Came, Run, SendTo, Tick
from tests.listening import free_port, lanes

NAMES = 400
"""Entries of what regions compare."""


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def hello(region: int, count: int) -> Hello:
    return Hello(
        region=region,
        join=False,
        lanes=lanes(f"10.0.{region >> 8}.{region & 255}"),
        machine=f"machine{region}",
        token=f"{region:064x}",
        terms=Terms(count=count, most=count, wait_s=3600.0),
        compared={
            "method": "diloco",
            "model": {f"model.layers.{each}.weight": f"float32 [4096, {each}]" for each in range(NAMES)},
            "versions": {"torch": "2.13.0", "hf-cocodc": "0.1.0"},
        },
    )


def beat(welcome: Welcome, step: int, awaits: int | None = None) -> Beat:
    return Beat(
        step=step, op=1, awaits=awaits, waited_s=1.0, members=tuple(each.member for each in welcome.members)
    )


def of_rules(count: int, waits: bool) -> None:
    """Heartbeats of all regions, and ticks, of one second at a time."""
    state, said, began = Run(name="run"), {}, time.perf_counter()
    for region in range(count):
        state, effects = rules.step(state, Came(region, hello(region, count)), 0.0)
        said.update(
            {
                each.to: each.message
                for each in effects
                if isinstance(each, SendTo) and isinstance(each.message, Welcome)
            }
        )
    met_s, times = time.perf_counter() - began, []
    for second in range(1, 6):
        beats = [beat(said[who], second, (who + 1) % count if waits else None) for who in range(count)]
        began = time.perf_counter()
        for who, each in enumerate(beats):
            state, _ = rules.step(state, Came(who, each), second + who / count)
        for tick in range(5):
            state, _ = rules.step(state, Tick(), second + 1 + tick / 5)
        times.append(time.perf_counter() - began)
    what = "all wait" if waits else "nobody waits"
    say(
        f"rules, {count} regions, {what}: {100 * statistics.median(times):.1f} % of a core; met within {met_s:.2f} s"
    )


@dataclass
class Coordinating:
    """A coordinator in a process of its own."""

    address: str
    process: psutil.Process

    @property
    def cpu_s(self) -> float:
        used = self.process.cpu_times()
        return float(used.user + used.system)


def started() -> tuple[Coordinating, subprocess.Popen[str]]:
    port = free_port()
    words = [
        sys.executable,
        "-m",
        "hf_cocodc",
        "coordinator",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--insecure",
    ]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, text=True)
    address = f"127.0.0.1:{port}"
    status(address, None, timeout_s=60.0)
    return Coordinating(address, psutil.Process(process.pid)), process


def measured(there: Coordinating, count: int, seconds: float, turn: Callable[[float], None]) -> None:
    before, began = there.cpu_s, time.monotonic()
    turn(seconds)
    took_s = time.monotonic() - began
    say(
        f"{count} regions: the coordinator uses {100 * (there.cpu_s - before) / took_s:.1f} % of a core, "
        f"{there.process.memory_info().rss >> 20} MiB"
    )


def of_processes(count: int, seconds: float) -> None:
    there, process = started()
    children: list[int] = []
    try:
        used, began = there.cpu_s, time.monotonic()
        for region in range(count):
            child = os.fork()
            if child == 0:
                be_region(there.address, region, count)
            children.append(child)
        while len(members := (status(there.address, None) or [{"members": []}])[0]["members"]) < count:
            if time.monotonic() > began + 120.0:
                raise SystemExit(f"only {len(members)} regions have met")
            time.sleep(0.1)
        met_s = time.monotonic() - began
        say(
            f"{count} processes have met within {met_s:.1f} s; the coordinator has used {there.cpu_s - used:.2f} s"
        )
        time.sleep(2.0)
        measured(there, count, seconds, time.sleep)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        process.terminate()
        process.wait()


def be_region(address: str, region: int, count: int) -> None:
    """Never returns."""
    client, since = Client(address, "run"), time.monotonic()
    welcome = client.meet(hello(region, count), 120.0)
    back = Back(
        run=welcome.run,
        member=welcome.me,
        token=welcome.token,
        generation=welcome.generation,
        losses=0,
        changes=0,
    )

    def heard(message: ToRegion) -> None:
        pass

    client.start(heard, lambda: beat(welcome, int(time.monotonic() - since)), lambda: back)
    while True:
        signal.pause()


def of_one_process(count: int, seconds: float) -> None:
    there, process = started()
    try:
        used, began = there.cpu_s, time.monotonic()
        thread = LoopThread()
        found = [
            thread.wait_for(connect(there.address, "run", "region", None, CONNECT_S)) for _ in range(count)
        ]
        for region, each in enumerate(found):
            thread.soon(each.say, hello(region, count))
        welcomes = [thread.wait_for(welcome_of(each)) for each in found]
        met_s = time.monotonic() - began
        say(
            f"{count} connections have met within {met_s:.1f} s; the coordinator has used {there.cpu_s - used:.2f} s"
        )

        def turn(seconds: float) -> None:
            """Each speaks once a second, at a time of its own."""
            began = time.monotonic()
            for number in range(int(seconds * count)):
                time.sleep(max(began + number / count - time.monotonic(), 0.0))
                each = found[number % count]
                thread.soon(each.say, beat(welcomes[number % count], number // count))

        measured(there, count, seconds, turn)
    finally:
        process.terminate()
        process.wait()


async def welcome_of(call: OpenCall) -> Welcome:
    while True:
        message = from_line(await asyncio.wait_for(call.hear(), 120.0))
        if isinstance(message, Welcome):
            return message


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--regions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--light", action="store_true", help="one process speaks for all regions")
    parser.add_argument("--rules", action="store_true", help="the rules alone")
    options = parser.parse_args()
    if options.rules:
        for waits in (False, True):
            of_rules(options.regions, waits)
    elif options.light:
        of_one_process(options.regions, options.seconds)
    else:
        of_processes(options.regions, options.seconds)


if __name__ == "__main__":
    main()
