"""A plain loop reads what its region is dealt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig, region_shard
from hf_cocodc.errors import HandshakeError, InputError
from hf_cocodc.link.lockstep import LockstepLink, VirtualLink, run_in_lockstep
from tests.toys import Blocks, Rows, Stream

STEPS, INTERVAL, ACCUMULATE, MICRO_BATCH, ROWS = 12, 3, 4, 2, 44
LINK = VirtualLink(step_time_s=1.0, latency_s=0.01, bandwidth=1e9, speeds=(3.0, 1.0))


class Read:
    """What a region has read: the rows of each inner step, micro-batch by micro-batch."""

    def __init__(self) -> None:
        self.seen: dict[int, list[list[int]]] = {}

    @property
    def rows(self) -> list[int]:
        return [row for step in sorted(self.seen) for batch in self.seen[step] for row in batch]


def train(
    region: int,
    link: LockstepLink,
    regions: RegionConfig,
    *,
    shuffle: bool = True,
    data: Any = None,
    folder: Path | None = None,
    save_at: int = 0,
    resume: bool = False,
    num_workers: int = 0,
    reads_loader: bool = False,
    counts: bool = True,
    other_loader: bool = False,
    steps: int = STEPS,
    **options: Any,
) -> Read:
    """An ordinary loop with `accumulate`. Not if it `counts` nothing: it then makes an inner step of each micro-batch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = Blocks([torch.zeros(1)])
    data = Rows(ROWS) if data is None else data
    options = options or {"shuffle": shuffle, "batch_size": MICRO_BATCH}
    loader = DataLoader(data, num_workers=num_workers, **options)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), loader
    )
    found = Read()
    with OuterOptimizer(
        accelerator,
        model,
        optimizer,
        OuterConfig(sync_interval=INTERVAL),
        regions,
        max_steps=steps,
        link=link,
        journal=None if folder is None else folder / f"region-{region}" / "cocodc" / "journal.jsonl",
    ) as outer:
        if resume:
            accelerator.load_state(str(folder / f"region-{region}" / "saved"))
        if other_loader:
            loader = accelerator.prepare(DataLoader(data, batch_size=MICRO_BATCH))
        for batch in loader if reads_loader else outer.batches(loader):
            found.seen.setdefault(outer.inner_step, []).append(batch.tolist())
            with accelerator.accumulate(model) if counts else torch.enable_grad():
                vectors = accelerator.unwrap_model(model).vectors()
                accelerator.backward(sum((each * batch.float().mean()).sum() for each in vectors))
                optimizer.step()
                optimizer.zero_grad()
                before = outer.inner_step
                outer.step()
            if save_at and before < outer.inner_step == save_at:
                accelerator.save_state(str(folder / f"region-{region}" / "saved"))
            if outer.should_stop:
                break
    return found


def both(regions: RegionConfig, **options: Any) -> list[Read]:
    return run_in_lockstep(2, lambda region, link: train(region, link, regions, **options), LINK)


def in_order(regions: list[Read]) -> list[int]:
    """The rows of all regions, in the order in which they were dealt."""
    return [row for step in sorted(regions[0].seen) for each in regions for b in each.seen[step] for row in b]


def passes_of(rows: list[int], size: int = ROWS) -> list[list[int]]:
    return [rows[first : first + size] for first in range(0, len(rows), size)]


