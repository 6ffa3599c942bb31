"""Every key of a recipe: its default, the values that it takes, and what it means, from the classes that read recipes."""

import dataclasses
import textwrap
import types
from typing import Any, NamedTuple, Union, get_args, get_origin

from . import OuterConfig
from .fields import WORDS, hints_of, is_expert, meaning
from .outer import AUTO, FOLLOWING, OF_EVERY_METHOD
from .recipe import Recipe

OTHERS = {
    "training": "Every field of `transformers.TrainingArguments`. `optim` may also be muon: AdamW then trains what is no matrix "
    "in a block, and `adam_beta2` is 0.99 by default.",
    "peft": "Every field of `peft.LoraConfig`. Without this section all parameters are trained.",
}
"""Sections whose keys another library documents."""

FOR_EXPERTS = "For experts: most runs leave these keys alone."


OF_A_METHOD = {each.name for each in dataclasses.fields(OuterConfig)} - set(OF_EVERY_METHOD)
"""Keys of `outer` that take the method's own value where a recipe gives none."""


class Key(NamedTuple):
    """One key of a recipe, in words: its name with the section (outer.sync_interval), the kinds of value, its default as in
    YAML (empty if there is none), one or more sentences, and whether most runs leave it alone.
    """

    name: str
    values: str
    default: str
    meaning: str
    is_expert: bool


def keys() -> list[Key]:
    """All keys, in the order of the sections."""
    hints = hints_of(Recipe)
    return [
        Key(
            f"{section}.{each.name}",
            _values(kinds[each.name]),
            _default(each),
            meaning(each),
            is_expert(each),
        )
        for section in (field.name for field in dataclasses.fields(Recipe))
        if dataclasses.is_dataclass(hints[section])
        for kinds in [hints_of(hints[section])]
        for each in dataclasses.fields(hints[section])
    ]


def in_markdown() -> str:
    """The keys in Markdown, narrow enough for a terminal: a heading for each section, and one for the keys for experts."""

    def item(title: str, text: str) -> str:
        line = f"- {title}: {text}"
        return textwrap.fill(
            line, 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )

    def of(section: str, expert: bool) -> list[str]:
        return [
            item(f"`{key.name}` ({key.values}{_by_default(key)})", key.meaning)
            for key in keys()
            if key.name.startswith(f"{section}.") and key.is_expert == expert
        ]

    lines: list[str] = []
    for section in (each.name for each in dataclasses.fields(Recipe)):
        text = textwrap.fill(OTHERS[section], 110) if section in OTHERS else "\n".join(of(section, False))
        lines += [f"## {section}", "", text, ""]
    experts = [line for each in dataclasses.fields(Recipe) for line in of(each.name, True)]
    return "\n".join([*lines, "## For experts", "", FOR_EXPERTS, "", *experts])


def _values(hint: Any) -> str:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = (get_origin(option) or option for option in options if option not in (type(None), Any))
    return " or ".join(WORDS[kind.__name__] for kind in kinds)


def _by_default(key: Key) -> str:
    if key.default:
        return f"; by default `{key.default}`"
    return "; by default the method's own" if key.name.removeprefix("outer.") in OF_A_METHOD else ""


def _default(field: dataclasses.Field) -> str:
    if field.name in FOLLOWING:
        return AUTO
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is None:
        return ""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("'", "")
