"""What reaches the Hub: one repository, from one region, with the model and nothing of the run. No network."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.trainer
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from transformers import Trainer

from hf_cocodc import CoCoDCCallback, OuterConfig, simulate
from hf_cocodc.link.base import Link
from hf_cocodc.trainer.hub import only_the_model
from tests.trainer.test_trainer import make

CONFIG = OuterConfig(method="diloco", sync_interval=2)


class Hub:
    """Takes what Trainer would send to the Hub."""

    def __init__(self) -> None:
        self.created: list[str] = []
        self.uploads: list[tuple[Path, set[str]]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def create_repo(self, name: str, **kwargs: Any) -> SimpleNamespace:
        self.created.append(name)
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(
        self, *, folder_path: str, ignore_patterns: list[str], run_as_future: bool, **kwargs: Any
    ) -> Any:
        folder = Path(folder_path)
        files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        kept = set(filter_repo_objects(files, ignore_patterns=ignore_patterns))
        self.uploads.append((folder, kept))
        self.weights.append(load_file(folder / "model.safetensors"))
        job: Future[str] = Future()
        job.set_result("done")
        return job if run_as_future else "done"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    taker = Hub()
    if hasattr(transformers.trainer, "hf_api"):
        monkeypatch.setattr(transformers.trainer, "hf_api", lambda: taker)
    else:
        monkeypatch.setattr(transformers.trainer, "create_repo", taker.create_repo)
        monkeypatch.setattr(transformers.trainer, "upload_folder", taker.upload_folder)
    return taker


def is_of_the_run(name: str) -> bool:
    first = name.split("/")[0]
    return first == "cocodc" or first.startswith(("checkpoint-", "region-", "log"))


@pytest.mark.parametrize("strategy", ["every_save", "end"])
def test_one_region_uploads_the_model(strategy: str, hub: Hub, tmp_path: Path) -> None:
    """push_to_hub=True: while training, from every checkpoint or not; and at the end, with save_model()."""

    def body(region: int, link: Link) -> Trainer:
        how = {"push_to_hub": True, "hub_strategy": strategy, "save_strategy": "steps", "save_steps": 2}
        trainer = make(tmp_path / "a-run", [CoCoDCCallback(CONFIG, link=link)], max_steps=4, **how)
        Path(trainer.args.output_dir).mkdir()
        (Path(trainer.args.output_dir) / "log.txt").write_text("what the command writes")
        trainer.train()
        trainer.save_model()
        return trainer

    first, _ = simulate(body, regions=2)
    assert hub.created == ["a-run"]
    assert len(hub.uploads) == (3 if strategy == "every_save" else 1)
    for folder, files in hub.uploads:
        assert folder == tmp_path / "a-run" / "region-0"
        assert {"config.json", "model.safetensors"} <= files
        assert not [name for name in files if is_of_the_run(name)]
    final = first.model.state_dict()
    assert all(torch.equal(final[name], tensor) for name, tensor in hub.weights[-1].items())


def test_a_push_by_hand(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """trainer.push_to_hub() in every region: region 1 says in one line that it does nothing."""

    def body(region: int, link: Link) -> Any:
        trainer = make(tmp_path / "a-run", [CoCoDCCallback(CONFIG, link=link)], max_steps=4)
        trainer.train()
        with caplog.at_level(logging.INFO):
            return trainer.push_to_hub()

    assert simulate(body, regions=2) == ["done", None]
    assert hub.created == ["a-run"]
    [(folder, files)] = hub.uploads
    assert folder == tmp_path / "a-run" / "region-0"
    assert {"README.md", "model.safetensors"} <= files
    assert not [name for name in files if is_of_the_run(name)]
    said = [record.message for record in caplog.records if "the Hub" in record.message]
    assert said == ["region 1 leaves the Hub to region 0: all regions have the same global model."]


def test_uploads_of_other_threads_stay_as_they_are(hub: Hub, tmp_path: Path) -> None:
    """While a region pushes, another thread may upload a folder of its own, with all that is in it."""
    trainer = make(tmp_path, [], max_steps=2)
    trainer.save_model()
    (tmp_path / "log.txt").write_text("mine")
    upload = {"folder_path": str(tmp_path), "ignore_patterns": None, "run_as_future": False}
    where = transformers.trainer.hf_api() if hasattr(transformers.trainer, "hf_api") else transformers.trainer
    with only_the_model():
        where.upload_folder(**upload)
        thread = threading.Thread(target=lambda: where.upload_folder(**upload))
        thread.start()
        thread.join()
    where.upload_folder(**upload)
    assert ["log.txt" in files for _, files in hub.uploads] == [False, True, True]


def test_a_trainer_without_our_callback_is_as_ever(hub: Hub, tmp_path: Path) -> None:
    """It creates its repository, and uploads what it always does."""
    CoCoDCCallback(CONFIG)
    trainer = make(tmp_path / "region-0", [], push_to_hub=True)
    (tmp_path / "region-0" / "cocodc").mkdir()
    (tmp_path / "region-0" / "cocodc" / "mine").write_text("")
    trainer.push_to_hub()
    assert hub.created == ["region-0"]
    assert "cocodc/mine" in hub.uploads[0][1]


def test_a_method_that_another_package_has_wrapped(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Still only region 0 creates a repository."""
    create = inspect.unwrap(Trainer.init_hf_repo)

    @functools.wraps(create)
    def of_another(self: Trainer, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "init_hf_repo", of_another)

    def body(region: int, link: Link) -> None:
        make(tmp_path / "run", [CoCoDCCallback(CONFIG, link=link)], push_to_hub=True)

    simulate(body, regions=2)
    assert len(hub.created) == 1
