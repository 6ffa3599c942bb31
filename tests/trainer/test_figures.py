"""What a run tells of itself: metrics for trackers, and the journal."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Trainer, TrainerCallback
from transformers.integrations import integration_utils

from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig, simulate
from hf_cocodc.errors import RunLeft
from hf_cocodc.link.base import Link
from hf_cocodc.run.events import FIELDS, wrong_with
from hf_cocodc.run.journal import read
from tests.trainer.test_trainer import make

CONFIG = OuterConfig(method="streaming", sync_interval=4, num_fragments=2, overlap_steps=1)
IN_EVERY_LINE = {"kind", "time_s", "step"}
REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def rows(text: str) -> set[str]:
    """The names that a page's tables explain."""
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))


def fields() -> dict[str, set[str]]:
    """The fields of a journal's lines that its page explains, by kind; a kind may have several headings."""
    page = (REFERENCE / "journal.md").read_text(encoding="utf-8")
    beginning, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    assert rows(beginning) == IN_EVERY_LINE
    found: dict[str, set[str]] = {}
    for section in sections:
        heading, _, text = section.partition("\n")
        for kind in heading.split(", "):
            found.setdefault(kind, set()).update(rows(text))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two regions that reports to TensorBoard."""
    folder = tmp_path_factory.mktemp("run") / "mine"

    def body(region: int, link: Link) -> Any:
        more = {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 4, "eval_steps": 4}
        trainer = make(
            folder, [CoCoDCCallback(CONFIG, link=link)], report_to=["tensorboard"], max_steps=10, **more
        )
        trainer.train()
        return trainer.args.run_name

    assert simulate(body, regions=2) == ["mine-region-0", "mine-region-1"]
    return folder


def test_every_outer_figure_reaches_a_tracker_once(run: Path) -> None:
    """One run, of region 0; both pages explain each figure."""
    [events] = run.rglob("events.out.*")
    assert "region-0" in events.parts
    seen = EventAccumulator(str(events))
    seen.Reload()
    prefix = "train/outer/"
    found = {tag.removeprefix(prefix) for tag in seen.Tags()["scalars"] if tag.startswith(prefix)}
    assert {f"outer/{name}" for name in found} == rows((REFERENCE / "metrics.md").read_text(encoding="utf-8"))
    assert {f"outer/{name}" for name in found} == fields()["log"]
    for name in found:
        steps = [each.step for each in seen.Scalars(prefix + name)]
        assert steps == sorted(set(steps))


def test_a_run_writes_no_field_that_is_not_described(run: Path) -> None:
    written = set()
    for region in range(2):
        for event in read(run / f"region-{region}" / "cocodc" / "journal.jsonl"):
            kind = event["kind"]
            written.add(kind)
            assert {name for name in event if name.startswith("outer/")} <= fields()["log"]
            if kind not in ("log", "evaluate"):  # these have Trainer's names too
                assert set(event) <= fields()[kind] | IN_EVERY_LINE
    assert {"start", "send", "land", "log", "evaluate", "save", "finish"} <= written


def test_the_schema_has_what_is_described() -> None:
    """And the writer takes no other kind or field, but for Trainer's and the outer optimizer's own figures in logs."""
    described = fields()
    assert set(described) == set(FIELDS)
    of_trainer = {"loss", "learning_rate", "eval_loss", "eval_perplexity", "eval_accuracy", "eval_runtime"}
    for kind, names in FIELDS.items():
        own = {name for name in described[kind] if not name.startswith("outer/")}
        assert own == {n for n in names if not n.startswith("outer/")} - IN_EVERY_LINE - of_trainer, kind


class Tracker(ModuleType):
    """Stands for wandb or trackio: keeps what a run was begun with."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun: list[dict[str, Any]] = []
        self.run: Any = None
        self.config, self.context_vars = MagicMock(), MagicMock()
        self.define_metric = MagicMock()

    def init(self, **given: Any) -> Any:
        self.begun.append({**given, "env": os.environ.get("WANDB_RUN_GROUP")})
        self.run = MagicMock()
        return self.run


