"""Checkpoints: stopping anywhere and going on gives the bits of a run that never stopped, and damage is never read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import CheckpointError
from hf_cocodc.link.base import Link
from hf_cocodc.link.group import RegionGroup
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.link.ranks import SharedLink
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from hf_cocodc.snapshot import checkpoint as state
from hf_cocodc.snapshot import manifest
from hf_cocodc.snapshot.checkpoint import Facts
from tests.methods import small
from tests.toys import Blocks, Region

H = 6
STEPS = 22
SETTINGS = small(
    {
        "diloco": {"codec": "topk", "error_feedback": True},
        "streaming": {"num_fragments": 3, "overlap_steps": 4},
        "eager": {"num_fragments": 3, "fragment_pattern": "strided"},
        "co2": {"outer_momentum": 0.3, "clip_momentum": 0.2},
        "dilocox": {"rank": 2},
        "cocodc": {"num_fragments": 3, "overlap_steps": 4, "sends_per_interval": 4},
    }
) | {
    "sparseloco": {"overlap_steps": 4, "merge": "additive", "top_k": 5},
    "a fragment every step": {
        **{"method": "streaming", "sync_interval": 3, "num_fragments": 3, "overlap_steps": 2},
        "error_feedback": True,
    },
}
FACTS = Facts(step=0, region=0, members=(0, 1), num_lanes=1, settings={}, finished=False)
START = [torch.linspace(-1, 1, 24).view(4, 6), torch.linspace(0, 1, 12).view(3, 4), torch.linspace(-2, 0, 7)]


def outer_config(name: str) -> OuterConfig:
    return OuterConfig(**{"method": name, "sync_interval": H, **SETTINGS[name]})


def region_of(name: str, index: int, link: Link, saved: dict[str, Any] | None = None) -> Region:
    """A region at the start of its run, or as it was saved."""
    model = Blocks(START)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    outer_state = None if saved is None else state.read(saved["folder"]).state
    synchronizer = Synchronizer(
        model, from_config(outer_config(name)), link, digest_interval=2, state=outer_state
    )
    return Region(index, model, optimizer, synchronizer)


def train(region: Region, step: int) -> None:
    """One inner step; gradients depend on the region and on the step."""
    for position, vector in enumerate(region.model.parameters()):
        goal = torch.linspace(-1, 1, vector.numel()).flip(0).view_as(vector) * (region.index + 1)
        vector.grad = (vector.detach() - goal) * (1 + 0.1 * ((step + position) % 3))
    region.step()


def shown(region: Region) -> Tensor:
    """Local and global params, flat."""
    local = [vector.detach().reshape(-1) for vector in region.model.parameters()]
    return torch.cat([*local, *(each.global_params for each in region.synchronizer.fragments)])


def save(region: Region, folder: Path) -> dict[str, Any]:
    state.begin(folder)
    state.write(folder, state.Saved(region.synchronizer.state_dict(), FACTS))
    state.seal(folder)
    return {
        "folder": folder,
        "model": copy.deepcopy(region.model.state_dict()),
        "optimizer": copy.deepcopy(region.optimizer.state_dict()),
    }


@pytest.mark.parametrize("num_regions", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SETTINGS)
def test_stopping_and_resuming_at_any_step_changes_no_bit(
    name: str, num_regions: int, tmp_path: Path
) -> None:
    """Saved at every step of two rounds, transfers in flight included, and resumed from each; bitwise (METHODS 8)."""

    def whole(index: int, link: Link, folder: Path | None) -> tuple[list[Tensor], list[dict[str, Any]]]:
        region = region_of(name, index, link)
        seen, saved = [], []
        for step in range(1, STEPS + 1):
            train(region, step)
            seen.append(shown(region))
            if folder is not None and step <= 3 * H:
                saved.append(save(region, folder / f"region-{index}" / f"checkpoint-{step}"))
        region.synchronizer.finish()
        return [*seen, shown(region)], saved

    def resumed(saved: list[dict[str, Any]], step: int, index: int, link: Link) -> list[Tensor]:
        region = region_of(name, index, link, saved[index])
        assert region.synchronizer.inner_step == step
        seen = []
        for each in range(step + 1, STEPS + 1):
            train(region, each)
            seen.append(shown(region))
        region.synchronizer.finish()
        return [*seen, shown(region)]

    expected = run_in_lockstep(num_regions, lambda index, link: whole(index, link, None)[0])
    saving = run_in_lockstep(num_regions, lambda index, link: whole(index, link, tmp_path))
    for (seen, _), reference in zip(saving, expected, strict=True):
        assert torch.equal(torch.stack(seen), torch.stack(reference)), "saving changed a number"
    in_flight = 0
    for step in range(1, 3 * H + 1):
        saved = [checkpoints[step - 1] for _, checkpoints in saving]
        in_flight += any(entry["in_flight"] for entry in state.read(saved[0]["folder"]).state["fragments"])
        ends = run_in_lockstep(num_regions, partial(resumed, saved, step))
        for end, reference in zip(ends, expected, strict=True):
            assert torch.equal(torch.stack(end), torch.stack(reference[step:])), f"resumed at step {step}"
    assert in_flight > 0 or name == "diloco"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A complete checkpoint of Streaming, with a file of Trainer's in it."""
    folder = tmp_path / "checkpoint-7"

    def body(index: int, link: Link) -> None:
        region = region_of("streaming", index, link)
        for step in range(1, 8):
            train(region, step)
        folder.mkdir()
        (folder / "optimizer.pt").write_bytes(b"adam")
        save(region, folder)

    run_in_lockstep(1, body)
    return folder


