"""Old files that the disk does not let go: a warning, another try with the next checkpoint, and the run goes on."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.snapshot import checkpoint as disk
from hf_cocodc.snapshot import folders
from tests.toys import llama, train_loop


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
    (checkpoint / "inside").mkdir(parents=True)
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
    assert [disk.facts_of(tmp_path / "checkpoints" / name).step for name in left] == [3, 4]
