"""Recipes load and run, and the README's commands do what the README says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_cocodc import simulate
from hf_cocodc.auto import warnings_of
from hf_cocodc.cli.main import main
from hf_cocodc.newer import known
from hf_cocodc.resolve import from_config, settings
from hf_cocodc.run.journal import read
from hf_cocodc.settings import OuterConfig
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.training.preflight import check
from tests.processes.launching import little_text
from tests.toys import with_known_names

ROOT = Path(__file__).parents[2]
RECIPES = sorted(set((ROOT / "recipes").rglob("*.yaml")) - set((ROOT / "recipes" / "launch").rglob("*.yaml")))
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORT = ["training.max_steps=4", "outer.sync_interval=2", "training.eval_steps=4", "data.eval_blocks=4"]
SHORT += ["training.logging_steps=1", "training.warmup_steps=1"]


def command(mark: str) -> str:
    """The one line of the README's block behind `<!-- mark -->`."""
    found = re.search(rf"<!-- {mark} -->\n```bash\n([^\n]+)\n```", README)
    assert found, f"README has no one-line command marked {mark}"
    return found.group(1)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_recipe_is_complete(path: Path) -> None:
    """It loads, its method composes, its training and peft keys exist."""
    check(with_known_names(Recipe.load(path)))


@pytest.mark.parametrize(
    "path",
    [each for each in RECIPES if each.parts[-2] != "llama-150m"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_recipe_does_not_do_what_we_warn_of(path: Path) -> None:
    """llama-150m has the values of a paper, whose runs are compared with each other."""
    recipe = Recipe.load(path)
    assert warnings_of(recipe.outer, recipe.training["max_steps"]) == []


@pytest.mark.slow
def test_the_readmes_quickstart_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of the README, shortened, trains two regions, sums up, draws, and leaves a model that completes code.

    The same recipe in one process ends with the same bits.
    """
    install, train = command("quickstart").split(" && ")
    assert install == "pip install '.[plots]'"
    program, verb, recipe, *rest = shlex.split(train)
    assert (program, verb, rest) == ("hf-cocodc", "train", [])
    monkeypatch.chdir(tmp_path)
    overrides = [part for override in SHORT for part in ("--set", override)]
    assert main([verb, str(ROOT / recipe), *overrides]) == 0
    said = capsys.readouterr().out
    for line in (
        "held-out perplexity",
        "inner steps           4 in each of 2",
        "outer steps           2",
        "training blocked",
        "sent by",
        "report                hf-cocodc report ",
    ):
        assert line in said
    folder = tmp_path / "runs" / "quickstart-diloco"
    kinds = [event["kind"] for event in read(folder / "region-1" / "cocodc" / "journal.jsonl")]
    assert kinds.count("land") == 2
    model = AutoModelForCausalLM.from_pretrained(folder / "region-0")
    tokenizer = AutoTokenizer.from_pretrained(folder / "region-1")
    assert tokenizer.decode(tokenizer("    def __init__(self")["input_ids"]) == "    def __init__(self"

    trainers = simulate(ROOT / recipe, overrides=[*SHORT, f"training.output_dir={folder}"])
    for name, parameter in trainers[1].model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_the_readmes_test_command_is_what_ci_runs() -> None:
    """.ci/run reads the command out of the README."""
    assert command("test") == "pip install -e '.[test]' && python -m pytest"
    assert "<!-- test -->" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_table_of_methods_is_the_code() -> None:
    """One row per method. Patterns, codecs, outer chains, merges and closings are those that the code composes."""
    page = (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \(\d{4}\.\d{5}\) \| (.+) \|$", page, flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(known())
    for name, cells in rows:
        pattern, _, codec, chain, merge = cells.split(" | ")
        chosen, composed = settings(OuterConfig(method=name)), from_config(OuterConfig(method=name))
        assert pattern == chosen["fragment_pattern"]
        assert codec == f"{chosen['codec']}{', feedback' if chosen['error_feedback'] else ''}"
        assert chain == ", ".join(composed.outer.init(torch.zeros(1)))
        assert merge == chosen.get("merge", "replace")
        assert composed.closing.__name__ == ("other_parts" if name == "eager" else "one_more_round")
    assert "All methods but `eager` close with `one_more_round`" in page
    assert "`eager` closes with `other_parts`" in page


def test_the_messages_of_the_troubleshooting_are_the_codes() -> None:
    """Each word for word in the package."""
    page = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.split("## Messages")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == 20
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hf_cocodc").rglob("*.py"))
    for row in rows:
        for words in re.findall(r"`([^`]+)`", row):
            assert words in code, words


@pytest.mark.slow
@pytest.mark.parametrize("name", known())
def test_every_quickstart_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps of each method's recipe: all regions end with the same model, and the journal tells of every landing."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    overrides = [*SHORT, "outer.sync_interval=4", "training.max_steps=9", "data.block_size=32"]
    overrides += little_text(tmp_path / "text")
    overrides += [
        "training.eval_strategy=no",
        "training.eval_on_start=false",
        f"training.output_dir={tmp_path}",
    ]
    overrides += ["outer.sends_per_interval=4"] if name == "cocodc" else []
    first, second = simulate(ROOT / "recipes" / "quickstart" / f"{name}.yaml", overrides=overrides)
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    kinds = [
        event["kind"] for event in read(tmp_path / "simulated" / "region-0" / "cocodc" / "journal.jsonl")
    ]
    assert kinds[0] == "start"
    assert kinds.count("land") >= 2
