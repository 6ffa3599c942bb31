"""A broadcast sends what is lacking, and no more; along a chain. It is made again without a region that is lost in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link import calls
from hf_cocodc.link.base import Link
from hf_cocodc.link.calls import SMALL, broadcast_chain
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.link.tcp import TcpLink
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.link.memory import Regions
from tests.processes.test_link import run_over_tcp
from tests.toys import Blocks

NUMEL = SMALL  # of fp32: four times what is compared
RUNS = pytest.mark.parametrize("run", [run_over_tcp, run_in_lockstep])


def test_the_chain_holds_the_source_and_who_differs_from_it() -> None:
    assert broadcast_chain([b"a", b"a", b"a"], 1) == (1,)
    assert broadcast_chain([b"a", b"b", b"a", b"c"], 2) == (2, 1, 3)
    assert broadcast_chain([b"a"], 0) == (0,)


@RUNS
@pytest.mark.parametrize(
    ("held", "source", "sends"),
    [
        ((1.0, 1.0, 1.0), 0, (0, 0, 0)),
        ((1.0, 2.0, 1.0), 0, (1, 0, 0)),
        ((1.0, 2.0, 2.0), 0, (1, 1, 0)),
        ((2.0, 1.0, 3.0), 2, (1, 0, 1)),
    ],
    ids=["equal", "one differs", "all differ", "from the last"],
)
def test_only_what_is_lacking_is_sent(
    run: Callable[..., list[Any]],
    held: tuple[float, ...],
    source: int,
    sends: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nobody sends it twice."""
    monkeypatch.setattr(calls, "_PIECE_BYTES", 10_000)
    monkeypatch.setattr(calls, "_MOST_UNDER_WAY", 3)

    def body(region: int, link: Link) -> tuple[list[float], int, float]:
        flat = torch.full((NUMEL,), held[region])
        flat[-1] += 0.5
        link.broadcast(flat, "weights", source)
        after = torch.full((2,), float(region))
        link.broadcast(after, "a little", 1)
        return flat[[0, -1]].tolist(), link.count_broadcasts(), after.sum().item()

    found = run(3, body)
    assert [weights for weights, _, _ in found] == 3 * [[held[source], held[source] + 0.5]]
    assert [after for _, _, after in found] == [2.0, 2.0, 2.0]
    little = [0, 2 * 8, 0]
    assert [count for _, count, _ in found] == [
        4 * NUMEL * times + more for times, more in zip(sends, little, strict=True)
    ]


@RUNS
@pytest.mark.parametrize("seeds", [(0, 0, 0), (0, 1, 2)], ids=["equal", "different"])
def test_a_run_begins_with_what_region_0_has(run: Callable[..., list[Any]], seeds: tuple[int, ...]) -> None:
    """Where all have it, nothing of the model travels."""

    def body(region: int, link: Link) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(seeds[region])
        model = Blocks([torch.randn(200, 100, generator=generator), torch.randn(100, generator=generator)])
        synchronizer = Synchronizer(model, from_config(OuterConfig(method="diloco")), link)
        begun = torch.cat([each.detach().flatten() for each in model.parameters()])
        return begun, synchronizer.totals.bytes_sent

    found = run(3, body)
    assert all(torch.equal(begun, found[0][0]) for begun, _ in found)
    numbers = found[0][0].numel()
    assert [sent for _, sent in found] == ([0, 0, 0] if seeds == (0, 0, 0) else [4 * numbers, 4 * numbers, 0])


@pytest.mark.parametrize("dies", [0, 1, 2])
def test_a_region_that_dies_in_the_chain_is_the_one_that_is_lost(
    dies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its place; the others have the bytes of the first of them."""
    monkeypatch.setattr(calls, "_PIECE_BYTES", 10_000)
    regions = Regions(3)
    pass_on = calls.BroadcastCall._pass_on
    dead = regions.links[dies]

    def die(call: calls.BroadcastCall, *args: Any) -> None:
        if call._view.region == dies and len(call._view.regions) == 3:
            dead.part_with()
        pass_on(call, *args)

    monkeypatch.setattr(calls.BroadcastCall, "_pass_on", die)

    def body(region: int, link: TcpLink) -> tuple[float, tuple[int, ...]]:
        flat = torch.full((NUMEL,), float(region))
        link.broadcast(flat, "weights")
        return flat.mean().item(), link.members

    found = regions.run(partial(body))
    rest = tuple(region for region in range(3) if region != dies)
    for region in rest:
        assert found[region] == (float(rest[0]), rest)
