"""Equalities between methods that must hold by their definitions (real models, regions with data of their own)."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

from hf_cocodc.methods import Method
from hf_cocodc.parts import closings, codecs, fragments, merges, outer, schedules
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.toys import Region, batch, global_of, llama, llama_adamw, params_of, run, train_llama

H = 4
STEPS = 14
LOCAL_SGD = outer.chain(lr=outer.scale(1.0))


def live(region: Region, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """Train, and keep (local, global) params after every step, then after finish()."""
    states = []
    for step in range(steps):
        train_llama(region, step)
        states.append((params_of(region.model), global_of(region)))
    region.synchronizer.finish()
    return [*states, (params_of(region.model), global_of(region))]


def nesterov(lr: float = 0.7, momentum: float = 0.9) -> outer.OuterTransform:
    return outer.chain(nesterov=outer.nesterov(momentum), lr=outer.scale(lr))


def method(**slots: object) -> Method:
    """DiLoCo every H steps, with some slots filled otherwise."""
    diloco = {
        "fragments": fragments.whole(),
        "schedule": schedules.every(H),
        "codec": codecs.fp32(),
        "outer": nesterov(),
        "merge": merges.replace(),
        "closing": closings.one_more_round,
    }
    return Method(**{**diloco, **slots})  # type: ignore[arg-type]


def locals_of(runs: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
    """Local params of all regions at all steps."""
    return torch.stack([torch.stack([local for local, _ in states]) for states in runs])


COMPENSATED = {"schedule": schedules.every(3, 2), "merge": merges.compensate_delay()}


@pytest.mark.parametrize(
    "slots",
    [*({"schedule": schedules.every(interval)} for interval in (1, 3, STEPS + 5)), COMPENSATED],
    ids=["H=1", "H=3", "one round", "delay compensated"],
)
def test_one_region_without_outer_optimizer_is_the_inner_optimizer(slots: dict[str, object]) -> None:
    """One region, outer lr 1, no momentum, any H: what AdamW does alone.

    Not bitwise: Theta - (Theta - theta) is theta only up to one rounding, which no compensation may take for a delay.
    """
    [states] = run(1, method(outer=LOCAL_SGD, **slots), llama_adamw(), live)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        tokens = batch(0, step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(states[step][0], params_of(model), atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_regions", [2, 3])
def test_synchronizing_every_sgd_step_is_data_parallel(num_regions: int) -> None:
    """M regions, H = 1, inner SGD, outer lr 1, no momentum: synchronous data-parallel SGD."""

    def build(index: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = llama()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    every_step = method(schedule=schedules.every(1), outer=LOCAL_SGD)
    runs = run(num_regions, every_step, build, live)
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for region in range(num_regions):
            tokens = batch(region, step)
            (model(input_ids=tokens, labels=tokens).loss / num_regions).backward()
        optimizer.step()
        optimizer.zero_grad()
        for states in runs:
            torch.testing.assert_close(states[step][0], params_of(model), atol=1e-6, rtol=0)


def test_streaming_of_one_fragment_without_overlap_is_diloco() -> None:
    """streaming(P=1, tau=0, alpha=0) = diloco, bitwise."""
    common = {"sync_interval": H, "outer_lr": 0.7, "outer_momentum": 0.9, "codec": "fp32"}
    streaming = OuterConfig(
        method="streaming",
        num_fragments=1,
        fragment_pattern="whole",
        overlap_steps=0,
        mixing_alpha=0.0,
        **common,  # type: ignore[arg-type]
    )
    ours = run(2, streaming, llama_adamw(), live)
    assert torch.equal(
        locals_of(ours),
        locals_of(run(2, OuterConfig(method="diloco", **common), llama_adamw(), live)),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "pattern",
    [
        fragments.strided(2),
        fragments.strided(4),
        fragments.strided(4, split_rows=True),
        fragments.sequential(3),
    ],
)
@pytest.mark.parametrize("num_regions", [2, 3])
def test_fragments_sent_together_are_diloco(pattern: fragments.Pattern, num_regions: int) -> None:
    """Cutting the model into fragments changes nothing as long as all are sent at once, bitwise."""
    cut = run(num_regions, method(fragments=pattern), llama_adamw(), live)
    whole = run(num_regions, method(), llama_adamw(), live)
    assert torch.equal(locals_of(cut), locals_of(whole))


@pytest.mark.parametrize("overlap_steps", [0, 2, 4])
def test_a_fragment_is_sent_in_every_step(overlap_steps: int) -> None:
    """P = layers + 1 = H: one send and one landing in each inner step, tau in flight, and the whole model once in a round."""
    config = OuterConfig(
        method="streaming", sync_interval=5, num_fragments=5, overlap_steps=overlap_steps, codec="int8"
    )
    first = 5 + overlap_steps

    def counted(region: Region) -> tuple[list[tuple[int, int, int]], Tensor]:
        totals, counts = region.synchronizer.totals, []
        for step in range(STEPS + 5):
            train_llama(region, step)
            counts.append((totals.sends, totals.landings, totals.bytes_sent))
        region.synchronizer.finish()
        return counts, global_of(region)

    (counts, ours), (_, theirs) = run(2, config, llama_adamw(), counted)
    assert [sends for sends, _, _ in counts] == [max(step - 4, 0) for step in range(1, STEPS + 6)]
    assert [landings for _, landings, _ in counts] == [
        max(step - first + 1, 0) for step in range(1, STEPS + 6)
    ]
    method = from_config(config)
    whole_model = sum(method.codec.wire_bytes(each, 0, 2) for each in method.fragments(llama()))
    assert counts[first + 8][2] - counts[first + 3][2] == whole_model
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("schedule", [schedules.every(H), schedules.every(H, 2), schedules.staggered(H, 1)])
def test_mixing_with_alpha_1_is_never_talking(schedule: schedules.Schedule) -> None:
    """A merge with alpha = 1 leaves every region as if the others did not exist, bitwise."""
    apart = method(schedule=schedule, merge=merges.mix(1.0))
    runs = run(2, apart, llama_adamw(), live)
    for index, states in enumerate(runs):
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            tokens = batch(index, step)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(states[step][0], params_of(model))


@pytest.mark.parametrize("schedule", [schedules.every(H), schedules.every(H, H), schedules.staggered(H, 3)])
@pytest.mark.parametrize("num_regions", [2, 3])
def test_regions_hold_the_same_global_params(schedule: schedules.Schedule, num_regions: int) -> None:
    """Theta is equal in all regions after every step, and the models are equal after finish(), bitwise."""
    runs = run(num_regions, method(schedule=schedule, fragments=fragments.strided(2)), llama_adamw(), live)
    for step in range(STEPS + 1):
        assert all(torch.equal(states[step][1], runs[0][step][1]) for states in runs)
    assert all(torch.equal(states[-1][0], runs[0][-1][0]) for states in runs)
    assert not torch.equal(runs[0][H][0], runs[1][H][0]), (
        "regions train on data of their own between landings"
    )


def test_finish_leaves_no_step_behind() -> None:
    """14 steps at H = 4 end with a round of the last 2, so that the run equals one whose interval divides 14 and 12."""
    [short] = run(1, method(outer=LOCAL_SGD), llama_adamw(), live)
    assert torch.allclose(short[-1][0], short[-2][0], atol=1e-6), (
        "the two steps after the last landing are kept"
    )


def test_finish_twice_changes_nothing() -> None:
    """A second finish() without a step between sends nothing and leaves the params as they are."""

    def twice(region: Region) -> bool:
        before = live(region)[-1][0]
        sends = region.synchronizer.totals.sends
        region.synchronizer.finish()
        return torch.equal(before, params_of(region.model)) and sends == region.synchronizer.totals.sends

    assert run(2, method(), llama_adamw(), twice) == [True, True]


def test_global_weights_come_and_go() -> None:
    """Inside global_weights() the model is the global one, afterwards the local one again, bit for bit."""

    def look(region: Region) -> None:
        for step in range(H + 2):
            train_llama(region, step)
        local = params_of(region.model)
        names = dict(region.model.named_parameters())
        with contextlib.suppress(KeyError), region.synchronizer.global_weights():
            for state in region.synchronizer.fragments:
                shown = torch.cat([names[n].detach().reshape(-1) for n in state.fragment.names])
                assert torch.equal(shown, state.global_params)
            raise KeyError("an evaluation that failed")
        assert torch.equal(local, params_of(region.model))

    run(2, method(), llama_adamw(), look)


def test_idle_bf16_regions_do_not_drift() -> None:
    """In pure bf16 an outer gradient against unrounded fp32 global params is not zero although nothing moved."""

    def idle(region: Region) -> bool:
        before = params_of(region.model)
        for _ in range(3):
            train_llama(region, 0)
        region.synchronizer.step()  # lands: global params are now no bf16 values
        state = region.synchronizer.fragments[0]
        assert not torch.equal(state.global_params, state.global_params.bfloat16().float())
        held = state.global_params.clone()
        for _ in range(5 * H):
            region.synchronizer.step()
        return torch.equal(held, state.global_params) and not torch.equal(before, params_of(region.model))

    def build(index: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = llama(dtype=torch.bfloat16)
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    assert run(2, method(outer=outer.chain(lr=outer.scale(0.7))), build, idle) == [True, True]


def test_a_region_with_nan_sits_out(caplog: pytest.LogCaptureFixture) -> None:
    """A NaN in one region's params costs that region the transfer; the others' global params stay finite."""

    def poisoned(region: Region) -> Tensor:
        for step in range(H):
            if region.index == 1 and step == 2:
                with torch.no_grad():
                    next(region.model.parameters()).fill_(float("nan"))
            train_llama(region, step)
        return params_of(region.model)

    first, second, third = run(3, method(), llama_adamw(), poisoned)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert "region 1 sat out fragment 0 sent at step 4" in caplog.text
