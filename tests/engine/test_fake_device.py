"""Parameters on an accelerator that is none: nothing meets across devices, and training never waits for the device."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.base import drive
from hf_cocodc.newer import known
from hf_cocodc.parts import codecs, merges, outer
from hf_cocodc.parts.codecs.base import Codec, mean_of
from hf_cocodc.parts.fragments import Fragment
from hf_cocodc.parts.guard import Guard
from hf_cocodc.parts.info import MergeInfo, MergeSlice, OuterInfo, OuterSlice
from hf_cocodc.parts.tensors.flat import moved, tensors_in
from hf_cocodc.parts.tensors.memory import HOST, Home
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from hf_cocodc.settings.outer import COMPENSATIONS
from tests.benchmarks import passes
from tests.fake import Fake, FakeLink, Waited, fake_tensors
from tests.far import FAR
from tests.toys import Blocks

SHAPES = ((130, 70), (64, 64), (7, 5, 3), (300,), (1,))
FRAGMENT = Fragment(
    0, tuple(map(str, range(len(SHAPES)))), SHAPES, sum(torch.Size(each).numel() for each in SHAPES)
)
PLAIN: dict[str, Callable[[], Codec]] = {
    "fp32": codecs.fp32,
    "bf16": codecs.bf16,
    "fp16": codecs.fp16,
    "int8": codecs.int8,
    "int4": codecs.int4,
    "fp4": codecs.fp4,
    "codebook_2bit": codecs.codebook_2bit,
    "topk": codecs.topk,
    "topk in 16 bits": lambda: codecs.topk(bits=16),
}
CODECS = {
    **PLAIN,
    "topk_2bit": codecs.topk_2bit,
    "lowrank": lambda: codecs.lowrank(4),
    **{
        f"feedback of {name}": lambda inner=inner: codecs.feedback(inner(), decay=0.95)
        for name, inner in {
            "int8": codecs.int8,
            "int4": codecs.int4,
            "fp4": codecs.fp4,
            "topk": codecs.topk,
            "topk_2bit": codecs.topk_2bit,
            "lowrank": lambda: codecs.lowrank(4),
        }.items()
    },
    "radial of bf16": lambda: codecs.radial(codecs.bf16()),
    "feedback of radial of int4": lambda: codecs.feedback(codecs.radial(codecs.int4())),
}


@pytest.fixture
def fake() -> Iterator[Fake]:
    with fake_tensors() as made:
        yield made


def on_device(*tensors: Tensor) -> bool:
    return all(each.device == FAR for each in tensors)


@pytest.mark.parametrize("numel", [0, 1, 299, 4096 * 3 + 5])
@pytest.mark.parametrize("name", PLAIN)
def test_a_payload_is_made_and_read_on_the_device(name: str, numel: int, fake: Fake) -> None:
    coder = PLAIN[name]().coder  # type: ignore[attr-defined]
    payload = coder.encode(torch.empty(numel, device=FAR))
    assert payload.dtype == torch.uint8 and payload.shape == (coder.num_bytes(numel),)
    values = coder.decode(payload, numel)
    assert values.dtype == torch.float32 and values.shape == (numel,)
    assert on_device(payload, values)


@pytest.mark.parametrize("num_regions", [1, 2, 3])
@pytest.mark.parametrize("name", CODECS)
def test_a_conversation_stays_on_the_device(name: str, num_regions: int, fake: Fake) -> None:
    """Several transfers, each from the state that the one before has left; no value is read."""
    codec = CODECS[name]()
    with fake.elsewhere():
        state = moved(codec.init(FRAGMENT), FAR)
    for _ in range(2):
        outer_grad = torch.empty(FRAGMENT.numel, device=FAR)
        result = drive(
            codec.converse(outer_grad, FRAGMENT, state),
            lambda message: mean_of([message] * num_regions, [1.0] * num_regions)[0],
        )
        state = result.state
        assert on_device(result.mean, result.own(), *tensors_in(state))
        assert result.mean.shape == result.own().shape == (FRAGMENT.numel,)


MERGES = {
    "replace": merges.replace(),
    "follow": merges.follow(),
    "mix": merges.mix(0.5),
    "mix of local params alone": merges.mix(1.0),
    "additive": merges.additive(),
    **{f"compensate {mode}": merges.compensate_delay(mode) for mode in COMPENSATIONS},
}


@pytest.mark.parametrize("staleness", [0, 3])
@pytest.mark.parametrize("name", MERGES)
def test_a_merge_stays_on_the_device(name: str, staleness: int, fake: Fake) -> None:
    merge, sizes = MERGES[name], (3, 4)
    here = MergeSlice(*(torch.empty(7, device=FAR) for _ in range(3)), sizes)
    info = MergeInfo(sent_at=2, landed_at=2 + staleness, flight_lr=0.1)
    if merge.measure is not None:
        assert merge.scales is not None
        norms = [
            torch.stack([part.norm().double() for part in each.split_with_sizes(sizes)])
            for each in merge.measure(here, info)
        ]
        numels = torch.empty(2, dtype=torch.float64, device=FAR)
        here = here._replace(scales=merge.scales(*norms, numels, info).unbind())
    assert on_device(merge.apply(here, info))


CHAINS = {
    "sgd": outer.chain(lr=outer.scale(0.7)),
    "lr of the round": outer.chain(lr=outer.scale(lambda info: info.round_lr)),
    "nesterov": outer.chain(nesterov=outer.nesterov(0.9), lr=outer.scale(0.7)),
    "momentum": outer.chain(momentum=outer.momentum(0.5)),
    "clipped momentum": outer.chain(momentum=outer.momentum(0.5, clip=1.0)),
    "gap": outer.chain(penalty=outer.staleness_penalty(), momentum=outer.momentum(0.2)),
    "constant": outer.chain(penalty=outer.staleness_penalty(2.0)),
    "eager": outer.chain(eager=outer.eager(), nesterov=outer.nesterov(0.9)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_an_outer_chain_stays_on_the_device(name: str, fake: Fake) -> None:
    chain = CHAINS[name]

    def flat() -> Tensor:
        return torch.empty(7, device=FAR)

    state = chain.init(flat())
    share = torch.empty((), dtype=torch.float64, device=FAR)
    info = OuterInfo(
        fragment=0,
        round_lr=0.1,
        global_at_send=flat(),
        global_params=flat(),
        home=Home(FAR),
        taken_share=0.5,
        fresh_share=share,
    )
    for _ in range(2):
        step, state = chain.begin(state, info)
        assert on_device(step(flat(), OuterSlice(state, flat(), flat())), *tensors_in(state))


def settings(name: str, overlaps: bool) -> dict[str, Any]:
    """For few inner steps; with or without an overlap, where a method can be asked for one."""
    takes = inspect.signature(known()[name]).parameters
    found: dict[str, Any] = {"sync_interval": 3}
    if "num_fragments" in takes and takes["num_fragments"].default > 1:
        found["num_fragments"] = 2
    if "overlap_steps" in takes:
        found["overlap_steps"] = 1 if overlaps else 0
        if overlaps and "merge" in takes and takes["merge"].default == "replace":
            found["merge"] = "compensate"
    if takes["codec"].default == "lowrank":
        found["rank"] = 4
    return found


def synchronizer(
    fake: Fake, link: FakeLink, config: OuterConfig, home: Home, *shapes: tuple[int, ...], **options: Any
) -> Synchronizer:
    """A region with parameters of these shapes on the device."""
    dtype = options.pop("dtype", torch.float32)
    with fake.elsewhere():
        model = Blocks(torch.empty(shape, dtype=dtype, device=FAR) for shape in shapes)
        return Synchronizer(model, from_config(config), link, home=home, **options)


@pytest.mark.parametrize(
    ("dtype", "rests_on_host", "overlaps", "num_regions"),
    [
        (torch.float32, False, True, 2),
        (torch.bfloat16, False, False, 3),
        (torch.float32, True, False, 3),
        (torch.bfloat16, True, True, 2),
    ],
    ids=["fp32-model-overlap", "bf16-model-alone", "fp32-host-alone", "bf16-host-overlap"],
)
@pytest.mark.parametrize("name", known())
def test_rounds_of_a_method(
    name: str, overlaps: bool, dtype: torch.dtype, rests_on_host: bool, num_regions: int, fake: Fake
) -> None:
    """Training waits for nothing; what is kept stays where it rests. Each two of the settings meet."""
    home, link = Home(FAR, rests_on_host), FakeLink(fake, num_regions)
    config = OuterConfig(method=name, **settings(name, overlaps))
    region = synchronizer(fake, link, config, home, *SHAPES, dtype=dtype, guard=Guard(), digest_interval=2)
    for _ in range(9):
        region.step(0.1)
    assert region.totals.landings >= 2
    for each in region.fragments:
        kept = [each.global_params, *tensors_in(each.outer), *tensors_in(each.codec)]
        assert all(tensor.device == home.rest for tensor in kept if tensor.dim())
        assert on_device(*each.local.params)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_rounds_of_a_sharded_region(codec: str, fake: Fake) -> None:
    """Its training thread prepares what the link's thread needs of the other ranks."""
    link = FakeLink(fake)
    link.num_lanes = 2
    config = OuterConfig(method="diloco", sync_interval=2, codec=codec, error_feedback=codec != "fp32")
    region = synchronizer(fake, link, config, Home(FAR), *SHAPES)
    for _ in range(5):
        region.step(0.1)
    assert region.totals.landings == 2


