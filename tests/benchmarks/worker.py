"""One region of the comparison: `python -m tests.benchmarks.worker PLACE`. The driver starts it in the region's namespace.

It imports slow modules once and forks a process for every row, so that rows cannot affect each other. It reads each row as a
line of JSON from standard input, and answers with the exit code of the row's process.
"""

import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from . import federated, workload
from .contestants import CONTESTANTS, Part, nothing
from .workload import Region, Text

PATIENCE_S = 300
ALONE_STEPS = 15
COMPUTING = ("forward", "backward", "optimizer")
PHASES = (*COMPUTING, "sync")
NOTHING = dict.fromkeys(PHASES, 0.0)


class Gate:
    """Regions meet and agree on the end through files, so that this causes no traffic on the link."""

    def __init__(self, place: Region, row: str) -> None:
        self._place = place
        self._folder = place.folder / row
        self._folder.mkdir(exist_ok=True)

    def meet(self, name: str) -> None:
        (self._folder / f"{name}.{self._place.region}").touch()
        for region in range(self._place.count):
            _await(self._folder / f"{name}.{region}")

    def say(self, chunk: int, last: bool) -> None:
        """In region 0: tell the other regions whether `chunk` is the last one."""
        path = self._folder / f"chunk-{chunk}"
        path.with_suffix(".new").write_text(str(int(last)))
        path.with_suffix(".new").rename(path)

    def is_last(self, chunk: int) -> bool:
        path = self._folder / f"chunk-{chunk}"
        _await(path)
        return path.read_text() == "1"


