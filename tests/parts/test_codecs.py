"""What every codec owes: exact bytes, a bounded error, the same mean in every region, nothing lost with feedback."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_cocodc.errors import InputError
from hf_cocodc.link.base import Arrival, MeanRequest, drive
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.link.records import Trailer
from hf_cocodc.parts import codecs
from hf_cocodc.parts.codecs.base import Codec, CodecState, Coder, Message, Plain, Reply, weighted_mean
from hf_cocodc.parts.codecs.block import Float4, Integers
from hf_cocodc.parts.codecs.cast import Cast
from hf_cocodc.parts.codecs.codebook import Codebook
from hf_cocodc.parts.codecs.lowrank import (
    LowRank,
    _orthonormal,
    effective_rank,
    lowrank,
    product,
    projection,
    share_of_rank,
)
from hf_cocodc.parts.codecs.topk import TopK
from hf_cocodc.parts.fragments import Fragment
from tests.oracles.codecs import e3m0_roundtrip, int4_roundtrip, int8_roundtrip
from tests.oracles.dilocox import lowrank_mean

FLOAT = torch.finfo(torch.float32)
FP32 = Cast(torch.float32)
BLOCK_CODERS = [Integers(8, 256), Integers(8, 3), Integers(4, 256), Integers(4, 6), Float4(64), Float4(2)]
CODERS: list[Coder] = [
    *BLOCK_CODERS,
    FP32,
    Cast(torch.bfloat16),
    TopK(3, 7, FP32),
    TopK(64, 4096, Integers(8, 64)),
    TopK(2, 100, Integers(4, 2)),
    Codebook(64),
    Codebook(5),
    TopK(6, 100, Codebook(6)),
]
CODECS: dict[str, Codec] = {
    "fp32": codecs.fp32(),
    "bf16": codecs.bf16(),
    "int8": codecs.int8(),
    "int4": codecs.int4(16),
    "fp4": codecs.fp4(),
    "codebook_2bit": codecs.codebook_2bit(16),
    "topk": codecs.topk(5, 64),
    "lowrank": codecs.lowrank(2),
    "lowrank, fp32": codecs.lowrank(3, FP32),
    "feedback of int4": codecs.feedback(codecs.int4(32)),
    "feedback of topk": codecs.feedback(codecs.topk(3, 50), decay=0.95),
    "feedback of lowrank": codecs.feedback(codecs.lowrank(1)),
    "feedback of topk_2bit": codecs.feedback(codecs.topk_2bit(40), decay=0.95),
}
quick = settings(derandomize=True, max_examples=40, database=None)
sizes = st.integers(0, 1500)
seeds = st.integers(0, 2**32)


def name_of(part: object) -> str:
    """A test's id: the coder's class and its whole numbers; functions by name."""
    numbers = [str(value) for value in vars(part).values() if isinstance(value, int)]
    return " ".join([getattr(part, "__name__", type(part).__name__), *numbers])


def normal(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def round_trip(coder: Coder, values: Tensor) -> Tensor:
    return coder.decode(coder.encode(values), values.numel())


def blocks_of(values: Tensor, block: int) -> Sequence[Tensor]:
    return values.split(block) if values.numel() else ()


def fragment_of(*shapes: tuple[int, ...], index: int = 0) -> Fragment:
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    return Fragment(index, tuple(f"p{i}" for i in range(len(shapes))), shapes, numel)


FRAGMENT = fragment_of((12, 20), (7,), (16, 3, 3, 3), (), (20, 30))


def transfer(
    codec: Codec,
    outer_grads: Sequence[Tensor],
    states: Sequence[CodecState],
    fragment: Fragment = FRAGMENT,
    weights: Sequence[float] | None = None,
) -> list[Arrival]:
    """One transfer of a fragment between as many regions as there are outer gradients."""
    shares = weights or [1.0] * len(outer_grads)
    return run_in_lockstep(
        len(outer_grads),
        lambda region, link: link.mean(
            MeanRequest(
                partial(codec.converse, outer_grads[region], fragment, states[region]),
                fragment.numel,
                lambda: Trailer(shares[region]),
                "x",
            )
        ).wait(),
    )


def matrix_of_rank(rows: int, cols: int, rank: int, seed: int) -> Tensor:
    return normal(rows * rank, seed).view(rows, rank) @ normal(rank * cols, seed + 1).view(rank, cols)


# Coders


@pytest.mark.parametrize("coder", CODERS, ids=name_of)
@quick
@given(numel=sizes, seed=seeds)
@example(numel=0, seed=0)
@example(numel=1, seed=0)
def test_bytes_are_as_many_as_promised(coder: Coder, numel: int, seed: int) -> None:
    """Any number of values, filling whole blocks or not, gives num_bytes bytes and comes back as fp32 of its length."""
    payload = coder.encode(normal(numel, seed))
    assert payload.dtype == torch.uint8 and payload.shape == (coder.num_bytes(numel),)
    values = coder.decode(payload, numel)
    assert values.dtype == torch.float32 and values.shape == (numel,)


@pytest.mark.parametrize("coder", CODERS, ids=name_of)
@quick
@given(numel=sizes, seed=seeds, num_blocks=st.integers(1, 9))
def test_parts_stand_for_themselves(coder: Coder, numel: int, seed: int, num_blocks: int) -> None:
    """Part after part, cut at multiples of the block: each as it is alone, all as they are together."""
    values = normal(numel, seed)
    parts = values.split(coder.block * num_blocks)
    decoded = [coder.decode(coder.encode(part), part.numel()) for part in parts]
    assert torch.equal(torch.cat(decoded), round_trip(coder, values))


def test_bytes_a_value() -> None:
    """The figures in the docstrings."""
    numel = 1 << 20
    bytes_a_value = {
        "int8": (codecs.int8(), 1 + 4 / 256),
        "int4": (codecs.int4(), 0.5 + 4 / 256),
        "fp4": (codecs.fp4(), 0.5 + 4 / 64),
        "codebook_2bit": (codecs.codebook_2bit(), 0.25 + 8 / 256),
        "topk": (codecs.topk(), (4 + 64 + 96) / 4096),
        "topk_2bit": (codecs.topk_2bit(), (8 + 16 + 96) / 4096),
    }
    for codec, expected in bytes_a_value.values():
        assert codec.wire_bytes(fragment_of((numel,)), 0, 2) == numel * expected


@pytest.mark.parametrize("coder", BLOCK_CODERS, ids=name_of)
@quick
@given(numel=sizes, seed=seeds, exponent=st.integers(-149, 126), spread=st.integers(0, 60))
@example(numel=300, seed=0, exponent=126, spread=0)
@example(numel=300, seed=0, exponent=-149, spread=0)
def test_error_is_bounded_at_every_scale(
    coder: Integers | Float4, numel: int, seed: int, exponent: int, spread: int
) -> None:
    """Finite values of any size, denormal to the largest, come back finite and within the format's error."""
    exponents = normal(numel, seed + 1).mul(spread).add(exponent).clamp(-149, 126)
    values = torch.ldexp(normal(numel, seed).clamp(-1, 1), exponents).clamp(-FLOAT.max, FLOAT.max)
    if exponent == 126:
        values[::5] = FLOAT.max
    decoded = round_trip(coder, values)
    assert decoded.isfinite().all()
    for x, y in zip(
        blocks_of(values.double(), coder.block), blocks_of(decoded.double(), coder.block), strict=True
    ):
        absmax = max(x.abs().max().item(), FLOAT.tiny)
        if isinstance(coder, Integers):
            bound = torch.full_like(x, max(absmax / coder.top, FLOAT.tiny) / 2)
        else:
            bound = torch.maximum(x.abs() / 3, torch.tensor(absmax * 2.0**-7, dtype=torch.float64))
        assert ((x - y).abs() <= bound + 1e-6 * absmax).all()


