"""What sends and landings do to memory: slice by slice or whole, strided or not, the numbers are the same; none is read after it
was given back, and no more is taken than was said. And steps where nothing is due."""

from __future__ import annotations

import dataclasses
import gc
import random
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cocodc.engine import fragment
from hf_cocodc.engine.fragment import FragmentState
from hf_cocodc.engine.local_params import LocalParams
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.engine.traffic import Traffic
from hf_cocodc.link.base import Arrival, Awaited, Handle, MeanRequest
from hf_cocodc.link.lockstep import LockstepHub, LockstepLink, loopback
from hf_cocodc.link.records import Trailer, Word
from hf_cocodc.methods import METHODS, Method
from hf_cocodc.parts import schedules
from hf_cocodc.parts.codecs.base import Result
from hf_cocodc.parts.schedules import AgreedStats, Land, Schedule
from hf_cocodc.parts.tensors import slices
from hf_cocodc.parts.tensors.flat import digest as flat_digest
from hf_cocodc.parts.tensors.memory import HOST, Buffers
from hf_cocodc.parts.tensors.slices import cuts, square
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.methods import small
from tests.toys import Blocks, Region, params_of, run

LENGTH = slices.ON_HOST
SHAPES = ((37, 5), (3,), (129, 3), (1,), (64, 2), (11, 7))
SETTINGS = small(
    {
        "diloco": {},
        "streaming": {"num_fragments": 3, "overlap_steps": 3, "codec": "fp32"},
        "eager": {"num_fragments": 3, "fragment_pattern": "strided"},
        "co2": {"outer_momentum": 0.3, "clip_momentum": 0.2},
        "dilocox": {"codec": "fp32", "error_feedback": False},
        "cocodc": {"num_fragments": 3, "overlap_steps": 3, "sends_per_interval": 4},
    },
    num_fragments=3,
    overlap_steps=3,
)


def method_of(name: str, **changes: Any) -> Method:
    return from_config(OuterConfig(method=name, sync_interval=6, **SETTINGS[name] | changes))


def crowded(name: str) -> Method:
    """The method with up to three transfers of every fragment in flight."""
    return dataclasses.replace(method_of(name), schedule=schedules.every(2, 5))


def contiguous(shape: tuple[int, ...], values: Tensor) -> Tensor:
    return values.view(shape).clone()


def unaligned(shape: tuple[int, ...], values: Tensor) -> Tensor:
    """A view that begins at an odd place of its memory."""
    return torch.cat([torch.zeros(3, dtype=values.dtype), values])[3:].view(shape)


def scattered(shape: tuple[int, ...], values: Tensor) -> Tensor:
    """Values that do not lie one behind the other."""
    return torch.stack([values, values], dim=1)[:, 0].view(shape)


