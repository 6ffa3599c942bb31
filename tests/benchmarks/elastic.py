"""Regions are killed, come back and freeze, in runs of this package and of torchft: `python -m tests.benchmarks.elastic`.

The rows of torchft need `pip install torchft==0.2.0`. Everything stays on the loopback of this machine.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.net.keys import Keys
from hf_cocodc.tools.bench.report import BenchReport, write

from . import workload
from .elastic_region import H

RESULTS = Path(__file__).parents[2] / "docs" / "evidence" / "benchmarks"
LEAST = 2


@dataclass(frozen=True)
class Contestant:
    """A row: who trains, with which settings.

    Attributes:
        more: fields of `Place` beside those of every row.
        env: more variables of the environment.
    """

    name: str
    by: str
    settings: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


CONTESTANTS = [
    Contestant("hf_cocodc", "ours", {"min": LEAST}),
    Contestant("hf_cocodc, grace 10 s", "ours", {"min": LEAST, "grace_s": 10.0}),
    Contestant("torchft", "torchft", {"min": LEAST}),
    Contestant("torchft, time-out 10 s", "torchft", {"min": LEAST, "timeout": 10.0}),
]


@dataclass(frozen=True)
class Event:
    """What happens to a region once region 0 has come to inner step `step`.

    Attributes:
        what: kill, freeze, or something that goes on beside the run until its end (`beside`).
        seconds: until the region is started again, or thawed.
    """

    step: int
    what: str
    region: int = 0
    seconds: float = 0.0
    beside: Callable[["Run"], contextlib.AbstractContextManager[Any]] | None = None


def events_of(options: argparse.Namespace) -> dict[str, list[Event]]:
    """Each kind in a run of its own; steps lie in the middle of a round, or beside a sync."""
    last = options.regions - 1
    middle, before = 4 * H + H // 2, 4 * H - 1
    return {
        "undisturbed": [],
        "killed, back after 5 s": [Event(middle, "kill", last, 5.0)],
        "killed at a sync, back after 5 s": [Event(before, "kill", last, 5.0)],
        f"frozen for {options.freeze:g} s": [Event(middle, "freeze", last, options.freeze)],
    }


class Run:
    """The processes of one run, and what is done to them.

    Attributes:
        folder: with the logs and diaries.
        meeting_point: HOST:PORT of our coordinator, or of the lighthouse.
        happened: the events, with their times.
        codes: exit codes, by region; None where a process had not ended.
    """

    def __init__(
        self, contestant: Contestant, events: list[Event], folder: Path, options: argparse.Namespace
    ) -> None:
        self._contestant, self._events, self.folder, self._options = contestant, events, folder, options
        self.meeting_point = ""
        self.happened: list[dict[str, Any]] = []
        self.codes: dict[int, int | None] = {}
        self._processes: dict[int, subprocess.Popen] = {}
        self._due: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> str:
        """Run until every process has ended, or time is over; returns what went wrong, or nothing."""
        with self._meeting_point() as self.meeting_point:
            try:
                for region in range(self._options.regions):
                    self.start(region)
                with contextlib.ExitStack() as self._beside:
                    return self._watch()
            finally:
                self.codes = {region: process.poll() for region, process in self._processes.items()}
                for process in self._processes.values():
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(signal.SIGCONT)
                    process.kill()
                    process.wait()

    @property
    def pids(self) -> list[int]:
        """The processes that train."""
        return [process.pid for process in self._processes.values()]

    def _watch(self) -> str:
        deadline = time.monotonic() + self._options.patience
        waiting = list(self._events)
        diary: Path | None = None
        while time.monotonic() < deadline:
            diary = diary or next(iter(self.folder.glob("region-0.*.jsonl")), None)
            step = last_step(diary) if diary is not None else 0
            while waiting and step >= waiting[0].step:
                self._do(waiting.pop(0))
            for at, do in [due for due in self._due if due[0] <= time.monotonic()]:
                self._due.remove((at, do))
                do()
            codes = {region: process.poll() for region, process in self._processes.items()}
            if not self._due and all(code is not None for code in codes.values()):
                failed = [region for region, code in codes.items() if code]
                if failed:
                    return f"region {failed[0]} failed: {self.last_words(failed[0])}"
                return f"it ended before step {waiting[0].step}" if waiting else ""
            if step and not waiting and codes[0] is not None and not self._due:
                deadline = min(deadline, time.monotonic() + self._options.after)
            time.sleep(0.02)
        left = [region for region, process in self._processes.items() if process.poll() is None]
        return f"region(s) {', '.join(map(str, left))} had not ended after {self._options.patience:g} s"

    def _do(self, event: Event) -> None:
        if event.beside is not None:
            self._beside.enter_context(event.beside(self))
            return
        process = self._processes[event.region]
        self.happened.append({"what": event.what, "region": event.region, "t": time.time()})
        if event.what == "kill":
            process.kill()
            process.wait()
            self._due.append((time.monotonic() + event.seconds, lambda: self._start_again(event.region)))
        else:
            process.send_signal(signal.SIGSTOP)
            self._due.append((time.monotonic() + event.seconds, lambda: self._thaw(event.region)))

    def _start_again(self, region: int) -> None:
        self.happened.append({"what": "start", "region": region, "t": time.time()})
        self.start(region)

    def _thaw(self, region: int) -> None:
        self.happened.append({"what": "thaw", "region": region, "t": time.time()})
        self._processes[region].send_signal(signal.SIGCONT)

    def start(self, region: int) -> None:
        """Start the process of a region."""
        self._processes[region] = self.begin(region)

    def begin(
        self,
        region: int,
        folder: Path | None = None,
        env: Mapping[str, str | None] = MappingProxyType({}),
        **settings: Any,
    ) -> subprocess.Popen:
        """A process as a region has it; or one with a folder, variables of the environment (None: without) and settings of its
        own."""
        folder = folder or self.folder
        spec = {
            "contestant": self._contestant.by,
            "region": region,
            "count": self._options.regions,
            "folder": str(folder),
            "meeting_point": self.meeting_point,
            "rounds": self._options.rounds,
            "pace_s": self._options.pace,
            "seed": self._options.seed,
            "settings": {**self._contestant.settings, **settings},
            **self._contestant.more,
        }
        variables: dict[str, str | None] = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
        variables |= {"ACCELERATE_USE_CPU": "true", **self._contestant.env, **env}
        with (folder / f"log-{region}.txt").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.elastic_region", json.dumps(spec)],
                env={name: value for name, value in variables.items() if value is not None},
                stdout=log,
                stderr=log,
            )

    def last_words(self, region: int) -> str:
        """The last line that a region has printed."""
        lines = (self.folder / f"log-{region}.txt").read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no output"

    @contextlib.contextmanager
    def _meeting_point(self) -> Iterator[str]:
        """HOST:PORT of our coordinator, or of torchft's lighthouse, which is a program of its own."""
        if self._contestant.by == "ours":
            secret = self._contestant.env.get("HF_COCODC_SECRET")
            keys = [] if secret is None else [Keys.from_secret(secret)]
            with contextlib.closing(serve_in_thread(secrets=keys)) as served:
                yield served.address
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = str(Path(sys.executable).with_name("torchft_lighthouse"))
        arguments = ["--min_replicas", str(LEAST), "--join_timeout_ms", str(self._options.join_timeout_ms)]
        with (self.folder / "lighthouse.txt").open("ab") as log:
            lighthouse = subprocess.Popen(
                [program, "--bind", f"[::]:{port}", *arguments], stdout=log, stderr=log
            )
        try:
            yield f"127.0.0.1:{port}"
        finally:
            lighthouse.kill()
            lighthouse.wait()