@pytest.mark.parametrize("coder", CODERS, ids=name_of)
@quick
@given(numel=sizes)
def test_zeros_stay_zero(coder: Coder, numel: int) -> None:
    """A block of zeros has no scale, and is zero again."""
    assert torch.equal(round_trip(coder, torch.zeros(numel)), torch.zeros(numel))


@pytest.mark.parametrize("coder", CODERS[:6] + CODERS[8:], ids=name_of)
@quick
@given(numel=st.integers(1, 1500), seed=seeds, value=st.sampled_from([np.inf, -np.inf, np.nan]))
def test_values_that_are_not_finite_stay_in_their_block(
    coder: Coder, numel: int, seed: int, value: float
) -> None:
    """Infinity and NaN do not crash, do not turn into numbers, and leave every other block as it was."""
    values = normal(numel, seed)
    at = seed % numel
    hurt = values.clone()
    hurt[at] = value
    decoded = round_trip(coder, hurt)
    assert not decoded[at].isfinite()
    start = at // coder.block * coder.block
    others = torch.ones(numel, dtype=torch.bool)
    others[start : start + coder.block] = False
    assert torch.equal(decoded[others], round_trip(coder, values)[others])


@pytest.mark.parametrize(
    ("coder", "oracle"),
    [
        (Integers(8, 256), int8_roundtrip),
        (Integers(8, 5), int8_roundtrip),
        (Integers(4, 256), int4_roundtrip),
        (Integers(4, 10), int4_roundtrip),
        (Float4(64), e3m0_roundtrip),
        (Float4(18), e3m0_roundtrip),
    ],
    ids=name_of,
)
@quick
@given(numel=sizes, seed=seeds, exponent=st.integers(-80, 100), spread=st.integers(0, 20))
def test_block_coders_are_their_oracles(
    coder: Integers | Float4, oracle: Callable, numel: int, seed: int, exponent: int, spread: int
) -> None:
    """What comes back is what the NumPy reference says, or, where rounding decides a tie, just as close to x."""
    values = normal(numel, seed) * torch.exp2(normal(numel, seed + 1).mul(spread).clamp(-20, 20) + exponent)
    decoded = round_trip(coder, values).double()
    expected = torch.from_numpy(oracle(values.numpy(), coder.block))
    triples = (blocks_of(t, coder.block) for t in (values.double(), decoded, expected))
    for x, ours, theirs in zip(*triples, strict=True):
        tolerance = 1e-6 * x.abs().max()
        same = (ours - theirs).abs() <= tolerance
        tie = ((x - ours).abs() - (x - theirs).abs()).abs() <= tolerance
        assert (same | tie).all()
        assert same.float().mean() > 0.99 or len(x) < 100, "ties are rare"


