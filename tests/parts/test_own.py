"""Methods and codecs of a user's own: how they are found, described and refused."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cocodc import OuterConfig
from hf_cocodc.errors import InputError
from hf_cocodc.methods import METHODS, Method, diloco
from hf_cocodc.newer import known
from hf_cocodc.parts import codecs, outer, own, schedules
from hf_cocodc.resolve import as_config, from_config, paper_of, settings

MODULE = '''
from hf_cocodc.methods import diloco
from hf_cocodc.parts import codecs

def mine(*, sync_interval: int = 7, k: int = 3, codec: str = "bf16"):
    """Mine: as an example (2401.00001)."""
    return diloco(sync_interval=sync_interval, outer_lr=1 / k, codec=codec)

def needy(*, k: int):
    return diloco()

def vague(**settings):
    return diloco(**settings)

def wrong(*, sync_interval: int = 1):
    return "diloco"

def fails(*, sync_interval: int = 1):
    raise KeyError("no such thing")

def leaves():
    raise SystemExit(0)

def heavy(*, sync_interval: int = 5, codec=codecs.int8()):
    return diloco(sync_interval=sync_interval, codec=codec)

def endless(*, k: float = float("inf")):
    return codecs.topk()

def half(*, k: int = 8):
    return codecs.feedback(codecs.topk(k=k))

made = diloco(sync_interval=9)
ready = codecs.feedback(codecs.topk(k=2))
number = 5
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module, where the process runs; no module of it outlives the test."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_mine.py").write_text(MODULE, encoding="utf-8")
    yield tmp_path
    forget_modules_of(tmp_path)


def forget_modules_of(folder: Path) -> None:
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


def test_a_recipe_can_name_a_method(here: Path) -> None:
    """Its settings are those of the function; the name and all settings are what regions and checkpoints compare."""
    config = OuterConfig(method="of_mine:mine", sync_interval=4, options={"k": 2})
    method = from_config(config)
    assert isinstance(method, Method) and method.name == "of_mine:mine"
    told = settings(config)
    assert {name: told[name] for name in ("method", "sync_interval", "options.k", "codec")} == {
        "method": "of_mine:mine",
        "sync_interval": 4,
        "options.k": 2,
        "codec": "bf16",
    }
    assert "_sync_interval=4" in str(told["part.schedule"])
    assert from_config(OuterConfig(method="of_mine:made")).name == "of_mine:made"
    assert paper_of("of_mine:mine") == ("Mine", "2401.00001")


@pytest.mark.parametrize("name", known())
def test_each_method_names_its_paper(name: str) -> None:
    """A model card links it."""
    assert paper_of(name) is not None


def test_a_method_as_an_object(here: Path) -> None:
    """Alone or in an OuterConfig; its name is compared, and each of its parts."""
    method = dataclasses.replace(diloco(sync_interval=5), name="mine")
    assert from_config(as_config(method)) is not None
    config = OuterConfig(method=method, weights="steps")
    told = settings(config)
    assert (told["method"], told["weights"]) == ("mine", "steps")
    other = settings(OuterConfig(method=dataclasses.replace(diloco(sync_interval=6), name="mine")))
    assert {name for name in told if told[name] != other.get(name)} == {"part.schedule", "weights"}
    assert as_config(None) == OuterConfig()
    assert OuterConfig(method=None).method == "diloco"


def test_a_recipe_can_name_a_codec(here: Path) -> None:
    """With any method; options that the method does not take are the codec's."""
    config = OuterConfig(method="streaming", codec="of_mine:half", options="k=4")
    assert from_config(config).codec.codec.coder.k == 4  # type: ignore[attr-defined]
    told = settings(config)
    assert (told["codec"], told["options.k"]) == ("of_mine:half", 4)
    assert {name for name in told if name.startswith("part.")} == {"part.codec", "part.codec.source"}
    fed = OuterConfig(codec="of_mine:half", error_feedback=True, options={"k": 4})
    assert "feedback.Feedback(codec=feedback.Feedback" in str(settings(fed)["part.codec"])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"method": "of_mime:mine"}, "there is no module of_mime. It is looked for in /"),
        ({"method": "of_mine:mihe"}, "has no mihe. Did you mean 'mine'"),
        ({"method": "of_mine:number"}, "is 5, and no function"),
        ({"method": "of_mine:wrong"}, "returns 'diloco', and no Method"),
        ({"method": "of_mine:fails"}, "KeyError: 'no such thing' is not known"),
        ({"method": "of_mine:needy"}, "needs k. Give each a value"),
        ({"method": "of_mine:vague"}, r"takes \*\*settings: regions could not compare"),
        (
            {"method": "of_mine:heavy"},
            "heavy' takes codec=.*Plain.*as JSON.* Take a plain value, for example a name",
        ),
        ({"codec": "of_mine:endless"}, "endless' takes k=inf: .* no finite number"),
        ({"method": "of mine:x"}, "must be MODULE:NAME"),
        ({"method": "of_mine:mine", "outer_lr": 1.0}, "outer_lr=1.0 has no meaning for method=of_mine:mine"),
        ({"method": "of_mine:made", "sync_interval": 2}, "It is composed already"),
        (
            {"method": "of_mine:mine", "options": {"j": 2}},
            "options: j=2 has no meaning .* take sync_interval, k",
        ),
        ({"method": "diloco", "options": {"k": 2}}, "options: k=2 has no meaning .* Only those of your own"),
        ({"options": {"outer_lr": 2}}, "Write outer.outer_lr=2"),
        ({"options": {"k": torch}}, "must be a number, text, true"),
        ({"options": "k"}, "k"),
        ({"method": "hf_cocodc.methods:diloco"}, "is of this package. Write outer.method=diloco"),
        ({"method": "broken:x"}, "importing broken fails: SyntaxError"),
        ({"method": "lacking:x"}, "importing lacking fails: No module named 'not_there'"),
        ({"method": "leaving:x"}, "importing leaving fails: SystemExit: 0"),
        ({"method": "of_mine:leaves"}, "of_mine:leaves': SystemExit: 0"),
        ({"method": 5}, "outer.method=5 must be text: diloco"),
        ({"method": "dilcoo"}, "Did you mean 'diloco'.* Or MODULE:NAME"),
        ({"codec": "of_mine:mine"}, "makes Method.* which is no codec: it has no init"),
        ({"codec": "of_mine:number"}, "outer.codec='of_mine:number' is 5"),
        ({"codec": "nowhere:x"}, "outer.codec='nowhere:x': there is no module nowhere"),
    ],
)
def test_what_cannot_work_is_said(wrong: dict[str, Any], words: str, here: Path) -> None:
    """Each mistake names the value, the rule and the way out."""
    (here / "broken.py").write_text("def", encoding="utf-8")
    (here / "leaving.py").write_text("import sys; sys.exit(0)", encoding="utf-8")
    (here / "lacking.py").write_text("import not_there", encoding="utf-8")
    with pytest.raises(InputError, match=words):
        from_config(OuterConfig(**wrong))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "no name: ''"),
        ("diloco", "a name of ours: 'diloco'"),
        ("my:way", "the form MODULE:NAME: 'my:way'"),
    ],
)
def test_an_object_needs_a_name_of_its_own(name: str, words: str) -> None:
    """One of ours would hide what is trained. MODULE:NAME would be imported for the model card."""
    with pytest.raises(InputError, match=words):
        from_config(OuterConfig(method=dataclasses.replace(diloco(), name=name)))


