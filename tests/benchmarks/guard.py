"""What the norm guard does, and what faults cost beside it: `python -m tests.benchmarks.guard` (about an hour on two cores).

A Llama of 30 thousand parameters learns text (code, prose) in two to four regions of one process, in 26 rounds of 10 inner
steps, with an outer learning rate and momentum that suit so few rounds. First runs that are well: all methods, with warm-ups,
spikes, restarts and decays of the learning rate, adapters, bf16 parameters, batches of different sizes, clipped SGD. Each says
how far norms were from ordinary ones, and how often the guard acted. Then faults of one region, or of two, in round 6 (before
the guard has a history) and in round 16: the held-out loss of the global model against the same run without the fault, or where
the run stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
import math
import pydoc_data.topics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.base import Arrival, Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.tools.bench.report import BenchReport, Row, write
from tests.toys import VOCAB, llama

STEPS, SYNC, SPIKE, SPIKE_STEPS = 260, 10, 180, 4
YOUNG, OLD = 51, 151
"""Inner steps at which faults begin: in round 6, and in round 16."""
SETTINGS: dict[str, dict[str, Any]] = {
    "diloco": {"outer_lr": 0.7, "outer_momentum": 0.6},
    "streaming": {"num_fragments": 2, "overlap_steps": 3, "outer_lr": 0.7, "outer_momentum": 0.6},
    "eager": {"outer_lr": 0.4, "outer_momentum": 0.3},
    "co2": {},
    "dilocox": {"outer_lr": 0.5, "outer_momentum": 0.3, "rank": 8},
    "cocodc": {
        "num_fragments": 2,
        "overlap_steps": 3,
        "sends_per_interval": 3,
        "outer_lr": 0.7,
        "outer_momentum": 0.6,
    },
    "sparseloco": {},
    "topk": {"method": "diloco", "codec": "topk", "error_feedback": True, "outer_momentum": 0.6},
}
TEXTS = [inspect.getsource(module) for module in (argparse, pydoc_data.topics, threading)]
HEALTHY: dict[str, tuple[int, dict[str, Any]]] = {
    "spike x 10": (4, {"spike": 10.0}),
    "spike x 20": (3, {"spike": 20.0}),
    "decay to 0": (3, {"decays": True}),
    "restarts": (2, {"restarts": True}),
    "adapters": (2, {"lora": True}),
    "bf16": (2, {"dtype": torch.bfloat16}),
    "batches 1, 16": (3, {"sizes": (1, 16)}),
    "clipped SGD": (2, {"sgd": True}),
}
"""Regions and changes of each kind of run that is well."""


def batch(region: int, step: int, seed: int, size: int = 4) -> Tensor:
    """Characters (size, 32) of the region's text."""
    text = TEXTS[region % len(TEXTS)]
    generator = torch.Generator().manual_seed(10**6 * seed + 10**4 * region + step)
    starts = torch.randint(0, len(text) - 32, (size,), generator=generator).tolist()
    return torch.tensor(
        [[ord(each) % (VOCAB - 1) + 1 for each in text[start : start + 32]] for start in starts]
    )


def rate(step: int, spike: float = 10.0, decays: bool = False, restarts: bool = False) -> float:
    """Warm-up and cosine, for a few steps `spike` times as high; or cosines that begin again."""
    if restarts:
        return 1.5e-3 * (1 + math.cos(math.pi * (step % 65) / 65))
    least = 0.0 if decays else 0.1
    cosine = (1 + least) / 2 + (1 - least) / 2 * math.cos(math.pi * step / STEPS)
    return 3e-3 * min(step / 20, 1) * cosine * (spike if SPIKE <= step < SPIKE + SPIKE_STEPS else 1)


class Fault(NamedTuple):
    """What goes wrong in a region, from an inner step on.

    Attributes:
        words: names it in the table.
        grad: an outer gradient times this leaves the region, by the number of its sends since the fault began.
        rate: its inner learning rate, in multiples of the others'.
        weights: done to its parameters, once.
    """

    words: str
    grad: Callable[[int], float] = lambda send: 1.0
    rate: float = 1.0
    weights: Callable[[Tensor], Any] | None = None


FAULTS = [
    Fault("a weight is NaN, once", weights=lambda param: param.view(-1)[0].fill_(math.nan)),
    Fault("all weights x 1e4, once", weights=lambda param: param.mul_(1e4)),
    Fault("outer gradient x 1e6, once", grad=lambda send: 1e6 if send == 1 else 1.0),
    Fault("outer gradient x 40, always", grad=lambda send: 40.0),
    Fault("outer gradient x 7, always", grad=lambda send: 7.0),
    Fault("learning rate x 1000, always", rate=1000.0),
    Fault("outer gradient x 4.5, always", grad=lambda send: 4.5),
    Fault("outer gradient x -4.5, always", grad=lambda send: -4.5),
    Fault("outer gradient x -1, always", grad=lambda send: -1.0),
    Fault("outer gradient x 1.15 more with each send", grad=lambda send: 1.15**send),
]


