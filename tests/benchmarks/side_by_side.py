"""The same training over the same emulated link with every library: `python -m tests.benchmarks.side_by_side`.

It needs Linux network namespaces: root, or a kernel that allows user namespaces. The rows of torchft need
`pip install torchft==0.2.0`, that of NVFlare `pip install nvflare==2.9.0`. Nothing leaves this machine.
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hf_cocodc.tools.bench.report import BenchReport, write

from . import federated, workload
from .contestants import CONTESTANTS, Contestant
from .emulation.privileges import obstacle
from .emulation.wan import Wan

RESULTS = Path(__file__).parents[2] / "docs" / "evidence" / "benchmarks"
PATIENCE_S = 240
PORTS = 20_000
TRIES, TOLERANCE = 3, 1.08
NO_LINK = CONTESTANTS[0].name
IDLE_S = 2.0
"""Pause between two syncs, as in training. During it, TCP forgets how much the link carries."""
SYNCS = {"first s": [0.0], "after idle s": [IDLE_S] * 3, "back to back s": [0.0] * 3}
SLOW = {"first s": [0.0], "after idle s": [IDLE_S]}
"""For contestants that take half a minute or longer."""
ONE_SYNC = {
    "LocalSGD (accelerate)": SLOW,
    "DiLoCo (torchft)": SLOW,
    "DiLoCo, buckets (torchft)": SYNCS,
    "DiLoCo fp32 (ours)": SYNCS,
    "DiLoCo fp32, gloo (ours)": SYNCS,
}


@dataclass(frozen=True)
class Profile:
    """A link between every two regions."""

    name: str
    rtt_s: float
    rate: float | None
    loss: float

    @property
    def words(self) -> str:
        if self.rate is None:
            return "no distance"
        loss = f"{100 * self.loss:g} % loss" if self.loss else "lossless"
        return f"{1e3 * self.rtt_s:g} ms, {self.rate / 1e6:g} Mbit/s, {loss}"


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("fast", 0.1, 1e9, 0.0),
        Profile("slow", 0.1, 50e6, 1e-4),
        Profile("cluster", 2e-4, 10e9, 0.0),
        Profile("near", 0.0, None, 0.0),
    )
}
FAR = ["fast", "slow"]
NEAR = PROFILES["near"]
"""A contestant that is too slow on a link trains here to get its loss at equal tokens."""
INSTALLED = {"torchft": "torchft==0.2.0", "NVFlare": "nvflare==2.9.0"}
"""What pip installs for the rows of a library."""


class Field:
    """The regions of one profile, each with its process."""

    def __init__(self, profile: Profile, regions: int, folder: Path, congestion: str) -> None:
        self._name, self._folder, self._regions = profile.name, folder, regions
        self._wan = Wan(
            regions, rtt_s=profile.rtt_s, rate=profile.rate, loss=profile.loss, congestion=congestion
        )
        self._rows = 0

    def __enter__(self) -> "Field":
        self._wan.__enter__()
        try:
            self._workers = [self._start(region) for region in range(self._regions)]
            for region in range(self._regions):
                self._answer(region, PATIENCE_S)
        except BaseException:
            self._wan.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self._wan.close()

    def run(self, **row: Any) -> list[dict[str, Any]] | str:
        """The answers of all regions, or an error text."""
        self._rows += 1
        name = f"{row['kind']}-{self._name}-{self._rows}"
        waits_s = federated.PATIENCE_S if CONTESTANTS[row["contestant"]].has_processes else PATIENCE_S
        line = json.dumps({"row": name, "port": PORTS + self._rows, "patience_s": waits_s, **row}) + "\n"
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(line)
            worker.stdin.flush()
        codes = [self._answer(region, waits_s + 30) for region in range(self._regions)]
        if any(codes):
            region = next(i for i, code in enumerate(codes) if code)
            lines = (self._folder / f"{name}.{region}.log").read_text(errors="replace").strip().splitlines()
            why = lines[-1][:200] if lines else "no output"
            return f"region {region} {'took too long' if codes[region] == 124 else f'failed: {why}'}"
        return [json.loads((self._folder / f"{name}.{i}.json").read_text()) for i in range(self._regions)]

    def _start(self, region: int) -> subprocess.Popen:
        place = {
            "folder": str(self._folder),
            "region": region,
            "count": self._regions,
            "first": self._wan.address(0),
            "address": self._wan.address(region),
        }
        return self._wan.popen(
            region,
            [sys.executable, "-m", "tests.benchmarks.worker", json.dumps(place)],
            env={"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _answer(self, region: int, patience_s: float) -> int:
        stdout = self._workers[region].stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], patience_s)
        line = stdout.readline() if ready else ""
        if not line:
            raise RuntimeError(f"the process of region {region} has ended or does not answer")
        return json.loads(line)


def train_row(
    contestant: Contestant, answers: list[dict[str, Any]], profile: Profile, options: argparse.Namespace
) -> dict[str, Any]:
    """The row of a contestant's run; seconds and bytes are the largest of all regions."""
    first = answers[0]
    tokens = workload.BATCH * workload.BLOCK
    steps, seconds = first["steps"], max(answer["seconds"] for answer in answers)
    sent = max(answer["sent_bytes"] for answer in answers)
    return {
        "contestant": contestant.name,
        "link": profile.words,
        "regions": len(answers),
        "parameters": first["num_params"],
        "tokens/s": round(len(answers) * tokens * steps / seconds),
        "share": None,
        "steps": steps,
        "seconds": round(seconds, 2),
        "computed s a step": round(max(answer["computed_step_s"] for answer in answers), 3),
        "CPU s a step": round(max(answer["cpu_step_s"] for answer in answers), 3),
        "blocked s": round(max(answer["blocked_s"] for answer in answers), 2),
        "MB sent": round(sent / 1e6, 2),
        "MB per 100 steps": round(sent / 1e4 / steps, 2),
        "loss at tokens": at_step(first["curve"], options.steps),
        "loss at time": at_time(first["curve"], options.seconds),
        "curve": [[step, round(at, 2), round(loss, 4)] for step, at, loss in first["curve"]],
    }


