"""One region of the comparison: `python -m tests.benchmarks.worker PLACE`, started by the driver inside its namespace.

It imports what is slow once and forks a process for every row, so that rows cannot disturb each other. A row is a line of
JSON on standard input; each is answered with its exit code.
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

from . import workload
from .contestants import CONTESTANTS, Part, nothing
from .workload import Region, Text

PATIENCE_S = 300
LONE_STEPS = 10
PHASES = ("forward", "backward", "optimizer", "sync")


class Gate:
    """Regions meet, and agree on when to end, through files, so that nothing of it crosses the link."""

    def __init__(self, place: Region, row: str) -> None:
        self._place = place
        self._folder = place.folder / row
        self._folder.mkdir(exist_ok=True)

    def meet(self, name: str) -> None:
        (self._folder / f"{name}.{self._place.region}").touch()
        for region in range(self._place.count):
            _await(self._folder / f"{name}.{region}")

    def say(self, chunk: int, last: bool) -> None:
        """Region 0's word whether `chunk` is the last one."""
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
            raise TimeoutError(f"{path.name} did not come")
        time.sleep(0.002)


class Loop:
    """Inner steps at a steady pace, and where their time goes.

    Computing a step counts as `pace_s` seconds, as if an accelerator of constant speed did it: what the CPU takes less is
    slept, so that other load on the machine decides nothing. Waiting for the link comes on top of that.
    """

    def __init__(self, part: Part, text: Text, pace_s: float, alone_s: float = 0.0) -> None:
        self._part, self._text, self._pace_s, self._alone_s = part, text, pace_s, alone_s
        self.computed_s = 0.0
        self.steps = 0
        self.seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def inner_step(self) -> None:
        part, seconds = self._part, self.seconds
        self.steps += 1
        workload.set_rate(part.optimizer, self.steps)
        batch = self._text.batch(self.steps)
        start = time.perf_counter()
        loss = part.model(input_ids=batch, labels=batch).loss
        ahead = self.steps * self._pace_s - self.computed_s - self._left(time.perf_counter() - start)
        time.sleep(max(ahead, 0.0))
        computed = time.perf_counter()
        part.backward(loss)
        backward = time.perf_counter()
        part.optimizer.step()
        part.optimizer.zero_grad()
        optimizer = time.perf_counter()
        part.sync()
        times = (computed - start, backward - computed, optimizer - backward, time.perf_counter() - optimizer)
        for phase, took in zip(PHASES, times, strict=True):
            seconds[phase].append(took)
            if phase != "sync":
                self.computed_s += self._alone_s if phase == part.waits_in else took

    def _left(self, forward_s: float) -> float:
        """What this step will have taken, as far as one can tell from the one before."""
        last = [self.seconds[phase][-1:] or [0.0] for phase in ("backward", "optimizer")]
        waits = self._part.waits_in
        known = {"backward": last[0][0], "optimizer": last[1][0]} | (
            {waits: self._alone_s} if waits != "sync" else {}
        )
        return forward_s + sum(known.values())


def lone(place: Region, text: Text, gate: Gate, row: dict[str, Any]) -> tuple[dict[str, float], float]:
    """Train without a link, beside the other regions doing the same.

    Returns:
        Seconds of a step's phases as the CPU takes them, and of a whole step at the pace.
    """
    part = nothing(place, workload.TRAINED, workload.H)
    loop = Loop(part, text, 0.0)
    for _ in range(LONE_STEPS):
        loop.inner_step()
    alone = {phase: statistics.median(took[2:]) for phase, took in loop.seconds.items()}
    loop = Loop(part, text, row["pace_s"])
    gate.meet("lone")
    start = time.perf_counter()
    for _ in range(LONE_STEPS):
        loop.inner_step()
    return alone, (time.perf_counter() - start) / LONE_STEPS


def train(place: Region, row: dict[str, Any]) -> dict[str, Any]:
    """Train for `wall_s` seconds and `steps` steps, but not for longer than `most_s`, and tell what came of it."""
    contestant = CONTESTANTS[row["contestant"]]
    text, gate = Text(place), Gate(place, row["row"])
    alone, lone_step_s = lone(place, text, gate, row)
    part = contestant.make(place, workload.TRAINED, workload.H, **contestant.settings)
    gate.meet("start")
    hidden = part.waits_in
    alone_s = 0.0 if hidden == "sync" else alone[hidden]
    loop, kept = Loop(part, text, row["pace_s"], alone_s), [(0, 0.0, part.weights())]
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
    computing = ("forward", "backward", "optimizer")
    found = {
        "steps": loop.steps,
        "seconds": took_s,
        "lone_step_s": lone_step_s,
        "computed_step_s": loop.computed_s / loop.steps,
        "cpu_step_s": sum(alone[phase] for phase in computing),
        "blocked_s": max(sum(loop.seconds[hidden]) - loop.steps * alone_s, 0.0),
        "sent_bytes": sent,
        "num_params": sum(param.numel() for param in part.model.parameters()),
        "num_tensors": sum(1 for _ in part.model.parameters()),
    }
    if place.region == 0:
        found["curve"] = curve(text, kept, row)
    return found


def curve(text: Text, kept: list[Any], row: dict[str, Any]) -> list[tuple[int, float, float]]:
    """Held-out loss of what there was: at the marks in steps and in seconds, and a few points between."""
    model = workload.model_of(workload.TRAINED)
    marks = {0, len(kept) - 1, *range(0, len(kept), max(len(kept) // 4, 1))}
    marks |= {index for index, (step, _, _) in enumerate(kept) if step == row["steps"]}
    marks.add(max(index for index, (_, at, _) in enumerate(kept) if at <= row["wall_s"]))
    points = []
    for index in sorted(marks):
        step, at, weights = kept[index]
        with torch.no_grad():
            for param, value in zip(model.parameters(), weights, strict=True):
                param.copy_(value)
        points.append((step, at, text.held_out_loss(model)))
    return points


def one_sync(place: Region, row: dict[str, Any]) -> dict[str, Any]:
    """Sync 28.6 MB in 291 tensors a few times, and compare with the mean in float64."""
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
    """What this namespace has sent, on any interface but loopback, headers and retransmits included."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counters = {name.strip(): fields.split() for name, fields in (line.split(":") for line in lines)}
    return sum(int(fields[8]) for name, fields in counters.items() if name != "lo")


def run(place: Region, row: dict[str, Any]) -> int:
    """One row in a process of its own; its answer is a file."""
    log = os.open(place.folder / f"{row['row']}.{place.region}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    found = {"train": train, "sync": one_sync}[row["kind"]](place, row)
    (place.folder / f"{row['row']}.{place.region}.json").write_text(json.dumps(found))
    return 0


def main() -> None:
    spec = json.loads(sys.argv[1])
    folder = Path(spec.pop("folder"))
    for name in (
        "accelerate.local_sgd",
        "transformers.models.llama.modeling_llama",
        "hf_cocodc.integrations.accelerate",
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
                os._exit(code)  # whatever threads and connections a contestant has left
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