def test_ties_go_as_written() -> None:
    """Integers: half to even. E3M0: to the smaller magnitude; the border above zero is 2^-7."""
    values = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert round_trip(Integers(4, 6), values).tolist() == [7, 0, 2, 2, 0, -2]
    powers = [2.0**power for power in range(-6, 1)]
    borders = [2.0**-7] + [1.5 * power for power in powers[:-1]]
    above = [border * (1 + 2.0**-20) for border in borders]
    values = torch.tensor([1.0, *borders, *[-x for x in borders], *above, *powers])
    expected = [1.0, 0.0, *powers[:-1], 0.0, *[-x for x in powers[:-1]], *powers, *powers]
    assert round_trip(Float4(64), values).tolist() == expected


def test_bytes_of_a_block() -> None:
    """The wire format, byte by byte: fp32 scales, then codes; two halves of a block share their bytes."""
    values = torch.tensor([7.0, -7, 1, 2, 3, 0, 14, 4])
    payload = Integers(4, 6).encode(values)
    assert payload[:8].view(torch.float32).tolist() == [1, 2]
    assert payload[8:].tolist() == [15 | 10 << 4, 1 | 11 << 4, 9 | 8 << 4, 15 | 8 << 4, 10 | 8 << 4]
    payload = Integers(8, 4).encode(torch.tensor([127.0, -127, 1, 0, 254]))
    assert payload[8:].view(torch.int8).tolist() == [127, -127, 1, 0, 127]
    payload = Float4(4).encode(torch.tensor([1.0, -0.5, 2.0**-6, 0]))
    assert payload[4:].tolist() == [7 | 1 << 4, 6 + 8]
    for coder in (
        Integers(8, 4),
        Integers(4, 4),
        Float4(4),
    ):  # no division by zero, nor by a number too small
        for values in (torch.zeros(4), torch.full((4,), 2.0**-149)):
            assert coder.encode(values)[:4].view(torch.float32).item() == FLOAT.tiny


