"""Simulated regions are lost, and come back: what lands, who shares the batch, and which rows nobody reads."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.errors import InputError
from hf_cocodc.link.lockstep import Absence, LockstepLink, VirtualLink, run_in_lockstep
from hf_cocodc.parts.deal import Portion
from hf_cocodc.run.journal import read
from hf_cocodc.tools.report.runs import read_run
from tests.toys import Blocks, Rows

STEPS, INTERVAL, ACCUMULATE = 40, 4, 4
PLAIN = OuterConfig(sync_interval=INTERVAL, outer_lr=1.0, outer_momentum=0.0)
LR = 0.01


class Trained:
    """What a region did in each inner step that it made: where its parameter was after it, its rows, and what it was dealt."""

    def __init__(self) -> None:
        self.places: dict[int, float] = {}
        self.rows: dict[int, list[int]] = {}
        self.portions: dict[int, Portion] = {}
        self.end = 0.0
        self.steps = self.end_s = 0.0


def train(
    region: int,
    link: LockstepLink,
    regions: RegionConfig,
    config: OuterConfig = PLAIN,
    rows: int = 1000,
    folder: Path | None = None,
) -> Trained:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = Blocks([torch.zeros(1)] * 4)
    loader = DataLoader(Rows(rows), batch_size=1, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    found = Trained()
    with OuterOptimizer(
        accelerator,
        model,
        optimizer,
        config,
        regions,
        max_steps=STEPS,
        link=link,
        journal=None if folder is None else folder / f"region-{region}" / "cocodc" / "journal.jsonl",
    ) as outer:
        vectors = accelerator.unwrap_model(model).vectors()
        for batch in outer.batches(loader):
            step = outer.inner_step + 1
            found.portions[step] = outer.synchronizer.portion
            found.rows.setdefault(step, []).extend(batch.tolist())
            with accelerator.accumulate(model):
                accelerator.backward(sum((each * -(region + 1.0)).sum() for each in vectors))
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    found.places[step] = vectors[0].item()
                outer.step()
                schedule.step()
        found.steps = outer.inner_step
    found.end, found.end_s = vectors[0].item(), link.clock()
    assert accelerator.unwrap_model(model).training
    assert schedule.scheduler.last_epoch == STEPS
    return found


def run(
    away: list[tuple[int, int, int]],
    speeds: tuple[float, ...] = (1.0, 1.0, 1.0),
    regions: dict[str, Any] | None = None,
    **options: Any,
) -> list[Trained]:
    link = VirtualLink(
        step_time_s=1.0,
        latency_s=0.01,
        bandwidth=1e9,
        speeds=speeds,
        away=tuple(Absence(*each) for each in away),
    )
    config = RegionConfig(**{"min": 1, **(regions or {})})
    return run_in_lockstep(len(speeds), lambda region, own: train(region, own, config, **options), link)


@pytest.mark.parametrize("since", [8, 9, 11])
def test_a_lost_region_is_in_no_mean_until_it_is_back(since: int) -> None:
    """Against means by hand: region r moves by (r + 1) * LR in each inner step. It is back at step 18, and trains from the
    landing at 20 on.
    """
    found = run([(2, since, 18)])
    expected = 0.0
    for end in range(INTERVAL, STEPS + 1, INTERVAL):
        there = [0, 1] if 12 <= end <= 20 else [0, 1, 2]
        for region in there:
            before = found[region].places[end]
            assert before == pytest.approx(expected + (region + 1) * LR * INTERVAL, rel=1e-4)
        expected += LR * INTERVAL * sum(region + 1 for region in there) / len(there)
    assert [each.end for each in found] == pytest.approx([expected] * 3, rel=1e-4)
    assert sorted(found[2].places) == [*range(1, since + 1), *range(21, STEPS + 1)]
    assert all(each.steps == STEPS for each in found)


def test_the_others_make_the_batch_of_a_lost_region() -> None:
    """From the first landing without it to the first one with it, in proportion to their speeds; and so time passes as if the
    batch were dealt to those that are there.
    """
    found = run([(2, 9, 18)], speeds=(2.0, 1.0, 1.0), regions={"balance": "auto", "shards": "dealt"})

    def batch(step: int) -> list[int]:
        return [len(each.rows.get(step, [])) for each in found]

    assert batch(1) == batch(INTERVAL) == [4, 4, 4]
    assert batch(5) == batch(8) == [6, 3, 3]
    assert batch(12) == [6, 3, 0]  # nobody has heard of the loss yet
    assert batch(13) == batch(20) == [8, 4, 0]
    assert batch(21) == batch(24) == [8, 4, 4]  # it has its own until it has said how fast it is
    assert batch(25) == batch(STEPS) == [6, 3, 3]
    slowest = 4 * 1.0 + 8 * 0.75 + 8 * 1.0 + 4 * 1.0 + 16 * 0.75
    assert [each.end_s for each in found] == pytest.approx([slowest] * 3, rel=0.02)


def test_a_journal_says_who_takes_part(tmp_path: Path) -> None:
    """And a report shows it."""
    run([(2, 9, 18)], folder=tmp_path)
    for region in range(3):
        events = read(tmp_path / f"region-{region}" / "cocodc" / "journal.jsonl")
        epochs = [(each["step"], each["members"]) for each in events if each["kind"] == "epoch"]
        assert epochs == [(0, [0, 1, 2]), (12, [0, 1]), (20, [0, 1, 2])]
        steps = [(each["kind"], each["step"]) for each in events if each["kind"] in ("away", "join")]
        assert steps == ([("away", 9), ("join", 20)] if region == 2 else [])
    journals = [tmp_path / f"region-{region}" / "cocodc" / "journal.jsonl" for region in range(3)]
    assert read_run("run", journals).trained == {0: [(0, STEPS)], 1: [(0, STEPS)], 2: [(0, 9), (20, STEPS)]}


def test_a_region_that_is_back_before_the_next_landing_was_lost(tmp_path: Path) -> None:
    run([(2, 9, 10)], folder=tmp_path)
    events = read(tmp_path / "region-0" / "cocodc" / "journal.jsonl")
    epochs = [(each["step"], each["members"]) for each in events if each["kind"] == "epoch"]
    assert epochs == [(0, [0, 1, 2]), (12, [0, 1]), (12, [0, 1, 2])]


@pytest.mark.parametrize("method", ["streaming", "co2", "dilocox", "cocodc", "sparseloco", "muloco"])
def test_other_methods_go_on_without_a_region(method: str, tmp_path: Path) -> None:
    """All regions end with the same global weights, also where transfers are under way as one is lost and comes back."""
    config = OuterConfig(method=method, sync_interval=INTERVAL)
    away = [(0, 6, 13), (2, 21, 27), (1, 32, 100)]
    shares = {"balance": "auto", "shards": "dealt"}
    found = run(away, config=config, regions=shares, folder=tmp_path)
    assert found[0].end == found[1].end == found[2].end != 0
    events = read(tmp_path / "region-0" / "cocodc" / "journal.jsonl")
    lost = [each["why"] for each in events if each["kind"] == "epoch" and "is lost" in each["why"]]
    assert len(lost) == len(away)


def churn(seed: int) -> list[tuple[int, int, int]]:
    """Absences of three regions, of which never all are away: one that comes back does so at a landing."""
    draws, away, step = random.Random(seed), [], 3
    while step < STEPS - INTERVAL:
        region, since = draws.randrange(3), step + draws.randrange(2 * INTERVAL)
        until = since + 1 + draws.randrange(3 * INTERVAL)
        away.append((region, since, until))
        step = until + INTERVAL if draws.random() < 0.6 else since + 1
        if step <= until:  # a second one meanwhile
            other = (region + 1) % 3
            away.append((other, step, until + draws.randrange(INTERVAL)))
            step = away[-1][2] + INTERVAL
    return [each for each in away if each[1] < STEPS]


def check_rows(found: list[Trained], away: list[tuple[int, int, int]], rows: int) -> int:
    """Rows are counted by what regions have trained and what has landed of it. Nothing that is dealt lands twice, and all lands
    that is dealt in a round without a loss. In a round with one, what was dealt to the others lands. Returns what has not.
    """
    lost = {(region, (since // INTERVAL + 1) * INTERVAL) for region, since, _ in away}
    landed, passes, dealt = Counter[int](), Counter[tuple[int, int]](), Counter[int]()
    for region, each in enumerate(found):
        for step, portion in each.portions.items():
            landing = -(-step // INTERVAL) * INTERVAL
            if portion.first < 0:  # it has come in, and draws rows of its own for a round
                assert any(r == region and landing - until <= 2 * INTERVAL for r, _, until in away)
                continue
            dealt[step] = portion.stride
            if (region, landing) not in lost:
                numbers = range(portion.begins(step), portion.begins(step) + portion.samples)
                landed.update(numbers)
                passes.update((n // rows, row) for n, row in zip(numbers, each.rows[step], strict=True))
    assert set(landed.values()) == {1} == set(passes.values())
    missing = set(range(sum(dealt.values()))) - set(landed)
    place, unread = 0, set[int]()
    for step in range(1, STEPS + 1):
        if any(landing - INTERVAL < step <= landing for _, landing in lost):
            unread.update(range(place, place + dealt[step]))
        place += dealt[step]
    assert missing <= unread
    for number in range(place // rows):
        assert sum(p == number for p, _ in passes) == rows - sum(n // rows == number for n in missing)
    return len(missing)


@pytest.mark.parametrize("balance", ["equal", "auto"])
@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(20), marks=pytest.mark.slow)], ids=["2 runs", "20 runs"]
)
def test_every_row_is_read_once_in_runs_of_churn(seeds: range, balance: str) -> None:
    """Up to what was dealt to a region in the round in which it was lost: at most its share of one round."""
    losses = 0
    for seed in seeds:
        away = churn(seed)
        found = run(away, (2.0, 1.0, 1.0), {"balance": balance, "shards": "dealt"}, rows=90)
        share = 3 * ACCUMULATE - 2 if balance == "auto" else ACCUMULATE
        assert check_rows(found, away, 90) <= len(away) * INTERVAL * share
        losses += len(away)
    assert losses >= 2 * len(seeds)


def test_what_a_real_run_would_not_do_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"by their settings the run ends when one is lost\. Set regions\.min"
    ):
        run([(1, 9, 18)], regions={"min": None})
    with pytest.raises(
        InputError, match=r"only 1 of at least 2 regions \(regions\.min\) take part at step 12"
    ):
        run([(1, 9, 18), (2, 10, 18)], regions={"min": 2})
    with pytest.raises(InputError, match="only 1 of at least 2 regions"):  # the majority, as in a real run
        run([(1, 9, 18), (2, 10, 18)], regions={"min": None, "on_loss": "continue"})
    with pytest.raises(InputError, match="region 1 takes part again only from the landing at step 20 on"):
        run([(1, 9, 18), (1, 20, 25)])
    with pytest.raises(InputError, match="all regions are away at once"):
        run([(0, 9, 18), (1, 9, 18), (2, 10, 18)])
    with pytest.raises(InputError, match=r"regions are numbered 0 \.\. 2"):
        run([(3, 9, 18)])
    with pytest.raises(
        InputError, match="a region is lost after inner step 1 or later, and back at a later one"
    ):
        run([(1, 9, 9)])
    with pytest.raises(InputError, match="eager with regions that are away is not simulated"):
        run([(1, 9, 18)], config=OuterConfig(method="eager", sync_interval=INTERVAL))