def at_step(points: list[list[float]], step: int) -> float | None:
    return next((round(loss, 3) for each, _, loss in points if each == step), None)


def at_time(points: list[list[float]], seconds: float) -> float:
    """The loss at a moment, interpolated between the models before and after it."""
    for (_, left, before), (_, right, after) in itertools.pairwise(points):
        if left <= seconds < right:
            return round(before + (after - before) * (seconds - left) / (right - left), 3)
    return round(points[-1][2], 3)


def compare(options: argparse.Namespace, chosen: list[Contestant], folder: Path) -> list[dict[str, Any]]:
    """Every contestant over every link."""
    rows: list[dict[str, Any]] = []
    marks = {
        "kind": "train",
        "pace_s": options.pace,
        "steps": options.steps,
        "wall_s": options.seconds,
        "most_s": 2 * options.seconds,
    }
    for name in options.profiles:
        profile = PROFILES[name]
        with Field(profile, options.regions, folder, options.congestion) as field:
            for contestant in chosen:
                if contestant.name == NO_LINK and rows:
                    continue  # the row is the same for every link
                if contestant.in_cluster and name in FAR:
                    continue
                answers = quietest(field, contestant, marks)
                if isinstance(answers, str):
                    rows.append({"contestant": contestant.name, "link": profile.words, "failed": answers})
                    say(f"{contestant.name}, {profile.words}: {answers}")
                    continue
                rows.append(train_row(contestant, answers, profile, options))
                say(progress(rows[-1]))
    late = {row["contestant"] for row in rows if "failed" not in row and row["loss at tokens"] is None}
    if late:
        marks.update(pace_s=0.0, wall_s=0.0, most_s=PATIENCE_S)
        with Field(NEAR, options.regions, folder, options.congestion) as field:
            for contestant in [each for each in chosen if each.name in late]:
                answers = field.run(contestant=CONTESTANTS.index(contestant), **marks)
                if isinstance(answers, str):
                    say(f"{contestant.name}, {NEAR.words}: {answers}")
                    continue
                loss = at_step(answers[0]["curve"], options.steps)
                say(f"{contestant.name}: loss {loss} at step {options.steps}, {NEAR.words}")
                for row in rows:
                    if row["contestant"] == contestant.name and row.get("loss at tokens", 0) is None:
                        row["loss at tokens"], row["loss from"] = loss, NEAR.words
    add_shares(rows)
    return rows


def add_shares(rows: list[dict[str, Any]]) -> None:
    """Add every row's share of the ceiling. The ceiling is the fastest run without a link, for all links."""
    ceiling = max(
        (row["tokens/s"] for row in rows if row["contestant"] == NO_LINK and "failed" not in row),
        default=None,
    )
    for row in rows:
        if ceiling is not None and "failed" not in row:
            row["share"] = round(row["tokens/s"] / ceiling, 3)


def quietest(field: Field, contestant: Contestant, row: dict[str, Any]) -> list[dict[str, Any]] | str:
    """Run until the machine keeps the pace, at most TRIES times; return the best run."""
    best: list[dict[str, Any]] | None = None
    for _ in range(TRIES):
        answers = field.run(contestant=CONTESTANTS.index(contestant), **row)
        if isinstance(answers, str):
            return answers
        if best is None or slowness(answers) < slowness(best):
            best = answers
        if not row["pace_s"] or slowness(best) < TOLERANCE * row["pace_s"]:
            break
        say(f"{contestant.name}: other load slowed a step to {slowness(answers):.3f} s")
    assert best is not None
    return best


def slowness(answers: list[dict[str, Any]]) -> float:
    return max(answer["computed_step_s"] for answer in answers)


def progress(row: dict[str, Any]) -> str:
    return (
        f"{row['contestant']}, {row['link']}, M={row['regions']}: {row['tokens/s']} tokens/s, "
        f"{row['steps']} steps, blocked {row['blocked s']} s, {row['MB sent']} MB, loss {row['loss at tokens']} / "
        f"{row['loss at time']}"
    )