def plain_payload(coder: Integers | Float4, values: Tensor) -> bytes:
    """The payload of whole blocks as the docstrings define it, in fp32, with nothing done for speed."""
    rows = values.numpy().reshape(-1, coder.block)
    with np.errstate(all="ignore"):
        absmax = np.abs(rows).max(axis=1, keepdims=True)
        finite = np.isfinite(absmax)
        if isinstance(coder, Integers):
            limit = np.float32(FLOAT.max / coder.top)
            if float(limit) * coder.top > FLOAT.max:
                limit = np.nextafter(limit, np.float32(0))
            scale = np.clip(absmax / np.float32(coder.top), np.float32(FLOAT.tiny), limit)
            codes = np.where(finite, np.rint(rows / scale) + (8 if coder.top == 7 else 0), 0).astype(np.int32)
        else:
            scale = np.maximum(absmax, np.float32(FLOAT.tiny))
            borders = np.array([2.0**-7, *(1.5 * 2.0**power for power in range(-6, 0))], dtype=np.float32)
            magnitudes = (np.abs(rows / scale)[..., None] > borders).sum(axis=-1)
            codes = np.where(finite, magnitudes + 8 * np.signbit(rows), 0)
    if coder.per_byte == 2:
        codes = codes[:, : coder.block // 2] + 16 * codes[:, coder.block // 2 :]
    return np.where(finite, scale, np.float32(np.nan)).tobytes() + codes.astype(np.uint8).tobytes()


@pytest.mark.parametrize("coder", [Integers(8, 256), Integers(4, 256), Float4(64)], ids=name_of)
def test_bytes_are_those_of_the_plain_formula(coder: Integers | Float4) -> None:
    """Bit for bit at every scale, on ties, just beside borders, and in blocks that are not finite."""
    x = normal(1 << 16, 0)
    powers = torch.ldexp(x.sign(), normal(1 << 16, 1).mul(4).sub(4).clamp(max=0).round())
    beside = torch.tensor([1, 0.75, 1 - 2.0**-24, 1 + 2.0**-23, 1.5, 1.5 + 2.0**-23]).repeat(11_000)[: len(x)]
    hurt = x.clone()
    hurt[::999], hurt[5::5000], hurt[7::7777] = torch.nan, torch.inf, -torch.inf
    exponents = normal(256, 2).mul(50).clamp(-149, 126).round().repeat_interleave(256)
    for values in (
        x,
        torch.ldexp(x.clamp(-1, 1), exponents),
        x * 2.0**-126,
        x * 2.0**-145,
        (x * 1e38).clamp(-FLOAT.max, FLOAT.max),
        torch.where(x > 2, FLOAT.max, x),
        x.mul(100).round() / 2,
        powers * beside,
        x.mul(0),
        hurt,
    ):
        assert coder.encode(values).numpy().tobytes() == plain_payload(coder, values)


@pytest.mark.parametrize(
    "coder",
    [Cast(torch.bfloat16), Cast(torch.float16), Integers(8, 256), Integers(4, 256), Float4(64)],
    ids=name_of,
)
def test_rounding_has_no_bias(coder: Coder) -> None:
    """The mean error of many values is zero within 4 standard errors: symmetric ones, and positive ones.

    The positive ones are uniform up to their block's largest, where rounding to the nearest errs as often up as down.
    """
    positive = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0))
    positive.view(-1, 64)[:, 0] = 1
    for values in (normal(1 << 20, 0), positive):
        error = (round_trip(coder, values) - values).double()
        assert error.mean().abs() <= 4 * error.std() / len(error) ** 0.5


def test_a_long_vector_is_its_pieces() -> None:
    """Values are worked on piece by piece: a vector longer than a piece gives what its parts give."""
    values = normal((1 << 18) + 4096 + 100, 0)
    for coder in (Integers(8, 256), Integers(4, 96), Float4(64), TopK(64, 4096, Integers(8, 64))):
        cut = coder.block * 100
        parts = [round_trip(coder, values[:cut]), round_trip(coder, values[cut:])]
        assert torch.equal(round_trip(coder, values), torch.cat(parts))


@pytest.mark.parametrize("coder", [*CODERS, Cast(torch.float16), Integers(8, 40_000)], ids=name_of)
def test_torch_threads_change_nothing(coder: Coder) -> None:
    """The steps are larger where torch has one thread only; the bytes and the values are the same."""
    values, before = normal(300_001, 0), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            payload = coder.encode(values)
            mean = weighted_mean([payload, payload], [1, 2.5], coder, len(values))
            found.append((payload, coder.decode(payload, len(values)), mean))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


@quick
@given(numel=sizes, seed=seeds, k=st.integers(1, 9), chunk=st.integers(9, 300), levels=st.integers(1, 50))
def test_topk_keeps_the_largest(numel: int, seed: int, k: int, chunk: int, levels: int) -> None:
    """The k largest magnitudes of each chunk come back, of equal ones those of lower position; the rest is zero."""
    values = (normal(numel, seed) * levels).round()  # whole numbers: many are equal
    expected = torch.zeros(numel)
    for start in range(0, numel, chunk):
        part = values[start : start + chunk].numpy()
        kept = start + np.argsort(-np.abs(part), kind="stable")[:k]
        expected[kept] = values[kept]
    assert torch.equal(round_trip(TopK(k, chunk, FP32), values), expected)


@pytest.mark.parametrize(("bits", "bound"), [(4, 1 / 14), (8, 1 / 254), (16, 2.0**-8), (32, 0.0)])
def test_topk_rounds_what_it_keeps_on_the_scale_of_the_chunk(bits: int, bound: float) -> None:
    """Kept values have the error of their format; the largest of another chunk has no part in it."""
    values = normal(8192, 0)
    values[:4096] *= 1e6
    exact = round_trip(TopK(64, 4096, FP32), values)
    coder = codecs.topk(bits=bits)
    assert isinstance(coder, Plain)
    error = (round_trip(coder.coder, values) - exact).abs()
    for x, e in zip(exact.split(4096), error.split(4096), strict=True):
        assert e.max() <= bound * x.abs().max() * (1 + 1e-5)


