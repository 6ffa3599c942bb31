"""One region of the comparison of losses: `python -m tests.benchmarks.elastic_region SPEC`. The driver starts it.

Every inner step, every sync and the end become a line of JSON in a file of this process, with the time of the machine.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import workload
from .workload import H, Region, Text

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9


@dataclass(frozen=True)
class Place:
    """Where a process trains, and for how long.

    Attributes:
        store: HOST:PORT of our store, or of the lighthouse.
        rounds: outer steps of the run.
        pace_s: seconds of an inner step.
        settings: of the contestant.
    """

    region: int
    count: int
    folder: str
    store: str
    rounds: int
    pace_s: float
    seed: int
    settings: dict[str, Any]


class Diary:
    """What happened when, one line of JSON for each event. A killed process loses nothing that it has written."""

    def __init__(self, place: Place) -> None:
        self._file = (Path(place.folder) / f"region-{place.region}.{os.getpid()}.jsonl").open("a")
        self.steps = 0

    def write(self, what: str, **facts: Any) -> None:
        self._file.write(json.dumps({"what": what, "t": time.time(), "trained": self.steps, **facts}) + "\n")
        self._file.flush()


def train(place: Place, model: Any, optimizer: Any, diary: Diary, at: Callable[[], int], more: Any) -> None:
    """Inner steps at a constant pace until `more()` is false; `at()` is the inner step of the run."""
    spot = Region(place.region, place.count, Path(place.folder), "", "", 0)
    text = Text(spot)
    due = time.perf_counter()
    while more():
        step = at() + 1
        workload.set_rate(optimizer, step)
        batch = text.batch(step + 10_000 * place.seed)
        model(input_ids=batch, labels=batch).loss.backward()
        due = max(due + place.pace_s, time.perf_counter())
        time.sleep(max(due - time.perf_counter(), 0.0))
        diary.steps += 1
        optimizer.step()
        optimizer.zero_grad()
        diary.write("step", step=step)


def end(diary: Diary, model: Any, weights: list[Tensor], place: Place) -> None:
    """Write the held-out loss of the global model, and a digest of it."""
    with torch.no_grad():
        for param, value in zip(model.parameters(), weights, strict=True):
            param.copy_(value)
    content = b"".join(value.numpy().tobytes() for value in weights)
    loss = Text(Region(place.region, place.count, Path(place.folder), "", "", 0)).held_out_loss(model)
    diary.write("end", loss=loss, digest=hashlib.sha256(content).hexdigest()[:16])


def ours(place: Place, diary: Diary) -> None:
    """hf_cocodc's DiLoCo in a plain loop. A process that is started again has the same command."""
    from accelerate import Accelerator

    from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig

    accelerator = Accelerator(cpu=True)
    bare = workload.model_of(workload.TRAINED)
    model, optimizer = accelerator.prepare(bare, workload.inner_optimizer(bare))
    regions = RegionConfig(
        region=place.region, count=place.count, store=place.store, run="elastic", **place.settings
    )
    config = OuterConfig(method="diloco", sync_interval=H, outer_lr=OUTER_LR, outer_momentum=OUTER_MOMENTUM)
    max_steps = place.rounds * H
    journal = Path(place.folder) / f"journal-{place.region}.jsonl"
    outer = OuterOptimizer(
        accelerator, model, optimizer, config, regions, max_steps=max_steps, journal=journal
    )
    diary.write("ready", step=outer.inner_step)

    class Stepping:
        """The inner optimizer with the outer one behind it, as torchft's hook has it."""

        param_groups = optimizer.param_groups
        zero_grad = optimizer.zero_grad

        def step(self) -> None:
            landings = outer.synchronizer.totals.landings
            optimizer.step()
            outer.step()
            if outer.synchronizer.totals.landings > landings:
                diary.write("landed", round=outer.inner_step // H)

    more = lambda: outer.inner_step < max_steps and not outer.should_stop  # noqa: E731
    train(place, model, Stepping(), diary, lambda: outer.inner_step, more)
    outer.finish()
    outer.close()
    end(diary, bare, [param.detach().clone() for param in bare.parameters()], place)


def torchft(place: Place, diary: Diary) -> None:
    """torchft's DiLoCo as its example has it: one lighthouse for all, a store and a manager for each region."""
    os.environ["OTEL_SDK_DISABLED"] = "true"
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    settings = dict(place.settings)
    least = settings.pop("min")
    seconds = {name: timedelta(seconds=value) for name, value in settings.items()}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = workload.model_of(workload.TRAINED)
    inner = workload.inner_optimizer(model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])
        diary.write("healed")

    manager = Manager(
        pg=ProcessGroupGloo(timeout=seconds.get("timeout", timedelta(seconds=60))),
        min_replica_size=least,
        use_async_quorum=False,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        replica_id=f"region_{place.region}",
        hostname="127.0.0.1",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{place.store}",
        init_sync=False,
        **seconds,
    )
    decide = manager.should_commit

    def should_commit(*args: Any, **kwargs: Any) -> bool:
        decided = decide(*args, **kwargs)
        taking = manager.num_participants()
        diary.write("landed" if decided else "discarded", round=manager.current_step(), regions=taking)
        return decided

    manager.should_commit = should_commit
    outer_optimizer = torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    outer = DiLoCo(manager, [model], inner, [outer_optimizer], sync_every=H)
    diary.write("ready", step=0)
    with outer:
        at = lambda: manager.current_step() * H + outer._local_step  # noqa: E731
        train(place, model, inner, diary, at, lambda: manager.current_step() < place.rounds)
    [fragment] = outer._fragments
    kept = [fragment.original_parameters[name].clone() for name, _ in model.named_parameters()]
    end(diary, model, kept, place)


def main() -> None:
    spec = json.loads(sys.argv[1])
    contestant = {"ours": ours, "torchft": torchft}[spec.pop("contestant")]
    place = Place(**spec)
    torch.set_num_threads(1)
    diary = Diary(place)
    diary.write("start")
    contestant(place, diary)
    os._exit(0)  # a manager has threads that outlive the run


if __name__ == "__main__":
    main()