def described(folder: Path, **config: Any) -> dict[str, object]:
    """The settings of a region that runs in this folder, with the modules that are there now."""
    with contextlib.chdir(folder):
        said = settings(OuterConfig(**config))
    forget_modules_of(folder)
    return said


REGIONS = {
    "a function": {"method": "of_mine:mine", "options": {"k": 2}},
    "its default": {"method": "of_mine:mine"},
    "a method that a module makes": {"method": "of_mine:made"},
    "a codec": {"codec": "of_mine:half", "options": {"k": 4}},
    "a codec that a module makes": {"codec": "of_mine:ready"},
}


@pytest.mark.parametrize("name", REGIONS)
def test_regions_with_the_same_files_and_settings_are_equal(name: str, tmp_path: Path) -> None:
    """Wherever the files are. A line that differs, anywhere in the module, is a difference; so is a setting."""
    config, texts = REGIONS[name], {"a": MODULE, "b": MODULE, "c": MODULE.replace("number = 5", "number = 6")}
    for folder, text in texts.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "of_mine.py").write_text(text, encoding="utf-8")
    ours, same, changed = (described(tmp_path / folder, **config) for folder in texts)
    assert ours == same == json.loads(json.dumps(ours))
    assert {key for key in ours if ours[key] != changed[key]} == {
        f"part.{'method' if 'method' in config else 'codec'}.source"
    }
    if "options" in config:
        other = described(tmp_path / "a", **config | {"options": {"k": 7}})
        assert "options.k" in {key for key in ours if ours[key] != other[key]}