def trajectory(
    method: Method,
    lay: Callable[[tuple[int, ...], Tensor], Tensor] = contiguous,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[Region], None] = lambda region: None,
) -> list[Tensor]:
    """Local and global params of two regions after every step, and their params after finish()."""

    def build(index: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Blocks([])
        for seed, shape in enumerate(SHAPES):
            numel, generator = torch.Size(shape).numel(), torch.Generator().manual_seed(seed)
            start = torch.randn(numel, generator=generator, dtype=torch.float32)
            model.layers.append(nn.ParameterList([nn.Parameter(lay(shape, start.to(dtype)))]))
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def live(region: Region) -> list[Tensor]:
        prepare(region)
        states = []
        for step in range(1, 32):
            for seed, param in enumerate(region.model.parameters()):
                generator = torch.Generator().manual_seed(1000 * region.index + 10 * step + seed)
                # computed apart: torch itself rounds bf16 another way where values are strided
                own = param.detach().float().contiguous()
                noise = torch.randn(own.shape, generator=generator, dtype=torch.float32)
                param.detach().copy_(own - 0.05 * (own + noise))
            region.synchronizer.step(0.05)
            states += [
                params_of(region.model),
                *(f.global_params.clone() for f in region.synchronizer.fragments),
            ]
        region.synchronizer.finish()
        return [*states, params_of(region.model)]

    return [state for states in run(2, method, build, live) for state in states]


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_where_the_params_lie_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    """From odd places in memory on, or strided: the same numbers."""
    expected = trajectory(method_of(name), dtype=dtype)
    assert same(trajectory(method_of(name), unaligned, dtype), expected)
    assert same(trajectory(method_of(name), scattered, dtype), expected)


AT_ONCE: list[tuple[str, dict[str, Any]]] = [
    ("diloco", {}),
    ("diloco", {"merge": "compensate"}),
    ("streaming", {"overlap_steps": 0, "mixing_alpha": 0.5}),
]


@pytest.mark.parametrize(("name", "changes"), AT_ONCE, ids=["replace", "compensate", "mix"])
def test_what_lands_at_once_needs_no_snapshot(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local params do not change between a send and its landing in the same step."""
    expected, send = trajectory(method_of(name, **changes)), Traffic.send
    takes: list[bool] = []

    def keeping(self: Traffic, fragment: FragmentState, word: Word, lands_at_once: bool = False) -> None:
        takes.append(not lands_at_once)
        send(self, fragment, word)

    monkeypatch.setattr(Traffic, "send", keeping)
    assert same(trajectory(method_of(name, **changes)), expected)
    assert takes.count(False) > takes.count(True)  # the last send is that of `finish`


@pytest.mark.parametrize("name", ["diloco", "co2"])
def test_a_landing_cuts_each_tensor_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not once for each slice."""
    split, counts = LocalParams.split, []

    def counting(self: LocalParams, flat: Tensor) -> Sequence[Tensor]:
        counts[-1] += 1
        return split(self, flat)

    monkeypatch.setattr(LocalParams, "split", counting)
    for length in (1 << 18, 1 << 4):
        monkeypatch.setattr(slices, "ON_HOST", length)
        counts.append(0)
        trajectory(method_of(name))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", METHODS)
def test_torchs_default_dtype_changes_no_bit(name: str, default: torch.dtype) -> None:
    """A script may have set another one: what is kept and computed is fp32."""
    method = method_of(name, codec="lowrank", rank=2) if name == "dilocox" else method_of(name, codec="int4")
    expected = trajectory(method)
    torch.set_default_dtype(default)
    try:
        assert same(trajectory(method), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("length", [7, 64, 300])
@pytest.mark.parametrize("name", METHODS)
def test_the_length_of_slices_changes_no_bit(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of any length, ends of parameters in them or not, give what the whole fragment at once gives; but for the last
    bits where a merge or an outer step sums over them."""
    expected = trajectory(method_of(name))
    monkeypatch.setattr(slices, "ON_HOST", length)
    found = trajectory(method_of(name))
    if name in ("cocodc", "co2"):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    else:
        assert same(found, expected)


def test_slices_cover_every_value_once() -> None:
    """In order, none longer than allowed, small neighbors together, empty parameters in none."""
    lengths = [0, 3, 5, LENGTH - 8, 1, 2 * LENGTH + 1, 0, 2]
    found = cuts(lengths, LENGTH)
    assert [cut.numel for cut in found] == [LENGTH, 1, LENGTH, LENGTH, 3]
    assert found[0].params == (1, 2, 3)
    covered = [0] * len(lengths)
    for cut in found:
        for param, size in zip(cut.params, cut.sizes, strict=True):
            covered[param] += size
    assert covered == lengths


@pytest.mark.parametrize("threads", [1, 3])
def test_a_sum_of_squares_is_the_same_on_any_number_of_threads(threads: int) -> None:
    """Decisions depend on it, and regions need not have equally many cores."""
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    expected, before = float(square(values)), torch.get_num_threads()
    assert expected == pytest.approx(float(values.double().square().sum()), rel=1e-6)
    try:
        torch.set_num_threads(threads)
        assert float(square(values)) == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("numel", [1, 4095, 4096, 4097, 10_000])
def test_sums_of_squares_hear_of_what_is_not_finite(numel: int) -> None:
    """Wherever it is."""
    values = torch.ones(numel)
    assert float(square(values)) == pytest.approx(numel)
    for place in (0, numel - 1):
        for wrong in (torch.nan, torch.inf, -torch.inf):
            hurt = values.clone()
            hurt[place] = wrong
            assert not square(hurt).isfinite()


@pytest.mark.parametrize("name", METHODS)
def test_nobody_reads_what_was_given_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several transfers of each fragment in flight, memory used again gives the numbers that new memory gives, which
    holds NaN at first and again as soon as it is given back."""
    pooled = trajectory(crowded(name))

    def take(self: Buffers, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((numel,), float("nan"), dtype=dtype)

    def give(self: Buffers, *buffers: Tensor) -> None:
        for buffer in buffers:
            buffer.fill_(float("nan"))

    monkeypatch.setattr(Buffers, "take", take)
    monkeypatch.setattr(Buffers, "give", give)
    fresh = trajectory(crowded(name))
    assert same(pooled, fresh)
    assert torch.isfinite(torch.cat(fresh)).all()


def test_buffers_are_used_again() -> None:
    """For as many values of the same type; what was not taken here is not kept."""
    buffers = Buffers()
    one, other = buffers.take(4), buffers.take(4)
    place = one.data_ptr()
    buffers.give(one, torch.zeros(9))
    assert buffers.spare_bytes == 16
    assert buffers.take(4, torch.uint8).data_ptr() != place
    assert buffers.take(4).data_ptr() == place != other.data_ptr()


def storages() -> dict[int, torch.UntypedStorage]:
    """Every memory that a tensor holds, by its address, which is nobody else's as long as the answer is kept."""
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and each.device.type == "cpu" and each.layout == torch.strided:
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage
    return found


@pytest.mark.parametrize("name", METHODS)
def test_memory_is_what_was_said_at_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a transfer lands, which is when most is held: never more than what is kept, what the transfers in flight add, and
    what is staged."""
    model = Blocks([torch.randn(1000, 800) for _ in range(3)])
    before = storages()
    seen: list[tuple[int, int]] = []
    land = FragmentState.land

    def look(self: FragmentState, *args: Any) -> None:
        held = sum(storage.nbytes() for place, storage in storages().items() if place not in before)
        flying = sum(len(state.in_flight) for state in synchronizer.fragments) + 1  # and the one that lands
        seen.append((held, flying))
        land(self, *args)

    monkeypatch.setattr(FragmentState, "land", look)
    synchronizer = Synchronizer(model, method_of(name), loopback())
    kept, each_adds, staged = synchronizer.memory()[HOST]
    for _ in range(30):
        synchronizer.step(1e-3)
    most = max(flying for _, flying in seen)
    assert max(held for held, _ in seen) <= kept + most * each_adds + staged
    assert max(held for held, _ in seen) >= kept + 0.6 * each_adds


class Answered(LockstepLink):
    """A lone region's link that answers every transfer of the same length with the same memory."""

    def __init__(self, numel: int) -> None:
        super().__init__(LockstepHub(1), region=0, num_regions=1)
        self.kept = torch.zeros(numel)

    def mean(self, parcel: MeanRequest) -> Handle:
        result, trailers = Result(self.kept, lambda: self.kept, {}), (parcel.trailer(),)
        return Awaited(lambda: Arrival(result, trailers, 0, 0.0, 0.0, (0,), parcel.judge(trailers)))


class Busy(LockstepLink):
    """A lone region's link whose thread comes to a transfer only when that lands, and finds a mean of ones."""

    def __init__(self) -> None:
        super().__init__(LockstepHub(1), region=0, num_regions=1)
        self.came_to: list[Trailer] = []

    def mean(self, parcel: MeanRequest) -> Handle:
        def come() -> Arrival:
            self.came_to.append(parcel.trailer())
            mean = torch.ones(parcel.numel)
            result, trailers = Result(mean, lambda: mean, {}), (self.came_to[-1],)
            return Arrival(result, trailers, 0, 0.0, 0.0, (0,), parcel.judge(trailers))

        return Late(come)


class Late:
    def __init__(self, come: Callable[[], Arrival]) -> None:
        self.wait = come


def test_a_checksum_found_late_is_that_of_the_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link's thread finds it, which training does not wait for; landings in between do not change it."""
    found: list[int] = []

    def digest(flat: Tensor) -> int:
        found.append(flat_digest(flat))
        return found[-1]

    monkeypatch.setattr(fragment, "digest", digest)
    link = Busy()
    method = dataclasses.replace(method_of("diloco"), schedule=schedules.every(2, 5))
    synchronizer = Synchronizer(Blocks([torch.zeros(8)]), method, link, digest_interval=1)
    sent = {}
    for step in range(1, 20):
        sent[step] = synchronizer.global_digest()
        synchronizer.step(1e-3)
        assert len(found) == synchronizer.totals.landings
    assert len(set(found)) > 3
    assert [(each.inner_step, each.digest) for each in link.came_to] == [
        (step, sent[step]) for step in range(2, 15, 2)
    ]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # of older releases of torch
@pytest.mark.parametrize("name", METHODS)
def test_no_round_after_the_first_takes_new_memory(name: str) -> None:
    """Once a fragment's first transfers have landed, no operation of a send or a landing asks for its length of memory."""
    numel = 6 * LENGTH + 3
    model = Blocks([torch.randn(numel) for _ in range(3)])
    method = method_of(name)
    length = method.fragments(model)[0].numel
    synchronizer = Synchronizer(model, method, Answered(length))
    for _ in range(24):
        synchronizer.step(1e-3)
    before = synchronizer.totals.landings
    with torch.profiler.profile(profile_memory=True) as profile:
        for _ in range(12):
            synchronizer.step(1e-3)
    assert synchronizer.totals.landings >= before + 2
    events = profile.events()
    assert events is not None
    largest = max(event.self_cpu_memory_usage for event in events)
    assert 0 < largest <= 8 * LENGTH < 4 * numel


def every_schedule() -> list[tuple[Schedule, int]]:
    return [
        (schedules.every(4), 2),
        (schedules.every(5, 5, primed=True), 1),
        (schedules.every(3, 7), 2),
        (schedules.staggered(9, 2), 4),
        (schedules.staggered(7, 7, primed=True), 3),
        (schedules.rounds(12), 2),
        (schedules.adaptive(13), 3),
        (schedules.adaptive(12, 3, sends_per_interval=5), 3),
        (schedules.adaptive(20, None, 0.9), 2),
    ]


@pytest.mark.parametrize("schedule", [schedules.every(4, 1), schedules.staggered(4, 1)])
def test_what_was_sent_with_a_longer_overlap_lands(schedule: schedules.Schedule) -> None:
    """A run that is resumed with a shorter one lands at once what is due by it."""
    before = schedules.staggered(8, 7)
    _, state = before.events(8, AgreedStats(), before.init(1))
    events, state = schedule.events(11, AgreedStats(), state)
    assert events == (Land(0, 8),)
    assert not state["in_flight"]


@pytest.mark.parametrize(("schedule", "num_fragments"), every_schedule())
def test_a_schedule_has_nothing_to_do_before_it_says(schedule: Schedule, num_fragments: int) -> None:
    """Asked at every step it gives what it gives where it is asked at its own next events only, whatever is measured at
    landings, which are where regions hear of it."""
    generator = random.Random(0)
    asked = rarely = schedule.init(num_fragments)
    stats, due, skipped = AgreedStats(), 0, 0
    for step in range(1, 300):
        events, asked = schedule.events(step, stats, asked)
        if step >= due:
            assert schedule.events(step, stats, rarely)[0] == events
            _, rarely = schedule.events(step, stats, rarely)
            due = schedule.next_event(step, rarely)
            assert due > step
        else:
            assert not events
            skipped += 1
        assert asked == rarely
        if any(isinstance(event, Land) for event in events):
            change = tuple(generator.random() for _ in range(num_fragments))
            stats = AgreedStats(1.0, generator.uniform(0.1, 6.0), change, generator.uniform(0.2, 1.0))
    assert skipped


@pytest.mark.parametrize("name", METHODS)
def test_an_idle_step_leaves_nothing_behind(name: str) -> None:
    """Ten thousand steps with nothing due, a transfer in flight or not, need no memory."""
    method = from_config(OuterConfig(method=name, sync_interval=10**6))
    synchronizer = Synchronizer(Blocks([torch.zeros(8)] * 4), method, loopback())
    for _ in range(1000):
        synchronizer.step(1e-3)
    tracemalloc.start()
    try:
        start, _ = tracemalloc.get_traced_memory()
        for _ in range(10_000):
            synchronizer.step(1e-3)
        end, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert synchronizer.totals.sends == 0
    assert end - start < 20_000 and peak - start < 40_000
