"""The engine of a region of DDP ranks: the leader has it, and the others get what it writes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.engine import replicas as module
from hf_cocodc.engine.fragment import FragmentState
from hf_cocodc.engine.replicas import Replicas, buckets
from hf_cocodc.errors import CocodcError, InputError, LinkError
from hf_cocodc.link.group import RegionGroup
from hf_cocodc.snapshot import checkpoint as disk
from tests.processes.forks import fork_regions

STEPS, INTERVAL = 13, 4
SMALL = 1000
WIDE = 40


def test_a_bucket_has_64_mb_at_most() -> None:
    assert module.BUCKET <= 64e6
    sizes = [
        sum(part.nbytes for part in each) for each in buckets([torch.empty(20_000_001, device="meta")] * 3)
    ]
    assert max(sizes) <= 64e6
    assert sum(sizes) == 3 * 4 * 20_000_001
    assert len(sizes) < 8


def test_buckets_hold_every_value_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several types, large, empty, of one value, and strided in all ways."""
    monkeypatch.setattr(module, "BUCKET", 64)
    tensors = [
        torch.zeros(3, 5),
        torch.zeros(7, dtype=torch.bfloat16),
        torch.zeros(0),
        torch.zeros((), dtype=torch.int64),
        torch.zeros(9, 7).T,
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(1, 41, dtype=torch.bfloat16)[:, ::2],
    ]
    for bucket in buckets(tensors):
        assert sum(part.nbytes for part in bucket) <= 64
        assert len({part.dtype for part in bucket}) == 1
        for part in bucket:
            part += 1
    assert all(bool((tensor == 1).all()) for tensor in tensors)


