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

from . import damages, workload
from .workload import H, Region, Text

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9


@dataclass(frozen=True)
class Place:
    """Where a process trains, and for how long.

    Attributes:
        meeting_point: HOST:PORT of our coordinator, or of the lighthouse.
        rounds: outer steps of the run.
        pace_s: seconds of an inner step.
        settings: of the contestant.
        interval: inner steps of a round.
        shift: region r trains on part r + shift of the text: with other parts in other places, sums have another order.
        damage: what breaks, see `damages`; nothing if it is empty.
        damaged: the region in which it breaks.
        damaged_at: the last inner step before it breaks.
        overheard: whether somebody on the network hears how regions greet the coordinator.
    """

    region: int
    count: int
    folder: str
    meeting_point: str
    rounds: int
    pace_s: float
    seed: int
    settings: dict[str, Any]
    interval: int = H
    shift: int = 0
    damage: str = ""
    damaged: int = -1
    damaged_at: int = 0
    overheard: bool = False


class Diary:
    """What happened when, one line of JSON for each event. A killed process loses nothing that it has written."""

    def __init__(self, place: Place) -> None:
        self._file = (Path(place.folder) / f"region-{place.region}.{os.getpid()}.jsonl").open("a")
        self.steps = 0

    def write(self, what: str, **facts: Any) -> None:
        self._file.write(json.dumps({"what": what, "t": time.time(), "trained": self.steps, **facts}) + "\n")
        self._file.flush()


def spot_of(place: Place) -> Region:
    """The part of the text."""
    part = (place.region + place.shift) % place.count
    return Region(part, place.count, Path(place.folder), "", "", 0)


def train(place: Place, model: Any, optimizer: Any, diary: Diary, at: Callable[[], int], more: Any) -> None:
    """Inner steps at a constant pace until `more()` is false; `at()` is the inner step of the run."""
    text = Text(spot_of(place))
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
    loss = Text(spot_of(place)).held_out_loss(model)
    diary.write("end", loss=loss, digest=hashlib.sha256(content).hexdigest()[:16])


def ours(place: Place, diary: Diary) -> None:
    """hf_cocodc's DiLoCo in a plain loop. A process that is started again has the same command."""
    from accelerate import Accelerator

    from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig

    accelerator = Accelerator(cpu=True)
    bare = workload.model_of(workload.TRAINED)
    inner = workload.inner_optimizer(bare)
    model, optimizer = accelerator.prepare(bare, inner)
    settings = dict(place.settings)
    more = settings.pop("outer", {})
    regions = RegionConfig(
        region=place.region, count=place.count, coordinator=place.meeting_point, run="elastic", **settings
    )
    lr: dict[str, Any] = {"outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM}
    config = OuterConfig(method="diloco", sync_interval=place.interval, **lr, **more)
    max_steps = place.rounds * place.interval
    journal = Path(place.folder) / f"journal-{place.region}.jsonl"
    outer = OuterOptimizer(
        accelerator, model, optimizer, config, regions, max_steps=max_steps, journal=journal
    )
    diary.write("ready", step=outer.inner_step)

    def global_params() -> list[Tensor]:
        with outer.own_global_weights():
            return [param.detach().clone() for param in bare.parameters()]

    damages.prepare(place, inner, global_params)

    class Stepping:
        """The inner optimizer with the outer one behind it, as torchft's hook has it."""

        param_groups = optimizer.param_groups
        zero_grad = optimizer.zero_grad

        def step(self) -> None:
            landings = outer.synchronizer.totals.landings
            optimizer.step()
            outer.step()
            if outer.synchronizer.totals.landings > landings:
                diary.write("landed", round=outer.inner_step // place.interval)

    more = lambda: outer.inner_step < max_steps and not outer.should_stop  # noqa: E731
    train(place, model, Stepping(), diary, lambda: outer.inner_step, more)
    outer.end()  # a region that has left writes its diary, too
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
        lighthouse_addr=f"http://{place.meeting_point}",
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
    outer = DiLoCo(manager, [model], inner, [outer_optimizer], sync_every=place.interval)
    diary.write("ready", step=0)

    def kept() -> list[Tensor]:
        [fragment] = outer._fragments
        return [fragment.original_parameters[name].clone() for name, _ in model.named_parameters()]

    damages.prepare(place, inner, kept)  # before the hooks of `outer`, which sync
    with outer:
        at = lambda: manager.current_step() * place.interval + outer._local_step  # noqa: E731
        train(place, model, inner, diary, at, lambda: manager.current_step() < place.rounds)
    end(diary, model, kept(), place)


def main() -> None:
    spec = json.loads(sys.argv[1])
    contestant = {"ours": ours, "torchft": torchft}[spec.pop("contestant")]
    place = Place(**spec)
    torch.set_num_threads(1)
    diary = Diary(place)
    diary.write("start")
    if place.overheard:
        damages.overhear(Path(place.folder))
    contestant(place, diary)
    os._exit(0)  # a manager has threads that outlive the run


if __name__ == "__main__":
    main()
