"""Equalities of the newer methods that follow from their equations, and what they owe as every method does."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cocodc.errors import InputError
from hf_cocodc.link.base import Link, MeanRequest
from hf_cocodc.link.records import Trailer
from hf_cocodc.methods import METHODS, Method
from hf_cocodc.newer import NEWER, known
from hf_cocodc.parts import codecs
from hf_cocodc.parts.codecs.base import Codec
from hf_cocodc.parts.codecs.cast import Cast
from hf_cocodc.parts.codecs.tiles import Tiled
from hf_cocodc.parts.codecs.topk import TopK
from hf_cocodc.parts.fragments import Fragment
from hf_cocodc.parts.guard import Guard, Ordinary, Said, believed, judge
from hf_cocodc.parts.tensors.slices import square
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.equalities.test_equalities import live, locals_of
from tests.methods import of_paper
from tests.parts.test_codecs import transfer
from tests.processes.test_link import run_over_tcp
from tests.toys import Region, batch, global_of, llama_adamw, params_of, run, train_llama

H = 4
SMALL: dict[str, dict[str, Any]] = {"sparseloco": {"top_k": 16}}


def small(name: str, **more: Any) -> Method:
    return from_config(OuterConfig(method=name, sync_interval=H, **{**SMALL.get(name, {}), **more}))


def everything() -> Codec:
    """All values of each tile, as they are."""
    return codecs.feedback(Tiled(TopK(4096, 4096, Cast(torch.float32))), 0.95)


@pytest.mark.parametrize("num_regions", [1, 2, 3])
@pytest.mark.parametrize("outer_lr", [1.0, 0.6])
def test_sparseloco_that_sends_everything_is_diloco_without_momentum(
    num_regions: int, outer_lr: float
) -> None:
    """k = all, no quantization: nothing is left for the feedback, at any decay. Bitwise."""
    whole = dataclasses.replace(small("sparseloco", outer_lr=outer_lr), codec=everything())
    diloco = small("diloco", outer_lr=outer_lr, outer_momentum=0.0)
    ours, theirs = run(num_regions, whole, llama_adamw(), live), run(num_regions, diloco, llama_adamw(), live)
    assert torch.equal(locals_of(ours), locals_of(theirs))


def test_muloco_is_diloco_with_its_settings() -> None:
    """The outer side alone, bitwise: what is new is the inner optimizer (`tests/oracles/test_newer.py`), and that error feedback
    forgets: without a decay it is DiLoCo's."""
    diloco = small("diloco", outer_lr=0.7, outer_momentum=0.6, codec="int4", error_feedback=True)
    same, ours, theirs = (
        locals_of(run(2, method, llama_adamw(), live))
        for method in (
            small("muloco", **of_paper("muloco"), feedback_decay=1.0),
            small("muloco", **of_paper("muloco")),
            diloco,
        )
    )
    assert torch.equal(same, theirs) and not torch.equal(ours, theirs)


def test_snoo_is_diloco_of_one_region() -> None:
    """b <- mu b + s ; w <- w - eta (mu b + s) of SNOO's paper (2510.15830), written out around AdamW. Within 1e-6: sums in
    another order."""
    eta, mu = 0.7, 0.6
    [ours] = run(1, small("diloco", outer_lr=eta, outer_momentum=mu), llama_adamw(), live)
    model, optimizer = llama_adamw()(0)
    slow = [param.detach().clone() for param in model.parameters()]
    buffers = [torch.zeros_like(each) for each in slow]
    for step in range(len(ours) - 1):
        tokens = batch(0, step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % H == 0:
            with torch.no_grad():
                for fast, weights, buffer in zip(model.parameters(), slow, buffers, strict=True):
                    moved = weights - fast
                    buffer.mul_(mu).add_(moved)
                    weights.sub_(eta * (mu * buffer + moved))
                    fast.copy_(weights)
        torch.testing.assert_close(params_of(model), ours[step][0], rtol=0, atol=1e-6)


def test_sparseloco_without_decay_forgets_what_it_did_not_send() -> None:
    """beta = 0 is no error feedback, bitwise; beta = 0.95 is another run."""
    forgets = small("sparseloco", feedback_decay=0.0)
    none = dataclasses.replace(forgets, codec=codecs.topk_2bit(16))
    ours, theirs = (locals_of(run(2, method, llama_adamw(), live)) for method in (forgets, none))
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, locals_of(run(2, small("sparseloco"), llama_adamw(), live)))


@pytest.mark.parametrize("name", NEWER)
@pytest.mark.parametrize("num_regions", [1, 3])
def test_regions_end_with_one_model(name: str, num_regions: int) -> None:
    """Global params are equal after every landing, models after finish(); the last inner step counts."""

    def train(region: Region, last: bool) -> tuple[list[Tensor], Tensor]:
        thetas = []
        for step in range(3 * H + 1):
            if step < 3 * H or last:
                train_llama(region, step)
            else:
                region.synchronizer.step(1e-3)  # the step is counted, but the params stay
            thetas.append(global_of(region))
        region.synchronizer.finish()
        return thetas, params_of(region.model)

    method = small(name)
    found = run(num_regions, method, llama_adamw(), partial(train, last=True))
    for thetas, final in found:
        assert all(map(torch.equal, thetas, found[0][0]))
        assert torch.equal(final, found[0][1]) and torch.isfinite(final).all()
    assert not torch.equal(found[0][0][0], found[0][0][-1])
    skipped = run(num_regions, method, llama_adamw(), partial(train, last=False))
    assert not torch.equal(found[0][1], skipped[0][1])


