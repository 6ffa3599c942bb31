"""What synchronizing costs on a GPU: `python -m tests.benchmarks.gpu --minutes 8 --json gpu.json`.

It trains a Llama on random tokens with Trainer on one GPU, in one process or in two regions that share it, and sends over
loopback, by gloo where no row says tcp: alone, with each method, and with torchft's DiLoCo if it is installed (`pip install
torchft==0.2.0`). It also runs the tests that need a GPU, and measures codecs, sends and landings beside a copy. What is worth
most comes first; what the minutes do not suffice for is listed as not run. Nothing is downloaded.

Without a GPU, or with --tiny, all of it is tiny: a rehearsal of about a minute and a half, whose figures say nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.parts.tensors.slices import cores
from hf_cocodc.tools.bench.report import BenchReport, Row, write
from tests.listening import free_port

ROOT = Path(__file__).parents[2]
LONGEST_S = 150.0
"""For one row."""
START_S = 15.0
"""About what a row takes beside its steps."""
LAST_LINES = 12
"""Of what a region that failed has printed."""
ROUNDS = {20: 3, 100: 1}
"""Rounds that are measured, by H. One comes before them, in which memory is newly allocated."""
SHORTER = 2.5
"""Tiny trainings have an H so many times smaller."""
STREAMING = {"method": "streaming", "codec": "fp4", "num_fragments": 4, "overlap_steps": 1}
METHODS: dict[str, dict[str, Any]] = {
    "diloco fp32": {"method": "diloco", "codec": "fp32"},
    "streaming fp4, 4 fragments, overlap 1": STREAMING,
    "cocodc int8": {"method": "cocodc", "codec": "int8"},
    "diloco int8": {"method": "diloco", "codec": "int8"},
    "eager": {"method": "eager"},
    "co2": {"method": "co2"},
    "dilocox": {"method": "dilocox"},
    "sparseloco": {"method": "sparseloco"},
    "muloco": {"method": "muloco"},
}
_OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9, "buckets": True}
PEERS: dict[str, dict[str, Any]] = {
    "torchft DiLoCo fp32": _OUTER,
    "torchft Streaming fp32, 4 fragments, overlap 1": {**_OUTER, "fragments": 4, "overlap": 1},
}
ALONE = "Trainer alone"
SMALL, LARGE = "0.2B", "1.2B"
TESTS, CODECS, OUTER = "gpu tests", "codecs", "sends and landings"


@dataclass(frozen=True)
class Size:
    """A model, and what a region of it takes.

    Attributes:
        batch: blocks in an inner step, at most: fewer if memory is short.
        state_bytes, block_bytes: of GPU memory, about, for each parameter and for each block.
    """

    shape: dict[str, int]
    batch: int
    parameters: float = 0.0
    state_bytes: float = 24.0
    block_bytes: float = 0.0

    def fitting(self, regions: int, free: int | None) -> int:
        """The largest batch with which so many regions fit into `free` bytes; 0 if none does."""
        batch = self.batch
        while free is not None and batch and regions * self.takes(batch) > free:
            batch //= 2
        return batch

    def takes(self, batch: int) -> float:
        return self.parameters * self.state_bytes + batch * self.block_bytes


def llama(width: int, hidden: int, layers: int, heads: int, vocabulary: int, block: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": block,
        "tie_word_embeddings": False,
    }


FULL = {
    SMALL: Size(llama(1024, 2688, 12, 16, 32000, 1024), 16, 0.215e9, block_bytes=1.07e9),
    LARGE: Size(llama(2048, 5504, 21, 16, 32000, 1024), 8, 1.19e9, block_bytes=1.9e9),
}
TINY = {SMALL: Size(llama(32, 64, 4, 4, 256, 32), 2), LARGE: Size(llama(64, 128, 4, 4, 256, 32), 2)}
VALUES = {False: (54_000_000, 215_000_000, 5), True: (100_000, 100_000, 1)}
"""If not tiny, and if tiny: values for codecs, parameters for sends and landings, and repeats."""


class Training(NamedTuple):
    """A row of the table."""

    name: str
    outer: dict[str, Any] | None = None
    torchft: dict[str, Any] | None = None
    regions: int = 2
    interval: int = 20
    size: str = SMALL
    link: str = "gloo"

    @property
    def title(self) -> str:
        over = "" if self.link == "gloo" else f" over {self.link}"
        where = "one region" if self.regions == 1 else f"{self.regions} regions"
        return f"{self.name}{over}, {self.size}, {where}, H = {self.interval}"


def plan() -> Iterator[Training | str]:
    """All there is to do, by value."""
    alone, ours = Training(ALONE), [Training(name, outer) for name, outer in METHODS.items()]
    diloco, first, rest = ours[0], ours[:3], ours[3:]
    large = [each._replace(size=LARGE) for each in (alone, diloco, rest[0], *first[1:])]
    yield from (each._replace(regions=1) for each in (alone, diloco))
    yield from (alone, *first)
    yield from (each._replace(link="tcp") for each in first[:2])
    yield from (CODECS, OUTER, TESTS)
    yield from (*large[:3], *rest)
    yield from (Training(name, torchft=settings) for name, settings in PEERS.items())
    yield from (each._replace(regions=1) for each in large[:2])
    yield from large[3:]
    for size in (SMALL, LARGE):
        longer = [diloco._replace(regions=1), *first]
        yield from (each._replace(size=size, interval=100) for each in longer)


class Crew:
    """The processes of two regions, which begin anew after a row that failed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._workers: list[subprocess.Popen] = []
        self._rows = 0

    def ask(self, regions: int, limit_s: float, **row: Any) -> list[Any] | str:
        """The answers of so many regions, or an error text."""
        if not self._workers:
            self._workers = [self._start(region) for region in range(2)]
        self._rows += 1
        place = {"row": f"row-{self._rows}", "regions": regions, "port": free_port()}
        asked = self._workers[:regions]
        try:
            for worker in asked:
                assert worker.stdin is not None
                worker.stdin.write(json.dumps({**place, **row}) + "\n")
                worker.stdin.flush()
            return _answers(asked, time.monotonic() + limit_s)
        except (RuntimeError, OSError) as error:
            self.close()
            for log in sorted(self._folder.glob("log.*")):
                lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
                say("\n".join([f"the last lines of region {log.suffix[1:]}:", *lines]))
            return str(error)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
        self._workers = []

    def _start(self, region: int) -> subprocess.Popen:
        spec = json.dumps({"region": region, "folder": str(self._folder)})
        env = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(max(cores() // 2, 1)),
            "GOMP_SPINCOUNT": "0",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-m", "tests.benchmarks.gpu_region", spec]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=ROOT, env=env, **pipes)


def _answers(workers: Sequence[subprocess.Popen], deadline: float) -> list[Any]:
    """What each region has found. Raises RuntimeError as soon as one has failed, or at the deadline."""
    found: dict[IO[str], Any] = {}
    outputs = [worker.stdout for worker in workers if worker.stdout is not None]
    while len(found) < len(outputs):
        waiting = [each for each in outputs if each not in found]
        ready, _, _ = select.select(waiting, [], [], max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise RuntimeError("took too long")
        for output in ready:
            answer = json.loads(output.readline() or '{"failed": "its process has ended"}')
            if "failed" in answer:
                raise RuntimeError(answer["failed"])
            found[output] = answer["found"]
    return [found[output] for output in outputs]


@dataclass
class Study:
    """What has been measured so far."""

    crew: Crew
    coordinator: str
    deadline: float
    tiny: bool
    about: dict[str, Any]
    has_torchft: bool = importlib.util.find_spec("torchft") is not None
    trained: list[Row] = field(default_factory=list)
    others: dict[str, list[Row]] = field(default_factory=dict)
    not_run: list[Row] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    bases: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """The runs of Trainer alone, by size and number of regions."""

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def do(self, job: Training | str) -> None:
        """Measure one thing, if time is left."""
        title = job if isinstance(job, str) else job.title
        why = self._obstacle(job)
        if why:
            self.not_run.append({"what": title, "why": why})
            say(f"{title}: not run: {why}")
            return
        limit_s = min(self.left_s, LONGEST_S)
        if job == TESTS:
            failed = self._test(limit_s)
        elif isinstance(job, str):
            failed = self._measure(job, limit_s)
        else:
            failed = self._train(job, limit_s)
        if failed:
            self.failed.append({"what": title, "why": failed})
            say(f"{title}: {failed}")

    def _obstacle(self, job: Training | str) -> str:
        """Why something cannot be run, if so."""
        if self.left_s < START_S:
            return "the time is over"
        if isinstance(job, str):
            return ""
        if job.torchft is not None and not self.has_torchft:
            return "torchft is not installed (pip install torchft==0.2.0)"
        size, free = self._sizes[job.size], self.about["free"]
        if not size.fitting(job.regions, free):
            need = job.regions * size.takes(1) / 1e9
            return f"it takes about {need:.0f} GB of GPU memory, and {free / 1e9:.0f} are free"
        base = self.bases.get((job.size, job.regions))
        steps = (1 + ROUNDS[job.interval]) * self._interval(job)
        if base is not None and START_S + steps * base["step_s"] > self.left_s:
            return "too little time is left"
        return ""

    @property
    def _sizes(self) -> dict[str, Size]:
        return TINY if self.tiny else FULL

    def _interval(self, job: Training) -> int:
        return round(job.interval / SHORTER) if self.tiny else job.interval

    def _train(self, job: Training, limit_s: float) -> str:
        interval, size = self._interval(job), self._sizes[job.size]
        batch = size.fitting(job.regions, self.about["free"])
        answers = self.crew.ask(
            job.regions,
            limit_s,
            kind="train",
            shape=size.shape,
            batch=batch,
            steps=[interval, (1 + ROUNDS[job.interval]) * interval],
            interval=interval,
            outer=job.outer,
            torchft=job.torchft,
            link=job.link,
            coordinator=self.coordinator,
        )
        if job.torchft is not None:
            self.crew.close()  # it leaves threads behind
        if isinstance(answers, str):
            return answers
        # of all regions the slowest, and the one that takes the most
        found = {
            name: _most([answer[name] for answer in answers]) for name in answers[0] if name != "seconds"
        }
        if job.name == ALONE:
            self.bases[job.size, job.regions] = found
        self.seconds[job.title] = answers[0]["seconds"]
        base = self.bases.get((job.size, job.regions))
        self.trained.append(figures(job, batch, interval, found, base))
        row = self.trained[-1]
        beside = f"{row['ms a step']:.1f} ms a step, {_times(row['over alone'])}"
        say(f"{job.title}: {beside}, longest {row['longest s']:.2f} s")
        return ""

    def _measure(self, what: str, limit_s: float) -> str:
        codecs, parameters, repeat = VALUES[self.tiny]
        kind, values = ("codecs", codecs) if what == CODECS else ("outer", parameters)
        answers = self.crew.ask(1, limit_s, kind=kind, values=values, repeat=repeat)
        if isinstance(answers, str):
            return answers
        self.others[f"{what}, {values:,} values"] = answers[0]
        say(f"{what}: {len(answers[0])} rows")
        return ""

    def _test(self, limit_s: float) -> str:
        with tempfile.TemporaryDirectory() as folder:
            row = run_tests(Path(folder, "tests.xml"), limit_s)
        if isinstance(row, str):
            return row
        self.others[TESTS] = [row]
        say(f"{TESTS}: {row}")
        return f"{row['failed']} of {row['tests']} failed" if row["failed"] else ""

    def reports(self) -> list[BenchReport]:
        """A table for each kind of figures."""
        card = self.about["card"] or "no GPU"
        setting = {"card": card, **self.about["versions"]}
        if self.tiny:
            setting["size"] = "tiny: a rehearsal"
        tables = [
            ("training on one GPU", self.trained, _NOTES),
            *((name, rows, []) for name, rows in self.others.items()),
            ("failed", self.failed, []),
            ("not run", self.not_run, []),
        ]
        return [
            BenchReport(title, setting, rows, notes, samples=self.seconds if rows is self.trained else {})
            for title, rows, notes in tables
            if rows
        ]


_NOTES = [
    "over alone: the time of a step beside that of Trainer alone, in as many processes on the same GPU.",
    "lost: what a round takes longer than alone. held: what it spends inside our callback. counted / held: the share of it that "
    "the log reports as outer/blocked_s.",
    "more GB: the most GPU memory that a region takes beyond Trainer alone; forecast GB: what `hf-cocodc doctor` expects.",
    "MB sent: a region's payload in a round. All figures are of the slowest region, after a first round.",
]


def figures(
    job: Training, batch: int, interval: int, found: dict[str, Any], base: dict[str, Any] | None
) -> Row:
    """The row of a training, beside Trainer alone with the same model and as many regions."""
    rounds = ROUNDS[job.interval]
    is_ours, is_base = job.outer is not None, found is base
    more = None
    if found["peak"] and base is not None and not is_base:
        more = max(found["peak"] - base["peak"], found["event_peak"] - base["resting"])
    expected = found["forecast"]
    return {
        "what": job.name,
        "parameters": f"{found['parameters'] / 1e6:.3g}M",
        "batch": batch,
        "regions": job.regions,
        "H": None if is_base else interval,
        "ms a step": 1e3 * found["step_s"],
        "over alone": None if base is None else found["step_s"] / base["step_s"],
        "longest s": found["longest_s"],
        "lost s a round": None if base is None or is_base else interval * (found["step_s"] - base["step_s"]),
        "held s a round": found["held_s"] / rounds if is_ours else None,
        "counted / held": found["counted_s"] / found["held_s"] if is_ours else None,
        "MB sent": found["sent"] / rounds / 1e6 if is_ours else None,
        "peak GB": max(found["peak"], found["event_peak"]) / 1e9 or None,
        "more GB": None if more is None else more / 1e9,
        "forecast GB": None if expected is None else expected / 1e9,
        "more / forecast": None if not expected or more is None else more / expected,
    }


def run_tests(report: Path, limit_s: float) -> Row | str:
    """The tests that need a GPU: how many there are and what became of them; or an error text."""
    if importlib.util.find_spec("pytest") is None:
        return "pytest is not installed"
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [str(path) for path in paths if "mark.gpu" in path.read_text(encoding="utf-8")]
    # a plugin that is common on machines with GPUs warns, and warnings are errors
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:benchmark", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, *marked]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return "took too long"
    seconds = time.monotonic() - began
    if done.returncode not in (0, 1):
        lines = done.stdout.strip().splitlines()
        return next((line for line in lines if line.startswith("E ")), lines[-1])[:300]
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [case.get("name", "") for case in cases if {"failure", "error"} & {each.tag for each in case}]
    skipped = sum("skipped" in {each.tag for each in case} for case in cases)
    return {
        "tests": len(cases),
        "passed": len(cases) - len(failed) - skipped,
        "failed": len(failed),
        "skipped": skipped,
        "seconds": seconds,
        "names of failed ones": ", ".join(failed) or None,
    }


def _most(values: Sequence[Any]) -> Any:
    return None if None in values else max(values)


def _times(ratio: float | None) -> str:
    return "nothing to compare with" if ratio is None else f"{ratio:.2f} times alone"


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="the most that it takes (default: 8)")
    parser.add_argument("--tiny", action="store_true", help="tiny models also on a GPU")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only what has one of these in its name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after each row")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder, closing(serve_in_thread()) as served:
        with closing(Crew(Path(folder))) as crew:
            about = crew.ask(1, LONGEST_S, kind="about")
            if isinstance(about, str):
                say(f"the process of a region does not start: {about}")
                return 1
            tiny = options.tiny or about[0]["card"] is None
            study = Study(crew, served.address, deadline, tiny, about[0])
            for job in plan():
                title = job if isinstance(job, str) else job.title
                if options.only and not any(text in title for text in options.only):
                    continue
                study.do(job)
                if options.json:
                    write(options.json, study.reports())
        for report in study.reports():
            say("\n" + "\n".join(report.lines()))
    return 1 if study.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