@pytest.mark.parametrize("rests_on_host", [False, True], ids=["model", "host"])
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_rounds_of_a_region_that_comes_in(codec: str, rests_on_host: bool, fake: Fake) -> None:
    """It follows landings in which it has no part."""
    link = FakeLink(fake)
    link.is_elastic, link.takes_part = True, lambda: False  # type: ignore[method-assign]
    config = OuterConfig(method="diloco", sync_interval=2, codec=codec, error_feedback=codec != "fp32")
    region = synchronizer(
        fake, link, config, Home(FAR, rests_on_host), *SHAPES, dtype=torch.bfloat16, guard=Guard()
    )
    for _ in range(5):
        region.step(0.1)
    assert region.totals.landings == 2


@pytest.mark.parametrize("name", ["diloco", "eager", "cocodc"])
@pytest.mark.parametrize("rests_on_host", [False, True], ids=["model", "host"])
def test_rounds_whose_values_are_not_finite(name: str, rests_on_host: bool, fake: Fake) -> None:
    """The link's thread finds that, and the landing changes nothing."""
    config = OuterConfig(method=name, **settings(name, overlaps=True))
    region = synchronizer(fake, FakeLink(fake), config, Home(FAR, rests_on_host), *SHAPES, guard=Guard())
    fake.answer = math.nan
    for _ in range(9):
        region.step(0.1)
    assert region.totals.landings >= 2
    assert all(each.voids for each in region.fragments)


