"""The documentation: generated pages are those of the code, links lead somewhere, pages are short and spelled in one way."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hf_cocodc
from hf_cocodc.newer import known
from hf_cocodc.settings.reading import read_yaml
from hf_cocodc.settings.reference import OTHERS, keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "recipes" / "README.md"]
BY_HAND = {"glossary.md", "journal.md", "metrics.md"}
"""Pages of the reference that are not generated; `tests/trainer/test_figures.py` compares the last two with the code."""
BRITISH = re.compile(
    r"\w*(?:[sc]hronis|quantis|normalis|utilis|summaris|initialis|optimis[ei]|behaviour|colour|neighbour|favour|labell|travell|modell"
    r"|centre\b|licence|grey|whilst|artefact|catalogue)\w*",
    re.IGNORECASE,
)


def generate() -> ModuleType:
    """The program that writes the reference."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_that_of_the_code() -> None:
    """Write it anew with: python docs/generate.py."""
    for name, text in generate().pages().items():
        assert (DOCS / "reference" / name).read_text(encoding="utf-8") == text, name
    assert {path.name for path in (DOCS / "reference").glob("*.md")} == {*generate().pages(), *BY_HAND}


def test_every_public_name_has_an_example() -> None:
    """Or is an exception, in the table of them. Examples are Python, and members that are shown exist."""
    made = generate()
    errors = {name for name in hf_cocodc.__all__ if name not in made.EXAMPLES}
    assert all(issubclass(getattr(hf_cocodc, name), hf_cocodc.CocodcError) for name in errors)
    assert set(made.EXAMPLES) | errors == set(hf_cocodc.__all__)
    for name, example in made.EXAMPLES.items():
        compile(example, name, "exec")
        assert name in example
    for name, members in made.MEMBERS.items():
        assert all(hasattr(getattr(hf_cocodc, name), member) for member in members), name


def test_every_variable_of_the_environment_is_described() -> None:
    """Those that the package names, and no other."""
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hf_cocodc").rglob("*.py"))
    named = set(re.findall(r"HF_COCODC_[A-Z_]*[A-Z]", code))
    assert named == {*generate().VARIABLES, *generate().INTERNAL}


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*OUTSIDE, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """To a file, and to a heading of it. mkdocs checks those inside `docs/` once more, when the documentation is built."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_that_is_named_exists(page: Path) -> None:
    """Each file of the package or of the tests, and the test in it."""
    text = page.read_text(encoding="utf-8")
    for name, test in re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)+\.py)(?:::(\w+))?`", text):
        file = next(
            (root / name for root in (ROOT / "hf_cocodc", ROOT, ROOT / "recipes") if (root / name).is_file()),
            None,
        )
        assert file is not None, name
        assert not test or f"def {test}(" in file.read_text(encoding="utf-8"), test


def test_the_readme_is_short() -> None:
    """200 lines, 1,300 words; the other two are short as well."""
    for path, lines, words in zip(OUTSIDE, (200, 90, 80), (1300, 900, 600), strict=True):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= lines and len(text.split()) <= words, path


@pytest.mark.parametrize("page", [*OUTSIDE, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_american_english(page: Path) -> None:
    """One spelling; what a program prints in a block is as it prints it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert not BRITISH.findall(text)


def test_code_is_american_english() -> None:
    """Docstrings become pages."""
    for path in sorted((ROOT / "hf_cocodc").rglob("*.py")):
        assert not BRITISH.findall(path.read_text(encoding="utf-8")), path


def test_every_method_has_a_page_and_a_picture() -> None:
    for name in known():
        page = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
        assert f"](../pictures/{name}.svg)" in page
        assert (DOCS / "pictures" / f"{name}.svg").is_file()


def test_recipes_in_pages_have_keys_that_exist() -> None:
    """Every block of YAML that is a part of a recipe."""
    names = {key.name for key in keys()} | {"extends"}
    seen = 0
    for page in [*OUTSIDE, *PAGES]:
        for block in re.findall(
            r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            for section, content in read_yaml(block, str(page)).items():
                if section in OTHERS or not isinstance(content, dict):
                    assert section in OTHERS or section in names, (page, section)
                    continue
                for key in content:
                    assert f"{section}.{key}" in names, (page, section, key)
                    seen += 1
    assert seen > 10


def test_pictures_are_those_of_the_script(tmp_path: Path) -> None:
    """The same bytes; their data come from schedules and from committed results."""
    script = DOCS / "pictures" / "draw.py"
    names = sorted(path.stem for path in script.parent.glob("*.svg"))
    done = subprocess.run(
        [sys.executable, str(script), *names, "--output", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        assert (tmp_path / f"{name}.svg").read_bytes() == script.with_name(f"{name}.svg").read_bytes(), name
