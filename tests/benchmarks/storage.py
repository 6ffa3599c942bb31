"""How long training waits for regions that meet in a storage: `python -m tests.benchmarks.storage` (seven minutes).

Two regions are processes on this machine with an ordinary Accelerate loop. An inner step sleeps, as a processor does that waits
for an accelerator. They meet over TCP, in a folder, and in a folder whose requests take as long as those of a distant bucket. It
prints the share of the time that inner steps took, and the requests of both regions. Then one of three regions is killed, and
started again at once: it prints how many seconds later it takes part again.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.coordinator.in_storage import serving_in
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.net import storage
from hf_cocodc.net.mailbox import mailbox
from hf_cocodc.tools.bench.report import BenchReport, Row, write
from tests.net import fake_hub
from tests.processes.coming_worker import loop
from tests.processes.forks import fork, region_env
from tests.processes.test_coming_and_going import Run
from tests.toys import llama

STEP_S, STEPS = 0.1, 300
FAR = "far://"
METHODS: dict[str, dict[str, Any]] = {
    "diloco, H = 100": {"sync_interval": 100},
    "streaming, fp4, H = 100, overlap 40": {
        "method": "streaming",
        "codec": "fp4",
        "sync_interval": 100,
        "num_fragments": 2,
        "overlap_steps": 40,
    },
}
FORMATS = {"trains": ".1%", "requests/h": ",.0f", "of who serves": ",.0f"}
PATIENCE_S = 300.0


class _Distant(storage._Folder):
    """A folder whose requests take `request_s` seconds."""

    request_s = 0.0

    def __init__(self, url: str, scheme: str) -> None:
        super().__init__(url.removeprefix(FAR))

    def write(self, name: str, content: bytes) -> None:
        time.sleep(self.request_s)
        super().write(name, content)

    def create(self, name: str, content: bytes) -> bool:
        time.sleep(self.request_s)
        return super().create(name, content)

    def read(self, name: str) -> bytes:
        time.sleep(self.request_s)
        return super().read(name)

    def delete(self, names: Sequence[str]) -> None:
        time.sleep(self.request_s)
        super().delete(names)

    def names(self, folder: str) -> list[str]:
        time.sleep(self.request_s)
        return super().names(folder)


def let_far_be(request_s: float) -> None:
    """Let this process find a folder at `FAR` whose requests take so long; only one of two creates an object there."""
    _Distant.request_s = request_s
    storage._Bucket = _Distant  # type: ignore[assignment, misc]
    storage._CONDITIONAL = ("far",)  # type: ignore[assignment]


def train(folder: str, request_s: float, options: dict[str, Any]) -> None:
    """One region: writes how long its inner steps were under way, and what it asked its storage for."""
    region, url = int(os.environ["HF_COCODC_REGION"]), os.environ["HF_COCODC_COORDINATOR"]
    let_far_be(request_s)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = llama(layers=2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    tokens = torch.arange(16).view(1, 16)
    ended = []
    config, regions = OuterConfig(**options), RegionConfig(run="storage")
    asked = Counter[str]()
    with OuterOptimizer(accelerator, model, optimizer, config, regions, max_steps=STEPS) as outer:
        box = mailbox(url) if "://" in url else None
        before, began = Counter() if box is None else box.storage.requests.copy(), time.time()
        while not outer.should_stop:
            time.sleep(STEP_S)
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
            ended.append(time.time())
        if box is not None:
            asked = box.storage.requests - before
    an_hour = sum(asked.values()) * 3600 / (ended[-1] - began)
    Path(folder, f"region-{region}.json").write_text(json.dumps((ended, an_hour)))


def together(way: str, request_s: float, options: dict[str, Any]) -> list[Any]:
    """What both regions write."""
    with tempfile.TemporaryDirectory() as folder:
        log, served = Path(folder, "log.txt"), serve_in_thread()
        env = (
            {}
            if way == "TCP"
            else {"HF_COCODC_COORDINATOR": f"{FAR if request_s else 'file://'}{folder}/storage"}
        )
        processes = [
            fork(train, folder, request_s, options, log=log, **{**region_env(served, region, 2), **env})
            for region in (0, 1)
        ]
        for process in processes:
            process.join(PATIENCE_S)
            assert process.exitcode == 0, log.read_text()[-4000:]
        served.close()
        return [json.loads(Path(folder, f"region-{region}.json").read_text()) for region in (0, 1)]


def coming(request_s: float, folder: str, *rest: Any) -> None:
    """A region of `back_s`."""
    let_far_be(request_s)
    loop(folder, *rest)


def back_s(way: str, request_s: float, serves: bool) -> float:
    """Seconds after which a region takes part again that was killed, and started again at once; it may be the one that serves."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"{FAR if request_s else 'file://'}{folder}/storage"
        place = None if way == "TCP" else SimpleNamespace(address=url)
        run = Run(
            Path(folder), 3, partial(coming, request_s), 100_000, STEP_S, "diloco", 1, coordinator=place
        )
        try:
            run.wait_for_step(2, 20)
            pids = {str(process.pid): region for region, process in run.processes.items()}
            shown = serving_in(storage.Storage(f"file://{folder}/storage")) if place else ""
            serving = pids[shown.partition("-")[0]] if shown else 0
            region = serving if serves else (serving + 1) % 3
            run.kill(region)
            began = time.monotonic()
            run.start(region)
            run.wait_for_join(region)
            return time.monotonic() - began
        finally:
            for region in run.processes:
                run.kill(region)