def resume(
    checkpoint: Path, name: str = "streaming", start: Sequence[Tensor] = START, **settings: Any
) -> None:
    """Build a region from the checkpoint, unless it is damaged."""
    wrong = manifest.damage(checkpoint)
    if wrong is not None:
        raise CheckpointError(wrong)
    config = OuterConfig(method=name, sync_interval=H, **{**SETTINGS[name], **settings})

    def body(index: int, link: Link) -> None:
        Synchronizer(Blocks(start), from_config(config), link, state=state.read(checkpoint).state)

    run_in_lockstep(1, body)


def test_a_whole_checkpoint_is_read(checkpoint: Path) -> None:
    assert manifest.damage(checkpoint) is None
    resume(checkpoint)


@pytest.mark.parametrize("name", ["cocodc/state.json", "cocodc/global-lane0.safetensors", "optimizer.pt"])
def test_a_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        resume(checkpoint)


@pytest.mark.parametrize("name", ["cocodc/state.json", "cocodc/global-lane0.safetensors", "optimizer.pt"])
def test_a_truncated_file_is_named(checkpoint: Path, name: str) -> None:
    whole = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"{name} has {len(whole) - 1} bytes, {len(whole)} were saved"):
        resume(checkpoint)


@pytest.mark.parametrize("name", ["cocodc/state.json", "cocodc/global-lane0.safetensors"])
def test_an_edited_file_is_noticed(checkpoint: Path, name: str) -> None:
    content = bytearray((checkpoint / name).read_bytes())
    content[-3] ^= 1
    (checkpoint / name).write_bytes(content)
    with pytest.raises(CheckpointError, match="has changed since it was saved"):
        resume(checkpoint)


def fragment_of(content: dict[str, Any]) -> dict[str, Any]:
    return content["state"]["fragments"][0]


def flight_of(content: dict[str, Any]) -> dict[str, Any]:
    return next(each for fragment in content["state"]["fragments"] for each in fragment["in_flight"])


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no state": lambda content: content.update(state=3),
    "no layout": lambda content: content["state"].update(layout=[3]),
    "no fragments": lambda content: content["state"].update(fragments=3),
    "a step that is none": lambda content: content.update(step="4"),
    "a step below zero": lambda content: content.update(step=-4),
    "lanes that are none": lambda content: content.update(num_lanes=0),
    "members that are none": lambda content: content.update(members=["0"]),
    "settings that are none": lambda content: content.update(settings=[]),
    "weights that are none": lambda content: content.update(weights=3),
    "a tensor that is not there": lambda content: fragment_of(content).update(global_params={"$tensor": "x"}),
    "a tensor of another shape": lambda content: flight_of(content).update(
        snapshot=content["state"]["fragments"][1]["global_params"]
    ),
    "a mean that is none": lambda content: flight_of(content).update(mean=None),
    "a send in the future": lambda content: flight_of(content).update(sent_at=10**6),
    "a count that is none": lambda content: fragment_of(content).update(num_sends=1.5),
    "a count below zero": lambda content: fragment_of(content).update(settled_at=-1),
    "a sum that is none": lambda content: fragment_of(content).update(lr_sum={"nan": 1}),
    "a sum that no float can be": lambda content: fragment_of(content).update(lr_sum=10**400),
    "no trailers": lambda content: flight_of(content).update(trailers=[]),
    "members out of order": lambda content: flight_of(content).update(members=[1, 0]),
    "a trailer that is none": lambda content: flight_of(content).update(trailers=[3] * 2),
    "no stats": lambda content: content["state"].update(stats={}),
    "other totals": lambda content: content["state"].update(totals={"x": 1}),
    "totals that are none": lambda content: content["state"]["totals"].update(sends="x"),
    "seconds that are none": lambda content: content["state"]["totals"].update(blocked_s=[]),
    "changes of no fragment": lambda content: content["state"].update(change=[]),
    "a change that is none": lambda content: content["state"].update(change=[0.0, "x", 0.0]),
    "stats that are none": lambda content: content["state"]["stats"].update(step_time_s="a"),
    "stats of another run": lambda content: content["state"]["stats"].update(change=[0.0]),
    "a learning rate that is none": lambda content: content["state"].update(lr="fast"),
    "a level too many": lambda content: fragment_of(content).update(outer=deep(100)),
    "far too many levels": lambda content: "[" * 100_000,
    "no dict": lambda content: "[]",
    "no text": lambda content: "\udcff",
}


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else 0


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_state_that_nobody_saves_is_refused(
    checkpoint: Path, edit: Callable[[dict[str, Any]], Any]
) -> None:
    """Though the list of files and hashes fits: whoever can write there, or a region that gives its base, may have gone mad."""
    path = checkpoint / "cocodc" / "state.json"
    content = json.loads(path.read_text())
    assert flight_of(content)["trailers"]
    text = edit(content) or json.dumps(content)
    path.write_bytes(text.encode(errors="surrogateescape"))
    state.seal(checkpoint)
    with pytest.raises(CheckpointError):
        resume(checkpoint)


