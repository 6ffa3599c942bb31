"""Values of a recipe against type hints: ours are strict, those of other libraries refuse only what cannot be meant."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_cocodc.errors import InputError
from hf_cocodc.settings.fields import converted, loosened
from hf_cocodc.settings.reading import read_yaml, yaml_of

Start = bool | Literal["pissa", "pissa_niter_[number of iters]"]


def test_text_for_a_list_of_words_of_another_library_is_left_to_it() -> None:
    """Its list may hold a placeholder."""
    assert converted("pissa_niter_16", loosened(Start), "peft.x") == "pissa_niter_16"
    assert converted(["pissa_niter_16"], loosened(list[Start]), "peft.x") == ["pissa_niter_16"]
    assert converted({"a": "b"}, loosened(dict[str, Start]), "peft.x") == {"a": "b"}


@dataclasses.dataclass
class Given:
    """A mapping stands for it in a recipe."""

    name: str = ""


@pytest.mark.parametrize("value", [{"name": "x"}, ["x"], [1], None])
def test_two_kinds_of_mappings_or_of_lists_may_be_meant(value: Any) -> None:
    """PEFT's LoRA has such settings."""
    hint = Given | dict[str, int] | list[str] | list[int] | None
    assert converted(value, loosened(hint), "peft.x") == value
    with pytest.raises(InputError, match="peft.x='x' must be "):
        converted("x", loosened(hint), "peft.x")


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (["pissa"], Start),
        ({"a": 1}, Start),
        (1.5, Start),
        ("text", int),
        (float("nan"), float),
        (True, int),
        ("text", Literal[1, 2]),
    ],
)
def test_what_no_library_can_mean_is_refused(value: Any, hint: Any) -> None:
    """Lists, mappings, truth and text for numbers; numbers and lists for words."""
    with pytest.raises(InputError, match="peft.x"):
        converted(value, loosened(hint), "peft.x")


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=6), PLAIN, min_size=1, max_size=4))
def test_any_content_that_is_written_is_read_as_it_was(content: dict[str, Any]) -> None:
    """Also text that looks like another value, and odd characters."""
    try:
        text = yaml_of(content)
    except InputError:  # YAML has no form for it
        return
    assert repr(read_yaml(text, "")) == repr(content)