@pytest.mark.parametrize("region", [0, 1])
@pytest.mark.parametrize("reports", ["first", "all"])
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_regions_that_all_report_are_runs_of_one_group(
    name: str, reports: str, region: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what Transformers' own callbacks call; by default region 0 alone reports. The user's name is that of the group."""
    monkeypatch.setenv("WANDB_RUN_GROUP", "x")  # undone afterwards
    monkeypatch.delenv("WANDB_RUN_GROUP")
    tracker = Tracker(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    for part in ("wandb.sdk", "wandb.sdk.lib", "wandb.sdk.lib.config_util"):
        monkeypatch.setitem(sys.modules, part, MagicMock(ConfigError=ValueError))
    monkeypatch.setattr(integration_utils, f"is_{name}_available", lambda: True)
    there = RegionConfig(region=region, count=2, coordinator="127.0.0.1:1", report_regions=reports)
    trainer = make(tmp_path / "mine", [CoCoDCCallback(CONFIG, there)], report_to=[name], run_name="trial")
    for each in trainer.callback_handler.callbacks:
        if type(each).__module__ == integration_utils.__name__:
            each.setup(trainer.args, trainer.state, trainer.model)
    begun = [(each["name"], each["env"] if name == "wandb" else each.get("group")) for each in tracker.begun]
    if reports == "all":
        assert begun == [(f"trial-region-{region}", "trial")]
    else:
        assert begun == [("trial", None)] * (1 - region)


def test_a_metric_that_is_no_number_stays_out_of_the_journal(tmp_path: Path) -> None:
    """Of what a script's own `evaluate` returns, the journal takes the numbers: a report reads every line."""
    odd = {
        "eval_accuracy": "good",
        "eval_each": [0.5, 0.25],
        "eval_f1": np.float32(0.5),
        "eval_recall": torch.tensor(0.25),
    }

    class Own(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            return {**super().evaluate(*args, **kwargs), **odd}

    trainer = make(tmp_path, [CoCoDCCallback(CONFIG)], kind=Own, max_steps=2)
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] == "good"
    [event] = [
        each
        for each in read(tmp_path / "region-0" / "cocodc" / "journal.jsonl")
        if each["kind"] == "evaluate"
    ]
    assert wrong_with(event) is None
    assert event["eval_loss"] > 0
    assert (event["eval_f1"], event["eval_recall"]) == (0.5, 0.25)
    assert not {"eval_accuracy", "eval_each"} & event.keys()


def test_a_group_is_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Trainer of a script has a group of its own, or none; the group that the user has named stays."""
    monkeypatch.setenv("WANDB_RUN_GROUP", "x")  # undone afterwards
    monkeypatch.delenv("WANDB_RUN_GROUP")

    def group_of(run: str, reports: str) -> str | None:
        there = RegionConfig(region=0, count=2, coordinator="127.0.0.1:1", report_regions=reports)
        make(tmp_path / run, [CoCoDCCallback(CONFIG, there)], run_name=run)
        return os.environ.get("WANDB_RUN_GROUP")

    assert group_of("one", "all") == "one"
    assert group_of("two", "all") == "two"
    assert group_of("three", "first") is None
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    assert group_of("four", "all") == group_of("five", "first") == "mine"


def test_a_region_that_leaves_logs_the_loss_of_what_it_has_trained(tmp_path: Path) -> None:
    """It keeps step with the others for 25 steps after its last one. Trainer would divide its losses by all of them."""
    callback = CoCoDCCallback(CONFIG)

    class Leave(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            outer = callback.outer
            assert outer is not None
            if state.global_step == 10:
                outer.step()
                for _ in range(25):
                    outer.coast_one()
                outer.training.endings.end("leave", "its machine is needed")

    trainer = make(tmp_path, [Leave(), callback], max_steps=60, logging_steps=10)
    with pytest.raises(RunLeft, match="has left the run at step 35"):
        trainer.train()
    [logged] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    [ended] = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    assert logged == pytest.approx(ended) == pytest.approx(4.1, abs=0.2), (
        "a model that knows nothing yet: ln 64"
    )
    assert trainer.state.global_step == 35