def test_settings_that_cannot_work_are_said() -> None:
    """Odd blocks of half bytes, k above the chunk, ranks the wrong way round."""
    for make in (
        lambda: codecs.int4(33),
        lambda: codecs.fp4(0),
        lambda: codecs.topk(65, 64),
        lambda: codecs.topk(64, 8192),
        lambda: codecs.topk(bits=3),
        lambda: codecs.topk_2bit(5000),
        lambda: codecs.lowrank(4, rank_min=5),
        lambda: codecs.lowrank(0),
    ):
        with pytest.raises(InputError):
            make()


# Codecs across regions


@pytest.mark.parametrize("num_regions", [1, 2, 3])
@pytest.mark.parametrize("name", CODECS)
def test_regions_agree_and_send_what_was_promised(name: str, num_regions: int) -> None:
    """Over four transfers every region holds the same mean, bitwise, having sent wire_bytes; none writes to its input."""
    codec = CODECS[name]
    states = [codec.init(FRAGMENT) for _ in range(num_regions)]
    for step in range(4):
        outer_grads = [normal(FRAGMENT.numel, 10 * step + region) for region in range(num_regions)]
        before = [outer_grad.clone() for outer_grad in outer_grads]
        arrivals = transfer(codec, outer_grads, states)
        for region, arrival in enumerate(arrivals):
            assert torch.equal(arrival.result.mean, arrivals[0].result.mean)
            assert arrival.result.mean.shape == arrival.result.own().shape == (FRAGMENT.numel,)
            assert arrival.result.mean.dtype == torch.float32
            assert arrival.bytes_sent == codec.wire_bytes(FRAGMENT, region, num_regions)
            assert torch.equal(outer_grads[region], before[region])
        if num_regions <= 2 or "topk" in name:
            own = sum(arrival.result.own() for arrival in arrivals)
            torch.testing.assert_close(arrivals[0].result.mean, own / num_regions, atol=1e-5, rtol=0)
        states = [arrival.result.state for arrival in arrivals]


@pytest.mark.parametrize("name", CODECS)
def test_a_transfer_can_be_repeated(name: str) -> None:
    """Sending again from the same state, as after a failure, gives the same bits: a conversation changes no state."""
    codec = CODECS[name]
    outer_grads = [normal(FRAGMENT.numel, region) for region in range(2)]
    states = [a.result.state for a in transfer(codec, outer_grads, [codec.init(FRAGMENT) for _ in range(2)])]
    [first, _], [again, _] = (transfer(codec, outer_grads, states) for _ in range(2))
    assert torch.equal(first.result.mean, again.result.mean)
    assert torch.equal(first.result.own(), again.result.own())


@pytest.mark.parametrize("name", CODECS)
def test_a_region_that_sits_out_has_no_part(name: str) -> None:
    """With weight 0 for one of two regions the mean is the other's own part."""
    codec = CODECS[name]
    outer_grads = [normal(FRAGMENT.numel, 0), torch.zeros(FRAGMENT.numel)]
    arrivals = transfer(codec, outer_grads, [codec.init(FRAGMENT) for _ in range(2)], weights=[1.0, 0.0])
    torch.testing.assert_close(arrivals[1].result.mean, arrivals[0].result.own(), atol=1e-6, rtol=1e-6)


def test_topk_of_many_regions_drops_nothing_from_the_mean() -> None:
    """Four regions with their largest values in different places: all of them are in the mean."""
    fragment = fragment_of((64,))
    outer_grads = [torch.zeros(64) for _ in range(4)]
    for region, outer_grad in enumerate(outer_grads):
        outer_grad[region * 8 : region * 8 + 3] = 1 + region
    codec = codecs.topk(3, 16, bits=32)
    for arrival in transfer(codec, outer_grads, [{}] * 4, fragment):
        torch.testing.assert_close(arrival.result.mean, torch.stack(outer_grads).mean(0))


# Feedback


@quick
@given(
    seed=seeds,
    decay=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    name=st.sampled_from(["fp32", "int8", "int4", "fp4", "codebook_2bit", "topk", "lowrank"]),
    num_regions=st.integers(1, 3),
)
def test_what_was_meant_is_what_was_sent_and_the_residual(
    seed: int, decay: float, name: str, num_regions: int
) -> None:
    """meant = Delta + decay residual = sent + next residual, in every region, over several transfers."""
    codec = codecs.feedback(CODECS[name], decay)
    states = [codec.init(FRAGMENT) for _ in range(num_regions)]
    for step in range(3):
        outer_grads = [normal(FRAGMENT.numel, seed + 7 * step + region) for region in range(num_regions)]
        arrivals = transfer(codec, outer_grads, states)
        for outer_grad, state, arrival in zip(outer_grads, states, arrivals, strict=True):
            meant = outer_grad + decay * state["residual"]
            sent = arrival.result.own() + arrival.result.state["residual"]
            torch.testing.assert_close(sent, meant, atol=1e-6, rtol=1e-6)
        states = [arrival.result.state for arrival in arrivals]