class Run(NamedTuple):
    """How a run ended.

    Attributes:
        loss: held-out, of region 0's model: the global weights, or its own where all have stopped.
        stopped: inner step at which all stopped; None if they went to the end.
        alarms: transfers in which the guard acted.
        young, known: of each transfer without and with a history, the largest norm in multiples of the ordinary one.
        now: of each transfer with a history, the median norm in multiples of what the history lets expect.
    """

    loss: float
    stopped: int | None
    alarms: int
    young: list[float]
    known: list[float]
    now: list[float]


class Watcher:
    """Reads verdicts at landings."""

    def __init__(self, outer: OuterOptimizer) -> None:
        self.alarms, self.young, self.known, self.now = 0, list[float](), list[float](), list[float]()
        engine = engine_of(outer)
        self._traffic, self._account = engine._traffic, engine.account
        self._landed, self._remember = self._account.landed, self._traffic._guarding.remember
        self._land, self._traffic.land = self._traffic.land, self.land  # type: ignore[method-assign, assignment]
        self._account.landed = self.landed  # type: ignore[method-assign, assignment]
        self._traffic._guarding.remember = self.remember  # type: ignore[method-assign]

    def landed(self, *args: Any) -> None:
        arrival: Arrival = args[3]
        self.alarms += any(arrival.verdict.fates)
        self._landed(*args)

    def land(self, fragment: Any, sent_at: int, *rest: Any) -> Any:
        self._ordinary = fragment.transfer_of(sent_at).ordinary
        return self._land(fragment, sent_at, *rest)

    def remember(self, fragment: Any, arrival: Arrival) -> None:
        verdict = arrival.verdict
        counted = [each for each in arrival.trailers if each.weight]
        norms = sorted(each.norm for each in counted)
        rates = sorted(each.round_lr for each in counted if each.round_lr)
        middle = (len(norms) - 1) // 2
        if norms and verdict.limit:
            before = self._ordinary.at(rates[0] if rates else 0.0)
            (self.known if before else self.young).append(norms[-1] / verdict.limit)
            if before:
                self.now.append(norms[middle] / before)
        self._remember(fragment, arrival)


def train(
    method: str,
    region: int,
    link: Link,
    seed: int,
    fault: Fault | None = None,
    at: int = 0,
    wrong: Sequence[int] = (),
    guard: str | None = None,
    *,
    lora: bool = False,
    dtype: torch.dtype = torch.float32,
    sizes: Sequence[int] = (4,),
    sgd: bool = False,
    **schedule: Any,
) -> Run:
    """One region's training, to its end or until all regions stop."""
    torch.manual_seed(seed)
    model: nn.Module = llama(seed, layers=2, dtype=dtype)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    params = [param for param in model.parameters() if param.requires_grad]
    inner: torch.optim.Optimizer = (
        torch.optim.SGD(params, lr=1.0, momentum=0.9) if sgd else torch.optim.AdamW(params, lr=1e-3)
    )
    accelerator = Accelerator(cpu=True)
    model, inner = accelerator.prepare(model, inner)
    settings: dict[str, Any] = {"method": method, "sync_interval": SYNC, "guard": guard} | SETTINGS[method]
    outer = OuterOptimizer(accelerator, model, inner, OuterConfig(**settings), max_steps=STEPS, link=link)
    watcher, is_wrong = Watcher(outer), fault is not None and region in wrong
    while outer.inner_step < STEPS and not outer.should_stop:
        step = outer.inner_step + 1
        lr = rate(step, **schedule) * (10 if sgd else 1)
        if is_wrong and step == at:
            assert fault is not None
            if fault.weights is not None:
                for param in params:
                    fault.weights(param.detach())
            scale_sends(outer, fault.grad)
        inner.param_groups[0]["lr"] = lr * (
            fault.rate if fault is not None and is_wrong and step >= at else 1
        )
        tokens = batch(region, step, seed, sizes[min(region, len(sizes) - 1)])
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(params, 1.0)
        inner.step()
        inner.zero_grad()
        outer.step(float(loss.detach()))
    stopped = outer.inner_step if outer.verdict == "stop" else None
    if stopped is None:
        outer.finish()
    held_out = torch.cat([batch(part, 10**4 - 1, seed=99, size=64) for part in range(len(TEXTS))])
    with torch.no_grad():
        loss = float(model(input_ids=held_out, labels=held_out).loss)
    return Run(loss, stopped, watcher.alarms, watcher.young, watcher.known, watcher.now)