def through_the_hub(url: str, *rest: Any) -> None:
    """A region that reaches the fake of the Hub at a URL."""
    fake_hub.reach(url, pytest.MonkeyPatch())
    loop(*rest)


def asked_of_the_hub() -> tuple[float, float]:
    """How many requests two regions make in five minutes to the Hub's API, and to read files, once they train. See `FakeHub`."""
    found = []
    with tempfile.TemporaryDirectory() as folder, fake_hub.fake_hub() as hub:
        place = SimpleNamespace(address=f"hf://buckets/{fake_hub.BUCKET}/run7")
        whole = partial(through_the_hub, hub.url), 100_000, STEP_S, "seldom", 1
        run = Run(Path(folder), 2, *whole, coordinator=place)
        try:
            for step in (20, 320):
                run.wait_for_step(0, step)
                found.append((time.monotonic(), sum(hub.asked.values()), hub.asked["resolve"]))
        finally:
            for region in run.processes:
                run.kill(region)
    (began, all_before, reads_before), (ended, every, reads) = found
    in_five_minutes, more = 300 / (ended - began), reads - reads_before
    return (every - all_before - more) * in_five_minutes, more * in_five_minutes


def all_back(far_ms: float, repeats: int) -> list[Row]:
    rows: list[Row] = []
    for way, request_s in (("TCP", 0.0), ("a folder", 0.0), (f"requests of {far_ms:g} ms", far_ms / 1000)):
        row: Row = {"way": way}
        for name, serves in (("another region", False), ("the one that serves", True)):
            is_there = way != "TCP" or not serves
            row[name] = (
                statistics.median(back_s(way, request_s, serves) for _ in range(repeats))
                if is_there
                else None
            )
        rows.append(row)
    return rows


def measured(options: dict[str, Any], far_ms: float, repeats: int) -> list[Row]:
    rows: list[Row] = []
    for way, request_s in (("TCP", 0.0), ("a folder", 0.0), (f"requests of {far_ms:g} ms", far_ms / 1000)):
        shares, asked = [], []
        for _ in range(repeats):
            ends = together(way, request_s, options)
            for ended, _ in ends:
                # a step takes a bit longer than it sleeps: the median has no wait
                steps = [after - before for before, after in zip(ended[:-1], ended[1:], strict=True)]
                shares.append(statistics.median(steps) * len(steps) / (ended[-1] - ended[0]))
            asked.append(sorted(an_hour for _, an_hour in ends))
        fewer, more = (statistics.median(each) for each in zip(*asked, strict=True))
        rows.append(
            {"way": way, "trains": statistics.median(shares), "requests/h": fewer, "of who serves": more}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.storage", description=__doc__)
    parser.add_argument("--repeats", type=int, default=1, help="the median counts")
    parser.add_argument("--request-ms", type=float, default=300.0)
    parser.add_argument("--only-back", action="store_true", help="only how long a region takes to come back")
    parser.add_argument("--only-hub", action="store_true", help="only requests to the Hub (a fake of it)")
    parser.add_argument("--only-training", action="store_true", help="all but that")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.only_hub:
        api, reads = asked_of_the_hub()
        sys.stdout.write(
            f"two regions, diloco, H = 100: {api:.0f} requests to the API in 5 minutes, {reads:.0f} reads\n"
        )
        return
    reports = []
    for method, settings in [] if options.only_back else METHODS.items():
        rows = measured(settings, options.request_ms, options.repeats)
        setting = {"repeats": options.repeats, "inner steps": STEPS, "seconds a step": STEP_S}
        reports.append(BenchReport(method, setting, rows, formats=FORMATS))
        sys.stdout.write("\n".join([*reports[-1].lines(), ""]))
        sys.stdout.flush()
    if not options.only_training:
        rows = all_back(options.request_ms, options.repeats)
        setting = {"repeats": options.repeats, "seconds a step": STEP_S, "regions": 3}
        formats = {"another region": ".0f", "the one that serves": ".0f"}
        title = "seconds until a region that was killed takes part again"
        reports.append(BenchReport(title, setting, rows, formats=formats))
        sys.stdout.write("\n".join([*reports[-1].lines(), ""]))
    if options.json is not None:
        write(options.json, reports)


if __name__ == "__main__":
    main()
