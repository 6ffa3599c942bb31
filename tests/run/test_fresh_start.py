"""A region that does not count for several rounds, not finite or far too large: it begins anew, or all regions stop."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import RunStopped
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.resolve import from_config
from hf_cocodc.run.journal import read
from hf_cocodc.tools.report.runs import read_run
from hf_cocodc.tools.report.summary import summarize
from tests.toys import Blocks, batch, llama, params_of

STEPS = 40
BAD_STEP = 6
SETTINGS: dict[str, dict[str, Any]] = {
    "diloco": {"sync_interval": 3},
    "streaming": {
        "sync_interval": 4,
        "num_fragments": 2,
        "overlap_steps": 2,
        "codec": "int8",
        "error_feedback": True,
    },
    "eager": {"sync_interval": 3},
    "co2": {"sync_interval": 3},
    "dilocox": {"sync_interval": 3, "rank": 4},
    "cocodc": {"sync_interval": 4, "num_fragments": 2, "overlap_steps": 2, "sends_per_interval": 4},
}


def train(
    folder: Path, region: int, link: Link, config: OuterConfig, wrong_lr: float | None = None
) -> OuterOptimizer:
    """A plain loop; one step of region 1 is not finite. With `wrong_lr` all are, but region 1 has this learning rate."""
    is_wrong = region == 1 and wrong_lr is not None
    accelerator = Accelerator(cpu=True)
    model = llama(layers=2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    journal = folder / f"region-{region}.jsonl"
    with (
        contextlib.suppress(RunStopped),
        OuterOptimizer(
            accelerator, model, optimizer, config, max_steps=STEPS, link=link, journal=journal
        ) as outer,
    ):
        while outer.inner_step < STEPS and not outer.should_stop:
            if is_wrong:
                optimizer.param_groups[0]["lr"] = wrong_lr
            tokens = batch(region, outer.inner_step)
            loss = model(input_ids=tokens, labels=tokens).loss
            bad = region == 1 and wrong_lr is None and outer.inner_step == BAD_STEP - 1
            accelerator.backward(loss * float("nan") if bad else loss)
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
    return outer


def run(folder: Path, config: OuterConfig) -> list[OuterOptimizer]:
    return run_in_lockstep(2, lambda region, link: train(folder, region, link, config))


@pytest.mark.parametrize("method", SETTINGS)
def test_a_region_begins_anew(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After three rounds it has a share in every transfer again; log, journal and summary tell of it."""
    with caplog.at_level(logging.WARNING):
        outers = run(tmp_path, OuterConfig(method=method, **SETTINGS[method]))
    journals = [tmp_path / f"region-{region}.jsonl" for region in range(2)]
    ours, theirs = map(read, journals)
    [anew] = [event for event in theirs if event["kind"] == "begin_anew"]
    assert anew["rounds"] == 3
    late = [e for e in ours if e["kind"] == "land" and e["sent_at"] > anew["step"]]
    assert len(late) >= 3
    assert all(event["regions"] == 2 for event in late)
    assert not [event for event in ours if event["kind"] in ("sit_out", "begin_anew")]
    first, second = (params_of(outer.synchronizer._model) for outer in outers)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    assert (
        "region 1 did not count in 3 rounds in a row (not finite, or clipped or dropped by outer.guard): after step"
        in caplog.text
    )
    count = sum(event["kind"] == "sit_out" for event in theirs)
    [line] = [
        line
        for line in summarize(read_run("run", journals)).lines(tmp_path, [])
        if line.startswith("not counted")
    ]
    assert line.split(maxsplit=2)[2] == (
        f"region 1 sat {count} transfers out, and began anew after step {anew['step']}"
    )


def with_wrong_rate(folder: Path, count: int) -> tuple[list[OuterOptimizer], list[Path]]:
    """Regions of which one has a learning rate of 3 instead of 1e-3, and their journals."""
    config = OuterConfig(method="diloco", sync_interval=3)
    outers = run_in_lockstep(count, lambda region, link: train(folder, region, link, config, wrong_lr=3.0))
    return outers, [folder / f"region-{region}.jsonl" for region in range(count)]