@pytest.mark.parametrize("name", ["int4", "fp4", "codebook_2bit", "topk", "lowrank"])
def test_feedback_sends_everything_in_the_end(name: str) -> None:
    """The mean of the means of a constant outer gradient comes close to it, where without feedback it does not."""
    outer_grads = [normal(FRAGMENT.numel, region) for region in range(2)]
    exact = torch.stack(outer_grads).mean(0)

    def error(codec: Codec, steps: int = 40) -> float:
        states, total = [codec.init(FRAGMENT) for _ in range(2)], torch.zeros(FRAGMENT.numel)
        for _ in range(steps):
            arrivals = transfer(codec, outer_grads, states)
            total += arrivals[0].result.mean
            states = [arrival.result.state for arrival in arrivals]
        return ((total / steps - exact).norm() / exact.norm()).item()

    assert error(codecs.feedback(CODECS[name])) < 0.35 * error(CODECS[name])


@pytest.mark.parametrize("num_regions", [1, 2, 3])
def test_what_fp16_cannot_hold_travels_later(num_regions: int) -> None:
    """A value beyond 65504 is sent as 65504, also where a mean is encoded again; the residual has the rest. NaN stays NaN."""
    codec = codecs.feedback(codecs.fp16())
    states = [codec.init(FRAGMENT) for _ in range(num_regions)]
    for sent, rest in ((-65504, -1e5 + 65504), (-65504, 2 * (-1e5 + 65504))):
        grads = [torch.full((FRAGMENT.numel,), -1e5) for _ in range(num_regions)]
        arrivals = transfer(codec, grads, states)
        states = [arrival.result.state for arrival in arrivals]
        assert torch.equal(arrivals[0].result.mean, torch.full((FRAGMENT.numel,), float(sent)))
        assert torch.equal(states[0]["residual"], torch.full((FRAGMENT.numel,), rest))
    values = torch.tensor([65519.0, 65504.0, -65520.0, 1e38, math.nan, 6e-8])
    sent = Cast(torch.float16).encode(values).view(torch.float16)
    torch.testing.assert_close(sent[:4], torch.tensor([65504, 65504, -65504, 65504]).half())
    assert torch.equal(sent[4:].isnan(), torch.tensor([True, False]))
    assert sent[5] == values[5].half()


# Low rank


