"""One run of a study: all arms begin alike and see the same batches; absences and the probe do what they say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cocodc.errors import InputError
from tests.studies import cost, training
from tests.studies.absences import Absences
from tests.studies.inner import Inner
from tests.studies.toys import settings, study

ARMS: dict[str, dict[str, Any]] = {
    "data-parallel": {"study__data_parallel": True},
    "diloco": {},
    "streaming": {"outer__method": "streaming", "outer__num_fragments": 2},
    "eager": {"outer__method": "eager"},
    "dilocox": {"outer__method": "dilocox"},
    "cocodc": {
        "outer__method": "cocodc",
        "outer__num_fragments": 2,
        "outer__sends_per_interval": 2,
        "outer__overlap_steps": 1,
    },
}


def test_arms_are_paired(batches: dict[int, list[Tensor]]) -> None:
    """Runs of a seed have the same first weights and train on the same batches in every arm; those of another seed do not."""
    trained: dict[str, dict[int, list[Tensor]]] = {}
    starts = set()
    for arm, changes in ARMS.items():
        found = training.run(settings(**changes))
        trained[arm] = dict(batches)
        batches.clear()
        starts.add((found["weights"], *found["batches"]))
        assert all(math.isfinite(loss) for _, loss in found["curve"])
    assert len(starts) == 1
    for step in range(8):
        (together,) = trained["data-parallel"][step]
        for other in ARMS.keys() - {"data-parallel"}:
            parts = sorted(batch.tolist() for batch in trained[other][step])
            assert parts == sorted(part.tolist() for part in together.chunk(2))
    found = training.run(settings(seed=2))
    assert not {found["weights"], *found["batches"]} & set(next(iter(starts)))


def test_a_dealt_batch_has_the_same_samples_and_takes_less_time(batches: dict[int, list[Tensor]]) -> None:
    """Three to one: after the first landing region 0 has three of four samples, of those that data-parallel training has."""
    found = training.run(settings(study__speeds=[3, 1], regions__balance="auto"))
    this = training.Run(settings())
    for step, parts in batches.items():
        together = torch.cat([this.text.batch(region, step + 1) for region in range(2)])
        assert torch.equal(torch.cat(sorted(parts, key=lambda each: -len(each))), together)
        assert sorted(map(len, parts)) == ([2, 2] if step < 4 else [1, 3])
    equal = training.run(settings(study__speeds=[3, 1]))
    assert (found["weights"], found["batches"]) == (equal["weights"], equal["batches"])
    assert (equal["simulated_s"], found["simulated_s"]) == pytest.approx((8.0, 4 + 4 * 0.5))
    assert equal["curve"] == training.run(settings())["curve"]


def test_one_region_whose_outer_step_changes_nothing_trains_like_data_parallel() -> None:
    """Of two regions one is never there: DiLoCo with outer lr 1 ends where data-parallel training on the other's batches does.

    Up to rounding: the global params less their difference to the local ones are not the local ones bit by bit.
    """
    absent: dict[str, Any] = {"study__absences": {"late": 1, "late_rounds": 9}}
    regions, parallel = (training.run(settings(**absent, **each)) for each in ({}, ARMS["data-parallel"]))
    assert regions["trained"] == parallel["trained"] == 0.5
    for (_, mine), (_, theirs) in zip(regions["curve"], parallel["curve"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert regions["curve"] != training.run(settings())["curve"]


def test_absences_leave_regions_and_follow_the_seed() -> None:
    """Regions are lost at the given rate, never all of them, and the same ones with the same seed."""
    given = {"rate": 0.5, "least": 2}
    one, same, other = (Absences(given, 4, 400, 4, seed) for seed in (1, 1, 2))

    def pattern(absences: Absences) -> list[list[bool]]:
        return [[absences.here(region, step) for region in range(4)] for step in range(1, 401)]

    assert pattern(one) == pattern(same) != pattern(other)
    assert min(map(sum, pattern(one))) >= 2
    assert 0.5 < one.trained < 0.95
    with pytest.raises(ValueError, match="Known: rate, rounds"):
        Absences({"rates": 1}, 4, 400, 4, 1)


def test_a_merge_that_keeps_local_params_has_no_absences() -> None:
    """A region that comes back must take the global params: other merges are refused."""
    with pytest.raises(InputError, match="merge=replace"):
        training.run(settings(outer__merge="additive", outer__overlap_steps=1, study__absences={"rate": 0.1}))


@pytest.mark.parametrize("regions", [1, 2])
def test_the_probe_redoes_inner_steps(regions: int) -> None:
    """A region alone whose outer step changes nothing misses nothing; with others, replacing misses what was redone."""
    flight: dict[str, Any] = {"outer__merge": "additive", "outer__overlap_steps": 3, "study__probe": True}
    found = training.run(settings(regions__count=regions, **flight))["probe"]
    assert set(found) == {
        "last third"
    }  # sent at 4 and 8; the first lands at 7, the second after the training
    (part,) = found.values()
    if regions == 1:
        assert part["missing"] < 1e-3
    else:
        assert part["missing"] > 1e-3
        assert part["replace error"] == pytest.approx(1 / part["missing"])
        assert -1 <= part["adaptive cosine"] <= 1
        assert part["fixed error"] == pytest.approx(1, abs=1e-3)


def test_muon_trains_the_matrices_of_the_layers() -> None:
    """With training.optim=muon as in a recipe, Muon has the matrices of the layers, AdamW the rest."""
    inner = training.Run(settings(training__optim="muon")).inner()
    kinds = {id(param): group["kind"] for group in inner.optimizer.param_groups for param in group["params"]}
    before = {name: param.detach().clone() for name, param in inner.model.named_parameters()}
    inner.train(torch.arange(32).view(2, 16))
    for name, param in inner.model.named_parameters():
        assert (kinds[id(param)] == "muon") == (".layers." in name and param.ndim == 2)
        assert not param.equal(before[name])


def test_a_trained_start_is_the_beginning_of_data_parallel_training() -> None:
    """Data-parallel training goes on with the bits that it would have had; regions begin with its weights, AdamW's moments and
    schedule: averaged after each step of one region alone, they end where it does."""
    schedule: dict[str, Any] = {"training__lr_scheduler_type": "cosine", "training__max_steps": 16}
    whole, later = (
        training.run(settings(**schedule, **ARMS["data-parallel"], study__trained_steps=steps))
        for steps in (0, 8)
    )
    assert later["curve"] == [point for point in whole["curve"] if point[0] > 8]
    assert later["weights"] == whole["weights"] and later["bytes"] == whole["bytes"] / 2
    alone: dict[str, Any] = {"regions__count": 1, "study__trained_steps": 8, "outer__sync_interval": 1}
    parallel, region = (
        training.run(settings(**schedule, **alone, **each)) for each in (ARMS["data-parallel"], {})
    )
    for (_, mine), (_, theirs) in zip(region["curve"], parallel["curve"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    with pytest.raises(InputError, match="trained_steps=16: it must be at least 0, and less than"):
        training.Run(settings(**schedule, study__trained_steps=16))


def test_an_estimate_times_a_few_steps_and_counts_a_trained_start_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The start is made together, and the rest by each region; nothing of it is trained for the estimate."""
    given = [settings(study__trained_steps=6), settings(**ARMS["data-parallel"], study__trained_steps=6)]
    steps, trained, train = given[0]["training"]["max_steps"], 0, Inner.train

    def counted(inner: Inner, batch: Tensor) -> float:
        nonlocal trained
        trained += 1
        return train(inner, batch)

    monkeypatch.setattr(Inner, "train", counted)
    assert cost.core_hours(given) > 0
    assert trained == 2 * (1 + cost.STEPS)
    monkeypatch.setattr(cost, "_step_s", lambda _, batches: 3600 / cost.OVERHEAD * batches)
    assert cost.core_hours(given[:1]) == pytest.approx(2 * 6 + 2 * (steps - 6))
    assert cost.core_hours(given[1:]) == pytest.approx(2 * steps)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_base_is_trained_on_other_text_and_only_its_adapter_travels() -> None:
    """All arms begin with the same base, and without `base_steps` with the same random weights as before."""
    adapter: dict[str, Any] = {"peft": {"r": 2, "target_modules": "all-linear"}, "study__base_steps": 2}
    regions, parallel = (training.run(settings(**adapter, **each)) for each in ({}, ARMS["data-parallel"]))
    assert regions["weights"] == parallel["weights"] != training.run(settings(**ARMS["diloco"]))["weights"]
    assert regions["params"] == parallel["params"]
    inner = training.Run(settings(**adapter)).inner()
    assert regions["params"] == sum(each.numel() for each in inner.model.parameters() if each.requires_grad)
    named = {name.removeprefix("base_model.model."): each for name, each in inner.model.named_parameters()}
    frozen = named["model.layers.0.mlp.up_proj.base_layer.weight"]
    random = training.Run(settings()).inner().model
    assert not torch.equal(frozen, dict(random.named_parameters())["model.layers.0.mlp.up_proj.weight"])


def test_auto_stands_for_its_numbers() -> None:
    """In the settings that name a run: what auto means may change."""
    arm = {"outer.outer_lr": "auto", "outer.outer_momentum": "auto"}
    of_arm = study(arms={"first": arm}).settings("", "first", {}, 1)
    assert of_arm == settings(outer__outer_lr=0.7, outer__outer_momentum=0.6)