def reading(here: MergeSlice, info: MergeInfo) -> Tensor:
    return here.new_global * here.local.sum().item()


def deciding(here: MergeSlice, info: MergeInfo) -> Tensor:
    return here.local if (here.local > 0).all() else here.new_global


def leaving(here: MergeSlice, info: MergeInfo) -> Tensor:
    return here.new_global + here.local.cpu().mean().to(FAR)


def coming(here: MergeSlice, info: MergeInfo) -> Tensor:
    return here.new_global * torch.tensor([2.0], device=FAR)


def counting(here: MergeSlice, info: MergeInfo) -> Tensor:
    return here.new_global[here.local.nonzero()[:, 0]]


def mixing(here: MergeSlice, info: MergeInfo) -> Tensor:
    return here.new_global + torch.zeros(here.local.numel(), device=HOST)


@pytest.mark.parametrize(
    ("apply", "error", "says"),
    [
        (reading, Waited, "item reads a value"),
        (deciding, Waited, "__bool__ reads a value"),
        (leaving, Waited, "copies between"),
        (coming, Waited, "copies between"),
        (counting, RuntimeError, "nonzero"),
        (mixing, RuntimeError, "devices"),
    ],
)
def test_what_a_gpu_would_wait_for_or_refuse_fails(
    apply: Callable[[MergeSlice, MergeInfo], Tensor], error: type[Exception], says: str, fake: Fake
) -> None:
    """Without this the tests above would prove nothing."""
    config = OuterConfig(method="diloco", sync_interval=2)
    region = synchronizer(fake, FakeLink(fake), config, Home(FAR), (7,))
    region.method = replace(region.method, merge=merges.Merge(apply, keeps_local_steps=True))
    region._traffic._method = region.method
    region.step(0.1)
    with pytest.raises(error, match=says):
        region.step(0.1)


def calls(numel: int, codec: str, merge: str, rests_on_host: bool) -> tuple[int, int]:
    """What one transfer of a parameter of that length costs in calls of torch: training, and the link's thread."""
    more = {"mixing_alpha": 0.5} if merge == "mix" else {}
    config = OuterConfig(
        method="streaming",
        num_fragments=1,
        sync_interval=4,
        overlap_steps=0 if merge == "replace" else 1,
        codec=codec,
        merge=merge,
        **more,
    )
    with fake_tensors() as fake:
        link = FakeLink(fake)
        region = synchronizer(fake, link, config, Home(FAR, rests_on_host), (numel,), digest_interval=100)

        def one_round() -> None:
            for _ in range(4):
                region.step(0.1)

        one_round()
        region.step(0.1)  # the landing of the first transfer, whose global params had a digest
        both = fake.count(one_round)
        assert region.totals.sends == region.totals.landings == 2
    return both - link.calls[-1], link.calls[-1]


@pytest.mark.parametrize("rests_on_host", [False, True], ids=["model", "host"])
@pytest.mark.parametrize("merge", ["replace", "mix", "compensate"])
@pytest.mark.parametrize("codec", ["fp32", "int8", "fp4"])
def test_a_transfer_is_few_calls_of_torch(codec: str, merge: str, rests_on_host: bool) -> None:
    """Each holds the interpreter's lock: fewer than 100 in either thread, however many values there are in a slice.

    Three more if the last block is short: it is filled up, and so are both payloads.
    """
    small, large = (calls(numel, codec, merge, rests_on_host) for numel in (1 << 10, 1 << 20))
    assert small == large
    assert max(small) < 100
    training, link = calls(1_000_001, codec, merge, rests_on_host)
    assert training == small[0] and link <= small[1] + 3


@pytest.mark.parametrize(
    ("method", "codec", "training", "link"),
    [
        ("diloco", "fp32", 9.5, 4.5),
        ("diloco", "int8", 9.5, 9.5),
        ("streaming", "fp4", 10.5, 19),
        ("muloco", "int4", 9.5, 17.5),
        ("cocodc", "int8", 28.5, 9.5),
    ],
)
def test_how_much_memory_of_the_device_a_transfer_moves(
    method: str, codec: str, training: float, link: float
) -> None:
    """Beside a copy of the values. Every pass over them is one that a GPU notices: who adds one changes a number here."""
    counted = passes.row(method, codec, (1 << 10, 1 << 12))
    assert 0 < counted["training: copies"] <= training
    assert 0 < counted["link: copies"] <= link
