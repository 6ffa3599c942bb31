"""Equalities between the six methods (METHODS 8), and what every method has to hold."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_cocodc.methods import METHODS, Method
from hf_cocodc.parts import codecs, merges, schedules
from hf_cocodc.parts.codecs.base import Plain
from hf_cocodc.parts.codecs.cast import Cast
from hf_cocodc.parts.info import MergeInfo, MergeSlice
from hf_cocodc.parts.merges import Merge
from hf_cocodc.parts.schedules import AgreedStats, Land, Send
from hf_cocodc.resolve import check, from_config
from hf_cocodc.resolve import settings as settings_of
from hf_cocodc.settings import OuterConfig
from hf_cocodc.snapshot.checkpoint import put_together, take_apart
from tests.equalities.test_equalities import live, locals_of
from tests.methods import small
from tests.toys import Blocks, Region, global_of, llama_adamw, params_of, run, train_llama

H = 4
SMALL = small(
    {
        "diloco": {"outer_lr": 0.7},
        "streaming": {"num_fragments": 2, "overlap_steps": 1},
        "eager": {},
        "co2": {"outer_momentum": 0.3},
        "dilocox": {"rank": 2, "outer_lr": 0.4},
        "cocodc": {"num_fragments": 2, "overlap_steps": 2, "sends_per_interval": 2},
    }
)


def small(method: str, **more: Any) -> Method:
    return from_config(OuterConfig(method=method, sync_interval=H, **{**SMALL[method], **more}))


def test_eager_of_one_region_is_diloco() -> None:
    """Eager updates with M = 1 = DiLoCo with M = 1, bitwise, from the first round to finish()."""
    ours = run(1, small("eager", outer_lr=0.7, outer_momentum=0.9), llama_adamw(), live)
    theirs = run(1, small("diloco", outer_lr=0.7, outer_momentum=0.9), llama_adamw(), live)
    assert torch.equal(locals_of(ours)[:, :-1], locals_of(theirs)[:, :-1])


def test_cocodc_without_overlap_is_streaming_without_mixing() -> None:
    """cocodc(tau=0) = streaming(tau=0, alpha=0) on the same schedule, bitwise."""
    streaming = small("streaming", overlap_steps=0, mixing_alpha=0.0, codec="fp32")
    cocodc = dataclasses.replace(streaming, merge=merges.compensate_delay("adaptive", 0.5))
    for num_regions in (1, 2):
        ours = run(num_regions, cocodc, llama_adamw(), live)
        theirs = run(num_regions, streaming, llama_adamw(), live)
        assert torch.equal(locals_of(ours)[:, :-1], locals_of(theirs)[:, :-1])


@pytest.mark.parametrize("mode", ["fixed", "lr_normalized", "adaptive"])
def test_no_compensation_is_the_additive_merge(mode: str) -> None:
    """cocodc(lambda=0) = additive merge, bitwise, in every mode."""
    ours = run(2, small("cocodc", compensation=mode, compensation_strength=0.0), llama_adamw(), live)
    theirs = run(2, small("cocodc", merge="additive"), llama_adamw(), live)
    assert torch.equal(locals_of(ours), locals_of(theirs))


def test_full_rank_is_the_naive_delay() -> None:
    """dilocox(full rank, no quantizer) = naive one-round delay, to rounding."""
    naive = from_config(
        OuterConfig(method="dilocox", sync_interval=H, outer_lr=0.4, codec="fp32", error_feedback=False)
    )
    exact = dataclasses.replace(naive, codec=codecs.lowrank(64, Plain_fp32()))
    ours, theirs = run(2, exact, llama_adamw(), live), run(2, naive, llama_adamw(), live)
    torch.testing.assert_close(locals_of(ours)[:, : 2 * H], locals_of(theirs)[:, : 2 * H], atol=1e-6, rtol=0)


def Plain_fp32() -> Cast:  # noqa: N802
    """The coder that loses nothing."""
    return Cast(torch.float32)


def test_a_codec_that_loses_nothing_is_no_codec() -> None:
    """Any codec = identity is no codec: fp32 inside feedback changes no bit."""
    plain = small("streaming", codec="fp32")
    wrapped = dataclasses.replace(plain, codec=codecs.feedback(Plain(Cast(torch.float32))))
    assert torch.equal(
        locals_of(run(2, wrapped, llama_adamw(), live)), locals_of(run(2, plain, llama_adamw(), live))
    )


def test_adaptive_compensation_has_the_strength_it_says() -> None:
    """||lambda u u D|| = lambda_0 ||u|| for each tensor, at the scale of weights."""
    generator = torch.Generator().manual_seed(0)
    snapshot = torch.randn(100, generator=generator)
    local = snapshot + 1e-4 * torch.randn(100, generator=generator)
    new_global = snapshot + 1e-3 * torch.randn(100, generator=generator)

    sizes = (40, 60)
    info = MergeInfo(
        **dict.fromkeys(field.name for field in dataclasses.fields(MergeInfo)),  # type: ignore[arg-type]
    )
    info = dataclasses.replace(info, sent_at=3, landed_at=8)

    def merged(merge: Merge) -> Tensor:
        whole = MergeSlice(local, new_global, snapshot, sizes)
        if merge.measure is not None:
            assert merge.scales is not None
            norms = [
                torch.stack([part.double().norm() for part in each.split(sizes)])
                for each in merge.measure(whole, info)
            ]
            scales = merge.scales(*norms, torch.tensor(sizes, dtype=torch.float64), info)
            whole = whole._replace(scales=scales.unbind())
        return merge.apply(whole, info).double()

    plain, ours = merged(merges.additive()), merged(merges.compensate_delay("adaptive", 0.3))
    steps = (local.double() - snapshot.double()).split(sizes)
    for term, step in zip((plain - ours).split(sizes), steps, strict=True):
        assert float(term.norm() / step.norm()) == pytest.approx(
            0.3, abs=2e-3
        )  # fp32 rounding of weights near 1


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("num_regions", [1, 3])
def test_every_method_ends_with_one_model(name: str, num_regions: int) -> None:
    """Global params are equal in all regions after every landing (but eager), and the models after finish(); all differ
    from where they started, nothing stays in flight, and what was counted is what the codec promises."""

    def train(region: Region) -> tuple[Tensor, list[Tensor], Tensor]:
        start, thetas = params_of(region.model), []
        for step in range(3 * H + 1):
            train_llama(region, step)
            thetas.append(global_of(region))
        region.synchronizer.finish()
        assert not any(state.in_flight for state in region.synchronizer.fragments)
        return start, thetas, params_of(region.model)

    outcomes = run(num_regions, small(name), llama_adamw(), train)
    for _, thetas, final in outcomes:
        assert torch.equal(final, outcomes[0][2])
        assert torch.isfinite(final).all()
        if name != "eager":
            assert all(torch.equal(a, b) for a, b in zip(thetas, outcomes[0][1], strict=True))
    assert not torch.equal(outcomes[0][0], outcomes[0][2])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("steps", [H - 1, H, H + 1, 2 * H + 3, 3 * H])
def test_no_inner_step_is_lost_at_the_end(name: str, steps: int) -> None:
    """However the last step falls between two sends, the last inner step still moves the model that finish() leaves."""

    def train(region: Region, last: bool) -> Tensor:
        for step in range(steps - 1):
            train_llama(region, step)
        if last:
            train_llama(region, steps - 1)
        else:
            region.synchronizer.step(1e-3)  # the step is counted, but the params stay
        region.synchronizer.finish()
        return params_of(region.model)

    trained = run(2, small(name), llama_adamw(), partial(train, last=True))
    skipped = run(2, small(name), llama_adamw(), partial(train, last=False))
    assert not torch.equal(trained[0], skipped[0])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("steps", [H - 1, H, H + 1, 2 * H - 1, 2 * H, 2 * H + 1, 3 * H, 3 * H + 2])
@pytest.mark.parametrize("num_regions", [1, 3])
def test_every_inner_step_counts_once(name: str, steps: int, num_regions: int) -> None:
    """Inner steps that depend on nothing, and a plain outer step: the global weights of the end have moved by the mean of all
    of them, also where nothing has landed yet when the second outer gradient is sent, and where the run is stopped and
    resumed there."""
    exact = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32"}
    more: dict[str, Any] = {"co2": {"staleness_penalty": "none"}, "dilocox": {"error_feedback": False}}
    only = {"streaming": {"overlap_steps": 0}, "cocodc": {"compensation": "additive"}}
    settings = {**exact, **more.get(name, {}), **only.get(name, {})}
    method = from_config(OuterConfig(method=name, sync_interval=H, **settings))  # type: ignore[arg-type]

    def build(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = Blocks([torch.zeros(3)] * 4)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    def train(region: Region) -> Tensor:
        synchronizer = region.synchronizer
        for step in range(steps):
            for param in region.model.parameters():
                param.grad = torch.full_like(param, -float(2**step + 100 * region.index))
            region.step()
            if step in (H, H + 1):
                tree, tensors = take_apart(synchronizer.state_dict())  # as on a disk
                copies = {key: tensor.clone() for key, tensor in tensors.items()}
                synchronizer.load_state_dict(put_together(tree, copies))
        synchronizer.finish()
        return params_of(region.model)

    moved = 2**steps - 1 + steps * 100 * (num_regions - 1) / 2
    for final in run(num_regions, method, build, train):
        torch.testing.assert_close(final, torch.full_like(final, moved), atol=0, rtol=1e-5)


@pytest.mark.parametrize("name", ["co2", "dilocox"])
def test_a_region_that_takes_over_at_the_start_counts_from_there(name: str) -> None:
    """With the first transfer in flight: what the lost region had sent still lands, and the new one's steps count once."""
    exact: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32"}
    more: dict[str, Any] = {"co2": {"staleness_penalty": "none"}, "dilocox": {"error_feedback": False}}
    method = from_config(OuterConfig(method=name, sync_interval=H, **{**exact, **more[name]}))

    def build(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = Blocks([torch.zeros(3)])
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    def train(region: Region) -> Tensor:
        for step in range(2 * H + 1):
            for param in region.model.parameters():
                param.grad = torch.full_like(param, -float(2**step))
            region.step()
            if step == H and region.index == 1:
                region.synchronizer.take_over()
        region.synchronizer.finish()
        return params_of(region.model)

    moved = 2 ** (2 * H + 1) - 1 - 2**H / 2  # region 1 has lost its step that no transfer carried
    for final in run(2, method, build, train):
        torch.testing.assert_close(final, torch.full_like(final, moved))


def test_eager_keeps_a_nan_at_home() -> None:
    """A region whose params become NaN late ends with the others' finite global weights, as they do."""

    def poisoned(region: Region) -> Tensor:
        for step in range(3 * H):
            if region.index == 1 and step == 2 * H + 1:
                with torch.no_grad():
                    next(region.model.parameters()).fill_(float("nan"))
            train_llama(region, step)
        region.synchronizer.finish()
        return params_of(region.model)

    first, second = run(2, small("eager"), llama_adamw(), poisoned)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)


