"""A first recipe, as `hf-cocodc recipe new` writes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from transformers import GPT2Config

from hf_cocodc.cli.main import main
from hf_cocodc.errors import InputError
from hf_cocodc.newer import known
from hf_cocodc.resolve import from_config, settings
from hf_cocodc.settings import OuterConfig
from hf_cocodc.settings.outer import AUTO, AUTO_VALUES, FOLLOWING
from hf_cocodc.settings.reading import read_yaml
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.training import building
from hf_cocodc.training.simulation import simulate
from hf_cocodc.training.starter import starter
from tests.processes.launching import little_text


def read(text: str) -> Recipe:
    return Recipe.from_dict(read_yaml(text, "the recipe"))


@pytest.mark.parametrize("method", known())
def test_it_has_the_methods_settings(method: str) -> None:
    recipe = read(starter("m", "d", method=method, num_regions=3))
    found, papers = settings(recipe.outer), settings(OuterConfig(method=method))
    assert found == papers | {name: found[name] for name in AUTO_VALUES.get(method, {})}
    from_config(recipe.outer)
    assert recipe.regions.count == 3


@pytest.mark.parametrize("method", known())
def test_no_setting_is_fixed_that_follows_from_others(method: str) -> None:
    """A longer overlap then mixes: the alpha of the first overlap, 0, would throw its inner steps away."""
    recipe = read(starter("m", "d", method=method))
    longer = OuterConfig(method=method, overlap_steps=5)
    assert recipe.outer.mixing_alpha is None
    if "overlap_steps" in settings(recipe.outer):
        changed = dataclasses.replace(recipe.outer, overlap_steps=5)
        assert settings(changed).get("mixing_alpha") == settings(longer).get("mixing_alpha")


@examples(max_examples=60)
@given(st.text(min_size=1, max_size=30), st.text(min_size=1, max_size=30))
def test_any_name_is_read_as_it_was_given(model: str, data: str) -> None:
    try:
        recipe = read(starter(model, data, data_name=data))
    except InputError:  # YAML has no form for it
        return
    assert recipe.model.name_or_path == recipe.tokenizer.name_or_path == model
    assert recipe.data.name == data
    assert data in (recipe.data.path, recipe.data.builtin)


def test_it_says_what_auto_means() -> None:
    """The values in a comment, of each method that this package knows, and only where the method has the setting."""
    text = " ".join(starter("m", "d", method="diloco").replace("#", "").split())
    assert "Here 0.7. outer_lr: auto" in text
    assert "Here 0.6. outer_momentum: auto" in text
    for method in known():
        outer = read(starter("m", "d", method=method)).outer
        assert {name for name in FOLLOWING if getattr(outer, name) == AUTO} == set(
            AUTO_VALUES.get(method, {})
        )


def test_it_offers_more_keys_as_comments() -> None:
    """Each works as it stands, once it is no comment."""
    text = starter("m", "d")
    assert read_yaml(text, "")["regions"] == {"count": 2}
    assert "  # What the others do when a region is lost" in text
    lines = text.replace("  # rate_limit: 90", "  rate_limit: 90").replace("  # on_loss: ", "  on_loss: ")
    lines = lines.replace("  # balance: auto", "  balance: auto")
    found = read_yaml(lines, "")["regions"]
    assert found == {"count": 2, "balance": "auto", "rate_limit": 90.0, "on_loss": "stop"}


def test_its_blocks_fit_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that was made for 256 tokens takes no block of 1024."""
    GPT2Config(n_positions=256).save_pretrained(tmp_path)
    assert main(["recipe", "new", "-", "--model", str(tmp_path), "--data", "d"]) == 0
    assert read(capsys.readouterr().out).data.block_size == 256
    assert read(starter("m", "d")).data.block_size == 1024


def test_it_writes_over_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    GPT2Config().save_pretrained("m")  # the Hub would be asked for another one
    words = ["recipe", "new", "mine.yaml", "--model", "m", "--data", "d"]
    for wrong in (["--regions", "0"], ["--steps", "0"], ["--method", "dilloco"]):
        assert main([*words, *wrong]) == 2
        assert "error: --" in capsys.readouterr().err
    assert not Path("mine.yaml").exists()
    assert main(words) == 0
    assert "hf-cocodc train mine.yaml" in capsys.readouterr().out
    written = Path("mine.yaml").read_text()
    assert main([*words, "--lora"]) == 2
    assert "'mine.yaml' exists already" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == written


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_it_trains_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for its length: a model of one's own, from a folder, with an adapter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    small = ["hidden_size=16", "num_hidden_layers=1", "intermediate_size=16"]
    recipe = Recipe.load("quickstart/diloco", [f"model.config.{each}" for each in small])
    tokenizer = building.tokenizer(recipe)
    tokenizer.save_pretrained("model")
    building.model(recipe, len(tokenizer)).save_pretrained("model")
    Path("mine.yaml").write_text(starter("model", "python-stdlib", method="diloco", lora=True, bf16=False))
    short = ["training.max_steps=2", "outer.sync_interval=1", "data.block_size=16", "data.eval_blocks=2"]
    short += ["training.gradient_accumulation_steps=1", "training.disable_tqdm=true"]
    short += [
        "training.dataloader_pin_memory=false",
        *little_text(tmp_path / "text"),
        "data.eval_split=train",
    ]
    first, second = simulate(Path("mine.yaml"), overrides=short)
    assert first.state.global_step == second.state.global_step == 2