@pytest.mark.parametrize("name", NEWER)
@pytest.mark.parametrize(
    "parts",
    [
        {"codec": "int8", "error_feedback": True},
        {"num_fragments": 2, "fragment_pattern": "strided", "overlap_steps": 2, "merge": "additive"},
        {"codec": "fp4", "mean": "radial"},
    ],
    ids=lambda parts: "-".join(map(str, parts.values())),
)
def test_every_part_can_be_replaced(name: str, parts: dict[str, Any]) -> None:
    """With another codec, fragments, an overlap, or radial means regions train, and end equal."""
    config = OuterConfig(method=name, sync_interval=H, **parts)
    first, second = run(2, from_config(config), llama_adamw(), live)
    assert torch.equal(first[-1][0], second[-1][0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "sparseloca"}, "'sparseloca' is not known. Did you mean 'sparseloco'"),
        (
            {"method": "sparseloco", "outer_momentum": 0.9},
            "outer_momentum=0.9 has no meaning for method=spars",
        ),
        ({"method": "sparseloco", "mean": "radial"}, "outer.mean=radial with codec=topk_2bit"),
        ({"method": "sparseloco", "error_feedback": False}, "outer.codec=topk_2bit without outer.error_feed"),
        (
            {"method": "sparseloco", "codec": "int4", "top_k": 8},
            "top_k=8 has an effect only with outer.codec=",
        ),
        (
            {"method": "sparseloco", "codec": "int4", "error_feedback": False, "feedback_decay": 0.9},
            "feedback_decay=0.9 has an effect only with outer.error_feedback=True",
        ),
        ({"method": "diloco", "top_k": 8}, "outer.top_k=8 has no meaning for method=diloco"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        from_config(OuterConfig(**settings))


@pytest.mark.parametrize(("name", "value"), [("top_k", 0), ("top_k", 4097), ("feedback_decay", 1.1)])
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"outer.{name}={value} must lie in"):
        OuterConfig(method="sparseloco", **{name: value})  # type: ignore[arg-type]


def test_the_guard_does_not_take_what_feedback_has_saved_up_for_a_fault() -> None:
    """The same outer gradient over and over: a value is sent with all that was kept of it, and the mean is believed."""
    fragment = Fragment(0, ("matrix",), ((128, 128),), 128 * 128)
    codec = codecs.feedback(codecs.topk_2bit(), 0.95)
    grad = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(0))
    norm, states = float(grad.norm()), [codec.init(fragment)] * 2
    verdict = judge(Guard(clip=1.01, drop=2.0), Ordinary(norm), [Said(norm)] * 2)
    longest = 0.0
    for _ in range(100):
        arrivals = transfer(codec, [grad] * 2, states, fragment)
        states = [arrival.result.state for arrival in arrivals]
        assert math.isfinite(believed(float(square(arrivals[0].result.mean)), verdict))
        longest = max(longest, float(arrivals[0].result.mean.norm()) / norm)
    assert longest > 1.5


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_changes_no_bit(default: torch.dtype) -> None:
    """A script may have set another one."""
    fragment = Fragment(0, ("matrix",), ((70, 66),), 70 * 66)
    codec, grad = codecs.feedback(codecs.topk_2bit(), 0.95), torch.linspace(-1, 1, 70 * 66).sin()
    expected = transfer(codec, [grad], [codec.init(fragment)], fragment)[0].result.mean
    torch.set_default_dtype(default)
    try:
        found = transfer(codec, [grad], [codec.init(fragment)], fragment)[0].result.mean
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_tcp_sends_the_bytes_that_it_says_and_finds_the_same_bits() -> None:
    """Three regions, each to both others; in lockstep the same mean."""
    shapes = ((70, 66), (9,), (300, 8))
    numel = 70 * 66 + 9 + 300 * 8
    fragment = Fragment(0, ("a", "b", "c"), shapes, numel)
    codec = codecs.feedback(codecs.topk_2bit(), 0.95)
    grads = [torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def body(region: int, link: Link) -> tuple[Tensor, int]:
        begin = partial(codec.converse, grads[region], fragment, codec.init(fragment))
        arrival = link.mean(MeanRequest(begin, numel, lambda: Trailer(1.0), "x")).wait()
        return arrival.result.mean.clone(), arrival.bytes_sent

    expected = transfer(codec, grads, [codec.init(fragment)] * 3, fragment)[0].result.mean
    for mean, sent in run_over_tcp(3, body):
        assert torch.equal(mean, expected)
        assert (
            sent == 2 * 120 * 6
        )  # to two others, 120 bytes for each of 4 tiles, the vector, and the narrow matrix


def test_the_newer_methods_stand_beside_the_six() -> None:
    """Found by name, the six first; none in both tables."""
    assert list(known()) == [*METHODS, *NEWER]
    assert not METHODS.keys() & NEWER.keys()