def test_a_nan_region_recovers_where_the_merge_keeps_local_steps() -> None:
    """NaN local params take the global ones at the next landing instead of being mixed in."""

    def poisoned(region: Region) -> Tensor:
        for step in range(4 * H):
            if region.index == 1 and step == H:
                with torch.no_grad():
                    for parameter in region.model.parameters():
                        parameter.fill_(float("nan"))
            region.synchronizer.step(1e-3)
        return params_of(region.model)

    for name in ("streaming", "cocodc"):
        assert all(torch.isfinite(params).all() for params in run(2, small(name), llama_adamw(), poisoned))


SPLIT = {"num_fragments": 4, "split_rows": True}


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("streaming", {"codec": "int8"}),
        ("streaming", {"codec": "lowrank", "rank": 2, "error_feedback": True, "merge": "compensate"}),
        ("cocodc", {"codec": "topk", "error_feedback": True}),
        ("cocodc", {"merge": "mix", "mixing_alpha": 0.3, "fragment_pattern": "sequential"}),
        ("diloco", {"merge": "additive", "overlap_steps": 2}),
        ("eager", {"num_fragments": 2, "fragment_pattern": "strided", "codec": "bf16"}),
        ("co2", {"codec": "int4", "error_feedback": True}),
        # four fragments of this model hold pieces of its embedding and its head
        ("streaming", SPLIT | {"codec": "lowrank", "rank": 2, "error_feedback": True}),
        ("eager", SPLIT | {"fragment_pattern": "strided", "codec": "int8"}),
        ("dilocox", SPLIT | {"fragment_pattern": "sequential", "rank": 2}),
    ],
)
def test_every_part_can_be_replaced_on_its_own(method: str, parts: dict[str, Any]) -> None:
    """Methods with another codec, merge or pattern than their paper's train, and regions end equal."""
    first, second = run(2, small(method, **parts), llama_adamw(), live)
    assert torch.equal(first[-1][0], second[-1][0])