def _await(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not appear within {PATIENCE_S} s")
        time.sleep(0.002)


class Loop:
    """Inner steps at a constant pace, and the time of each phase.

    Each step computes for `pace_s` seconds, as on an accelerator of constant speed: if the CPU takes less, the loop sleeps for
    the rest, so that other load on the machine has no effect. Waiting for the link adds to this time.
    """

    def __init__(self, part: Part, text: Text, pace_s: float, cpu_s: dict[str, float]) -> None:
        self._part, self._text, self._pace_s, self._cpu_s = part, text, pace_s, cpu_s
        self.computed_s = 0.0
        self.steps = 0
        self.seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def inner_step(self) -> None:
        part = self._part
        self.steps += 1
        workload.set_rate(part.optimizer, self.steps)
        batch = self._text.batch(self.steps)
        start = time.perf_counter()
        loss = part.model(input_ids=batch, labels=batch).loss
        times = {"forward": time.perf_counter() - start}
        ahead = self.steps * self._pace_s - self.computed_s - self._expected(times)
        start = time.perf_counter()
        time.sleep(max(ahead, 0.0))
        slept = time.perf_counter() - start
        start = time.perf_counter()
        part.backward(loss)
        times["backward"] = time.perf_counter() - start
        part.optimizer.step()
        part.optimizer.zero_grad()
        times["optimizer"] = time.perf_counter() - start - times["backward"]
        start = time.perf_counter()
        part.sync()
        times["sync"] = time.perf_counter() - start
        self.computed_s += slept + self._expected(times)
        for phase, took in times.items():
            self.seconds[phase].append(took)

    def _expected(self, times: dict[str, float]) -> float:
        """Computing seconds of a step. Phases that wait for the link count with their CPU time; a phase that is not yet
        measured counts with the last step's time.
        """
        last = {phase: self.seconds[phase][-1] for phase in COMPUTING if self.seconds[phase]}
        waiting = {phase: self._cpu_s[phase] for phase in self._part.waits_in}
        known = {**last, **times, **waiting}
        return sum(known.get(phase, 0.0) for phase in COMPUTING)

    def blocked_s(self) -> float:
        """Seconds in the phases that wait for the link, minus their CPU time."""
        waits = self._part.waits_in
        return max(sum(sum(self.seconds[phase]) - self.steps * self._cpu_s[phase] for phase in waits), 0.0)


def alone(place: Region, text: Text, gate: Gate) -> dict[str, float]:
    """CPU seconds of a step's phases without a link, while the other regions do the same."""
    loop = Loop(nothing(place, workload.TRAINED, workload.H), text, 0.0, NOTHING)
    gate.meet("alone")
    for _ in range(ALONE_STEPS):
        loop.inner_step()
    return NOTHING | {phase: statistics.median(loop.seconds[phase][2:]) for phase in COMPUTING}


def train(place: Region, row: dict[str, Any]) -> dict[str, Any]:
    """Train for at least `wall_s` seconds and `steps` steps, but at most `most_s` seconds; return the figures."""
    contestant = CONTESTANTS[row["contestant"]]
    text, gate = Text(place), Gate(place, row["row"])
    cpu_s = alone(place, text, gate)
    part = contestant.make(place, workload.TRAINED, workload.H, **contestant.settings)
    gate.meet("start")
    loop, kept = Loop(part, text, row["pace_s"], cpu_s), [(0, 0.0, part.weights())]
    sent = _sent_bytes()
    start = time.perf_counter()
    chunk, last = 0, False
    while not last:
        loop.inner_step()
        if loop.steps % part.chunk == 0:
            now = time.perf_counter() - start
            if place.region == 0:
                kept.append((loop.steps, now, part.weights()))
                until = now + (now - kept[-2][1])  # the next chunk's end
                enough = until >= row["wall_s"] and loop.steps + part.chunk >= row["steps"]
                gate.say(chunk + 1, enough or until >= row["most_s"])
            last = chunk > 0 and gate.is_last(chunk)
            chunk += 1
    took_s = time.perf_counter() - start
    sent = _sent_bytes() - sent
    gate.meet("end")
    found = {
        "steps": loop.steps,
        "seconds": took_s,
        "computed_step_s": loop.computed_s / loop.steps,
        "cpu_step_s": sum(cpu_s[phase] for phase in COMPUTING),
        "blocked_s": loop.blocked_s(),
        "sent_bytes": sent,
        "num_params": sum(param.numel() for param in part.model.parameters()),
        "num_tensors": sum(1 for _ in part.model.parameters()),
    }
    if place.region == 0:
        found["curve"] = curve(text, kept, row)
    return found


def curve(text: Text, kept: list[Any], row: dict[str, Any]) -> list[tuple[int, float, float]]:
    """Held-out loss of the kept weights: at the marks in steps and in seconds, and at a few points between."""
    model = workload.model_of(workload.TRAINED)
    marks = {0, len(kept) - 1, *range(0, len(kept), max(len(kept) // 4, 1))}
    marks |= {index for index, (step, _, _) in enumerate(kept) if step == row["steps"]}
    before = max(index for index, (_, at, _) in enumerate(kept) if at <= row["wall_s"])
    marks |= {before, min(before + 1, len(kept) - 1)}
    points = []
    for index in sorted(marks):
        step, at, weights = kept[index]
        with torch.no_grad():
            for param, value in zip(model.parameters(), weights, strict=True):
                param.copy_(value)
        points.append((step, at, text.held_out_loss(model)))
    return points


def one_sync(place: Region, row: dict[str, Any]) -> dict[str, Any]:
    """Sync 28.6 MB in 291 tensors several times, and compare with the mean in float64."""
    contestant = CONTESTANTS[row["contestant"]]
    gate = Gate(place, row["row"])
    part = contestant.make(place, workload.LARGE, 1, **contestant.settings)
    params = list(part.model.parameters())
    took, sent, worst = [], [], 0.0
    for repeat, idle_s in enumerate(row["idle_s"]):
        mean = [torch.zeros(param.shape, dtype=torch.float64) for param in params]
        for region in range(place.count):
            generator = torch.Generator().manual_seed(1000 * repeat + region)
            for param, total in zip(params, mean, strict=True):
                local = 0.02 * torch.randn(param.shape, generator=generator)
                total += local.double() / place.count
                if region == place.region:
                    param.data.copy_(local)
        time.sleep(idle_s)
        gate.meet(f"sync-{repeat}")
        counted = _sent_bytes()
        start = time.perf_counter()
        part.optimizer.step()
        part.sync()
        took.append(time.perf_counter() - start)
        sent.append(_sent_bytes() - counted)
        worst = max(worst, *((p.double() - m).abs().max().item() for p, m in zip(params, mean, strict=True)))
        gate.meet(f"synced-{repeat}")
    gate.meet("end")
    return {
        "seconds": took,
        "sent_bytes": max(sent),
        "worst_error": worst,
        "num_params": sum(param.numel() for param in params),
        "num_tensors": len(params),
    }


def _sent_bytes() -> int:
    """Bytes sent from this namespace, on all interfaces except loopback, including headers and retransmits."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counters = {name.strip(): fields.split() for name, fields in (line.split(":") for line in lines)}
    return sum(int(fields[8]) for name, fields in counters.items() if name != "lo")


def run(place: Region, row: dict[str, Any]) -> int:
    """Run one row in this forked process; write the figures to a file."""
    log = os.open(place.folder / f"{row['row']}.{place.region}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    contestant = CONTESTANTS[row["contestant"]]
    if contestant.has_processes:
        found = federated.run(place, row, contestant.settings)
    else:
        found = {"train": train, "sync": one_sync}[row["kind"]](place, row)
    (place.folder / f"{row['row']}.{place.region}.json").write_text(json.dumps(found))
    return 0


def main() -> None:
    spec = json.loads(sys.argv[1])
    folder = Path(spec.pop("folder"))
    for name in (
        "accelerate.local_sgd",
        "transformers.models.llama.modeling_llama",
        "hf_cocodc.run.outer_optimizer",
    ):
        __import__(name)
    answer(None)
    for line in sys.stdin:
        row = json.loads(line)
        place = Region(folder=folder, port=row.pop("port"), **spec)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = run(place, row)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)  # even if the contestant has left threads or connections
        answer(_reap(child, row["patience_s"]))


def _reap(child: int, patience_s: float) -> int:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def answer(code: int | None) -> None:
    sys.stdout.write(json.dumps(code) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
