"""Kept checkpoints: how those of each format are written, read and trained on.

They hold two small regions of a plain loop, mid-round, with a transfer in flight.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.link.base import Link
from hf_cocodc.snapshot import checkpoint as state
from hf_cocodc.snapshot.local_weights import kept, restore
from hf_cocodc.snapshot.manifest import FORMAT
from hf_cocodc.training.simulation import simulate
from tests.toys import Blocks

H = 6
SAVED_AT, STEPS = 13, 22
SETTINGS: dict[str, dict[str, Any]] = {
    "streaming": {"num_fragments": 2, "overlap_steps": 3, "outer_lr": 0.4, "outer_momentum": 0.9},
    "dilocox": {"rank": 2, "outer_lr": 0.7, "outer_momentum": 0.9},
}
START = [torch.linspace(-1, 1, 24).view(4, 6), torch.linspace(0, 1, 6).view(2, 3), torch.linspace(-2, 0, 5)]


def region_of(name: str, link: Link, checkpoint: Path | None) -> tuple[Blocks, OuterOptimizer]:
    """A region at the start of its run, or as it was saved."""
    model = Blocks(START)
    if checkpoint is not None:
        restore(model, checkpoint, kept(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    saved = None if checkpoint is None else state.read(checkpoint)
    config = OuterConfig(method=name, sync_interval=H, **SETTINGS[name])
    more = {"link": link, "saved": saved, "max_steps": STEPS}
    outer = OuterOptimizer(Accelerator(cpu=True), model, optimizer, config, **more)
    model.optimizer = optimizer
    return model, outer


def train(model: Blocks, outer: OuterOptimizer, until: int) -> list[float]:
    """To inner step `until`, with gradients that depend on the region and on the step; the local params then."""
    for step in range(outer.inner_step + 1, until + 1):
        for position, vector in enumerate(model.vectors()):
            goal = torch.linspace(-1, 1, vector.numel()).flip(0).view_as(vector) * (outer.link.region + 1)
            vector.grad = (vector.detach() - goal) * (1 + 0.1 * ((step + position) % 3))
        model.optimizer.step()
        outer.step()
    return local_params(model)


def local_params(model: Blocks) -> list[float]:
    return torch.cat([vector.detach().reshape(-1) for vector in model.vectors()]).tolist()


def plain(value: Any) -> Any:
    """A saved state with its tensors as lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def facts_of(saved: state.Saved, number: int) -> dict[str, Any]:
    """The facts under their names, with the number of their format."""
    named = dataclasses.asdict(saved.facts)
    assert named.pop("members") == (0, 1)
    return {"format": number, "num_regions": 2, **named}


def write(name: str, folder: Path) -> None:
    """Save every region mid-round with a transfer in flight, and what comes of training on."""

    def body(region: int, link: Link) -> dict[str, Any]:
        model, outer = region_of(name, link, None)
        train(model, outer, SAVED_AT)
        checkpoint = folder / f"region-{region}" / f"checkpoint-{SAVED_AT}"
        outer.save(checkpoint, weights=True)
        outer.seal(checkpoint)
        saved = state.read(checkpoint)
        return {
            "facts": facts_of(saved, FORMAT),
            "state": plain(saved.state),
            "after": train_on(model, outer),
        }

    (folder / "numbers.json").write_text(json.dumps(simulate(body, regions=2)) + "\n", encoding="utf-8")


def train_on(model: Blocks, outer: OuterOptimizer) -> list[list[float]]:
    """Local params after each third step, then the global ones."""
    steps = [train(model, outer, step) for step in range(SAVED_AT + 3, STEPS + 1, 3)]
    outer.finish()
    return [*steps, local_params(model)]


def check(folder: Path, name: str, number: int, may_write: bool) -> None:
    """A kept checkpoint is read as it was saved, bit for bit; training on gives the same numbers to rounding.

    Args:
        folder: of the format.
        name: method.
        number: of the format.
        may_write: whether to write the checkpoint if it is missing.
    """
    folder = folder / name
    if may_write and not folder.exists():
        assert number == FORMAT
        write(name, folder)
    numbers = json.loads((folder / "numbers.json").read_text(encoding="utf-8"))

    def body(region: int, link: Link) -> list[list[float]]:
        checkpoint = folder / f"region-{region}" / f"checkpoint-{SAVED_AT}"
        saved = state.read(checkpoint)
        assert json.loads((checkpoint / state.COMPLETE).read_text(encoding="utf-8"))["format"] == number
        found = {"facts": facts_of(saved, number), "state": plain(saved.state)}
        for part, values in found.items():  # as text, for a loss that is not known is NaN
            assert json.dumps(values, sort_keys=True) == json.dumps(numbers[region][part], sort_keys=True)
        assert sum(len(fragment["in_flight"]) for fragment in saved.state["fragments"]) == 1
        assert saved.weights
        return train_on(*region_of(name, link, checkpoint))

    after = simulate(body, regions=2)
    expected = [region["after"] for region in numbers]
    torch.testing.assert_close(torch.tensor(after), torch.tensor(expected), atol=1e-5, rtol=0)
    assert after[0][-1] == after[1][-1]