def test_the_source_is_that_of_the_module_that_defines_it(tmp_path: Path) -> None:
    """Also if another module names it."""
    for folder, rate in (("a", 0.1), ("b", 0.2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "named.py").write_text("from inner import mine\n", encoding="utf-8")
        text = f"from hf_cocodc.methods import diloco\nRATE = {rate}\ndef mine():\n    return diloco()\n"
        (tmp_path / folder / "inner.py").write_text(text, encoding="utf-8")
    ours, theirs = (described(tmp_path / folder, method="named:mine") for folder in ("a", "b"))
    assert {key for key in ours if ours[key] != theirs[key]} == {"part.method.source"}


SCRIPT = """
from hf_cocodc.parts import own

class Mine:
    {word} = 1

def step():
    return [{number}, lambda: {number}]

said = own.described(Mine()), own.described(step)
"""


@pytest.mark.parametrize("is_typed_in", [False, True])
def test_of_a_script_the_definition_counts(is_typed_in: bool, tmp_path: Path) -> None:
    """Not the rest of the script, in which regions may differ. Where there is no source, the function's code."""

    def said(head: str, **words: Any) -> list[str]:
        text = head + SCRIPT.format(**{"word": "a", "number": 1, **words})
        if is_typed_in:
            space: dict[str, Any] = {"__name__": "typed_in"}
            exec(compile(text, f"<{head}>", "exec"), space)
            return list(space["said"])
        path = tmp_path / f"script{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text, encoding="utf-8")
        return list(runpy.run_path(str(path), run_name="__main__")["said"])

    ours = said("")
    assert said("REGION = 5\n") == ours
    assert said("", number=2)[0] == ours[0] and said("", number=2)[1] != ours[1]
    if not is_typed_in:
        assert said("", word="b")[0] != ours[0]


@pytest.mark.parametrize("name", METHODS)
def test_descriptions_are_the_same_when_the_parts_are(name: str) -> None:
    """Of two methods that are composed alike, every part has one description."""
    one, other = METHODS[name](), METHODS[name]()
    for each in dataclasses.fields(Method):
        ours, theirs = getattr(one, each.name), getattr(other, each.name)
        assert own.described(ours) == own.described(theirs), each.name


def test_descriptions_differ_where_parts_do() -> None:
    """In a number that a function remembers, in an attribute, and in an argument, at any depth."""
    pairs: list[tuple[Any, Any]] = [
        (outer.chain(lr=outer.scale(0.5)), outer.chain(lr=outer.scale(0.25))),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (functools.partial(max, key=1), functools.partial(max, key=2)),
        (schedules.every(4), schedules.staggered(4, 0)),
        ({"a": 1}, {"a": 2}),
        (codecs.bf16(), codecs.fp16()),
        (codecs.topk(k=2), codecs.topk(k=3)),
        (codecs.feedback(codecs.topk(k=2)), codecs.feedback(codecs.topk(k=3))),
        (codecs.feedback(codecs.topk(), 0.9), codecs.feedback(codecs.topk())),
    ]
    for one, other in pairs:
        assert own.described(one) != own.described(other)
        assert own.described(one) == own.described(copy.deepcopy(one))
    loop: list[Any] = []
    loop.append(loop)
    assert own.described(loop).startswith("builtins.list(0=...) [")


def test_a_codec_as_an_object() -> None:
    """Its description stands for it, and may be sent."""
    ours = settings(OuterConfig(codec=codecs.topk(k=2)))  # type: ignore[arg-type]
    theirs = settings(OuterConfig(codec=codecs.topk(k=3)))  # type: ignore[arg-type]
    assert json.dumps(ours) and {key for key in ours if ours[key] != theirs[key]} == {"part.codec"}