def one_sync(options: argparse.Namespace, chosen: list[Contestant], folder: Path) -> list[dict[str, Any]]:
    """Sync 28.6 MB in 291 tensors over the fast link, or a cluster's, with each contestant, to the same mean."""
    rows: list[dict[str, Any]] = []
    profile = PROFILES["cluster" if "cluster" in options.profiles else "fast"]
    with Field(profile, 2, folder, options.congestion) as field:
        for contestant in chosen:
            plan = ONE_SYNC.get(contestant.name)
            if contestant.in_cluster and profile.name in FAR:
                continue
            if plan is None or (plan is SLOW and contestant.by != "torchft" and not options.all):
                continue
            answers = field.run(
                kind="sync", contestant=CONTESTANTS.index(contestant), idle_s=sum(plan.values(), [])
            )
            if isinstance(answers, str):
                rows.append({"contestant": contestant.name, "failed": answers})
                say(f"one sync, {contestant.name}: {answers}")
                continue
            each = [max(pair) for pair in zip(*(answer["seconds"] for answer in answers), strict=True)]
            rows.append(
                {
                    "contestant": contestant.name,
                    "link": profile.words,
                    "parameters": answers[0]["num_params"],
                    "tensors": answers[0]["num_tensors"],
                    **{name: round(median(times), 3) for name, times in by_plan(plan, each).items()},
                    "MB sent": round(max(answer["sent_bytes"] for answer in answers) / 1e6, 2),
                    "worst error": max(answer["worst_error"] for answer in answers),
                }
            )
            say(f"one sync, {rows[-1]}")
    return rows


def by_plan(plan: dict[str, list[float]], times: list[float]) -> dict[str, list[float]]:
    left = iter(times)
    return {name: [next(left) for _ in idles] for name, idles in plan.items()}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def report(
    title: str, rows: list[dict[str, Any]], options: argparse.Namespace, notes: list[str], name: str
) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    full = [{column: row.get(column) for column in columns} for row in rows]
    setting = {
        "congestion control": options.congestion,
        "versions": {
            each: _version(each) for each in ("torch", "torchft", "nvflare", "accelerate", "transformers")
        },
    }
    if name.startswith("training"):
        setting |= {
            "parameters": next((row["parameters"] for row in rows if "parameters" in row), None),
            "H": workload.H,
            "fragments": workload.FRAGMENTS,
            "overlap": workload.OVERLAP,
            "tokens a step and region": workload.BATCH * workload.BLOCK,
            "threads a process": 1,
            "seconds a step counts as": options.pace,
            "seconds": options.seconds,
            "equal tokens at step": options.steps,
        }
    content = BenchReport(title, setting, full, notes)
    shown = BenchReport(
        title, setting, [{k: v for k, v in row.items() if k != "curve"} for row in full], notes
    )
    say("\n" + "\n".join(shown.lines()))
    options.output.mkdir(parents=True, exist_ok=True)
    write(options.output / f"{name}.json", [content])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed(chosen: list[Contestant]) -> tuple[list[Contestant], list[str]]:
    """The contestants whose library is installed here, and a sentence for each library that is not."""
    notes = []
    for library, package in INSTALLED.items():
        out = [each.name for each in chosen if each.by == library]
        if out and importlib.util.find_spec(library.lower()) is None:
            chosen = [each for each in chosen if each.by != library]
            notes.append(f"Left out: {'; '.join(out)}. This needs `pip install {package}`.")
    return chosen, notes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--regions", type=int, default=2, help="M (default: 2)")
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=FAR)
    parser.add_argument("--seconds", type=float, default=9.0, help="of training for each row (default: 9)")
    parser.add_argument(
        "--steps", type=int, default=60, help="step of the loss at equal tokens (default: 60)"
    )
    parser.add_argument(
        "--pace",
        type=float,
        default=0.15,
        help="seconds of computing per step (default: 0.15); 0 does not wait for a pace",
    )
    parser.add_argument("--congestion", default="cubic", help="TCP congestion control (default: cubic)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="rows whose names contain one of these")
    parser.add_argument("--all", action="store_true", help="include the rows that are left out by default")
    parser.add_argument("--skip", choices=["training", "one-sync"], help="skip one of the two measurements")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    missing = obstacle()
    if missing is not None:
        say(missing)
        return 2
    chosen = [each for each in CONTESTANTS if each.default or options.all or options.only]
    if options.only:
        chosen = [each for each in chosen if any(text in each.name for text in (NO_LINK, *options.only))]
    chosen, notes = installed(chosen)
    for note in notes:
        say(note)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        where = "" if set(options.profiles) <= {*FAR} else f"-{options.profiles[0]}"
        if options.skip != "training":
            workload.write_text(folder)
            rows = compare(options, chosen, folder)
            what = f"training-{options.regions}-regions{where}"
            report("training side by side", rows, options, notes, what)
        if options.skip != "one-sync":
            rows = one_sync(options, chosen, folder)
            if rows:
                report("one sync of a large model", rows, options, notes, f"one-sync{where}")
    say(f"\n{time.monotonic() - start:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