@pytest.mark.parametrize("num_regions", [1, 2, 3])
def test_low_rank_is_exact_where_it_can_be(num_regions: int) -> None:
    """Full rank, or a mean whose rank is not above the rank sent, through fp32: the exact mean."""
    fragment = fragment_of((12, 20), (7,), (30, 25))
    full = [normal(fragment.numel, region) for region in range(num_regions)]
    thin = [
        torch.cat(
            [matrix_of_rank(12, 20, 1, r).ravel(), normal(7, r), matrix_of_rank(30, 25, 1, r + 9).ravel()]
        )
        for r in range(num_regions)
    ]
    for codec, outer_grads in ((lowrank(30, FP32), full), (lowrank(num_regions, FP32), thin)):
        arrivals = transfer(codec, outer_grads, [codec.init(fragment)] * num_regions, fragment)
        for outer_grad, arrival in zip(outer_grads, arrivals, strict=True):
            exact = torch.stack(outer_grads).mean(0)
            torch.testing.assert_close(arrival.result.mean, exact, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(arrival.result.own()[240:247], outer_grad[240:247])
    assert lowrank(30, FP32).wire_bytes(fragment, 0, 2) == 4 * fragment.numel
    assert lowrank(2, FP32).wire_bytes(fragment, 0, 2) == 4 * (2 * (12 + 20 + 30 + 25) + 7)


@pytest.mark.parametrize("num_regions", [1, 2, 3])
def test_low_rank_is_its_oracle(num_regions: int) -> None:
    """Three warm-started transfers are those of the NumPy reference: the mean, and what each region sent."""
    rows, cols, rank = 14, 18, 3
    fragment = fragment_of((rows, cols))
    codec = lowrank(rank, FP32)
    states = [codec.init(fragment) for _ in range(num_regions)]
    Q = states[0]["q"].view(rank, cols).T.double().numpy()
    for step in range(3):
        deltas = [normal(fragment.numel, 5 * step + region) for region in range(num_regions)]
        arrivals = transfer(codec, deltas, states, fragment)
        mean, Q, sent = lowrank_mean([delta.view(rows, cols).double().numpy() for delta in deltas], Q)
        for arrival, own in zip(arrivals, sent, strict=True):
            np.testing.assert_allclose(arrival.result.mean.view(rows, cols), mean, atol=1e-5)
            np.testing.assert_allclose(arrival.result.own().view(rows, cols), own, atol=1e-5)
        states = [arrival.result.state for arrival in arrivals]
        unit = Q / np.abs(Q).max(axis=0)
        np.testing.assert_allclose(states[0]["q"].view(rank, cols).T, unit, atol=1e-4)


class OfProducts(TorchDispatchMode):
    """Notes the types of the matrices that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.types |= {each.dtype for each in args if isinstance(each, Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CODECS)
def test_no_setting_of_a_script_changes_a_product(name: str) -> None:
    """Products of fp32 matrices follow `torch.set_float32_matmul_precision` (TF32 on GPUs, bf16 on CPUs): here there are none."""
    codec = CODECS[name]

    def exchange(message: Message) -> Reply:
        values = round_trip(message.coder, message.values)
        return Reply(values, lambda: values)

    with OfProducts() as products:
        drive(codec.converse(normal(FRAGMENT.numel, 1), FRAGMENT, codec.init(FRAGMENT)), exchange)
    assert products.types == ({torch.float64} if "lowrank" in name else set())


def test_a_product_is_summed_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part by part: the fp32 numbers next to the true sums."""
    left, right = normal(70 * 300, 1).view(70, 300), normal(300 * 5, 2).view(300, 5)
    exact = (left.double() @ right.double()).float()
    monkeypatch.setitem(product.__globals__, "SLICE", 300 * 16)
    into = torch.empty(70, 5)
    assert product(left, right, into) is into
    for found in (product(left, right), into, projection(left, right), projection(right.T, left.T).T):
        assert torch.equal(found, exact)


def test_warm_starts_are_equal_everywhere_and_leave_the_random_state_alone() -> None:
    """The first Q depends on nothing but the fragment's index and the matrix's position."""
    codec = lowrank(2)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = codec.init(FRAGMENT)["q"]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(codec.init(FRAGMENT)["q"], first)
    other = codec.init(Fragment(1, FRAGMENT.names, FRAGMENT.shapes, FRAGMENT.numel))["q"]
    assert not torch.equal(other, first)
    assert first.numel() == 2 * (20 + 27 + 30) and first.abs().max() <= 1
    assert first[:20].ne(first[20:40]).any(), "columns differ"


def settle(codec: LowRank, rank: int, steps: int, num_regions: int = 2) -> list[list[CodecState]]:
    """The states of all regions after each of `steps` transfers of matrices of a common rank."""
    fragment = fragment_of((40, 60), (9,))
    states, history = [codec.init(fragment) for _ in range(num_regions)], []
    for step in range(steps):
        grads = [
            torch.cat([matrix_of_rank(40, 60, rank, step).ravel() * (1 + r), normal(9, r)])
            for r in range(num_regions)
        ]
        arrivals = transfer(codec, grads, states, fragment)
        for region, arrival in enumerate(arrivals):
            at_this_rank = lowrank(states[region]["rank"], codec.coder)
            assert arrival.bytes_sent == at_this_rank.wire_bytes(fragment, region, num_regions)
            assert arrival.bytes_sent <= codec.wire_bytes(fragment, region, num_regions)
        states = [arrival.result.state for arrival in arrivals]
        history.append(states)
    return history


@pytest.mark.parametrize("num_regions", [2, 3])
def test_the_rank_follows_the_spectrum(num_regions: int) -> None:
    """Outer gradients of rank 3 bring a rank of 12 down to 3 over the window, equally everywhere, and the bytes with it."""
    codec = lowrank(12, FP32, rank_min=1, energy=0.9999, window=2)
    history = settle(codec, 3, 6, num_regions)
    assert [states[0]["rank"] for states in history] == [12, 3, 3, 3, 3, 3]
    assert [share_of_rank(states[0]) for states in history[:2]] == [1, 0.25]
    for states in history:
        for state in states:
            assert state["rank"] == states[0]["rank"] and torch.equal(state["q"], states[0]["q"])


def test_the_rank_stays_within_its_limits() -> None:
    """Not below rank_min; fixed where rank_min is not given."""
    assert settle(lowrank(12, FP32, rank_min=5, window=2), 3, 4)[-1][0]["rank"] == 5
    assert settle(lowrank(12, FP32), 3, 4)[-1][0]["rank"] == 12


def test_a_lower_rank_is_as_if_it_had_always_been_so() -> None:
    """After the rank has fallen, the estimate is that of the leading columns of the same Q."""
    codec = lowrank(6, FP32)
    fragment = fragment_of((30, 40))
    state = codec.init(fragment)
    delta = normal(1200, 0)
    [fallen] = transfer(codec, [delta], [{**state, "rank": 2}], fragment)
    expected, _, _ = lowrank_mean([delta.view(30, 40).double().numpy()], state["q"].view(6, 40)[:2].T.numpy())
    np.testing.assert_allclose(fallen.result.mean.view(30, 40), expected, atol=1e-5)
    assert torch.equal(fallen.result.state["q"].view(6, 40)[2:], state["q"].view(6, 40)[2:])


def test_the_rank_is_a_mean_rounded_up() -> None:
    """Effective ranks 4, 3 and, now, 3 make a rank of 4; without the third the window is not full."""
    fragment = fragment_of((40, 60))
    codec = lowrank(12, FP32, rank_min=1, energy=0.9999, window=3)
    delta = matrix_of_rank(40, 60, 3, 0).ravel()
    for before, after in (([4, 3], 4), ([9, 4, 3], 4), ([4], 12)):
        [arrival] = transfer(codec, [delta], [{**codec.init(fragment), "effective_ranks": before}], fragment)
        assert arrival.result.state["effective_ranks"] == [*before, 3][-3:]
        assert arrival.result.state["rank"] == after


def test_an_overflowing_factor_does_not_become_the_warm_start() -> None:
    """A Q that is infinite although P is not leaves the Q before it."""
    codec, fragment = lowrank(1, FP32), fragment_of((12, 20))
    delta = torch.zeros(12, 20)
    delta[:, 0] = 3e38
    state = codec.init(fragment)
    [arrival] = transfer(codec, [delta.ravel()], [state], fragment)
    assert not arrival.result.mean.isfinite().all()
    assert torch.equal(arrival.result.state["q"], state["q"])


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 3e38])
def test_a_transfer_that_says_nothing_leaves_the_warm_start(value: float) -> None:
    """Zeros and what is not finite change neither Q nor the ranks, and do not crash."""
    codec = lowrank(2, rank_min=1, window=1)
    state = codec.init(FRAGMENT)
    [arrival] = transfer(codec, [torch.full((FRAGMENT.numel,), value)], [state])
    assert arrival.result.state["rank"] == 2 and arrival.result.state["effective_ranks"] == []
    assert torch.equal(arrival.result.state["q"], state["q"])
    if value == 0:
        assert torch.equal(arrival.result.mean, torch.zeros(FRAGMENT.numel))


