"""What a run tells of itself: metrics for trackers, and the journal."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback

import hf_cocodc
from hf_cocodc import CoCoDCCallback, OuterConfig, simulate
from hf_cocodc.errors import RunLeft
from hf_cocodc.link.base import Link
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


def writings() -> dict[str, list[ast.Call]]:
    """The calls in the package that write an event into a journal, by kind."""
    found: dict[str, list[ast.Call]] = {}
    for module in sorted(Path(hf_cocodc.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and node.args and node.keywords):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("write", "write_later", "_record", "record"):
                first = node.args[0]
                either = (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,)
                for kind in either:
                    if isinstance(kind, ast.Constant):
                        found.setdefault(str(kind.value), []).append(node)
    return found


def test_the_code_writes_what_is_described() -> None:
    """All kinds of events, with all fields that a call names; and no kind or field that does not occur in the code."""
    described, found = fields(), writings()
    assert {"start", "resume", "land", "void", "join", "best"} <= set(found)
    for kind, calls in found.items():
        for call in calls:
            assert {word.arg for word in call.keywords if word.arg} <= described[kind] | IN_EVERY_LINE, kind
    code = "\n".join(path.read_text() for path in Path(hf_cocodc.__file__).parent.rglob("*.py"))
    for kind, names in described.items():
        assert kind in found or f'"{kind}"' in code, kind
        for name in names:
            assert re.search(rf"\b{re.escape(name.removeprefix('outer/'))}\b\s*[=:\"]", code), (
                f"{kind}: {name}"
            )


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