@settings(max_examples=200, derandomize=True)
@given(data=st.data())
def test_adaptive_transmission_serves_every_fragment(data: st.DataObject) -> None:
    """Over random measured times and change rates every fragment is sent at least once in H steps (but for the wait for its
    turn), none is in flight twice, everything lands after it was sent, and equal inputs give equal choices."""
    num_fragments = data.draw(st.integers(1, 6))
    interval = data.draw(st.integers(2 * num_fragments, 60))
    overlap = data.draw(st.one_of(st.none(), st.integers(1, max(1, interval // (2 * num_fragments)))))
    schedule = schedules.adaptive(interval, overlap, data.draw(st.floats(0.05, 1.0)))
    state, in_flight = schedule.init(num_fragments), {}
    last = dict.fromkeys(range(num_fragments), 0)
    longest = 0
    rates = data.draw(st.lists(st.floats(0, 1), min_size=num_fragments, max_size=num_fragments))
    for step in range(1, 6 * interval):
        stats = AgreedStats()
        if step > interval:
            sync_time_s = data.draw(st.floats(0.1, 2.0)) if step % interval == 1 else stats.sync_time_s or 1.0
            stats = AgreedStats(1.0, sync_time_s, tuple(rates))
        events, next_state = schedule.events(step, stats, state)
        assert (events, next_state) == schedule.events(step, stats, state)
        state = next_state
        for event in events:
            if isinstance(event, Send):
                assert event.fragment not in in_flight
                in_flight[event.fragment] = step
                longest = max(longest, step - last[event.fragment])
                last[event.fragment] = step
        for event in events:
            if isinstance(event, Land):
                assert in_flight.pop(event.fragment) == event.sent_at <= step
    spacing = interval // num_fragments
    slack = num_fragments * spacing + (
        overlap or interval
    )  # due fragments queue for their turn, one every h steps
    assert max(longest, *(6 * interval - s for s in last.values())) <= interval + slack


def test_rounds_follow_the_rank() -> None:
    """DiLoCoX: a round has H r_t / r_1 steps, never fewer than the transfer takes; it lands one round late."""
    schedule = schedules.rounds(20)
    state = schedule.init(1)
    found = []
    for step in range(1, 60):
        compression, sync_time_s = (1.0, 0.0) if step < 20 else (0.5, 0.0) if step < 35 else (0.1, 6.0)
        events, state = schedule.events(step, AgreedStats(1.0, sync_time_s, (), compression), state)
        if events:
            found.append((step, events))
    assert [step for step, _ in found] == [20, 30, 40, 46, 52, 58]
    assert found[1][1] == (Send(0), Land(0, 20))


@pytest.mark.parametrize(
    ("given_", "alpha"),
    [({}, 0.0), ({"overlap_steps": 0}, 0.0), ({"overlap_steps": 2}, 0.5), ({"mixing_alpha": 0.3}, 0.3)],
)
def test_streaming_mixes_as_its_paper_does(given_: dict[str, Any], alpha: float) -> None:
    """0.5, and 0 where at most one step is in flight; both what is done and what is said."""
    config = OuterConfig(method="streaming", **given_)
    assert settings_of(config)["mixing_alpha"] == alpha
    whole = MergeSlice(torch.ones(1), torch.zeros(1), torch.zeros(1))
    info = MergeInfo(**dict.fromkeys(field.name for field in dataclasses.fields(MergeInfo)))  # type: ignore[arg-type]
    assert from_config(config).merge.apply(whole, info) == pytest.approx(alpha)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"method": "diloco", "overlap_steps": 2}, "would throw away the steps"),
        ({"method": "diloco", "overlap_steps": "auto", "merge": "additive"}, "only method=cocodc uses them"),
        ({"method": "streaming", "overlap_steps": "auto"}, "only method=cocodc uses them"),
        ({"method": "co2", "staleness_penalty": 0.5}, "must be gap, none, or a number"),
        ({"method": "streaming", "codec": "topk"}, "Set error_feedback=true"),
        ({"method": "diloco", "error_feedback": True}, "no error to feed back"),
        ({"method": "cocodc", "sends_per_interval": 2}, "must lie between outer.num_fragments=4"),
        ({"method": "co2", "staleness_penalty": "0.5"}, "must be gap, none, or a number"),
        ({"method": "co2", "staleness_penalty": "inf"}, "staleness_penalty=inf must be finite"),
        ({"method": "co2", "staleness_penalty": float("inf")}, "staleness_penalty=inf must be finite"),
        ({"method": "co2", "clip_momentum": "inf"}, "clip_momentum=inf must be finite"),
        ({"method": "co2", "clip_momentum": 0.0}, "must be none, or a positive number"),
        ({"method": "co2", "clip_momentum": "off"}, "must be none, or a positive number"),
        ({"method": "cocodc", "compensation": "adaptiv"}, "Did you mean 'adaptive'"),
        ({"method": "cocodc", "merge": "mixx"}, "Did you mean 'mix'"),
        (
            {"method": "streaming", "rank": 4},
            r"only with outer.codec=lowrank, .*outer.rank=null\), or set outer.codec=lowrank",
        ),
        ({"method": "cocodc", "mixing_alpha": 0.4}, "only with outer.merge=mix"),
        (
            {"method": "cocodc", "utilization": 0.4, "sends_per_interval": 8},
            r"only with outer.sends_per_interval=null, but outer.sends_per_interval is 8. .*--set outer.utilization=null",
        ),
    ],
)
def test_combinations_that_make_no_sense_are_refused(given_: dict[str, Any], message: str) -> None:
    """The reason and the way out are said, before anything is composed."""
    with pytest.raises(ValueError, match=message) as refused:
        from_config(OuterConfig(**given_))
    with pytest.raises(ValueError) as before:
        check(OuterConfig(**given_))
    assert str(before.value) == str(refused.value)
