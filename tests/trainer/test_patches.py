"""What we need of Trainer beyond its public face: a new Transformers that moves any of it is noticed here first."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_cocodc.trainer
from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig
from hf_cocodc.trainer.patches import CALLED, COUNTERS, PROVEN, WRAPPED, Patches
from tests.processes.worker import Tokens
from tests.toys import llama

PACKAGE = Path(hf_cocodc.trainer.__file__).parent
ROOT = PACKAGE.parents[1]
PAGE = ROOT / "docs" / "internals" / "trainer.md"


@pytest.mark.parametrize("name", sorted({**WRAPPED, **CALLED}))
def test_trainer_has_what_is_wrapped_or_called(name: str) -> None:
    """Each method is there, with the parameters that we name."""
    parameters = inspect.signature(getattr(Trainer, name)).parameters
    for parameter in (*WRAPPED.get(name, ()), *CALLED.get(name, ())):
        assert parameter in parameters, f"Trainer.{name} takes {', '.join(parameters)}"


def test_every_wrapped_method_has_a_wrapper() -> None:
    """And no wrapper is left over."""
    wrappers = {name for name, value in vars(Patches).items() if inspect.isfunction(value)}
    helpers = {"__init__", "_fill", "_chosen_weights", "_own_global_weights", "_tell_callbacks"}
    assert wrappers - helpers == set(WRAPPED)


@pytest.mark.parametrize("weights", ["equal", "tokens"])
def test_what_every_step_calls_is_wrapped_only_if_needed(weights: str, tmp_path: Path) -> None:
    """Each call costs microseconds: only where tokens are weights must they be counted."""
    callback = CoCoDCCallback(OuterConfig(weights=weights), RegionConfig(region=0, count=1))
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, callbacks=[callback])
    assert ("get_batch_samples" in vars(trainer)) == (weights == "tokens")


def test_nothing_private_of_trainer_is_used_besides() -> None:
    """Every `trainer._name` and `Trainer._name` in the package is declared in `patches`."""
    used = set()
    for module in PACKAGE.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
            ):
                owner = (
                    node.value.attr
                    if isinstance(node.value, ast.Attribute)
                    else getattr(node.value, "id", "")
                )
                if owner.lower().lstrip("_") == "trainer":
                    used.add(node.attr)
    assert used == set(CALLED) | set(COUNTERS)


@pytest.mark.parametrize("name", COUNTERS)
def test_trainer_still_counts_by_these_names(name: str) -> None:
    assert f"self.{name} = self.state.global_step" in inspect.getsource(Trainer._inner_training_loop)


def test_the_page_says_what_is_wrapped_and_called() -> None:
    """Its two tables are those of `patches`, with the first paragraph of each wrapper's docstring."""

    def code(names: tuple[str, ...]) -> str:
        return ", ".join(f"`{name}`" for name in names) or "none"

    def summary(name: str) -> str:
        return re.sub(r"\s+", " ", (inspect.getdoc(getattr(Patches, name)) or "").split("\n\n")[0])

    wrapped = [f"| `{name}` | {code(given)} | {summary(name)} |" for name, given in WRAPPED.items()]
    called = [f"| `{name}` | {code(given)} |" for name, given in CALLED.items()]
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^\| `\w+` \|.*", text.partition("## Behavior")[0], re.MULTILINE) == wrapped + called
    assert " and ".join(f"`{name}`" for name in COUNTERS) in text
    assert f"Transformers {PROVEN[0]} to {PROVEN[1]} " in text
    for path in re.findall(r"`(tests/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_versions_are_those_that_are_tested() -> None:
    """From the bound of `pyproject.toml` to the installed one. Once all tests pass with a newer one, say so in PROVEN."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [bound] = [each for each in project["dependencies"] if each.startswith("transformers")]
    assert bound.startswith(f"transformers>={PROVEN[0]},")
    major, minor = transformers.__version__.split(".")[:2]
    oldest, newest = ([int(part) for part in version.split(".")] for version in PROVEN)
    assert oldest <= [int(major), int(minor)] <= newest


def test_the_order_of_a_step(tmp_path: Path) -> None:
    """The outer step comes after the count, and before log, evaluation and save; the best model is loaded before the end."""
    seen: list[str] = []

    class Notes(TrainerCallback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                return lambda args, state, control, **_: seen.append(f"{name} {state.global_step}")
            return super().__getattribute__(name)

    how = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "logging_steps": 1,
        "load_best_model_at_end": True,
    }
    common = {"max_steps": 1, "eval_steps": 1, "save_steps": 1, "report_to": "none", "use_cpu": True}
    args = TrainingArguments(str(tmp_path), eval_on_start=True, disable_tqdm=True, **(common | how))
    trainer = Trainer(llama(), args, train_dataset=Tokens(8), eval_dataset=Tokens(2), callbacks=[Notes()])
    for name in ("_evaluate", "_determine_best_metric", "_save_checkpoint", "_load_best_model"):
        method = getattr(trainer, name)

        def noted(*args: Any, _method: Any = method, _name: str = name, **kwargs: Any) -> Any:
            seen.append(f"{_name}{' on start' if kwargs.get('skip_scheduler') else ''}")
            return _method(*args, **kwargs)

        setattr(trainer, name, noted)
    trainer.train()
    inside = ("on_prediction_step", "on_log", "on_substep_end")
    found = [each for each in seen if not each.startswith(inside)]
    assert found[: found.index("on_epoch_end 1")] == [
        "on_init_end 0",
        "on_train_begin 0",
        "_evaluate on start",
        "on_evaluate 0",
        "on_epoch_begin 0",
        "on_step_begin 0",
        "on_pre_optimizer_step 0",
        "on_optimizer_step 0",
        "on_step_end 1",
        "_evaluate",
        "on_evaluate 1",
        "_determine_best_metric",
        "_save_checkpoint",
        "on_save 1",
    ]
    assert found[-2:] == ["_load_best_model", "on_train_end 1"]
