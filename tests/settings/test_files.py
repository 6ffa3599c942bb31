"""Recipes that extend others, recipes that come with the package, and the wheel that brings them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hf_cocodc.cli.main import main
from hf_cocodc.errors import InputError
from hf_cocodc.newer import known
from hf_cocodc.settings.reading import read_recipe, shipped
from hf_cocodc.settings.recipe import Recipe

ROOT = Path(__file__).parents[2]


def written(folder: Path, **files: str) -> Path:
    """Writes NAME.yaml for each name; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def test_a_recipe_holds_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mappings are merged, other values replaced, null removes; files are found beside the one that names them."""
    written(tmp_path, base="a: {x: 1, y: {p: 1, q: 2}, l: [1, 2]}\nb: 5\nc: {gone: 1, stays: 2}\nd: null\n")
    written(
        tmp_path / "sub", middle="extends: ../base.yaml\na: {y: {q: 3}, l: [9]}\nc: {gone: null, stays: 4}\n"
    )
    written(tmp_path / "sub", top="extends: middle.yaml\nb: null\ne: null\na: {y: {r: 4}}\n")
    monkeypatch.chdir(tmp_path)
    content, where = read_recipe("sub/top.yaml")
    assert content == {
        "a": {"x": 1, "y": {"p": 1, "q": 3, "r": 4}, "l": [9]},
        "c": {"stays": 4},
        "d": None,
        "e": None,
    }
    assert where == "recipe top.yaml, which extends middle.yaml, which extends base.yaml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: mine.yaml", "extend each other in a circle: mine.yaml -> mine.yaml"),
        ("extends: back.yaml", "extend each other in a circle: mine.yaml -> back.yaml -> mine.yaml"),
        ("extends: none.yaml", "recipe mine.yaml: extends: recipe 'none.yaml' is not a file"),
        ("extends: .", "is not a file"),
        (f"extends: {'a' * 5000}", "cannot be read"),
        ('extends: "a\\0b"', "is not a file"),
        ("extends: [base.yaml]", "extends=['base.yaml'] must be the path of one other recipe"),
        ("extends: null", "extends=None must be the path of one other recipe"),
        ("extends: 5", "extends=5 must be the path of one other recipe"),
        ("extends: broken.yaml", "recipe mine.yaml: extends: recipe '"),
        ("extends: list.yaml", "must be a mapping of sections"),
        ("extends: base.yaml\ntraining: {extends: 5}", "training.extends"),
        ("extends: base.yaml", "recipe mine.yaml, which extends base.yaml: unknown key extra"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_extended_is_one_paragraph(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the file that extends, and ends with exit code 2."""
    quickstart = (ROOT / "recipes" / "quickstart" / "diloco.yaml").read_text(encoding="utf-8")
    base = quickstart if "training" in text else f"{quickstart}extra: 5\n"
    written(tmp_path, mine=text, back="extends: mine.yaml", broken="a: [", list="[1]", base=base)
    assert main(["train", str(tmp_path / "mine.yaml"), "--dry-run"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert len(errors) < 1000


QUICKSTARTS = (*known(), "snoo", "streaming-every-step")


def test_a_quickstart_is_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any folder, also to extend it; a file of that name wins; what is neither is refused with the names."""
    monkeypatch.chdir(tmp_path)
    assert sorted(shipped()) == sorted(f"quickstart/{name}" for name in QUICKSTARTS)
    for name in known():
        recipe = Recipe.load(f"quickstart/{name}")
        assert recipe.outer.method == name
        assert recipe.training["output_dir"] == f"runs/quickstart-{name}"
    mine = written(tmp_path, mine="extends: quickstart/cocodc\ntraining: {max_steps: 7}\n") / "mine.yaml"
    assert Recipe.load(mine).training["max_steps"] == 7
    written(tmp_path / "quickstart", diloco="extends: ../mine.yaml\n")
    assert Recipe.load("quickstart/diloco.yaml").outer.method == "cocodc"
    with pytest.raises(
        InputError, match=r"'quickstart/adam' is not a file. These come .*quickstart/diloco, "
    ):
        Recipe.load("quickstart/adam")


@pytest.mark.slow
def test_a_wheel_brings_the_quickstarts(tmp_path: Path) -> None:
    """An installed package trains `quickstart/diloco`; its metadata say what it is and where it runs."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
        [metadata] = [archive.read(name).decode() for name in names if name.endswith("METADATA")]
    assert {name for name in names if name.endswith(".yaml")} == {
        *(f"hf_cocodc/recipes/quickstart/{name}.yaml" for name in QUICKSTARTS),
        "hf_cocodc/tools/plan/prices.yaml",
        "hf_cocodc/training/accelerate.yaml",
    }
    assert not [name for name in names if name.startswith(("tests/", "recipes/"))]
    assert "hf_cocodc/py.typed" in names
    for line in ("License-Expression: Apache-2.0", "Operating System :: POSIX :: Linux", "Project-URL: "):
        assert line in metadata
    there = (
        "import hf_cocodc, sys; from hf_cocodc.settings.recipe import Recipe; "
        "print(Recipe.load('quickstart/cocodc').outer.method, hf_cocodc.__file__)"
    )
    found = subprocess.run(
        [sys.executable, "-c", there],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["cocodc", str(tmp_path / "installed" / "hf_cocodc" / "__init__.py")]
