"""`torch.set_default_device` is the business of whoever sets it: a run has the numbers that it has without."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_cocodc import OuterConfig, OuterOptimizer, simulate
from hf_cocodc.coordinator.messages import Terms
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.newer import known
from hf_cocodc.parts.tensors.memory import HOST
from hf_cocodc.resolve import from_config
from tests.link.memory import linked
from tests.toys import Blocks

SHAPES = [(48, 40), (40, 40), (40,)]
STEPS = 9
CHANGES = {
    "streaming": {"num_fragments": 2},
    "dilocox": {"rank": 4},
    "cocodc": {"num_fragments": 2, "overlap_steps": 1},
    "sparseloco": {"codec": "topk"},
}


def default(device: str | None) -> Any:
    """torch makes its tensors on `device`; `torch.set_default_device` is a block of this kind without end."""
    return nullcontext() if device is None else torch.device(device)


def over_tcp(body: Callable[[int, Link], Any], device: str, elastic: bool) -> list[Any]:
    """body(region, link) for two regions, each on a thread of its own, from their meeting on."""
    terms = Terms(count=2, most=4, wait_s=3600.0 * elastic, timeout_s=10.0)

    def live(region: int) -> Any:
        with default(device), closing(linked(served.address, region, terms)) as link:
            return body(region, link)

    with closing(serve_in_thread()) as served, ThreadPoolExecutor(2) as pool:
        return list(pool.map(live, range(2)))


def model_of(region: int) -> nn.Module:
    """A model on the host, whatever the default."""
    noise = torch.Generator(HOST).manual_seed(region)
    return Blocks(torch.randn(shape, generator=noise, device=HOST) for shape in SHAPES)


def train(model: nn.Module, region: int, step: Callable[[], Any]) -> None:
    noise = torch.Generator(HOST).manual_seed(100 + region)
    for _ in range(STEPS):
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * torch.randn(param.shape, generator=noise, device=HOST)
        step()


def engine(region: int, link: Link, name: str) -> list[Tensor]:
    """The parameters of a region at the end of a run, with what it has saved and taken back before."""
    model = model_of(region)
    method = from_config(OuterConfig(method=name, sync_interval=3, **CHANGES.get(name, {})))
    synchronizer = Synchronizer(model, method, link, digest_interval=1)
    train(model, region, lambda: synchronizer.step(0.1))
    synchronizer.load_state_dict(synchronizer.state_dict())
    synchronizer.finish()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("name", known())
def test_a_method_has_the_same_numbers(name: str) -> None:
    """Over sockets, where the regions are fixed and where they may come and go."""
    body = partial(engine, name=name)
    expected = run_in_lockstep(2, body)
    for elastic in (False, True) if name == "diloco" else (False,):
        found = over_tcp(body, "meta", elastic)
        torch.testing.assert_close(found, expected, atol=0, rtol=0)


def plain_loop(region: int, link: Link, device: str | None, folder: Path) -> list[Tensor]:
    """The parameters of a region at the end of an Accelerate loop that saves."""
    model = model_of(region)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with default(device):
        config, accelerator = OuterConfig(method="diloco", sync_interval=3), Accelerator(cpu=True)
        with OuterOptimizer(accelerator, model, optimizer, config, link=link, max_steps=STEPS) as outer:
            train(model, region, lambda: outer.step(0.5))
            outer.save(folder / f"{device}-{region}")
    return [param.detach() for param in model.parameters()]


def test_a_plain_loop_has_the_same_numbers(tmp_path: Path) -> None:
    found, expected = (
        simulate(partial(plain_loop, device=device, folder=tmp_path), regions=2) for device in ("meta", None)
    )
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