def test_effective_rank_is_the_smallest_that_holds_the_energy() -> None:
    """Squared singular values 64, 32, 4 of one factor, and 16, 4, 4 of another: together 80, 36, 8."""
    one = torch.diag(torch.tensor([8.0, 32**0.5, 2.0]))
    two = torch.zeros(3, 5)
    two[:, :3] = torch.diag(torch.tensor([4.0, 2.0, 2.0]))
    assert [effective_rank([one], energy) for energy in (0.6, 0.9, 0.95, 0.97, 1.0)] == [1, 2, 2, 3, 3]
    assert [effective_rank([one, two], energy) for energy in (0.64, 0.66, 0.93, 0.95)] == [1, 2, 2, 3]
    turned = torch.linalg.qr(normal(9, 0).view(3, 3))[0] @ one
    assert effective_rank([turned], 0.9) == 2


def test_the_share_of_rank_looks_through_feedback() -> None:
    """The share of the first rank in force, wherever in the state it is; 1 for codecs without a rank."""
    codec = codecs.feedback(lowrank(8, rank_min=1))
    state = codec.init(FRAGMENT)
    assert share_of_rank(state) == 1
    assert share_of_rank({**state, "codec": {**state["codec"], "rank": 2}}) == 0.25
    assert share_of_rank({}) == share_of_rank(codecs.feedback(codecs.int8()).init(FRAGMENT)) == 1


def test_exports_are_sorted_and_there() -> None:
    """`codecs.__all__` names every codec, in order."""
    assert codecs.__all__ == sorted(codecs.__all__)
    assert all(callable(getattr(codecs, name)) for name in codecs.__all__)


def test_directions_that_are_only_noise_are_left_out() -> None:
    """Where the mean has fewer directions than columns, P has zeros: what a QR puts there differs between processors."""
    thin = torch.outer(torch.linspace(-1, 1, 40), torch.linspace(1, 2, 30))
    sketch = thin @ torch.rand(30, 5, generator=torch.Generator().manual_seed(0))
    basis = _orthonormal(sketch.T)
    assert torch.equal(basis[1:], torch.zeros(4, 40))
    torch.testing.assert_close(basis[0].norm(), torch.tensor(1.0))
