"""Only what a resume reads is compared with the list of files: what users add to a checkpoint, or edit, is theirs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from accelerate import Accelerator

from hf_cocodc.errors import CheckpointError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import LockstepLink, run_in_lockstep
from hf_cocodc.run.saving import seal
from hf_cocodc.run.training import Training
from hf_cocodc.snapshot import checkpoint as state
from hf_cocodc.snapshot import folders, manifest
from hf_cocodc.snapshot.checkpoint import Facts
from hf_cocodc.snapshot.manifest import sha256_of_all
from hf_cocodc.snapshot.resume import Start, checkpoint_to_resume, settle_in

FILES = (
    "model.safetensors",
    "optimizer.pt",
    "README.md",
    "default/adapter_model.safetensors",
    "pytorch_model_fsdp_0/__0_0.distcp",
    "cocodc/state.json",
    "cocodc/global-lane0.safetensors",
    "cocodc/local-lane0.safetensors",
    "config.json",
)


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A sealed checkpoint; only the names of its files matter here."""
    for name in FILES:
        put(tmp_path / "checkpoint-4" / name, b"saved")
    manifest.write(tmp_path / "checkpoint-4", run=7)
    return tmp_path / "checkpoint-4"


@pytest.fixture
def whole(checkpoint: Path) -> Path:
    """A sealed checkpoint whose facts can be read."""
    facts = Facts(step=4, region=0, members=(0,), num_lanes=1, settings={}, finished=False)
    state.write(checkpoint, state.Saved({"layout": []}, facts))
    manifest.write(checkpoint, run=7)
    return checkpoint


@pytest.mark.parametrize(
    "name",
    ["adapter_model/adapter_model.safetensors", "merged/model.safetensors", "meta.pt", "notes.bin"],
)
def test_a_file_that_no_resume_reads_may_be_added(checkpoint: Path, name: str) -> None:
    put(checkpoint / name, b"the user's")
    assert manifest.damage(checkpoint) is None


def test_a_card_may_change(checkpoint: Path) -> None:
    put(checkpoint / "README.md", b"edited by its user")
    assert manifest.damage(checkpoint) is None
    (checkpoint / "README.md").unlink()
    assert manifest.damage(checkpoint) is None


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_changed_global_model_is_damage(checkpoint: Path, name: str) -> None:
    """A region that takes the checkpoint over would have it."""
    put(checkpoint / name, b"other")
    assert str(manifest.damage(checkpoint)).startswith(f"{name} has changed since it was saved")


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "adapter_model.safetensors",
        "optimizer.bin",
        "optimizer_1.bin",
        "scheduler.pt",
        "scaler.pt",
        "rng_state_1.pth",
        "random_states_0.pkl",
        "custom_checkpoint_0.pkl",
        "dl_state_dict.bin",
        "sampler.bin",
        "pytorch_model_fsdp.bin",
        "pytorch_model_fsdp_0/__1_0.distcp",
        "optimizer_0/__0_0.distcp",
        "default/adapter_model.bin",
        "cocodc/global-lane1.safetensors",
    ],
)
def test_a_file_that_a_resume_would_read_must_not_appear(checkpoint: Path, name: str) -> None:
    put(checkpoint / name, b"another's")
    assert manifest.damage(checkpoint) == f"{name} was not there when the checkpoint was saved"


def test_a_process_that_was_killed_while_it_sealed_spoils_no_later_seal(checkpoint: Path) -> None:
    """A plain loop saves into the same folder again; the new list is written under that name, too."""
    put(checkpoint / "cocodc/COMPLETE.half", b"{")
    manifest.write(checkpoint, run=7)
    assert manifest.damage(checkpoint) is None


@pytest.mark.parametrize("lacking", ["its own hash", "the hash of a file", "the size of a file"])
def test_a_list_without_a_hash_is_damaged(checkpoint: Path, lacking: str) -> None:
    content = json.loads((checkpoint / manifest.COMPLETE).read_text())
    content.pop("sha256")
    if lacking != "its own hash":
        next(iter(content["files"].values())).pop("sha256" if "hash" in lacking else "bytes")
        content["sha256"] = manifest._sha256(content)
    (checkpoint / manifest.COMPLETE).write_text(json.dumps(content))
    assert str(manifest.damage(checkpoint)).startswith("cocodc/COMPLETE is damaged (")


@pytest.mark.parametrize("name", ["optimizer.pt", "cocodc/COMPLETE"])
def test_a_sealed_checkpoint_is_never_deleted_to_make_room(checkpoint: Path, name: str) -> None:
    """Not even a damaged one of the same run: a user may have kept something in it."""
    folders.begin_run(checkpoint.parent, 7)
    put(checkpoint / "merged/model.safetensors", b"the user's")
    put(checkpoint / name, b"damaged")
    folders.make_room(checkpoint)
    assert not checkpoint.exists()
    [aside] = checkpoint.parent.glob("checkpoint-4.*")
    assert (aside / "merged/model.safetensors").read_bytes() == b"the user's"
    assert list(folders.checkpoints(checkpoint.parent)) == []