@pytest.mark.parametrize("balance", ["equal", "auto"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_is_read_once_in_a_pass(balance: str, shuffle: bool) -> None:
    """By one region, whose dataloader has all rows. 192 rows are dealt: four passes of 44, whose ends lie within inner steps."""
    regions = both(RegionConfig(balance=balance, shards="dealt"), shuffle=shuffle)
    rows = in_order(regions)
    assert len(rows) == STEPS * 2 * ACCUMULATE * MICRO_BATCH
    *whole, last = passes_of(rows)
    assert all(sorted(each) == list(range(ROWS)) for each in whole)
    assert len(set(last)) == len(last)
    assert all((each == sorted(each)) is not shuffle for each in whole)
    assert not shuffle or whole[0] != whole[1]
    counts = [len(regions[0].seen[step]) for step in range(STEPS)]
    assert counts == ([4] * INTERVAL + [6] * (STEPS - INTERVAL) if balance == "auto" else [4] * STEPS)


@pytest.mark.parametrize("balance", ["equal", "auto"])
def test_a_region_reads_its_own_part_pass_after_pass(balance: str) -> None:
    """As much of it as its speed allows."""

    def body(region: int, link: LockstepLink) -> Read:
        data = region_shard(Rows(ROWS), region, 2)
        return train(region, link, RegionConfig(balance=balance), data=data)

    for region, found in enumerate(run_in_lockstep(2, body, LINK)):
        own = list(range(region, ROWS, 2))
        *whole, last = passes_of(found.rows, len(own))
        assert all(sorted(each) == own for each in whole) and len(set(last)) == len(last)
        micro_batches = {"equal": [4] * STEPS, "auto": [4] * INTERVAL + [[6, 2][region]] * (STEPS - INTERVAL)}
        assert [len(found.seen[step]) for step in range(STEPS)] == micro_batches[balance]


@pytest.mark.parametrize("shards", ["dealt", "fixed"])
@pytest.mark.parametrize("save_at", [2, 7, 9])
def test_a_resumed_loop_reads_on(shards: str, save_at: int, tmp_path: Path) -> None:
    """Exactly there; step 9 is the end of a round. The script says nothing of places, passes or batches to skip."""
    config = RegionConfig(balance="auto", shards=shards)
    whole = both(config)
    both(config, folder=tmp_path, save_at=save_at)
    rest = both(config, folder=tmp_path, resume=True)
    for region in range(2):
        assert rest[region].seen == {s: rows for s, rows in whole[region].seen.items() if s >= save_at}


@pytest.mark.usefixtures("fresh_workers")
def test_what_worker_processes_have_read_ahead_is_not_trained() -> None:
    """The first deal changes what the next inner step has."""
    config = RegionConfig(balance="auto", shards="dealt")
    plain, ahead = both(config, steps=5), both(config, steps=5, num_workers=1)
    assert [each.seen for each in plain] == [each.seen for each in ahead]


def test_region_shard_leaves_a_dealt_dataset_whole() -> None:
    """A script that asks for its part trains in both kinds of run. A stream cannot be dealt."""
    config = RegionConfig(region=1, count=3, shards="dealt")
    data = Rows(ROWS)
    assert region_shard(data, config) is data
    with pytest.raises(InputError, match=r"regions\.shards=dealt.*a stream has none"):
        region_shard(Stream(Rows(ROWS)), config)


DEALT = RegionConfig(shards="dealt")
REFUSED = {
    "the loader itself": ({"reads_loader": True}, r"this loop reads others.*outer\.batches\(loader\)"),
    "another loader": ({"other_loader": True}, r"first dataloader that accelerator\.prepare has returned"),
    "a stream": ({"data": Stream(Rows(ROWS)), "batch_size": 2}, r"a stream, whose samples have no numbers"),
    "a sampler": (
        {"batch_size": 2, "sampler": torch.utils.data.WeightedRandomSampler([1.0] * ROWS, ROWS)},
        "its samples come from WeightedRandomSampler",
    ),
    "some of the samples": (
        {"batch_size": 2, "sampler": torch.utils.data.RandomSampler(Rows(ROWS), num_samples=4)},
        "its samples come from RandomSampler",
    ),
    "a batch sampler": (
        {"batch_sampler": type("Own", (BatchSampler,), {})(SequentialSampler(Rows(ROWS)), 2, False)},
        "its batches come from Own",
    ),
    "no accumulate": (
        {"counts": False},
        r"this inner step has 4 micro-batches, and the loop has read 1 from outer\.batches",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_loop_that_would_read_other_samples_is_refused(what: str) -> None:
    options, why = REFUSED[what]
    with pytest.raises(InputError, match=why):
        both(DEALT, **options)


@pytest.mark.parametrize("differs", [{"shuffle": True}, {"data": Rows(ROWS, 1)}])
def test_regions_that_would_number_samples_differently_do_not_begin(differs: dict[str, Any]) -> None:
    def body(region: int, link: LockstepLink) -> Read:
        return train(region, link, DEALT, **{"shuffle": False, **(differs if region else {})})

    with pytest.raises(HandshakeError, match=r"data\.(shuffle|order)"):
        run_in_lockstep(2, body, LINK)


def test_a_loader_is_prepared_before_anything_is_dealt() -> None:
    accelerator, model = Accelerator(cpu=True), Blocks([torch.zeros(1)])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with pytest.raises(InputError, match="give a dataloader with all of the data"):
        OuterOptimizer(accelerator, model, optimizer, "diloco", DEALT)
