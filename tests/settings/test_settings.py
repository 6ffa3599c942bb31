"""The settings as objects of a script: refused when they are made, documented, and given as plain data."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import math
import pydoc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hf_cocodc import (
    CoCoDCCallback,
    OuterOptimizer,
    muon,
    region_shard,
    script_parser,
    simulate,
    split_world,
)
from hf_cocodc.errors import InputError
from hf_cocodc.methods import Method, diloco
from hf_cocodc.newer import known
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig, RegionConfig
from hf_cocodc.settings.fields import is_expert, meaning, rules_of
from hf_cocodc.settings.outer import CODECS, METHODS, Names
from hf_cocodc.settings.reference import in_markdown

EXPERT = {
    *("split_rows", "feedback_decay", "top_k", "staleness_penalty", "clip_momentum", "compensation"),
    *("compensation_strength", "utilization", "sends_per_interval", "digest_interval", "on_nonfinite"),
    *("nonfinite_rounds", "guard"),
}
BOTH = (OuterConfig, RegionConfig)
LINEAR = nn.Linear(2, 2)


def test_the_names_of_methods_are_those_of_the_methods() -> None:
    assert list(METHODS) == list(known())


@pytest.mark.parametrize("method", ["streaming", "cocodc", "sparseloco"])
def test_each_name_of_a_part_makes_one(method: str) -> None:
    """What the settings know without torch, the parts have; and no setting has names that a part does not know."""
    names = {name: rule.names for name, rule in rules_of(OuterConfig, Names).items()}
    assert names["codec"] == CODECS and set(names) == {
        *("method", "fragment_pattern", "merge", "codec", "mean", "compensation"),
    }
    taken = inspect.signature(known()[method]).parameters
    for name, value in ((name, each) for name, each_of in names.items() if name in taken for each in each_of):
        fitting: dict[str, Any] = {}
        if name == "fragment_pattern" and value == "whole":
            fitting = {"num_fragments": 1}
        if name == "codec":
            fitting = {"error_feedback": value != "fp32"}
        if name == "mean" and method == "sparseloco":
            fitting = {"codec": "int4"}
        if name == "merge" and method == "sparseloco":
            fitting = {"overlap_steps": 0}
        assert isinstance(from_config(OuterConfig(method=method, **{name: value}, **fitting)), Method)


def test_an_unknown_method_is_refused_when_it_is_given() -> None:
    """Without torch, which takes seconds to import. A method of one's own has another form."""
    for wrong in ("dilcoo", "", "Diloco"):
        with pytest.raises(InputError, match=f"outer.method='{wrong}' is not known.*Known: co2"):
            OuterConfig(method=wrong)
    assert OuterConfig(method="mine:method").method == "mine:method"
    for wrong in (5, True, ["diloco"], diloco(), OuterConfig()):
        with pytest.raises(InputError, match="outer.method=.* must be text, or in a script a function"):
            OuterConfig(method=wrong)
    code = (
        "import sys\nfrom hf_cocodc import OuterConfig\ntry: OuterConfig(method='dilcoo')\n"
        "except ValueError as error: print(error, 'torch' in sys.modules)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "Did you mean 'diloco'?" in said and said.endswith("False\n")


@pytest.mark.parametrize("kind", BOTH)
def test_help_shows_every_field(kind: Any) -> None:
    """With its meaning, its default, and those for experts at the end."""
    text = " ".join(pydoc.plain(pydoc.render_doc(kind)).replace("|", " ").split())
    for each in dataclasses.fields(kind):
        assert f"{each.name}: {' '.join(meaning(each).split())}" in text
    if kind is OuterConfig:
        assert "all regions stop. Default: 3. guard: Norm guard" in text
        assert text.index("device: Where") < text.index("for experts") < text.index("split_rows: Split")
    else:
        assert "for experts" not in text


def test_what_is_for_experts_stands_apart() -> None:
    """At the end, in the class, in the lists of keys, and in the help of a script's flags."""
    fields = dataclasses.fields(OuterConfig)
    assert {each.name for each in fields if is_expert(each)} == EXPERT
    assert all(is_expert(each) for each in fields[-len(EXPERT) :])
    for_all, for_experts = in_markdown().split("\nFor experts: most runs leave these keys alone.\n")
    assert "outer.rank" in for_all and "regions.rate_limit" in for_all and "Expert:" not in for_experts
    for name in EXPERT:
        assert f"outer.{name}" in for_experts and f"outer.{name}" not in for_all
    helps = {each.dest.removeprefix("outer_"): each.help or "" for each in script_parser()._actions}
    for each in fields:
        assert helps[each.name.removeprefix("outer_")].startswith("Expert: ") == (each.name in EXPERT)


@pytest.mark.parametrize(
    "config",
    [
        OuterConfig(),
        OuterConfig(method="mine:method", options="k=32,decay=0.9", codec="mine:codec"),
        OuterConfig(method="cocodc", overlap_steps="3", guard="clip=3", outer_lr=1, staleness_penalty="2.5"),
        RegionConfig(),
        RegionConfig(
            region=1, count=3, min=2, max=4, coordinator="h:1", may_differ=["batch"], grace_s="auto"
        ),
    ],
)
def test_settings_are_given_as_plain_data(config: OuterConfig | RegionConfig) -> None:
    """They come back equal, also by way of JSON, and who changes the data does not change the settings."""
    data = config.to_dict()
    assert type(config)(**data) == config
    assert type(config)(**json.loads(config.to_json_string())) == config
    assert list(data) == [each.name for each in dataclasses.fields(config)]
    for value in data.values():
        if isinstance(value, dict | list):
            value.clear()
    assert type(config)(**json.loads(config.to_json_string())) == config


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (
            OuterConfig,
            {"sync_interval": "20"},
            "outer.sync_interval='20' must be a whole number or null, not str",
        ),
        (
            OuterConfig,
            {"sync_interval": 2.5},
            "outer.sync_interval=2.5 must be a whole number or null, not float",
        ),
        (
            OuterConfig,
            {"sync_interval": True},
            "outer.sync_interval=True must be a whole number or null, not bool",
        ),
        (
            OuterConfig,
            {"error_feedback": "no"},
            "outer.error_feedback='no' must be true or false or null, not str",
        ),
        (
            OuterConfig,
            {"nonfinite_rounds": 1.5},
            "outer.nonfinite_rounds=1.5 must be a whole number, not float",
        ),
        (OuterConfig, {"weights": None}, "outer.weights=None must be text, not NoneType"),
        (OuterConfig, {"codec": 5}, "outer.codec=5 must be text, or in a script a function"),
        (OuterConfig, {"outer_lr": [0.7]}, "outer.outer_lr=[0.7] must be a number or text or null, not list"),
        (OuterConfig, {"outer_lr": np.float32("nan")}, "outer.outer_lr=nan must be finite"),
        (
            OuterConfig,
            {"sync_interval": np.arange(2)},
            "outer.sync_interval=array([0, 1]) must be a whole number",
        ),
        (OuterConfig, {"options": {1: 2}}, "outer.options: the key 1 must be text, not int"),
        (
            OuterConfig,
            {"guard": {"clip": "x"}},
            "outer.guard.clip='x' must be a number, not str",
        ),
        (RegionConfig, {"timeout_s": "20"}, "regions.timeout_s='20' must be a number, not str"),
        (RegionConfig, {"region": 0.5}, "regions.region=0.5 must be a whole number or null, not float"),
        (RegionConfig, {"region": 1024}, "regions.region=1024 must lie in 0 .. 1023"),
        (OuterConfig, {"rank": 10**30}, " must fit into 64 bits"),
        (RegionConfig, {"announce": ["a", 5]}, "regions.announce[1]=5 must be text, not int"),
        (RegionConfig, {"announce": {5}}, "regions.announce[0]=5 must be text, not int"),
        (OuterConfig, {"rank": "\ud800"}, "outer.rank='\\ud800' must be text in UTF-8"),
        (RegionConfig, {"run": "a\0b"}, "regions.run='a\\x00b' must be text in UTF-8"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused(kind: Any, given: dict[str, Any], message: str) -> None:
    """A constructor refuses what a recipe refuses, and names the field: nothing trains on a value that was not meant."""
    with pytest.raises(InputError) as caught:
        kind(**given)
    assert message in str(caught.value)


class Known(str, enum.Enum):
    """As some libraries name what a setting may be."""

    METHOD = "streaming"


def test_a_word_of_an_enumeration_is_text() -> None:
    """It has the class of its enumeration, and other libraries write that."""
    assert type(OuterConfig(method=Known.METHOD).method) is str


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: OuterConfig(rank=10**5000), "outer.rank=<a number of thousands of digits> must fit"),
        (lambda: region_shard([1, 2, 3], 0.5, 2), "region_shard: region=0.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: region_shard([1, 2, 3], 0, True), "region_shard: num_regions=True must be a whole number"),
        (lambda: region_shard([1, 2, 3], 0, math.inf), "num_regions=inf must be a whole number"),  # type: ignore[arg-type]
        (lambda: region_shard("wikitext", 0, 2), "str is not a dataset"),
        (lambda: split_world("2"), "split_world: num_regions='2' must be a whole number"),  # type: ignore[arg-type]
        (lambda: simulate(print, 2.5), "simulate: regions=2.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: CoCoDCCallback(link=5), "CoCoDCCallback: link=5 must be Link, not int"),  # type: ignore[arg-type]
        (lambda: CoCoDCCallback(facts=5), "CoCoDCCallback: facts=5 must be "),  # type: ignore[arg-type]
        (lambda: OuterOptimizer(LINEAR, None, None, "diloco"), "accelerator=Linear.* must be Accelerator"),  # type: ignore[arg-type]
        (lambda: muon(LINEAR, lr="1e-3"), "muon: lr='1e-3' must be a number"),  # type: ignore[arg-type]
        (lambda: muon(LINEAR, lr=-1), "muon: lr=-1.0 must be at least 0"),
        (lambda: muon(LINEAR, lr=0.1, momentum=1), r"muon: momentum=1.0 must lie in \[0, 1\)"),
        (lambda: muon(LINEAR, lr=0.1, nesterov="no"), "muon: nesterov='no' must be true or false"),  # type: ignore[arg-type]
        (lambda: muon(LINEAR, lr=0.1, betas=0.9), "muon: betas=0.9 must be "),  # type: ignore[arg-type]
    ],
    ids=lambda each: each if isinstance(each, str) else "call",
)
def test_functions_check_what_they_are_given(call: Callable[[], object], message: str) -> None:
    """As constructors do: half a region would get the data of another one."""
    with pytest.raises(InputError, match=message):
        call()


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    """They become Python's: settings are written as JSON, and compared between regions."""
    config = OuterConfig(sync_interval=np.int64(4), outer_lr=np.float32(0.5), error_feedback=np.bool_(True))
    assert config == OuterConfig(sync_interval=4, outer_lr=0.5, error_feedback=True)
    assert [type(each) for each in (config.sync_interval, config.outer_lr)] == [int, float]
    assert RegionConfig(timeout_s=torch.tensor(5), count=np.uint8(2)) == RegionConfig(timeout_s=5, count=2)


@pytest.mark.parametrize(
    ("config", "regions", "changes", "message"),
    [
        ({"method": "diloco"}, None, {}, r"config=\{.* not dict. Give config=OuterConfig\(\*\*settings\)"),
        (
            RegionConfig(),
            OuterConfig(),
            {},
            "config=RegionConfig.* or the name of a method, not RegionConfig",
        ),
        (
            OuterConfig(),
            OuterConfig(),
            {},
            r"regions=OuterConfig.* must be RegionConfig\(...\), not OuterConfig",
        ),
        ("dilcoo", None, {}, "Did you mean 'diloco'"),
        (
            "diloco",
            None,
            {"sync_intervall": 4},
            "unknown key outer.sync_intervall. Did you mean 'sync_interval'",
        ),
        ("diloco", None, {"sync_interval": "4"}, "outer.sync_interval='4' must be a whole number"),
    ],
    ids=str,
)
def test_what_is_no_config_is_refused(
    config: Any, regions: Any, changes: dict[str, Any], message: str
) -> None:
    """A mapping, and arguments in the wrong order, by the callback and by OuterOptimizer alike."""
    with pytest.raises(InputError, match=message):
        CoCoDCCallback(config, regions, **changes)
    if not changes:
        with pytest.raises(InputError, match=message):
            OuterOptimizer(None, None, None, config, regions)  # type: ignore[arg-type]


def test_a_callback_takes_a_method_and_its_settings() -> None:
    """By name, or as changes to a config, which stays as it is."""
    alone = RegionConfig(count=1)
    assert CoCoDCCallback("streaming", alone, sync_interval=100).config == OuterConfig(
        method="streaming", sync_interval=100
    )
    config = OuterConfig(method="streaming", sync_interval=50, codec="int8", error_feedback=True)
    changed = CoCoDCCallback(config, alone, sync_interval=100).config
    assert changed == dataclasses.replace(config, sync_interval=100) and config.sync_interval == 50
    assert CoCoDCCallback(regions=alone, sync_interval=7).config == OuterConfig(sync_interval=7)


def test_plain_data_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a secret is named; a secret in the environment is not there."""
    monkeypatch.setenv("HF_COCODC_SECRET", "0123456789abcdef")
    config = RegionConfig(region=0, count=2, coordinator="h:1", secret_file="secret").resolved()
    assert config.to_dict()["secret_file"] == "secret"
    assert "0123456789abcdef" not in config.to_json_string() + repr(config)
