"""What a run tells of itself: metrics for trackers, and the journal; and the README's tables of both."""

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
from hf_cocodc.run import journal
from hf_cocodc.run.journal import read
from tests.trainer.test_trainer import make

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8").partition("### Metrics and journal\n")[2]
CONFIG = OuterConfig(method="streaming", sync_interval=4, num_fragments=2, overlap_steps=1)
IN_EVERY_LINE = {"kind", "time_s", "step"}


def rows(head: str) -> list[tuple[set[str], set[str]]]:
    """The names in code of the first and the last cell of each row of a README table."""
    table = README.partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert table, head
    cells = [line.strip("|").split(" | ") for line in table]
    return [
        (set(re.findall(r"`([\w/]+)`", row[0])), set(re.findall(r"`([\w/]+)`", row[-1]))) for row in cells
    ]


def fields() -> dict[str, set[str]]:
    """What the README says that a journal's lines have, by kind."""
    said: dict[str, set[str]] = {}
    for kinds, names in rows("kind of line"):
        for kind in kinds:
            said.setdefault(kind, set()).update(names)
    return said


def described() -> dict[str, set[str]]:
    """The same in the words of `run/journal.py`: a line for each field, below the kinds that have it."""
    said: dict[str, set[str]] = {}
    kinds: list[str] = []
    for line in (journal.__doc__ or "").splitlines():
        if head := re.match(r"([a-z_]+(?:, [a-z_]+)*): [\w`]", line):
            kinds = head[1].split(", ")
            for kind in kinds:
                said.setdefault(kind, set())
        elif field := re.match(r"    ([\w/]+): \w", line):
            for kind in kinds:
                said[kind].add(field[1])
    return said


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
    """One run, of region 0; the README names each figure."""
    [events] = run.rglob("events.out.*")
    assert "region-0" in events.parts
    seen = EventAccumulator(str(events))
    seen.Reload()
    prefix = "train/outer/"
    found = {tag.removeprefix(prefix) for tag in seen.Tags()["scalars"] if tag.startswith(prefix)}
    assert {f"outer/{name}" for name in found} == {name for names, _ in rows("metric") for name in names}
    for name in found:
        steps = [each.step for each in seen.Scalars(prefix + name)]
        assert steps == sorted(set(steps))


def test_the_readme_and_the_journal_name_what_a_journal_has(run: Path) -> None:
    """Each field that a run wrote."""
    written = set()
    for region in range(2):
        for event in read(run / f"region-{region}" / "cocodc" / "journal.jsonl"):
            kind = event["kind"]
            written.add(kind)
            figures = {name for name in event if name.startswith("outer/")}
            assert figures <= described()["log"]
            if kind not in ("log", "evaluate"):  # these have Trainer's names too
                for said in (fields(), described()):
                    assert set(event) <= said[kind] | IN_EVERY_LINE
    assert {"start", "send", "land", "log", "evaluate", "save", "finish"} <= written


def test_the_journal_describes_every_field_that_the_readme_names() -> None:
    """And no other."""
    metrics = {name for names, _ in rows("metric") for name in names}
    assert described() == {
        kind: names | (metrics if kind == "log" else set()) for kind, names in fields().items()
    }


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


def test_the_readme_names_what_the_code_writes() -> None:
    """All kinds of events, with all fields that a call names; and no kind or field that does not occur in the code."""
    said, found = fields(), writings()
    assert {"start", "resume", "land", "void", "join", "best"} <= set(found)
    for kind, calls in found.items():
        for call in calls:
            assert {word.arg for word in call.keywords if word.arg} <= said[kind] | IN_EVERY_LINE, kind
    code = "\n".join(path.read_text() for path in Path(hf_cocodc.__file__).parent.rglob("*.py"))
    assert code.count(journal.__doc__ or "-") == 1
    code = code.replace(journal.__doc__ or "", "")  # it names them all
    for kind, names in said.items():
        assert kind in found or f'"{kind}"' in code, kind
        for name in names:
            assert re.search(rf"\b{re.escape(name)}\b\s*[=:\"]", code), f"{kind}: {name}"


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
                outer.endings.end("leave", "its machine is needed")

    trainer = make(tmp_path, [Leave(), callback], max_steps=60, logging_steps=10)
    with pytest.raises(RunLeft, match="has left the run at step 35"):
        trainer.train()
    [logged] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    [ended] = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    assert logged == pytest.approx(ended) == pytest.approx(4.1, abs=0.2), (
        "a model that knows nothing yet: ln 64"
    )
    assert trainer.state.global_step == 35
