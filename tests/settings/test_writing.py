"""A recipe that is written from others keeps their comments, and means what it shall mean."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_cocodc.settings.reading import read_yaml
from hf_cocodc.settings.writing import Notes, notes_of, scalar, written
from hf_cocodc.training.starter import starter

ROOT = Path(__file__).parents[2]
COMMENTED = """\
# What this is for.

# About the model.
model:  # of the Hub
  name_or_path: "m"  # quoted

  # lists
  layers:
    # the first
    - 1  # one
    - name: x  # a mapping
      # inside
      value: 2e-5
  flow: [a, b]  # beside a list
  # off: true

# About training.
training:
  lr: 2e-5   # not 0.00002
  anchor: &x 5
  alias: *x

  # a key that is commented out
  # seed: 3
# The end.
"""


def notes(text: str, folder: Path) -> Notes:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return notes_of(path)


def test_every_comment_stays_where_it_is(tmp_path: Path) -> None:
    found = written(read_yaml(COMMENTED, ""), notes(COMMENTED, tmp_path))
    assert found == COMMENTED.replace("2e-5   #", "2e-5  #").replace("*x", "5")


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_our_recipes_come_out_as_they_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert written(read_yaml(text, ""), notes_of(path)) == text


def test_keys_come_and_go_with_their_comments(tmp_path: Path) -> None:
    """A new key stands above what is commented out; a comment of a value that changes stays."""
    content = read_yaml(COMMENTED, "")
    del content["model"]["layers"]
    content["model"]["flow"] = ["a", "c"]
    content["training"] |= {"lr": 1.0, "new": "yes: no"}
    found = written(content, notes(COMMENTED, tmp_path))
    assert read_yaml(found, "") == content
    assert "# lists" not in found and "# the first" not in found
    assert "  flow:  # beside a list\n    - a\n    - c\n  # off: true\n\n# About training.\n" in found
    assert "  lr: 1.0  # not 0.00002\n" in found
    assert found.endswith('  new: "yes: no"\n\n  # a key that is commented out\n  # seed: 3\n# The end.\n')


def test_a_recipe_says_more_than_the_one_that_it_extends(tmp_path: Path) -> None:
    """Its own comments count where it has a key; those of the other one stay elsewhere."""
    base = "# base\na:  # section\n  x: 1  # base x\n  y: 2  # base y\n"
    own = "# own\nextends: base.yaml\na:\n  x: 5\n"
    merged = notes(own, tmp_path).over(notes(base, tmp_path))
    assert written({"a": {"x": 5, "y": 2}}, merged) == "# own\na:  # section\n  x: 5\n  y: 2  # base y\n"


@pytest.mark.parametrize(
    "odd", ["\ufeff", "# a\u2028# b\n", "# a\x85# b\n", "\r\n# a\r\n", "%YAML 1.2\n---\n"]
)
def test_odd_lines_confuse_nothing(odd: str, tmp_path: Path) -> None:
    """A byte order mark, and what ends a line only for Python."""
    text = f"{odd}a: 1  # one\nb: {{c: 2}}  # two\n"
    content = read_yaml(text.removeprefix("\ufeff"), "")
    (tmp_path / "recipe.yaml").write_bytes(text.encode())
    found = written(content, notes_of(tmp_path / "recipe.yaml"))
    assert read_yaml(found, "") == content == {"a": 1, "b": {"c": 2}}
    assert found.endswith("a: 1  # one\nb: {c: 2}  # two\n")


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150)
@given(st.dictionaries(st.text(min_size=1, max_size=6), PLAIN, min_size=1, max_size=4))
def test_any_content_is_read_as_it_was(content: dict[str, Any]) -> None:
    assert repr(read_yaml(written(content, Notes((), {}, ())), "")) == repr(content)


def test_infinity_is_a_number() -> None:
    assert [read_yaml(scalar(each), "") for each in (math.inf, -math.inf)] == [math.inf, -math.inf]


def test_a_first_recipe_offers_more_keys_as_comments(tmp_path: Path) -> None:
    """Each works as it stands, once it is no comment; the seed is there."""
    text = starter("m", "d")
    content = read_yaml(text, "")
    assert content["training"]["seed"] == 42 and content["regions"] == {"count": 2}
    assert "  # Smallest number of regions that train on" in text
    lines = text.replace("  # rate_limit: 90", "  rate_limit: 90").replace("  # min: 1", "  min: 1")
    assert read_yaml(lines, "")["regions"] == {"count": 2, "rate_limit": 90.0, "min": 1}
    assert written(content, notes(text, tmp_path)) == text