def engine_of(outer: OuterOptimizer) -> Synchronizer:
    assert isinstance(outer.synchronizer, Synchronizer)
    return outer.synchronizer


def scale_sends(outer: OuterOptimizer, factor: Callable[[int], float]) -> None:
    """Let each fragment's outer gradients leave this region times factor(number of the send)."""
    for fragment in engine_of(outer).fragments:
        prepare, sends = fragment.prepare, [0]

        def wrong(
            base: Tensor, keep: bool = False, prepare: Any = prepare, sends: list[int] = sends
        ) -> tuple[Tensor | None, Tensor, Tensor]:
            snapshot, outer_grad, square = prepare(base, keep)
            sends[0] += 1
            times = factor(sends[0])
            return snapshot, outer_grad.mul_(times), square * times * times

        fragment.prepare = wrong  # type: ignore[method-assign]


def run(method: str, count: int, seed: int, *args: Any, **changes: Any) -> Run:
    """Region 0's end of a run of so many regions."""
    return run_in_lockstep(count, lambda region, link: train(method, region, link, seed, *args, **changes))[0]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that every fault prints."""
    logger = logging.getLogger("hf_cocodc")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def spread(values: Sequence[float]) -> str:
    """Median, 99th percentile and largest of these."""
    if not values:
        return "-"
    ranked = sorted(values)
    return " / ".join(
        f"{ranked[min(int(share * len(ranked)), len(ranked) - 1)]:.3g}" for share in (0.5, 0.99, 1.0)
    )


def outcome(found: Run, sound: Run) -> str:
    """What a fault came to."""
    if found.stopped is not None:
        return f"stop at {found.stopped}"
    return f"{100 * (found.loss / sound.loss - 1):+.1f} %"


def healthy(methods: Sequence[str], seeds: int) -> BenchReport:
    """How far norms are from ordinary ones in runs that are well, and in how many transfers the guard acts."""
    rows: list[Row] = []
    for words, (count, changes) in HEALTHY.items():
        found = []
        for method in methods:
            for seed in range(1, seeds + 1):
                found.append(run(method, count, seed, **changes))
                say(f"{words}, {method}: {found[-1].alarms} alarms")
        row: Row = {"well": words, "regions": count, "runs": len(found)}
        for title, name in (("young", "young"), ("known", "known"), ("median", "now")):
            row[title] = spread([value for each in found for value in getattr(each, name)])
        rows.append({**row, "alarms": sum(each.alarms for each in found)})
    notes = (
        "Median / 99th percentile / largest over all transfers. young: the largest norm of a transfer in multiples of the",
        "median one, before there is a history; known: in multiples of the larger one of that and what the history lets",
        "expect; median: the median norm in multiples of the latter.",
    )
    return BenchReport("norm guard, runs that are well", {"steps": STEPS, "sync_interval": SYNC}, rows, notes)


def faulty(methods: Sequence[str], faults: Sequence[Fault], guard: str | None) -> BenchReport:
    """What faults cost."""
    sound = {(method, count): run(method, count, 1) for method in methods for count in (2, 3)}
    rows: list[Row] = []
    for fault in faults:
        for method in methods:
            row: Row = {"fault": fault.words, "method": method}
            norms: list[float] = []
            for count, wrong in ((2, [1]), (3, [1]), (3, [1, 2])):
                for age, at in (("young", YOUNG), ("old", OLD)):
                    found = run(method, count, 1, fault, at, wrong, guard)
                    norms += found.young + found.known
                    row[f"{len(wrong)} of {count}, {age}"] = outcome(found, sound[method, count])
            rows.append({**row, "largest norm": max(norms, default=None)})
            say(", ".join(map(str, rows[-1].values())))
    notes = (
        "Loss against the run without the fault (one seed), or the inner step at which all regions stopped, with a checkpoint.",
    )
    setting = {"young": YOUNG, "old": OLD, "steps": STEPS, "sync_interval": SYNC, "guard": guard or "default"}
    return BenchReport("norm guard, faults", setting, rows, notes, {"largest norm": ".3g"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="only these")
    parser.add_argument("--faults", metavar="TEXT", default="", help="only faults whose words contain this")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind that is well; 0: only faults")
    parser.add_argument(
        "--guard", help="settings of the guard for the faults, for example none or clip=5,drop=50"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    faults = [fault for fault in FAULTS if options.faults in fault.words]
    with quiet():
        reports = [healthy(options.methods, options.seeds)] if options.seeds else []
        reports += [faulty(options.methods, faults, options.guard)] if faults else []
    for report in reports:
        say("\n".join(["", *report.lines()]))
    if options.json is not None:
        write(options.json, reports)


if __name__ == "__main__":
    main()
