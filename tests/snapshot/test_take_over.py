"""Taking over another region's checkpoint: what crosses the link, and what becomes of it."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from hf_cocodc.errors import CheckpointError, LinkError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.snapshot import checkpoint as state
from hf_cocodc.snapshot import files, folders, local_weights, manifest
from hf_cocodc.snapshot import files as take_over
from tests.snapshot.test_checkpoints import FACTS

RUN = 7
ADAM = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(4.0)}, 2: {"step": torch.tensor(3.0)}},
    "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 2], "foreach": None}],
}
WEIGHTS = {"weight": torch.arange(6.0).view(2, 3)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Region 0's checkpoint of step 3, as Trainer and we write it, with an adapter in a folder of its own."""
    folder = tmp_path / "region-0" / "checkpoint-3"
    folders.begin_run(folder.parent, RUN)
    state.begin(folder)
    ours = {"tensor": torch.ones(2), "layout": [[["weight", [2, 3]]]]}
    state.write(folder, state.Saved(ours, FACTS, {"weight": "its digest"}))
    local_weights.write(torch.nn.Module(), folder, WEIGHTS | {"buffer": torch.ones(1)})
    (folder / "extra").mkdir()
    save_file(WEIGHTS, folder / "model.safetensors")
    save_file(WEIGHTS, folder / "extra" / "adapter_model.safetensors")
    (folder / "config.json").write_text("{}")
    torch.save({"a": 1}, folder / "training_args.bin")
    torch.save(ADAM, folder / "optimizer.pt")
    torch.save({"last_epoch": 3, "_last_lr": [1e-3], "lr_lambdas": [None]}, folder / "scheduler.pt")
    torch.save({"python": [1, 2]}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text("{}")
    state.seal(folder)
    return folder


def taken_over(checkpoint: Path) -> Path:
    """Region 1's copy."""

    def body(region: int, link: Link) -> Path:
        own = checkpoint.parent.with_name(f"region-{region}") / checkpoint.name
        own.parent.mkdir(exist_ok=True)
        take_over.take_over(link, own, [0], RUN)
        return own

    return run_in_lockstep(2, body)[1]


def test_a_take_over_that_breaks_off_leaves_no_complete_checkpoint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The region's own, damaged one is kept aside; what has come is deleted by the next take-over."""
    own = taken_over(checkpoint)
    (own / "model.safetensors").write_bytes(b"damaged")
    monkeypatch.setattr(take_over, "make_own", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        taken_over(checkpoint)
    assert (own / "config.json").is_file()
    assert not manifest.is_sealed(own)
    (own / "left.bin").touch()
    monkeypatch.undo()
    assert manifest.damage(taken_over(checkpoint)) is None
    assert sorted(path.name for path in own.parent.iterdir()) == [
        *("checkpoint-3", "checkpoint-3.replaced", "cocodc"),
    ]
    assert not (own / "left.bin").exists()


def test_what_cannot_be_moved_away_is_not_mixed_with_what_comes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be open elsewhere (NFS)."""
    own = checkpoint.parent.with_name("region-1") / checkpoint.name
    (own / "cocodc").mkdir(parents=True)
    torch.save(ADAM, own / "optimizer_1.pt")
    rename = Path.rename

    def refusing(self: Path, target: Path) -> Path:
        if self == own:
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(
        CheckpointError, match=f"{own} cannot be moved away, .* Remove it by hand, then resume"
    ):
        taken_over(checkpoint)
    assert sorted(path.name for path in own.iterdir()) == ["cocodc", "optimizer_1.pt"]


def test_a_take_over_that_fails_at_once_leaves_the_regions_own_in_its_place(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = taken_over(checkpoint)
    monkeypatch.setattr(files, "spread", lambda *told: b"[]")
    with pytest.raises(LinkError, match="does not say which files it sends"):
        taken_over(checkpoint)
    assert manifest.is_sealed(own)


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


def test_a_checkpoint_arrives_whole(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the global model's subfolders; without local weights and random numbers."""
    traveled: set[str] = set()
    travel = take_over._travel

    def look(link: Link, source: int, files: dict[str, Path], into: Path | None) -> None:
        traveled.update(files)
        travel(link, source, files, into)

    monkeypatch.setattr(take_over, "_travel", look)
    own = taken_over(checkpoint)
    assert manifest.damage(own) is None
    assert folders.unusable(own) is None
    assert state.read(own).facts.taken_over
    assert same(torch.load(own / "optimizer.pt", weights_only=True), ADAM)
    scheduler = torch.load(own / "scheduler.pt", weights_only=True)
    assert scheduler == torch.load(checkpoint / "scheduler.pt", weights_only=True)
    assert torch.equal(load_file(own / "extra" / "adapter_model.safetensors")["weight"], WEIGHTS["weight"])
    assert not (own / "rng_state.pth").exists()
    assert {"optimizer.pt", "cocodc/state.json"} < traveled
    assert not {"rng_state.pth", "training_args.bin"} & traveled
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == ["checkpoint-3", "cocodc"]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch's own, of older releases
def test_a_sharded_checkpoint_arrives_whole(checkpoint: Path, tmp_path: Path) -> None:
    """FSDP2 writes folders with a pickle in them: the optimizer's is written anew, local weights are not sent."""
    whole = tmp_path / "whole.pt"
    adam = {"optimizer": {"state": {"weight": WEIGHTS["weight"]}}}
    for name, content in (
        ("optimizer_0", adam),
        ("pytorch_model_fsdp_0", {"model": {"weight": torch.zeros(2, 3)}}),
    ):
        torch.save(content, whole)
        torch_save_to_dcp(whole, checkpoint / name)
    state.seal(checkpoint)
    own = taken_over(checkpoint)
    dcp_to_torch_save(own / "optimizer_0", whole)
    assert same(torch.load(whole), adam)
    assert not (own / "pytorch_model_fsdp_0").exists()


def test_a_state_of_strided_tensors_arrives(tmp_path: Path) -> None:
    """AdamW's moments have the strides of their parameter: those of images are often in channels_last."""
    model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert not state["state"][0]["exp_avg"].is_contiguous()
    files.write_state(state, tmp_path / "optimizer.pt")
    assert same(torch.load(tmp_path / "optimizer.pt", weights_only=True), state)


class Evil:
    """What a pickle can do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["another pickle", "no pickle", "not even that"])
def test_a_state_that_cannot_travel_is_refused(kind: str, tmp_path: Path) -> None:
    """With an error that a donor expects: its own training goes on."""
    other = {
        "another pickle": Evil(tmp_path / "done"),
        "no pickle": lambda: 0,
        "not even that": threading.Lock(),
    }
    with pytest.raises(CheckpointError, match=r"optimizer\.pt cannot be sent to another region: "):
        files.write_state({"state": [WEIGHTS["weight"], other[kind]]}, tmp_path / "optimizer.pt")
    assert not (tmp_path / "done").exists()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch's own, of older releases
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "cocodc/optimizer_0.pt"])
@pytest.mark.parametrize("content", ["another pickle", "cut", "empty"])
def test_a_state_from_another_region_runs_no_code(name: str, content: str, tmp_path: Path) -> None:
    """It is refused, and nothing of it remains for Trainer to load."""
    (tmp_path / "checkpoint-3" / "cocodc").mkdir(parents=True)
    path = tmp_path / "checkpoint-3" / name
    torch.save({"state": Evil(tmp_path / "done")} if content == "another pickle" else ADAM, path)
    path.write_bytes(path.read_bytes()[: {"another pickle": None, "cut": -300, "empty": 0}[content]])
    with pytest.raises(CheckpointError, match="cannot be read"):
        files.make_own(tmp_path / "checkpoint-3")
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize("told", [b"[]", b"{", b'{"x.json": -1}', b'{"config.json": true}', b"[" * 99_999])
def test_a_list_of_files_that_is_none_is_refused(told: bytes) -> None:
    """Whatever comes in its place; and a file that is shorter than was told."""
    with pytest.raises(LinkError, match="does not say which files it sends"):
        files.check_files(told, 0)


def test_a_file_of_another_length_than_was_told_is_refused(tmp_path: Path) -> None:
    """In every region, before a byte of it is written."""
    grows = Path("/proc/self/status")  # the system says that it is empty
    into = tmp_path / "half"

    def body(region: int, link: Link) -> None:
        files = {"trainer_state.json": grows} if region == 0 else {}
        with pytest.raises(LinkError, match="region 0 sends trainer_state.json with another length"):
            take_over._travel(link, 0, files, into if region else None)

    run_in_lockstep(2, body)
    assert not into.exists()


def test_what_a_user_has_added_stays(checkpoint: Path) -> None:
    (checkpoint / "merged").mkdir()
    save_file(WEIGHTS, checkpoint / "merged" / "model.safetensors")
    assert not (taken_over(checkpoint) / "merged").exists()


def test_what_is_not_trained_travels(checkpoint: Path) -> None:
    """Of the local weights: buffers and frozen weights. No digest goes with them, for local weights are then the global ones."""
    own = taken_over(checkpoint)
    assert set(load_file(own / local_weights.weights_file())) == {"buffer"}
    assert state.read(checkpoint).weights
    assert not state.read(own).weights


NAMES = [
    "/tmp/evil.json",
    "../evil.json",
    "extra/../../evil.json",
    "cocodc/other.json",
    "training_args.bin",
    "rng_state.pth",
    "optimizer.pkl",
    "optimizer_0/.metadata",
    "cocodc/COMPLETE",
    "cocodc/run",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_checkpoint_has_is_refused(name: str, tmp_path: Path) -> None:
    """Nothing is written, inside the folder or elsewhere."""
    (tmp_path / "file").write_text(json.dumps({}))

    def body(region: int, link: Link) -> None:
        into = tmp_path / "deep" / "into" if region else None
        take_over._travel(link, 0, {} if region else {name: tmp_path / "file"}, into)

    with pytest.raises(CheckpointError, match="which no checkpoint has: it is not written"):
        run_in_lockstep(2, body)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]
