"""gradientmail and hf_cocodc through the same storage: `python -m tests.benchmarks.buckets` (15 minutes).

Two regions are processes on this machine. Both tools train the same model on the same batches with the same inner optimizer, H
and outer step, in a folder, and in a folder whose requests take as long as those of a distant bucket. gradientmail needs Python
3.12 and `pip install 'gradientmail[torch]==0.0.2'`; without it its rows are left out, with a sentence that says so.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.net import storage
from hf_cocodc.net.mailbox import mailbox
from hf_cocodc.tools.bench.report import BenchReport, Row, write
from tests.processes.forks import fork

from . import workload
from .storage import FAR, PATIENCE_S, let_far_be

H, ROUNDS, STEP_S = 50, 4, 0.2
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.6}
"""With a momentum of 0.9, the last bit of a sum is worth 0.03 in the loss after four rounds."""
STREAMING = {"outer_lr": 0.6, "outer_momentum": 0.4}
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "diloco, fp32": {"hf_cocodc": {}, "gradientmail": {}},
    "diloco, bf16": {
        "hf_cocodc": {"codec": "bf16"},
        "gradientmail": {"delta_dtype": "BF16", "commit_dtype": "BF16"},
    },
    "streaming, 4 bits": {
        "hf_cocodc": STREAMING
        | {
            "method": "streaming",
            "codec": "fp4",
            "num_fragments": 2,
            "overlap_steps": 20,
            "mixing_alpha": 0.5,
        },
        "gradientmail": STREAMING
        | {"delta_dtype": "F4", "commit_dtype": "F4", "fragments": 2, "in_flight": 2, "overlap_steps": None},
    },
}
"""By name and tool: settings that differ from plain DiLoCo."""


class Timed:
    """Inner steps of a constant pace, and the seconds between them."""

    def __init__(self, place: workload.Region, model: Any, optimizer: Any) -> None:
        self.started = time.monotonic()
        self.text, self._model, self._optimizer = workload.Text(place), model, optimizer
        self.began, self.ended, self.waited_s, self.step = 0.0, 0.0, 0.0, 0

    def __call__(self, _batch: Any = None) -> int:
        start = time.monotonic()
        self.waited_s += start - self.ended if self.step else 0.0
        self.began = self.began or start
        self.step += 1
        workload.set_rate(self._optimizer, self.step)
        tokens = self.text.batch(self.step)
        self._model(input_ids=tokens, labels=tokens).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        time.sleep(max(start + STEP_S - time.monotonic(), 0.0))
        self.ended = time.monotonic()
        return tokens.numel()

    def found(self, used: Any) -> Row:
        """The figures when the run is over. `used` counts what was asked of the storage."""
        return {
            "pause": self.waited_s / ROUNDS,
            "first step": self.began - self.started,
            "wall": time.monotonic() - self.began,
            "requests": sum(used.requests.values()),
            "written": used.num_bytes["write"],
            "read": used.num_bytes["read"],
        }


def ours(place: workload.Region, url: str, settings: dict[str, Any]) -> Row:
    from accelerate import Accelerator

    accelerator, bare = Accelerator(cpu=True), workload.model_of(workload.TRAINED)
    model, optimizer = accelerator.prepare(bare, workload.inner_optimizer(bare))
    timed = Timed(place, model, optimizer)
    config = OuterConfig(**{"sync_interval": H, **OUTER, **settings})
    regions = RegionConfig(region=place.region, count=place.count, coordinator=url, run="buckets")
    with OuterOptimizer(accelerator, model, optimizer, config, regions, max_steps=H * ROUNDS) as outer:
        while not outer.should_stop:
            timed()
            outer.step()
    return timed.found(mailbox(url).storage) | {"loss": timed.text.held_out_loss(bare)}


class GradientmailFolder:
    """The storage of `ours`, as gradientmail asks for it; in threads, as its own S3 mailbox."""

    def __init__(self, url: str) -> None:
        self._backend = storage._backend_of(url)
        self.requests: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        self.num_bytes["write"] += len(data)
        return await self._ask("write", self._backend.create, quote(key, safe=""), data)

    async def get(self, key: str) -> bytes | None:
        try:
            data = await self._ask("read", self._backend.read, quote(key, safe=""))
        except FileNotFoundError:
            return None
        self.num_bytes["read"] += len(data)
        return data

    async def list(self, prefix: str, *, after: str = "") -> list[str]:
        keys = map(unquote, await self._ask("list", self._backend.names, "."))
        return sorted(key for key in keys if key.startswith(prefix) and key > after)

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                await self._ask("delete", self._backend.delete, quote(key, safe=""))
            except FileNotFoundError:
                continue

    def clock(self) -> Any:
        from gradientmail.clock import MonotonicClock

        return MonotonicClock()

    async def _ask(self, kind: str, request: Callable, *args: Any) -> Any:
        self.requests[kind] += 1
        return await asyncio.to_thread(request, *args)


def theirs(place: workload.Region, url: str, settings: dict[str, Any]) -> Row:
    import gradientmail

    model = workload.model_of(workload.TRAINED)
    timed, folder = Timed(place, model, workload.inner_optimizer(model)), GradientmailFolder(url)
    plain = {"fragments": 1, "in_flight": 1, "overlap_steps": 0, "follow": 0, "quorum_size": place.count}
    aligned = gradientmail.Blend(0.5) if settings.get("fragments") else gradientmail.Overwrite()
    parts = {"merge": gradientmail.WeightedMean(), "alignment": aligned}
    algorithm = gradientmail.DiLoCo(**{"sync_every": H, **plain, **parts, **OUTER, **settings})
    session = gradientmail.Session(
        model, algorithm=algorithm, mailbox=folder, node_id=f"region-{place.region}"
    )
    session.run(timed, range(H * ROUNDS))
    found = timed.found(folder)
    gradientmail.align(model, mailbox=folder)
    return found | {"loss": timed.text.held_out_loss(model)}


def train(place: workload.Region, tool: str, request_s: float, settings: dict[str, Any]) -> None:
    """One region: writes its figures."""
    let_far_be(request_s)
    torch.set_num_threads(1)
    url = f"{FAR if request_s else 'file://'}{place.folder}/storage"
    found = (ours if tool == "hf_cocodc" else theirs)(place, url, settings)
    (place.folder / f"region-{place.region}.json").write_text(json.dumps(found))


def together(tool: str, request_s: float, settings: dict[str, Any]) -> Row:
    """The figures of a tool: the slowest region's seconds, the sum of what both moved."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workload.write_text(folder)
        places = [workload.Region(region, 2, folder, "", "", 0) for region in (0, 1)]
        log = folder / "log.txt"
        for process in [fork(train, place, tool, request_s, settings, log=log) for place in places]:
            process.join(PATIENCE_S)
            assert process.exitcode == 0, log.read_text()[-4000:]
        found = [json.loads((folder / f"region-{place.region}.json").read_text()) for place in places]
    seconds = {key: max(each[key] for each in found) for key in ("pause", "first step", "wall")}
    moved = {key: sum(each[key] for each in found) for key in ("requests", "written", "read")}
    return seconds | {"loss": sum(each["loss"] for each in found) / 2} | moved


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.buckets", description=__doc__)
    parser.add_argument("--request-ms", type=float, default=300.0)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    missing = importlib.util.find_spec("gradientmail") is None
    if missing:
        how = "Python 3.12 and `pip install 'gradientmail[torch]==0.0.2'`"
        sys.stdout.write(f"Left out: gradientmail. This needs {how}.\n")
    reports = []
    ways = {"a folder": 0.0, f"requests of {options.request_ms:g} ms": options.request_ms / 1000}
    mega = {key: lambda value: f"{value / 1e6:.1f} MB" for key in ("written", "read")}
    for method in options.only:
        rows: list[Row] = [
            {"way": way, "tool": tool, **together(tool, request_s, settings)}
            for way, request_s in ways.items()
            for tool, settings in METHODS[method].items()
            if not (missing and tool == "gradientmail")
        ]
        setting = {"H": H, "rounds": ROUNDS, "seconds a step": STEP_S, "load": os.getloadavg()[0]}
        reports.append(
            BenchReport(method, setting, rows, formats={"loss": ".3f", "requests": ",.0f", **mega})
        )
        sys.stdout.write("\n".join([*reports[-1].lines(), "\n"]))
        sys.stdout.flush()
    if options.json is not None:
        write(options.json, reports)


if __name__ == "__main__":
    main()
