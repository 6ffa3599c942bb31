"""A folder of checkpoints: old ones that the disk does not let go, whose it is, and one that is saved into again and again."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from hf_cocodc import OuterConfig, OuterOptimizer, simulate
from hf_cocodc.errors import CheckpointError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.snapshot import checkpoint as disk
from hf_cocodc.snapshot import folders, manifest
from hf_cocodc.snapshot.folders import claim
from tests.run.test_loaded import Loop
from tests.toys import llama, train_loop

CONFIG = OuterConfig(sync_interval=2)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of files that cannot be deleted, or renamed."""
    names: set[str] = set()

    def refusing(method: str) -> None:
        usual = getattr(Path, method)

        def call(self: Path, *args: Any, **kwargs: Any) -> Any:
            if self.name in names:
                raise OSError(errno.EBUSY, "Device or resource busy", str(self))
            return usual(self, *args, **kwargs)

        monkeypatch.setattr(Path, method, call)

    for method in ("unlink", "rename"):
        refusing(method)
    return names


def saved(folder: Path, step: int) -> None:
    checkpoint = folder / f"checkpoint-{step}"
    for name in ("inside", "cocodc"):
        (checkpoint / name).mkdir(parents=True)
    for name in ("optimizer.pt", "model.safetensors", "inside/more"):
        (checkpoint / name).write_text("content")