class Counting(nn.Module):
    """A model with a buffer that follows its data, in bf16; and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 1)
        self.frozen = nn.Parameter(torch.ones(WIDE), requires_grad=False)
        self.register_buffer("mean", torch.zeros(WIDE))

    def forward(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(values.float().mean(0), 0.5)
        return self.last(self.first(values * self.frozen).relu()).square().mean()


class Seen:
    """What a rank does with its group, and with its process group beside DDP."""

    def __init__(self) -> None:
        self.leads: list[str] = []
        self.buckets: list[Tensor] = []
        self._patch(RegionGroup, "lead", lambda group, call, what, *more: self.leads.append(what))
        self._patch(dist, "broadcast", lambda tensor, *more, **named: self.buckets.append(tensor))

    def _patch(self, owner: Any, name: str, note: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            note(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, noting)

    def take(self) -> tuple[list[str], list[Tensor]]:
        taken = self.leads[:], self.buckets[:]
        self.leads.clear()
        self.buckets.clear()
        return taken


def begin(steps: int = STEPS) -> tuple[OuterOptimizer, Callable[[], None], nn.Module, int]:
    """A plain loop whose model is in bf16; returns what makes an inner step, too."""
    torch.manual_seed(0)
    accelerator, region = Accelerator(cpu=True), int(os.environ["HF_COCODC_REGION"])
    rank, bare = accelerator.process_index, Counting()
    for part in (bare.first, bare.last):
        part.bfloat16()
    bare.frozen.data = bare.frozen.data.bfloat16()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    config = OuterConfig(method="diloco", sync_interval=INTERVAL)
    outer = OuterOptimizer(accelerator, model, optimizer, config, max_steps=steps)
    generator = torch.Generator().manual_seed(10 * region + rank)

    def step() -> None:
        values = torch.randn(8, WIDE, generator=generator).bfloat16()
        accelerator.backward(model(values))
        optimizer.step()
        optimizer.zero_grad()
        outer.step()

    return outer, step, bare, rank


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().float().flatten() for param in model.parameters()])


def observe(folder: str) -> None:
    """Train with small buckets; write down what this rank has held, said and got."""
    module.BUCKET = SMALL
    seen = Seen()
    outer, step, model, rank = begin()
    engine = outer.synchronizer
    assert isinstance(engine, Replicas)
    started, _ = seen.take(), [step() for _ in range(INTERVAL - 1)]
    quiet = seen.take()
    step()
    landing, local = seen.take(), weights(model)
    step()
    before = weights(model)
    with outer.own_global_weights(everywhere=False):
        saved = weights(model)
    alone = seen.take()
    with outer.global_weights():
        shown = weights(model)
    assert torch.equal(weights(model), before)
    for _ in range(STEPS - INTERVAL - 1):
        step()
    num_flats = sum(isinstance(each, FragmentState) for each in gc.get_objects())
    outer.finish()
    found = {
        "states": num_flats,
        "keys": list(engine.state_dict()),
        "quiet": [quiet[0], len(quiet[1]), alone[0], len(alone[1])],
        "started": started[0],
        "leads": landing[0],
        "bytes": [each.nbytes for each in landing[1]],
        "local": local,
        "saved": saved,
        "shown": shown,
        "final": weights(model),
        "mean": model.mean,
        "facts": str(
            [engine.facts, engine.totals.landings, engine.num_params, engine.layout, sorted(outer.report)]
        ),
    }
    torch.save(found, Path(folder, f"region{os.environ['HF_COCODC_REGION']}-rank{rank}.pt"))


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("replicas")
    return fork_regions(observe, 2, [str(folder)], folder)


def ranks_of(found: dict[str, dict]) -> list[tuple[dict, dict]]:
    """Leader and other rank of each region."""
    return [(found[f"region{region}-rank0"], found[f"region{region}-rank1"]) for region in (0, 1)]


def test_only_the_leader_has_outer_state(observed: dict[str, dict]) -> None:
    for leader, other in ranks_of(observed):
        assert leader["states"] == 1
        assert not other["states"], "global params and outer state of a rank that is no leader"
        assert "fragments" in leader["keys"]
        assert not other["keys"]


def test_ranks_hear_of_events_and_of_nothing_else(observed: dict[str, dict]) -> None:
    """After step 1, which asks for them, no message before the next event, nor where a model is only saved; then one, the
    weights in their own type, and whether somebody pulls the model.
    """
    num_bytes = 2 * (WIDE * WIDE + WIDE + WIDE + 1)
    for leader, other in ranks_of(observed):
        for each in (leader, other):
            assert each["quiet"] == [["the events of step 1"], 0, [], 0]
            assert "the beginning of training" in each["started"]
            assert each["leads"] == [f"the events of step {INTERVAL}", *2 * ["who pulls the model"]]
            assert sum(each["bytes"]) == num_bytes
            assert max(each["bytes"]) <= SMALL
        assert leader["facts"] == other["facts"]


def test_all_ranks_have_what_the_leader_has_written(observed: dict[str, dict]) -> None:
    """At a landing, where the global weights are shown, and at the end, an averaged buffer included."""
    [first, beside], [second, _] = ranks_of(observed)
    for leader, other in ranks_of(observed):
        for name in ("local", "shown", "final", "mean"):
            assert torch.equal(leader[name], other[name]), name
            assert torch.equal(leader[name], first[name]) or name == "local", name
        assert torch.equal(leader["saved"], leader["shown"])
        assert not torch.equal(other["saved"], other["shown"])
    assert torch.equal(first["local"], second["local"])
    assert not torch.equal(beside["mean"], torch.zeros(WIDE))


def change(folder: str, wrong: str) -> None:
    """Do what is refused: in step 2, where nothing is due, or at an event."""
    outer, step, model, rank = begin()
    step()
    if wrong == "trainable":
        model.frozen.requires_grad_(True)
    else:
        del model.last
        model.last = nn.Linear(WIDE, 2).bfloat16()
    try:
        for _ in range(INTERVAL):
            outer.step()
    except (InputError, LinkError) as error:
        said = f"{type(error).__name__}: {error} (step {outer.inner_step})"
    outer.close(said)
    torch.save({"said": said}, Path(folder, f"region{os.environ['HF_COCODC_REGION']}-rank{rank}.pt"))


@pytest.mark.parametrize(("wrong", "step", "what"), [("trainable", 2, "frozen [40]"), ("shape", 4, "last.")])
def test_all_ranks_refuse_what_the_leader_refuses(wrong: str, step: int, what: str, tmp_path: Path) -> None:
    """With the same words, at the same step."""
    for leader, other in ranks_of(fork_regions(change, 2, [str(tmp_path), wrong], tmp_path)):
        assert leader["said"].startswith(f"InputError: {what}")
        assert leader["said"].endswith(f"(step {step})")
        assert other["said"] == leader["said"]


def load(folder: str) -> None:
    """A load that fails in the leader of each region, when Accelerate may load there no more, and everywhere else has."""
    outer, step, _, rank = begin()
    place = str(Path(folder, f"saved-{os.environ['HF_COCODC_REGION']}"))
    step()
    outer.training.accelerator.save_state(place)
    said = []
    with patch.object(disk, "read_own", fails if rank == 0 else disk.read_own):
        for call in (lambda: outer.training.accelerator.load_state(place), step):
            try:
                call()
            except (CocodcError, MemoryError) as error:
                said.append(f"{type(error).__name__}: {error}")
    outer.close(said[0])
    torch.save({"said": said}, Path(folder, f"region{os.environ['HF_COCODC_REGION']}-rank{rank}.pt"))


def fails(*given: Any) -> None:
    raise MemoryError("no room")


def test_no_rank_trains_on_after_a_load_that_has_failed_in_its_leader(tmp_path: Path) -> None:
    """The others have loaded their inner optimizers; nothing is due at the next step, and all of them refuse it."""
    for leader, other in ranks_of(fork_regions(load, 2, [str(tmp_path)], tmp_path)):
        assert leader["said"][0] == "MemoryError: no room"
        assert other["said"][0] == "LinkError: MemoryError: no room"
        for said in (leader["said"][1], other["said"][1]):
            assert "a load of a checkpoint at step 1 failed halfway" in said