def test_no_two_checkpoints_are_renamed_to_one_name(checkpoint: Path) -> None:
    """Also not if the user has a file of a similar name; the name of one that the user has deleted is free."""
    folders.begin_run(checkpoint.parent, 7)
    kept = shutil.copytree(checkpoint, checkpoint.parent / "kept")
    put(checkpoint.parent / "checkpoint-4.replaced.txt", b"the user's")
    names = []
    for turn in range(3):
        before = set(checkpoint.parent.iterdir())
        folders.make_room(checkpoint)
        names += [path.name for path in set(checkpoint.parent.iterdir()) - before]
        if turn == 1:
            shutil.rmtree(checkpoint.parent / names[0])
        shutil.copytree(kept, checkpoint)
    assert names == ["checkpoint-4.replaced", "checkpoint-4.replaced-2", "checkpoint-4.replaced"]


def test_a_part_of_a_checkpoint_is_deleted_to_make_room(checkpoint: Path) -> None:
    (checkpoint / state.COMPLETE).unlink()
    folders.make_room(checkpoint)
    assert not checkpoint.exists()
    assert not list(checkpoint.parent.glob("checkpoint-4*"))


def holding_nothing_else(folder: Path) -> int:
    """The step that a region with this folder resumes from."""
    [start] = run_in_lockstep(1, lambda region, link: checkpoint_to_resume(link, Accelerator(), folder, True))
    return 0 if start.checkpoint is None else int(start.checkpoint.name.partition("-")[2])


def test_a_checkpoint_that_was_copied_alone_is_resumed_from(whole: Path) -> None:
    """To another machine, into a folder that does not say which run writes there."""
    assert holding_nothing_else(whole.parent) == 4


def test_checkpoints_of_another_run_are_not_resumed_from(
    whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run that writes there now was ended before its first one: it begins once more."""
    folders.begin_run(whole.parent, 8)
    assert holding_nothing_else(whole.parent) == 0
    assert "is of an earlier run in this folder; give its path to continue that run" in caplog.text
    settle_in(whole.parent, 99, Start(None), step=0, region=0)
    assert manifest.is_sealed(whole), "it is of another run than 99"


@pytest.mark.parametrize(("number", "which"), [(2, "the older"), (99, "a newer")])
def test_a_checkpoint_of_another_format_is_not_called_damaged(
    number: int, which: str, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does a run of many hours begin anew because of it."""
    folders.begin_run(whole.parent, 8)
    (whole / manifest.COMPLETE).write_text(json.dumps({"format": number, "files": []}))
    with pytest.raises(CheckpointError, match="none of region 0 can be used") as refused:
        holding_nothing_else(whole.parent)
    assert f"its format is {number}, this hf_cocodc reads 3; install {which} one" in str(refused.value)
    assert "damaged" not in str(refused.value)


def test_later_checkpoints_of_the_run_are_given_up(whole: Path) -> None:
    folders.begin_run(whole.parent, 7)
    settle_in(whole.parent, 99, Start(whole, 7), step=4, region=0)
    assert manifest.is_sealed(whole)
    settle_in(whole.parent, 99, Start(whole, 7), step=2, region=0)
    assert holding_nothing_else(whole.parent) == 0


def test_a_damaged_checkpoint_at_a_path_says_what_is_wrong_with_it(whole: Path) -> None:
    """Also if there is no other checkpoint that could be named in its place."""
    (whole / "optimizer.pt").write_bytes(b"other")
    with pytest.raises(CheckpointError, match="cannot be resumed from: optimizer.pt has changed"):
        run_in_lockstep(
            1, lambda region, link: checkpoint_to_resume(link, Accelerator(), whole.parent, str(whole))
        )


def test_checkpoints_of_two_runs_at_two_paths_are_refused(whole: Path, tmp_path: Path) -> None:
    """Each is good by itself; together they would be a run that never was."""
    other = shutil.copytree(whole, tmp_path / "elsewhere" / whole.name)
    manifest.write(other, 99)
    with pytest.raises(CheckpointError, match="of region 0 and region 1 are of two different runs"):
        run_in_lockstep(
            2,
            lambda region, link: checkpoint_to_resume(
                link, Accelerator(), tmp_path / "run" / f"region-{region}", str((whole, other)[region])
            ),
        )


def test_the_other_ranks_wait_for_hashes_without_a_time_out(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The region's main process hashes files only where the link lets it lead, never while others are in a collective call."""
    leading, hashed, lead = [], [], LockstepLink.lead

    def noted_lead(link: LockstepLink, call: Callable[[Link], Any], what: str) -> Any:
        leading.append(what)
        try:
            return lead(link, call, what)
        finally:
            leading.pop()

    def noted_hashes(paths: Sequence[Path]) -> list[str]:
        hashed.append(bool(leading))
        return sha256_of_all(paths)

    monkeypatch.setattr(LockstepLink, "lead", noted_lead)
    monkeypatch.setattr(manifest, "sha256_of_all", noted_hashes)

    def body(region: int, link: Link) -> None:
        checkpoint_to_resume(link, Accelerator(), whole.parent, True)
        training = SimpleNamespace(accelerator=Accelerator(), link=link, endings=Mock(), inner_step=4)
        seal(cast(Training, training), whole)

    run_in_lockstep(1, body)
    assert hashed == [True, True], "at the resume, and at the seal"