@pytest.mark.parametrize("name", ["optimizer.pt", "checkpoint-1"])
def test_rotation_goes_on_whatever_cannot_be_deleted(
    name: str, held: set[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step)
    held.add(name)
    with caplog.at_level(logging.WARNING):
        folders.rotate(tmp_path, 1, 3, set())
    assert f"{name} cannot be deleted ([Errno 16] Device or resource busy" in caplog.text
    gone = [1, 3] if name == "checkpoint-1" else [3]
    assert list(folders.checkpoints(tmp_path)) == gone, "what is half deleted is no checkpoint"
    left = {path.name for path in tmp_path.rglob("*") if path.is_file() and "checkpoint-3" not in str(path)}
    assert left == ({"optimizer.pt", "model.safetensors", "more"} if gone == [1, 3] else {"optimizer.pt"})
    held.clear()
    saved(tmp_path, 4)
    folders.rotate(tmp_path, 1, 4, set())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_the_place_of_a_checkpoint_is_free_though_a_file_stays(held: set[str], tmp_path: Path) -> None:
    for _ in range(2):
        saved(tmp_path, 1)
        held.add("optimizer.pt")
        folders.make_room(tmp_path / "checkpoint-1")
        assert not (tmp_path / "checkpoint-1").exists()
    held.clear()
    folders.discard([], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_loop_with_a_limit_goes_on(held: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate itself would delete old ones before it saves, and end."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model = Accelerator(cpu=True, project_config=project), llama(layers=1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    outer = OuterOptimizer(accelerator, model, optimizer, OuterConfig(sync_interval=2), link=loopback())
    monkeypatch.setattr("shutil.rmtree", lambda *_: (_ for _ in ()).throw(OSError(errno.EBUSY, "busy")))
    held.add("optimizer.bin")
    for step in (1, 2, 3, 4):
        train_loop(accelerator, model, optimizer, outer, step)
        accelerator.save_state()
    outer.close()
    assert project.total_limit == 2
    left = sorted(path.name for path in (tmp_path / "checkpoints").glob("checkpoint_*"))
    assert left == ["checkpoint_2", "checkpoint_3"]
    assert [disk.read(tmp_path / "checkpoints" / name).facts.step for name in left] == [3, 4]


def test_rotation_keeps_what_some_region_may_still_need(tmp_path: Path) -> None:
    """The newest that all regions have, later ones, and the best; however low the limit."""
    for step in (1, 3, 5, 7, 9):
        (tmp_path / f"checkpoint-{step}" / "cocodc").mkdir(parents=True)
    folders.rotate(tmp_path, 4, 7, {3})
    assert list(folders.checkpoints(tmp_path)) == [3, 5, 7, 9]
    folders.rotate(tmp_path, 1, 7, {3})
    assert list(folders.checkpoints(tmp_path)) == [3, 7, 9]
    folders.rotate(tmp_path, None, 9, set())
    assert list(folders.checkpoints(tmp_path)) == [3, 7, 9]


def test_what_was_never_completed_is_rotated_and_what_another_run_has_completed_stays(tmp_path: Path) -> None:
    for step, run in ((1, 6), (2, None), (3, 7), (4, 7)):
        saved(tmp_path, step)
        if run is not None:
            manifest.write(tmp_path / f"checkpoint-{step}", run)
    folders.begin_run(tmp_path, 7)
    folders.rotate(tmp_path, 1, 4, set())
    assert list(folders.checkpoints(tmp_path)) == [1, 4]


def test_what_a_plain_trainer_has_saved_there_is_not_rotated(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step)
    (tmp_path / "checkpoint-1" / "cocodc").rmdir()
    folders.rotate(tmp_path, 1, 3, set())
    assert list(folders.checkpoints(tmp_path)) == [1, 3]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("named", [True, False], ids=["a path", "Accelerate's names"])
def test_two_regions_do_not_save_into_one_folder(named: bool, first: int, tmp_path: Path) -> None:
    """Whichever comes first; what it has saved stays as it is."""
    folder, said = tmp_path / "ck", {}

    def body(region: int, link: Link) -> None:
        naming = {} if named else {"project_dir": str(folder), "automatic_checkpoint_naming": True}
        loop = Loop(link, **naming)
        loop.begin()

        def save(step: int) -> None:
            if step == (2 if region == first else 9):
                try:
                    loop.accelerator.save_state(str(folder) if named else None)
                except CheckpointError as error:
                    said[region] = str(error)

        loop.train(until=9, then=save)

    simulate(body, regions=2)
    own = folder / f"region-{1 - first}"
    assert said == {
        1
        - first: f"region {1 - first} is to save into {folder}, where region {first} of this run saves: they would overwrite "
        f"each other. Nothing was written. Give every region a folder of its own, for example {own}."
    }
    checkpoint = folder if named else folder / "checkpoints" / "checkpoint_0"
    assert manifest.damage(checkpoint) is None
    assert disk.read(checkpoint).facts.region == first


def test_a_region_saves_again_into_its_folder_and_later_runs_do(tmp_path: Path) -> None:
    """Also where regions have other numbers then: machines may be numbered anew."""

    def body(region: int, link: Link, place: int) -> None:
        loop, home = Loop(link), tmp_path / f"machine-{place}"
        loop.begin()
        loop.train(4, lambda step: step > 2 and loop.accelerator.save_state(str(home)))
        assert disk.read(home).facts.region == region
        assert len(list((home / "cocodc").glob("saved-by-*"))) == 1

    simulate(lambda region, link: body(region, link, region), regions=2)
    simulate(lambda region, link: body(region, link, 1 - region), regions=2)


def test_of_regions_that_save_at_once_one_does(tmp_path: Path) -> None:
    for trial in range(50):
        folder, barrier, own = tmp_path / f"{trial}", threading.Barrier(4), []

        def save(region: int, folder: Path = folder, barrier: Any = barrier, own: list = own) -> None:
            barrier.wait()
            with contextlib.suppress(CheckpointError):
                claim(folder, 7, region, range(4))
                own.append(region)

        threads = [threading.Thread(target=save, args=(region,)) for region in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(own) == 1


def test_the_folder_of_a_region_that_has_left_is_free(tmp_path: Path) -> None:
    claim(tmp_path, 7, 2, [0, 1, 2])
    claim(tmp_path, 7, 1, [0, 1])
    with pytest.raises(CheckpointError, match="where region 1 of this run saves"):
        claim(tmp_path, 7, 2, [0, 1, 2])


class Killed(BaseException):
    """The process ends here."""


def loop(folder: Path, body: Callable[[Accelerator, OuterOptimizer, Callable[[int], None]], None]) -> None:
    accelerator, model = Accelerator(cpu=True), llama(layers=1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    outer = OuterOptimizer(accelerator, model, optimizer, CONFIG, link=loopback())
    try:
        body(accelerator, outer, lambda until: train_loop(accelerator, model, optimizer, outer, until))
    finally:
        outer.close()


def complete(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, in the folder and beside it."""
    found = [each for each in (folder, folders._beside(folder)) if manifest.damage(each) is None]
    return [disk.read(each).facts.step for each in found]


def test_a_complete_checkpoint_is_there_whatever_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever anything is written into the folder or beside it; at the end nothing but the new one is left."""
    folder, seen = tmp_path / "saved", list[list[int]]()

    def watch(module: Any, name: str) -> None:
        write = getattr(module, name)

        def watched(*given: Any) -> None:
            seen.append(complete(folder))
            write(*given)

        monkeypatch.setattr(module, name, watched)

    def body(accelerator: Accelerator, outer: OuterOptimizer, train: Callable[[int], None]) -> None:
        train(2)
        assert accelerator.save_state(str(folder)) == str(folder)
        (folder / "notes.txt").write_text("mine")
        watch(manifest, "replace")
        watch(disk, "save_file")
        accelerator.register_save_state_pre_hook(lambda models, weights, path: seen.append(complete(folder)))
        train(5)
        assert accelerator.save_state(output_dir=str(folder)) == str(folder)

    loop(folder, body)
    assert len(seen) > 2
    assert all(each == [2] for each in seen), seen
    assert complete(folder) == [5]
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_save_deletes_no_file_of_a_user(tmp_path: Path) -> None:
    """Neither one from before the first save, nor an adapter that a script has written beside ours."""
    folder, mine = tmp_path / "saved", ["notes.txt", "region-1/model.safetensors"]

    def body(accelerator: Accelerator, outer: OuterOptimizer, train: Callable[[int], None]) -> None:
        for name in mine:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("mine")
        for step in (2, 4, 5):
            train(step)
            accelerator.save_state(str(folder))
            (folder / "adapter_model.safetensors").write_text("mine")

    loop(folder, body)
    for name in (*mine, "adapter_model.safetensors"):
        assert (folder / name).read_text() == "mine"


def test_what_no_run_of_ours_began_is_renamed_to_make_room(tmp_path: Path) -> None:
    """A plain Trainer's checkpoint of the same step."""
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "model.safetensors").write_text("mine")
    folders.make_room(tmp_path / "checkpoint-4")
    assert (tmp_path / "checkpoint-4.replaced" / "model.safetensors").read_text() == "mine"


@pytest.mark.parametrize("moved", [0, 1, 4, "all"])
def test_a_process_that_is_killed_while_files_move_leaves_a_checkpoint(
    moved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one that loads or saves goes on moving."""
    folder, count = tmp_path / "saved", 0
    move = os.replace

    def dies(source: Any, target: Any) -> None:
        nonlocal count
        if Path(source).parts[len(tmp_path.parts)] == "saved.next" and ".half" not in str(source):
            if count == moved or (moved == "all" and str(source).endswith("COMPLETE")):
                raise Killed
            count += 1
        move(source, target)

    def dying(accelerator: Accelerator, outer: OuterOptimizer, train: Callable[[int], None]) -> None:
        train(2)
        accelerator.save_state(str(folder))
        train(5)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dies)
            with pytest.raises(Killed):
                accelerator.save_state(str(folder))

    def loading(accelerator: Accelerator, outer: OuterOptimizer, train: Callable[[int], None]) -> None:
        accelerator.load_state(str(folder))
        assert outer.inner_step == 5
        train(7)
        accelerator.save_state(str(folder))

    loop(folder, dying)
    loop(folder, loading)
    assert complete(folder) == [7]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_process_that_is_killed_while_it_saves_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"

    def dying(accelerator: Accelerator, outer: OuterOptimizer, train: Callable[[int], None]) -> None:
        train(2)
        accelerator.save_state(str(folder))
        train(5)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "seal", lambda checkpoint: (_ for _ in ()).throw(Killed))
            with pytest.raises(Killed):
                accelerator.save_state(str(folder))

    def loading(accelerator: Accelerator, outer: OuterOptimizer, train: Callable[[int], None]) -> None:
        accelerator.load_state(str(folder))
        assert outer.inner_step == 2
        train(3)
        accelerator.save_state(str(folder))

    loop(folder, dying)
    assert complete(folder) == [2]
    loop(folder, loading)
    assert complete(folder) == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_damaged_list_keeps_no_loop_from_saving(tmp_path: Path) -> None:
    """The checkpoint before is lost, but not the run."""
    folder = tmp_path / "saved"

    def body(accelerator: Accelerator, outer: OuterOptimizer, train: Callable[[int], None]) -> None:
        train(2)
        accelerator.save_state(str(folder))
        (folder / manifest.COMPLETE).write_text("{")
        train(3)
        accelerator.save_state(str(folder))

    loop(folder, body)
    assert complete(folder) == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_checkpoint_that_is_overwritten_in_place_is_no_complete_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before any file is written: a process that is killed then leaves a mix of two."""
    folder = tmp_path / "checkpoint-1"
    saved(tmp_path, 1)
    manifest.write(folder, 7)
    folders._beside(folder).touch()
    assert folders.place_to_save(folder) == folder
    assert not manifest.is_sealed(folder)
    assert "From now until the save ends, this folder holds no complete checkpoint." in caplog.text


def test_a_process_that_is_killed_once_the_old_list_is_gone_leaves_no_old_files(tmp_path: Path) -> None:
    """A region of two ranks saved there before; what a user has added stays."""
    folder = tmp_path / "saved"
    for place, names in {
        folders._beside(folder): ["random_states_0.pkl"],
        folder: ["random_states_0.pkl", "random_states_1.pkl"],
    }.items():
        (place / "cocodc").mkdir(parents=True)
        for name in names:
            (place / name).write_text(place.name)
        manifest.write(place, 7)
    (folder / "notes.txt").write_text("mine")
    (folder / manifest.COMPLETE).unlink()
    folders.move_in(folder)
    assert manifest.damage(folder) is None
    assert {path.name for path in folder.iterdir()} == {"cocodc", "notes.txt", "random_states_0.pkl"}
