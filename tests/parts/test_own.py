"""Methods and codecs of a user's own: how they are found, compared and refused."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cocodc import OuterConfig
from hf_cocodc.errors import InputError
from hf_cocodc.methods import Method, diloco
from hf_cocodc.newer import known
from hf_cocodc.parts import codecs
from hf_cocodc.resolve import from_config, paper_of, settings

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
    assert isinstance(from_config(config), Method)
    told = settings(config)
    assert {name: told[name] for name in ("method", "sync_interval", "options.k", "codec")} == {
        "method": "of_mine:mine",
        "sync_interval": 4,
        "options.k": 2,
        "codec": "bf16",
    }
    assert isinstance(from_config(OuterConfig(method="of_mine:made")), Method)
    assert paper_of("of_mine:mine") == ("Mine", "2401.00001")


@pytest.mark.parametrize("name", known())
def test_each_method_names_its_paper(name: str) -> None:
    """A model card links it."""
    assert paper_of(name) is not None


def top_level(*, sync_interval: int = 5, k: int = 3) -> Method:
    """A method of this module."""
    return diloco(sync_interval=sync_interval, outer_lr=1 / k)


def few(*, k: int = 8) -> codecs.base.Codec:
    """A codec of this module."""
    return codecs.topk(k=k)


def test_a_script_gives_a_function_itself() -> None:
    """It stands for its name: settings, checkpoints and plain data are those of MODULE:NAME."""
    config = OuterConfig(method=top_level, options={"k": 2})
    assert config == OuterConfig(method=f"{__name__}:top_level", options={"k": 2})
    assert settings(config)["options.k"] == 2 and OuterConfig(**config.to_dict()) == config
    with_codec = OuterConfig(codec=few, error_feedback=True)
    assert with_codec.codec == f"{__name__}:few"
    assert from_config(with_codec).codec.codec.coder.k == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["method", "codec"])
def test_what_regions_could_not_compare_is_refused(name: str) -> None:
    """An object, whose numbers are in closures, and a function that has no name of its own: with the way out."""
    k = 3

    def inner() -> Method:
        return diloco(outer_lr=1 / k)

    for wrong in (diloco(), diloco().codec, inner, lambda: inner(), functools.partial(top_level, k=2), 5):
        with pytest.raises(
            InputError, match=f"outer.{name}=.* or in a script a function that returns a {name}"
        ):
            OuterConfig(**{name: wrong})


def test_a_recipe_can_name_a_codec(here: Path) -> None:
    """With any method; options that the method does not take are the codec's."""
    config = OuterConfig(method="streaming", codec="of_mine:half", options="k=4")
    assert from_config(config).codec.codec.coder.k == 4  # type: ignore[attr-defined]
    told = settings(config)
    assert (told["codec"], told["options.k"]) == ("of_mine:half", 4)
    assert [name for name in told if name.startswith("source.")] == ["source.of_mine"]
    assert settings(OuterConfig(method="streaming", codec="of_mine:half"))["options.k"] == 8


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
        ({"method": 5}, "outer.method=5 must be text, or in a script a function"),
        ({"method": diloco}, "is of this package. Write outer.method=diloco"),
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
    assert {key for key in ours if ours[key] != changed[key]} == {"source.of_mine"}
    if "options" in config:
        other = described(tmp_path / "a", **config | {"options": {"k": 7}})
        assert "options.k" in {key for key in ours if ours[key] != other[key]}


def test_the_source_is_also_that_of_modules_that_define_what_it_uses(tmp_path: Path) -> None:
    """At any distance, and of no other module: regions may differ in what they import besides."""
    for folder, rate in (("a", 0.1), ("b", 0.2)):
        (tmp_path / folder).mkdir()
        texts = {
            "named": "import place\nfrom inner import mine\n",
            "inner": "from rates import rate\nfrom hf_cocodc.methods import diloco\n"
            "def mine():\n    return diloco(outer_lr=rate())\n",
            "rates": f"import json\nfrom torch import Tensor\ndef rate():\n    return {rate}\n",
            "place": f"FOLDER = {folder!r}\n",
        }
        for name, text in texts.items():
            (tmp_path / folder / f"{name}.py").write_text(text, encoding="utf-8")
    ours, theirs = (described(tmp_path / folder, method="named:mine") for folder in ("a", "b"))
    assert [key for key in ours if key.startswith("source.")] == [
        "source.inner",
        "source.named",
        "source.rates",
    ]
    assert {key for key in ours if ours[key] != theirs[key]} == {"source.rates"}


SCRIPT = """
from hf_cocodc import OuterConfig
from hf_cocodc.methods import diloco
from hf_cocodc.resolve import settings

def mine(*, sync_interval: int = 4):
    return diloco(sync_interval=sync_interval, outer_lr={rate})

said = settings(OuterConfig(method=mine))
"""


@pytest.mark.parametrize("is_typed_in", [False, True])
def test_of_a_script_the_definition_counts(
    is_typed_in: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the rest of the script, in which regions may differ. What was typed in has no source, and is not compared."""

    def said(head: str, rate: float) -> dict[str, Any]:
        text = head + SCRIPT.format(rate=rate)
        if is_typed_in:
            exec(compile(text, f"<{head}>", "exec"), vars(main))
            return dict(vars(main)["said"])
        path = tmp_path / f"script{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text, encoding="utf-8")
        exec(compile(text, str(path), "exec"), vars(main))
        return dict(vars(main)["said"])

    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    ours = said("", 0.5)
    assert ours["method"] == "__main__:mine" and "source.__main__:mine" in ours
    assert said("REGION = 5\n", 0.5) == ours
    assert (said("", 0.25) == ours) is is_typed_in
