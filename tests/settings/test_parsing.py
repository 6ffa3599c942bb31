"""Recipes as text: YAML 1.2 is read as its standard says, and what cannot be read is one paragraph with the line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.cli.main import main
from hf_cocodc.errors import InputError
from hf_cocodc.settings.recipe import Recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart" / "diloco.yaml"
TEXT = RECIPE.read_text(encoding="utf-8")


def training_value(text: str) -> Any:
    """The value of a key whose YAML is `text`."""
    return Recipe.load(RECIPE, [f"model.config.extra={text}"]).model.config.get("extra")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("0o10", 8),
        ("1:30", "1:30"),
        ("1e-3", 0.001),
        ("4.e2", 400.0),
        ("off", "off"),
        ("True", True),
        ("2024-02-30", "2024-02-30"),
        ("[1, {a: .inf}]", [1, {"a": float("inf")}]),
        ("=", "="),
    ],
)
def test_yaml_1_2(text: str, value: Any) -> None:
    """Numbers, words and dates are what YAML 1.2 says; PyYAML's 1.1 reads half of these otherwise."""
    found = training_value(text)
    assert found == value
    assert type(found) is type(value)


def test_aliases_and_merge_keys_work(tmp_path: Path) -> None:
    """A value may be used twice; keys beside << win over merged ones."""
    file = tmp_path / "recipe.yaml"
    text = TEXT.replace("tokenizer:", "tokenizer: &names").replace("  max_steps: 800", "  max_steps: &n 800")
    text = text.replace("  save_steps: 200", "  save_steps: *n")
    text += "  <<: {count: 7, timeout_s: 33}\n"
    file.write_text(text, encoding="utf-8")
    recipe = Recipe.load(file)
    assert recipe.training["save_steps"] == 800
    assert (recipe.regions.count, recipe.regions.timeout_s) == (2, 33.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00\x01", "byte 0 is not UTF-8"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "byte 0 is not UTF-8"),
        (b"a: 1\nb: \x00\n", "line 2: not valid YAML: special characters are not allowed"),
        (b"a: " + b"[" * 1500 + b"]" * 1500, "not valid YAML: maximum recursion"),
        (b"a: 1\nb: !!int 'x'\n", "not valid YAML: invalid literal for int()"),
        (b"a: !!int ''\n", "not valid YAML: "),
        (b"a: !!bool 'x'\n", "not valid YAML: 'x' is not known"),
        (b"a: " + b"9" * 5000, "not valid YAML: Exceeds the limit"),
        (
            b"a: !!python/object:os.system x",
            "could not determine a constructor for the tag",
        ),
        (b"%YAML 9.9\n---\na: 1\n", "not valid YAML: "),
        (b"%YAML 1." + b"9" * 5000 + b"\n---\na: 1\n", "not valid YAML: "),
        (
            b"a: 1\nb: 2\na: 3\n",
            'line 3: not valid YAML: while constructing a mapping, found duplicate key "a"',
        ),
        (b"a: *b", "line 1: not valid YAML: found undefined alias"),
        (b"<<: 5", "expected a mapping or list of mappings for merging"),
        (b"a: " + b"x" * 200_000, "longer than 128 KiB"),
        (b"a: 1\n---\nb: 2\n", "expected a single document"),
        (b"", "must be a mapping of sections"),
        (b"5: 6", "unknown key 5."),
        (b"model: &m {config: {model_type: llama}}\ntraining: 5", "section tokenizer is missing"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_broken_recipe_is_one_paragraph(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the file and the line, has a sensible length, and ends with exit code 2."""
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    assert main(["train", str(file)]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: recipe ")
    assert "mine.yaml" in errors
    assert message in errors
    assert errors.count("\n") == 1
    assert len(errors) < 1000


def test_what_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    """A folder, a missing file, an impossible name, a device, and a file that may not be read."""
    secret = tmp_path / "secret.yaml"
    secret.write_text(TEXT)
    secret.chmod(0)
    places = [tmp_path, tmp_path / "none.yaml", "a" * 5000, "a\0b", "/dev/zero"]
    for place in [*places, *([secret] if os.geteuid() else [])]:
        with pytest.raises(InputError, match=r"is not a file|cannot be read") as caught:
            Recipe.load(place)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.bf16=5", "training.bf16=5 must be true or false, not int"),
        ("training.output_dir=[a]", "training.output_dir=['a'] must be text or null, not list"),
        ("training.optim={a: 1}", "training.optim={'a': 1} must be text, not dict"),
        ("training.report_to=[1]", "training.report_to[0]=1 must be text, not int"),
        ("training.save_total_limit=many", "training.save_total_limit='many' must be a whole number or null"),
        ("training.learning_rate=.inf", "training.learning_rate=inf must be finite"),
        ("training.lr_scheduler_kwargs=[1]", "must be text or a mapping or null, not list"),
        ("peft.bias=some", "peft: Requested bias: some"),
        ("peft.target_modules=[1]", "peft.target_modules[0]=1 must be text, not int"),
        ("evaluation.metrics=[[1]]", "evaluation.metrics[0]=[1] must be text, not list"),
        ("model.config={1: 2}", "model.config: the key 1 must be text, not int"),
        ("model.config={model_type: [1]}", "model.config needs model_type"),
        ("outer.outer_lr=.inf", "outer.outer_lr=inf must be finite"),
        ("outer.method=" + "d" * 100_000, "outer.method='ddd"),
        ("x" * 100_000 + ".y=1", "unknown key xxx"),
        ("training." + "x" * 100_000 + "=1", "unknown key training.xxx"),
        ("outer.codec=[" + "x, " * 5000 + "]", "outer.codec=['x', 'x'"),
        ("a" * 100_000, "must be SECTION.KEY=VALUE"),
    ],
    ids=lambda value: value[:40],
)
def test_wrong_types_and_long_values(override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A message names the key, the type and the value, which is cut if it is long."""
    assert main(["train", str(RECIPE), "--dry-run", "--set", override]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
    assert len(errors) < 1500
