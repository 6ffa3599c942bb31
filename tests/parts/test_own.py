"""Methods and codecs of a user's own: how they are found, described and refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import random
import threading
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
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

def half(*, k: int = 8):
    return codecs.feedback(codecs.topk(k=k))

made = diloco(sync_interval=9)
number = 5
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module, where the process runs; no module of it outlives the test."""
    import sys

    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_mine.py").write_text(MODULE, encoding="utf-8")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
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
    assert {name for name in told if name.startswith("part.")} == {"part.codec"}
    fed = OuterConfig(codec="of_mine:half", error_feedback=True, options={"k": 4})
    assert "Feedback(codec=feedback.Feedback" in str(settings(fed)["part.codec"])


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


@pytest.mark.parametrize("name", METHODS)
def test_descriptions_are_the_same_when_the_parts_are(name: str) -> None:
    """Of two methods that are composed alike, every part has one description."""
    one, other = METHODS[name](), METHODS[name]()
    for each in dataclasses.fields(Method):
        ours, theirs = getattr(one, each.name), getattr(other, each.name)
        assert own.described(ours) == own.described(theirs), each.name


class Chunks(list):
    """A list of a user's own."""


def test_what_no_words_tell_is_refused() -> None:
    """Two of them would look alike, whatever they hold."""
    with pytest.raises(InputError, match="cannot compare a lock"):
        own.described(functools.partial(max, threading.Lock()))


def test_descriptions_differ_where_parts_do(here: Path) -> None:
    """In a number that only a function remembers, in a tensor, in an argument, and in the source of a user's module."""
    pairs: list[tuple[Any, Any]] = [
        (outer.chain(lr=outer.scale(0.5)), outer.chain(lr=outer.scale(0.25))),
        (
            outer.scale(lambda info: 1.0),
            outer.scale(lambda info: 2.0),
        ),
        (torch.zeros(3), torch.tensor([0.0, 0.0, 1.0])),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (schedules.every(4), schedules.staggered(4, 0)),
        ({"a": 1}, {"a": 2}),
        (deque([1]), deque([2])),
        (deque([1], maxlen=1), deque([1], maxlen=2)),
        (Chunks([1]), Chunks([2])),
        (1j, 2j),
        (np.zeros(3), np.ones(3)),
        (np.float32(2), np.float32(3)),
        (torch.Size([1]), torch.Size([2])),
        (operator.methodcaller("max", dim=0), operator.methodcaller("max", dim=1)),
        (random.Random(1), random.Random(2)),
        (Fraction(1, 2), Fraction(1, 3)),
        (codecs.topk(k=2), codecs.topk(k=3)),
    ]
    for one, other in pairs:
        assert own.described(one) != own.described(other)
        assert own.described(one) == own.described(copy.deepcopy(one))
    found = {}
    for k in (1, 2):
        (here / f"part{k}.py").write_text(f"K = {k}\ndef step():\n    return K\n", encoding="utf-8")
        found[k] = own.described(own.found("outer.method", f"part{k}:step")).replace(f"part{k}", "part")
    assert found[1] != found[2]
    loop: list[Any] = []
    loop.append(loop)
    assert own.described(loop).startswith("[...] [")
