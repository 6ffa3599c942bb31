"""Radial-directional averaging: against its equation, with every codec that it takes, and what it does for M = 2, 4, 8."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_cocodc.errors import InputError
from hf_cocodc.link.base import Arrival, MeanRequest
from hf_cocodc.link.records import Trailer
from hf_cocodc.parts import codecs, fragments
from hf_cocodc.parts.fragments import Fragment
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.oracles.radial import plain_mean, radial_mean
from tests.parts.test_codecs import FRAGMENT, normal, transfer
from tests.processes.test_link import run_over_tcp
from tests.toys import global_of, llama, llama_adamw, run, train_llama

WEIGHTS = (1.0, 0.25, 0.5)
PARTLY = dataclasses.replace(FRAGMENT, outside=frozenset({0}), rows={4: (0, 20)})
"""Its first parameter is an embedding, its last one a piece of a parameter."""


def scaled(regions: int) -> list[Tensor]:
    """Outer gradients of very different norms."""
    return [10.0**region * normal(FRAGMENT.numel, region) for region in range(regions)]


def expected(grads: Sequence[Tensor], fragment: Fragment, weights: Sequence[float]) -> Tensor:
    parts = []
    for i, views in enumerate(zip(*(fragment.views(grad) for grad in grads), strict=True)):
        plain = i in fragment.outside or i in fragment.rows
        mean = plain_mean if plain else radial_mean
        exact = mean([np.asarray(view.double()).reshape(-1) for view in views], weights)
        parts.append(torch.from_numpy(np.asarray(exact)))
    return torch.cat(parts)


@pytest.mark.parametrize("regions", [1, 2, 3])
@pytest.mark.parametrize("fragment", [FRAGMENT, PARTLY], ids=["all", "without an embedding and rows"])
def test_the_mean_is_that_of_the_equation(fragment: Fragment, regions: int) -> None:
    """Every parameter of a block by norm and direction, the others plainly; by the shares of the regions."""
    codec, grads = codecs.radial(codecs.fp32()), scaled(regions)
    before = [grad.clone() for grad in grads]
    arrivals = transfer(codec, grads, [codec.init(fragment)] * regions, fragment, WEIGHTS[:regions])
    exact = expected(grads, fragment, WEIGHTS[:regions])
    for grad, arrival in zip(grads, arrivals, strict=True):
        torch.testing.assert_close(arrival.result.mean.double(), exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(arrival.result.own(), grad)
    assert all(map(torch.equal, grads, before))


@pytest.mark.parametrize("cosine", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("regions", [2, 4, 8])
def test_the_length_does_not_depend_on_the_number_of_regions(regions: int, cosine: float) -> None:
    """The table of `radial`: the plain mean of outer gradients with these cosines is shorter, the more there are."""
    fragment = Fragment(0, ("block",), ((100, 100),), 10_000)
    common = normal(10_000, 99)
    grads = [math.sqrt(cosine) * common + math.sqrt(1 - cosine) * normal(10_000, r) for r in range(regions)]
    length = float(torch.stack([grad.norm() for grad in grads]).mean())
    for codec, ratio in (
        (codecs.fp32(), math.sqrt((1 + (regions - 1) * cosine) / regions)),
        (codecs.radial(codecs.fp32()), 1.0),
    ):
        mean = transfer(codec, grads, [{}] * regions, fragment)[0].result.mean
        assert float(mean.norm()) / length == pytest.approx(ratio, abs=0.02)


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "int4", "fp4"])
def test_codecs_round_directions(name: str) -> None:
    """The mean has the exact norm and nearly the direction; with feedback the means of a constant come closer to it."""
    regions, grads = 3, scaled(3)
    exact = expected(grads, FRAGMENT, [1.0] * 3)
    plain = codecs.radial(getattr(codecs, name)())
    mean = transfer(plain, grads, [plain.init(FRAGMENT)] * regions)[0].result.mean.double()
    for one, other in zip(FRAGMENT.views(mean), FRAGMENT.views(exact), strict=True):
        assert float(one.norm()) == pytest.approx(float(other.norm()), rel=1e-5)
    error = float((mean - exact).norm() / exact.norm())
    assert error < 0.4
    codec = codecs.radial(codecs.feedback(getattr(codecs, name)()))
    states, total = [codec.init(FRAGMENT) for _ in range(regions)], torch.zeros_like(mean)
    for _ in range(10):
        arrivals = transfer(codec, grads, states)
        total += arrivals[0].result.mean
        states = [arrival.result.state for arrival in arrivals]
    assert float((total / 10 - exact).norm() / exact.norm()) < error


def test_what_is_zero_stays_zero() -> None:
    """A parameter that moves in no region, in one region only, or in opposite directions; and a region that sits out."""
    codec, fragment = codecs.radial(codecs.fp32()), Fragment(0, ("a", "b", "c"), ((2,), (2,), (2,)), 6)
    grads = [torch.tensor([0.0, 0, 3, 4, 1, 0]), torch.tensor([0.0, 0, 0, 0, -2, 0])]
    mean = transfer(codec, grads, [{}] * 2, fragment)[0].result.mean
    torch.testing.assert_close(mean, torch.tensor([0.0, 0, 1.5, 2, 0, 0]))
    mean = transfer(codec, [grads[0], torch.zeros(6)], [{}] * 2, fragment, [1.0, 0.0])[0].result.mean
    torch.testing.assert_close(mean, grads[0])


def test_a_region_that_hardly_moves_has_no_direction() -> None:
    """Its norm is too small to divide by in fp32: the mean stays finite, and half as long, as where it does not move at all."""
    codec, fragment = codecs.radial(codecs.fp32()), Fragment(0, ("a",), ((2,),), 2)
    grads = [torch.tensor([3.0, 4]), torch.tensor([0.0, 1e-44])]
    mean = transfer(codec, grads, [{}] * 2, fragment)[0].result.mean
    torch.testing.assert_close(mean, torch.tensor([1.5, 2]))


def test_tcp_sends_the_bytes_that_it_says_and_finds_the_same_bits() -> None:
    """Two messages, of three regions; in lockstep the same mean."""
    codec, grads = codecs.radial(codecs.int8()), scaled(3)

    def body(region: int, link: object) -> tuple[Tensor, int]:
        def begin() -> object:
            return codec.converse(grads[region], PARTLY, codec.init(PARTLY))

        told = Trailer(1.0)
        arrival = link.mean(MeanRequest(begin, PARTLY.numel, lambda: told, "x")).wait()  # type: ignore[attr-defined, arg-type]
        assert isinstance(arrival, Arrival)
        return arrival.result.mean.clone(), arrival.bytes_sent

    expected = transfer(codec, grads, [codec.init(PARTLY)] * 3, PARTLY)[0].result.mean
    for region, (mean, sent) in enumerate(run_over_tcp(3, body)):
        assert torch.equal(mean, expected)
        assert sent == codec.wire_bytes(PARTLY, region, 3)


def test_fragments_know_what_is_outside_the_blocks() -> None:
    """Embedding, last norm and head of a Llama, by every pattern; of a model without blocks nothing is."""
    model = llama(layers=2)
    for pattern in (fragments.whole(), fragments.strided(2), fragments.sequential(2, split_rows=True)):
        for fragment in pattern(model):
            names = {fragment.names[i] for i in fragment.outside}
            assert names == {name for name in fragment.names if ".layers." not in name}
    [fragment] = fragments.whole()(nn.Linear(2, 2))
    assert not fragment.outside


@pytest.mark.parametrize("method", ["diloco", "streaming", "co2", "cocodc", "dilocox"])
def test_one_region_alone_trains_as_with_a_plain_mean(method: str) -> None:
    """To rounding: its norm times its direction are its outer gradient."""

    def end(mean: str) -> Tensor:
        config = OuterConfig(
            method=method,
            sync_interval=4,
            mean=mean,
            codec="fp32",
            error_feedback=False,
            **({"num_fragments": 2, "overlap_steps": 2} if method in ("streaming", "cocodc") else {}),
            **({"sends_per_interval": 2} if method == "cocodc" else {}),
        )

        def live(region: object) -> Tensor:
            for step in range(12):
                train_llama(region, step)  # type: ignore[arg-type]
            return global_of(region)  # type: ignore[arg-type]

        return run(1, from_config(config), llama_adamw(), live)[0]

    torch.testing.assert_close(end("radial"), end("average"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mean": "radiall"}, "outer.mean='radiall' is not known. Did you mean 'radial'"),
        ({"mean": "radial", "codec": "lowrank"}, "outer.mean=radial with codec=lowrank"),
        ({"mean": "radial", "codec": "topk", "error_feedback": True}, "outer.mean=radial with codec=topk"),
        ({"mean": "radial", "method": "eager"}, "outer.mean='radial' has no meaning for method=eager"),
    ],
)
def test_what_it_cannot_do_is_refused(settings: dict, message: str) -> None:
    """With the reason."""
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        from_config(OuterConfig(**settings))