def test_one_of_two_young_regions_with_a_wrong_learning_rate_stops_both(tmp_path: Path) -> None:
    """Nobody can say which one is right: no mean counts, and both stop with their global params as they began."""
    outers, journals = with_wrong_rate(tmp_path, 2)
    for outer, journal in zip(outers, map(read, journals), strict=True):
        assert (outer.verdict, outer.inner_step) == ("stop", 9)
        assert "the means of 3 rounds in a row were void (fragment 0)" in outer.why
        assert "have broken (norms far beyond the others': region 1)" in outer.why
        assert [event["regions"] for event in journal if event["kind"] == "guard"] == [{"1": "void"}] * 3
        assert outer.why in [event["message"] for event in journal if event["kind"] == "note"]
    ours, theirs = (params_of(outer.synchronizer._model) for outer in outers)
    assert torch.equal(ours, theirs), "a run that resumes here begins with the global params in both"
    lines = summarize(read_run("run", journals)).lines(tmp_path, [])
    assert [line.split(maxsplit=2)[2] for line in lines if line.startswith("not counted")] == [
        "region 1 made 3 means void"
    ]


def test_losses_far_above_what_they_were_stop_all_regions(tmp_path: Path) -> None:
    """Whatever made the model so bad, and whatever regions do when one ends: the run does not end as if it were well."""

    def body(region: int, link: Link) -> tuple[OuterOptimizer, int]:
        accelerator = Accelerator(cpu=True)
        model = Blocks([torch.zeros(8)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        regions = RegionConfig(when_one_ends="finish")
        config = OuterConfig(method="diloco", sync_interval=2, outer_lr=0.7, outer_momentum=0.0)
        outer = OuterOptimizer(accelerator, model, optimizer, config, regions, max_steps=40, link=link)
        while outer.inner_step < 40 and not outer.should_stop:
            model.vectors()[0].data.add_(1e-3)
            outer.step(3.0 if outer.inner_step < 20 else 9.5)
        outer.end()
        return outer, len(outer.synchronizer.fragments[0].losses)

    for outer, remembered in run_in_lockstep(2, body):
        assert (outer.verdict, outer.finished) == ("stop", False)
        assert outer.inner_step == 26, "three rounds later"
        assert "were far above what they had been, in 3 rounds in a row" in outer.why
        assert "Their median was 3 before" in outer.why
        assert remembered == 10, "such losses are no new normal"


def moved(
    factor: Callable[[int, int], float],
    loss: Callable[[int], float] = lambda step: math.nan,
    method: str = "diloco",
    weights: str = "equal",
) -> list[OuterOptimizer]:
    """Two regions of a plain loop that move by factor(region, inner step) times 1e-3, with this loss."""

    def body(region: int, link: Link) -> OuterOptimizer:
        accelerator = Accelerator(cpu=True)
        model = Blocks([torch.zeros(8)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = OuterConfig(method=method, sync_interval=2, outer_momentum=0.0, weights=weights)
        outer = OuterOptimizer(accelerator, model, optimizer, config, max_steps=40, link=link)
        while outer.inner_step < 40 and not outer.should_stop:
            step = outer.inner_step + 1
            model.vectors()[0].data.add_(1e-3 * factor(region, step))
            outer.step(loss(step), tokens=100 + region)
        outer.end()
        return outer

    return run_in_lockstep(2, body)


def test_a_region_that_begins_anew_counts_void_means_as_the_others_do() -> None:
    """It was clipped once, and then two means were void: all stop with the next one."""
    outers = moved(lambda region, step: 1.0 if not region or step < 3 else 4.0 if step < 5 else 60.0)
    assert {(outer.verdict, outer.inner_step) for outer in outers} == {("stop", 10)}


def test_regions_of_which_none_counts_stop() -> None:
    """All values are NaN in all regions: that no mean is worth anything is no ordinary end."""
    outers = moved(lambda region, step: 1.0 if step < 20 else math.nan)
    assert {(outer.verdict, outer.finished) for outer in outers} == {("stop", False)}


@pytest.mark.parametrize("loss", [math.nan, 1e8])
def test_losses_that_go_wrong_in_the_last_transfers_stop_too(loss: float) -> None:
    """Those that land when the run ends, with a delay of one round; a loss that was known and is NaN is one of them."""
    outers = moved(lambda region, step: 1.0, lambda step: 2.0 if step < 38 else loss, method="co2")
    assert {(outer.verdict, outer.finished) for outer in outers} == {("stop", False)}
    assert {
        (outer.verdict, outer.finished) for outer in moved(lambda region, step: 1.0, lambda step: 2.0)
    } == {(None, True)}


def test_a_loop_that_must_not_go_on_does_not_end_as_if_it_were_well() -> None:
    """Its with block raises, before a script could save a model as the result."""

    def body(region: int, link: Link) -> None:
        accelerator = Accelerator(cpu=True)
        model = Blocks([torch.zeros(8)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = OuterConfig(method="diloco", sync_interval=2)
        with OuterOptimizer(accelerator, model, optimizer, config, max_steps=40, link=link) as outer:
            while not outer.should_stop and outer.inner_step < 40:
                model.vectors()[0].data.add_(1e6 if region else 1e-3)
                outer.step()

    with pytest.raises(RunStopped, match="the means of 3 rounds in a row were void"):
        run_in_lockstep(2, body)


def test_shares_by_tokens_are_judged_from_the_start() -> None:
    """No two regions have trained on as many tokens."""
    outers = moved(lambda region, step: 1e6 if region and step > 2 else 1.0, weights="tokens")
    assert {(outer.verdict, outer.inner_step) for outer in outers} == {("stop", 8)}


@pytest.mark.parametrize(
    ("max_norm", "is_clipped"), [(None, False), (math.inf, False), (1.0, True)], ids=["no", "logged", "yes"]
)
def test_steps_that_nothing_bounds_are_not_judged(
    max_norm: float | None, is_clipped: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SGD, and one region a million times too far; unless gradients are clipped, as Trainer does, or a loop. With max_grad_norm=0
    Trainer asks for their norm alone.
    """

    def body(region: int, link: Link) -> OuterOptimizer:
        accelerator = Accelerator(cpu=True)
        model = Blocks([torch.zeros(8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config, journal = OuterConfig(method="diloco", sync_interval=2), tmp_path / f"region-{region}.jsonl"
        outer = OuterOptimizer(
            accelerator, model, optimizer, config, max_steps=40, link=link, journal=journal
        )
        while outer.inner_step < 40 and not outer.should_stop:
            far = 1e6 if region == 1 and outer.inner_step == 30 else 1.0
            model.vectors()[0].data.add_(1e-3 * far)
            if max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            outer.step()
        return outer

    with caplog.at_level(logging.WARNING):
        run_in_lockstep(2, body)
    events = read(tmp_path / "region-1.jsonl")
    assert ("guard" in [event["kind"] for event in events]) == is_clipped
    said = "outer.guard leaves all finite outer gradients as they are: the inner optimizer of region 0 and region 1"
    assert caplog.text.count(said) == (not is_clipped)
    assert sum(said in event.get("message", "") for event in events) == (not is_clipped)


def test_a_region_with_a_wrong_learning_rate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of three is left out of every mean from the first one on, begins anew again and again, and says why."""
    with caplog.at_level(logging.WARNING):
        outers, journals = with_wrong_rate(tmp_path, 3)
    ours, theirs, _ = map(read, journals)
    [*guarded] = [event for event in ours if event["kind"] == "guard"]
    assert [event["regions"] for event in guarded] == [{"1": "dropped"}] * 14
    assert [event["regions"] for event in ours if event["kind"] == "land"][:14] == [2] * 14
    times = [event["times"] for event in theirs if event["kind"] == "begin_anew"]
    assert times == [1, 2, 3, 4]
    assert caplog.text.count("another time will not help") == 2
    assert params_of(outers[0].synchronizer._model).abs().max() < 2
    [line] = [
        line
        for line in summarize(read_run("run", journals)).lines(tmp_path, [])
        if line.startswith("not counted")
    ]
    assert line.split(maxsplit=2)[2].startswith(
        "region 1 had 14 outer gradients dropped, and began anew after step"
    )


def test_all_regions_stop(tmp_path: Path) -> None:
    """on_nonfinite=stop, after the rounds of the setting; the reason says what to do."""
    outers = run(
        tmp_path, OuterConfig(method="diloco", sync_interval=3, on_nonfinite="stop", nonfinite_rounds=2)
    )
    for outer in outers:
        assert (outer.verdict, outer.inner_step) == ("stop", BAD_STEP + 6), (
            "told with the round after the second"
        )
        assert (
            "region 1 was interrupted (region 1 did not count in 2 rounds in a row (not finite" in outer.why
        )
        assert "); go back to an earlier checkpoint" in outer.why


def test_a_checkpoint_knows_the_rounds() -> None:
    """Stopped between two rounds that are not finite, a region counts on."""
    method = from_config(OuterConfig(method="diloco", sync_interval=2))
    states = []

    def live(region: int, link: Link) -> int:
        model = Blocks([torch.ones(8)])
        synchronizer = Synchronizer(model, method, link)
        model.vectors()[0].data.fill_(float("nan"))
        for _ in range(2):
            synchronizer.step()
        states.append(synchronizer.state_dict())
        resumed = Synchronizer(model, method, link, state=states[0])
        return resumed.fragments[0].nonfinite_rounds

    assert run_in_lockstep(1, live) == [1]
