"""A loop that saves into one folder again and again: at each moment a complete checkpoint is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.snapshot import beside, manifest
from hf_cocodc.snapshot import checkpoint as disk
from tests.toys import llama, train_loop

CONFIG = OuterConfig(sync_interval=2)


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
    found = [each for each in (folder, beside._beside(folder)) if manifest.damage(each) is None]
    return [disk.facts_of(each).step for each in found]


def test_a_complete_checkpoint_is_there_whatever_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever anything is written into the folder or beside it; at the end nothing but the new one is left."""
    folder, seen = tmp_path / "saved", list[list[int]]()
    write = manifest.replace

    def watched(path: Path, save: Any) -> None:
        seen.append(complete(folder))
        write(path, save)

    def body(accelerator: Accelerator, outer: OuterOptimizer, train: Callable[[int], None]) -> None:
        train(2)
        assert accelerator.save_state(str(folder)) == str(folder)
        (folder / "notes.txt").write_text("mine")
        monkeypatch.setattr(manifest, "replace", watched)
        monkeypatch.setattr(disk, "replace", watched)
        accelerator.register_save_state_pre_hook(lambda models, weights, path: seen.append(complete(folder)))
        train(5)
        assert accelerator.save_state(output_dir=str(folder)) == str(folder)

    loop(folder, body)
    assert len(seen) > 2
    assert all(each == [2] for each in seen), seen
    assert complete(folder) == [5]
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


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