def test_torchs_default_dtype_keeps_no_checkpoint_from_being_resumed(checkpoint: Path) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        resume(checkpoint)
    finally:
        torch.set_default_dtype(torch.float32)


def test_without_its_last_mark_a_checkpoint_is_half_written(checkpoint: Path) -> None:
    (checkpoint / state.COMPLETE).unlink()
    with pytest.raises(CheckpointError, match="COMPLETE is missing"):
        resume(checkpoint)


def test_a_folder_that_is_not_there_is_no_half_written_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder"):
        resume(tmp_path / "checkpoint-4")


@pytest.mark.parametrize(
    ("number", "other"), [(state.FORMAT + 1, "a newer"), (state.FORMAT - 1, "the older")]
)
def test_another_format_is_refused(checkpoint: Path, number: int, other: str) -> None:
    mark = checkpoint / state.COMPLETE
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "format": number}))
    with pytest.raises(
        CheckpointError,
        match=f"its format is {number}, this hf_cocodc reads {state.FORMAT}; install {other}",
    ):
        resume(checkpoint)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("streaming", {"num_fragments": 2}, "has 3 fragments, this run 2"),
        ("streaming", {"error_feedback": True}, "the codec state of fragment 0"),
        ("co2", {}, "fragments"),
        ("cocodc", {}, "the schedule's state"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    checkpoint: Path, name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        resume(checkpoint, name, **settings)


def test_a_checkpoint_of_another_model_is_refused(checkpoint: Path) -> None:
    longer = [*START[:2], torch.zeros(8)]
    with pytest.raises(CheckpointError, match=r"parameter layers.2.0 \[7\], this run layers.2.0 \[8\]"):
        resume(checkpoint, start=longer)


def test_regions_that_resume_from_different_steps_are_told(tmp_path: Path) -> None:
    def body(index: int, link: Link) -> None:
        region = region_of("diloco", index, link)
        folders = []
        for step in (1, 2):
            train(region, step)
            folders.append(save(region, tmp_path / f"{index}" / f"checkpoint-{step}"))
        region_of("diloco", index, link, folders[index])

    with pytest.raises(CheckpointError, match="region 0 resumes from step 1, region 1 from step 2"):
        run_in_lockstep(2, body)


def test_a_disk_that_refuses_spoils_no_other_checkpoint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    saved = state.read(checkpoint)
    monkeypatch.setattr(state, "save_file", full)
    state.begin(checkpoint.parent / "checkpoint-8")
    with pytest.raises(CheckpointError, match="No space left on device"):
        state.write(checkpoint.parent / "checkpoint-8", saved)
    assert manifest.damage(checkpoint) is None
    assert manifest.damage(checkpoint.parent / "checkpoint-8") is not None


def test_a_rank_without_an_engine_reads_no_values(checkpoint: Path) -> None:
    """Of a DDP region, only the leader needs them; all ranks know of which run the checkpoint is, and what it trains."""
    link = SharedLink(None, 0, 2, torch.device("cpu"), cast(RegionGroup, None))
    whole, own = state.read(checkpoint), state.read_own(link, checkpoint)
    assert own.facts == whole.facts
    assert own.weights == whole.weights
    assert own.state["layout"] == whole.state["layout"]
    assert own.synchronized == whole.synchronized
    assert sum(tensor.numel() for tensor in state.take_apart(whole.state)[1].values())
    assert not any(tensor.numel() for tensor in state.take_apart(own.state)[1].values())