def last_step(diary: Path) -> int:
    """The inner step of the last whole line that has one."""
    with diary.open("rb") as file:
        file.seek(max(diary.stat().st_size - 500, 0))
        lines = file.read().splitlines(keepends=True)[1:]
    steps = (
        json.loads(line)["step"] for line in reversed(lines) if b'"step":' in line and line.endswith(b"\n")
    )
    return next(steps, 0)


def diaries(folder: Path) -> dict[int, list[list[dict[str, Any]]]]:
    """The events of every process, by region, in the order of their starts."""
    found: dict[int, list[list[dict[str, Any]]]] = {}
    for path in sorted(folder.glob("region-*.jsonl"), key=lambda path: path.stat().st_ctime):
        lines = path.read_text().splitlines()
        events = [json.loads(line) for line in lines if line.endswith("}")]
        found.setdefault(int(path.name.split(".")[0].split("-")[1]), []).append(events)
    return {region: sorted(each, key=lambda events: events[0]["t"]) for region, each in found.items()}


def figures(folder: Path, happened: list[dict[str, Any]], hurt: int | None) -> dict[str, Any]:
    """The figures of a run; `hurt`: the region to which something happened."""
    found = diaries(folder)
    survivors = {region: events[0] for region, events in found.items() if region != hurt}
    waits, lost, landed = [], 0, 0
    for region, lives in found.items():
        for events in lives:
            steps = [event for event in events if event["what"] == "step"]
            gaps = [after["t"] - before["t"] for before, after in zip(steps, steps[1:], strict=False)]
            if region in survivors and gaps:
                waits.append(max(gaps) - median(gaps))
            in_model = 0
            since = 0
            for event in events:
                if event["what"] == "landed":
                    in_model += event["trained"] - since
                if event["what"] in ("landed", "discarded", "healed"):
                    since = event["trained"]
            landed += in_model
            lost += events[-1]["trained"] - in_model
    row: dict[str, Any] = {
        "longest pause s": round(max(waits), 2),
        "steps lost": lost,
        "steps in the model": landed,
    }
    ends = {region: event for region, lives in found.items() for event in lives[-1] if event["what"] == "end"}
    if 0 in ends:
        row["seconds"] = round(ends[0]["t"] - next(e["t"] for e in survivors[0] if e["what"] == "step"), 1)
        row["loss"] = round(ends[0]["loss"], 4)
        row["equal"] = len({event["digest"] for event in ends.values()}) == 1 and len(ends) == len(found)
    back = next((event for event in happened if event["what"] in ("start", "thaw")), None)
    if back is not None and hurt is not None:
        events = found[hurt][-1]
        ready = next((event["t"] for event in events if event["what"] == "ready"), None)
        first = next((e["t"] for e in events if e["what"] == "landed" and e["t"] > back["t"]), None)
        row["back after s"] = None if first is None else round(first - back["t"], 1)
        if back["what"] == "start" and ready is not None and first is not None:
            row["of which starting"] = round(ready - back["t"], 1)
    return row


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--regions", type=int, default=3, help="M (default: 3)")
    parser.add_argument(
        "--rounds", type=int, default=16, help=f"outer steps of {H} inner steps (default: 16)"
    )
    parser.add_argument("--pace", type=float, default=0.2, help="seconds of an inner step (default: 0.2)")
    parser.add_argument("--freeze", type=float, default=30.0, help="seconds of the freeze (default: 30)")
    parser.add_argument("--patience", type=float, default=400.0, help="seconds for one run (default: 400)")
    parser.add_argument(
        "--after", type=float, default=60.0, help="seconds for the others once region 0 has ended"
    )
    parser.add_argument(
        "--join-timeout-ms", type=int, default=10_000, help="of the lighthouse (default: 10000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the data (default: 0)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="rows whose names contain one of these")
    parser.add_argument("--events", nargs="+", metavar="TEXT", help="events whose names contain one of these")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and diaries there")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    chosen = [each for each in CONTESTANTS if not options.only or any(t in each.name for t in options.only)]
    notes = [
        "longest pause: the longest time between two inner steps of a region that was not hurt, less the median. steps lost: "
        "inner steps that brought nothing into the global model, of all regions. back after: from the start of the new process, "
        "or the thaw, to its first landing.",
    ]
    if importlib.util.find_spec("torchft") is None:
        chosen = [each for each in chosen if each.by != "torchft"]
        notes.append("Left out: torchft. Its rows need `pip install torchft==0.2.0`.")
        say(notes[-1])
    rows = []
    with contextlib.ExitStack() as stack:
        base = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for index, contestant in enumerate(chosen):
            for number, (name, events) in enumerate(events_of(options).items()):
                if options.events and not any(text in name for text in options.events):
                    continue
                folder = base / f"{index}-{number}"
                folder.mkdir(parents=True)
                workload.write_text(folder)
                run = Run(contestant, events, folder, options)
                wrong = run()
                hurt = events[0].region if events else None
                row: dict[str, Any] = {"contestant": contestant.name, "event": name}
                with contextlib.suppress(KeyError, StopIteration, ValueError, IndexError):
                    row |= figures(folder, run.happened, hurt)
                if wrong:
                    row["failed"] = wrong
                rows.append(row)
                say(json.dumps(row))
    columns = list(dict.fromkeys(key for row in rows for key in row))
    setting = {"regions": options.regions, "H": H, "rounds": options.rounds, "seconds a step": options.pace}
    report = BenchReport(
        "regions that are lost", setting, [{c: row.get(c) for c in columns} for row in rows], notes
    )
    say("\n" + "\n".join(report.lines()))
    options.output.mkdir(parents=True, exist_ok=True)
    write(options.output / "elastic.json", [report])
    return 0


if __name__ == "__main__":
    sys.exit(main())
