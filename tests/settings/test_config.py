"""Recipes and settings: what cannot work is said at once, with the way out."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments
from trl import TrlParser

from hf_cocodc import script_parser, settings
from hf_cocodc.cli.main import main
from hf_cocodc.errors import InputError
from hf_cocodc.net import members
from hf_cocodc.newer import known
from hf_cocodc.parts.guard import LONGEST_HISTORY, Guard
from hf_cocodc.resolve import from_config, guard_of
from hf_cocodc.resolve import settings as method_settings
from hf_cocodc.settings import OuterConfig, RegionConfig
from hf_cocodc.settings.fields import LONGEST_HOST
from hf_cocodc.settings.outer import OF_EVERY_METHOD
from hf_cocodc.settings.recipe import DataSection, Recipe
from hf_cocodc.settings.regions import MOST_ADDRESSES

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart" / "diloco.yaml"


def test_null_removes_what_a_recipe_holds() -> None:
    """A key, whatever its type, and a section; and nothing where there is nothing: one may say it again."""
    overrides = [
        "training.max_steps=null",
        "outer=null",
        "data.block_size=null",
        "data.block_size=null",
        "peft=null",
    ]
    recipe = Recipe.load(RECIPE, [*overrides, "model.config.hidden_size=null"])
    assert "max_steps" not in recipe.training
    assert recipe.outer == OuterConfig()
    assert recipe.data.block_size == DataSection.block_size
    assert recipe.model.config is not None
    assert "hidden_size" not in recipe.model.config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("outer.sync_intervall=5", "unknown key outer.sync_intervall. Did you mean 'sync_interval'"),
        ("outr.sync_interval=5", "unknown key outr. Did you mean 'outer'"),
        ("training.max_step=5", "unknown key training.max_step. Did you mean 'max_steps'"),
        ("training.max_steps=abc", "training.max_steps='abc' must be a whole number, not str"),
        ("training=null", "section training is missing"),
        ("outer.sync_interval.x=null", "outer.sync_interval is not a mapping"),
        ("training.learning_rate=fast", "training.learning_rate='fast' must be a number, not str"),
        ("peft.rank=5", "unknown key peft.rank"),
        ("outer.sync_interval=0", "outer.sync_interval=0 must be at least 1"),
        ("outer.sync_interval=five", "outer.sync_interval='five' must be a whole number or null, not str"),
        ("outer.outer_lr=-1", "outer.outer_lr=-1.0 must be positive"),
        ("outer.guard=of", "unknown key outer.guard.of. Known: clip, drop, history"),
        ("outer.guard.clap=3", "Did you mean 'clip'"),
        ("outer.guard=clip=x", "outer.guard.clip='x' must be a number, not str"),
        ("outer.guard.drop=2", "outer.guard: clip=3 and drop=2 must be finite, clip more than 1"),
        ("outer.guard.clip=1", "must be finite, clip more than 1"),
        ("outer.guard.history=8.5", "outer.guard.history=8.5 must be a whole number, not float"),
        (f"outer.guard.history={LONGEST_HISTORY + 1}", "must lie in 8 .. 4096"),
        ("outer.method=dilcoo", "Did you mean 'diloco'"),
        ("outer.codec=bf17", "Did you mean 'bf16'"),
        ("outer.mixing_alpha=0.5", "outer.mixing_alpha=0.5 has no meaning for method=diloco"),
        ("outer.num_fragments=3", "num_fragments=3 with fragment_pattern=whole"),
        ("regions.count=0", "regions.count=0 must lie in 1 .. 1024"),
        ("regions.count=1025", "regions.count=1025 must lie in 1 .. 1024"),
        ("regions.link=glo", "regions.link='glo' must be one of auto, tcp, gloo, nccl"),
        ("regions.coordinator=nowhere", "must be HOST:PORT"),
        ("data.builtin=python-stdlibb", "Did you mean 'python-stdlib'"),
        ("data.path=x", "data needs exactly one of builtin"),
        ("model.dtype=float31", "Did you mean 'float32'"),
        ("evaluation.on=globall", "Did you mean 'global'"),
        ("evaluation.metrics=[perplexityy]", "Did you mean 'perplexity'"),
        ("outer=5", "must be SECTION.KEY=VALUE"),
        ("outer.method={", "not valid YAML"),
    ],
)
def test_a_bad_value_is_one_paragraph_and_exit_code_2(
    override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says what is wrong, and starts nothing."""
    assert main(["train", str(RECIPE), "--set", override, "--dry-run"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"method": "streaming", "sync_interval": 3, "num_fragments": 4},
            "sync_interval=3 is smaller than outer.num_frag",
        ),
        (
            {"method": "streaming", "sync_interval": 8, "overlap_steps": 8},
            "overlap_steps=8 must be smaller than",
        ),
        ({"method": "streaming", "mixing_alpha": 1.5}, "mixing_alpha=1.5 must lie in"),
    ],
)
def test_numbers_that_exclude_each_other_are_refused(settings: dict, message: str) -> None:
    """H < fragments, overlap >= H and the like."""
    with pytest.raises(InputError, match=message):
        from_config(OuterConfig(**settings))


def test_yaml_is_read_as_1_2() -> None:
    """4e-4 is a number, `on` and `no` are words, a key given twice is an error."""
    recipe = Recipe.load(
        RECIPE, ["training.learning_rate=4e-4", "training.save_strategy=no", "evaluation.on=local"]
    )
    assert recipe.training["learning_rate"] == 4e-4
    assert recipe.training["save_strategy"] == "no"
    assert recipe.evaluation.on == "local"
    with pytest.raises(InputError, match='found duplicate key "max_steps"'):
        Recipe.load(RECIPE, ["training.x={max_steps: 1, max_steps: 2}"])


def test_overrides_reach_nested_keys() -> None:
    """--set model.config.hidden_size=64 changes one key of the nested mapping."""
    recipe = Recipe.load(RECIPE, ["model.config.hidden_size=64"])
    assert recipe.model.config is not None
    assert (recipe.model.config["hidden_size"], recipe.model.config["model_type"]) == (64, "llama")


def test_config_classes_are_frozen_and_keyword_only() -> None:
    """A setting has one source: nothing changes it later."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        OuterConfig().method = "x"  # type: ignore[misc]
    with pytest.raises(TypeError):
        OuterConfig("diloco")  # type: ignore[misc]


def test_every_script_has_our_flags_with_a_prefix(tmp_path: Path) -> None:
    """Beside its own, with help; the values come back as the settings classes, checked."""
    flags = [
        "--output_dir",
        str(tmp_path),
        "--use_cpu",
        "--outer_method",
        "streaming",
        "--outer-sync-interval",
        "50",
    ]
    flags += ["--outer_overlap_steps", "3", "--outer_lr", "0.3", "--outer_error_feedback", "no"]
    flags += ["--region_count", "2", "--region", "1", "--region_coordinator", "10.0.0.1:29650"]
    args, outer, regions = script_parser(TrainingArguments).parse_args_into_dataclasses(flags)
    assert outer == OuterConfig(
        method="streaming", sync_interval=50, overlap_steps=3, outer_lr=0.3, error_feedback=False
    )
    assert regions == RegionConfig(region=1, count=2, coordinator="10.0.0.1:29650") and args.use_cpu
    with pytest.raises(InputError, match="outer.sync_interval=0 must be at least 1"):
        script_parser().parse_args_into_dataclasses(["--outer_sync_interval", "0"])
    assert script_parser().parse_dict({"region_count": 3}) == (OuterConfig(), RegionConfig(count=3))
    assert script_parser(parser=TrlParser).parse_args_and_config([])[0] == OuterConfig()
    assert all(
        f.metadata.get("help") for kind in (OuterConfig, RegionConfig) for f in dataclasses.fields(kind)
    )


@dataclasses.dataclass
class Mine:
    """A script's own class with names of ours."""

    device: str = "cpu"


def test_a_flag_without_its_prefix_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With the new name; a script may have a flag of that name."""
    for old, new in (
        ("sync_interval", "outer_sync_interval"),
        ("sync-interval", "outer_sync_interval"),
        ("min", "region_min"),
    ):
        with pytest.raises(SystemExit):
            script_parser(Mine).parse_args_into_dataclasses([f"--{old}", "5"])
        assert f"--{old} is --{new}: flags of hf_cocodc have a prefix" in capsys.readouterr().err
    [mine, outer, _] = script_parser(Mine).parse_args_into_dataclasses(["--device", "cuda"])
    assert (mine.device, outer.device) == ("cuda", "auto")
    for kind in (OuterConfig, RegionConfig):
        with pytest.raises(InputError, match=rf"flags of {kind.__name__} without a prefix.*script_parser"):
            HfArgumentParser((Mine, kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [["b", " a"], "b, a", "a,b,"])
def test_names_of_what_may_differ_are_a_list_or_a_line(given: list[str] | str) -> None:
    """A recipe has a list, a flag has commas; both mean the same."""
    assert RegionConfig(may_differ=given).allowed == ["a", "b"]
    line = given if isinstance(given, str) else ",".join(given)
    _, regions = script_parser().parse_args_into_dataclasses(["--region_may_differ", line])
    assert regions.allowed == ["a", "b"]
    recipe = Recipe.load(RECIPE, [f"regions.may_differ={json.dumps(given)}"])
    assert recipe.regions.allowed == ["a", "b"]


def test_regions_come_from_the_environment() -> None:
    """None is filled from HF_COCODC_*; contradictions and gaps are errors that name both sides."""
    env = {"HF_COCODC_REGION": "1", "HF_COCODC_REGIONS": "3", "HF_COCODC_COORDINATOR": "h:1"}
    resolved = RegionConfig().resolved(env)
    assert (resolved.region, resolved.count, resolved.coordinator) == (1, 3, "h:1")
    assert RegionConfig().resolved({}).count == 1
    with pytest.raises(InputError, match="regions.run='a' but the environment says HF_COCODC_RUN='b'"):
        RegionConfig(run="a").resolved({**env, "HF_COCODC_RUN": "b"})
    assert RegionConfig().resolved({**env, "HF_COCODC_RUN": "b"}).run == "b"
    with pytest.raises(InputError, match="regions.count=2 but the environment says HF_COCODC_REGIONS='3'"):
        RegionConfig(count=2).resolved(env)
    with pytest.raises(InputError, match="does not know which region it is"):
        RegionConfig(count=2).resolved({})
    with pytest.raises(InputError, match="2 regions need a coordinator"):
        RegionConfig(count=2, region=0).resolved({})
    with pytest.raises(InputError, match="region 3 of 3"):
        RegionConfig().resolved({**env, "HF_COCODC_REGION": "3"})


OF_TCP = {"rate_limit": 90.0, "connections": 4, "congestion": "bbr"}


@pytest.mark.parametrize("link", ["gloo", "nccl"])
@pytest.mark.parametrize("name", OF_TCP)
def test_a_process_group_ignores_no_setting(link: str, name: str) -> None:
    """What only connections of our own do is refused with gloo and nccl; its default is not, and neither is a secret."""
    message = f"regions.link={link} with regions.{name}=.* Remove regions.{name}, or set regions.link=tcp."
    with pytest.raises(InputError, match=message):
        RegionConfig(link=link, **{name: OF_TCP[name]})
    plain = RegionConfig(link=link, secret_file="secret", connections="auto", congestion="auto", port=29700)
    assert plain.compared["link"] == link and not plain.of_tcp
    for own in ("auto", "tcp"):
        assert RegionConfig(link=own, **{name: OF_TCP[name]}).of_tcp == {name: OF_TCP[name]}
        assert RegionConfig(link=own, congestion="system").of_tcp == {"congestion": "system"}


ELASTIC_ONLY = {"min": 2, "max": 3, "wait_s": 5.0, "grace_s": "auto", "join": True}


def test_what_implies_that_the_run_goes_on() -> None:
    """Any setting of such a run alone makes it elastic; nothing, or on_loss=stop, does not; the rest follows once the number is
    known.
    """
    assert not RegionConfig().elastic
    assert not RegionConfig(on_loss="stop").elastic
    assert RegionConfig(on_loss="continue").elastic and RegionConfig(on_loss="auto").elastic
    for name, value in ELASTIC_ONLY.items():
        assert RegionConfig(**{name: value}).elastic
    found = RegionConfig(region=0, count=3, coordinator="h:1", on_loss="continue").resolved({})
    facts = (found.on_loss, found.min, found.max, found.wait_s, found.join)
    assert facts == ("continue", 2, 3, 3600.0, False)
    found = RegionConfig(region=0, min=2, max=5, wait_s=9, coordinator="h:1").resolved(
        {"HF_COCODC_REGIONS": "4"}
    )
    assert (found.on_loss, found.min, found.max, found.wait_s, found.grace_s) == ("continue", 2, 5, 9, None)
    assert found.resolved({}) == found
    fixed = RegionConfig(region=0, count=3, coordinator="h:1").resolved({})
    assert (fixed.on_loss, fixed.min, fixed.max, fixed.wait_s, fixed.join) == ("stop", None, None, None, None)


BY_DEFAULT = {"region": 0, "count": 3, "coordinator": "h:1"}


def test_the_environment_says_what_a_loss_does_only_where_nothing_else_does() -> None:
    """Our commands say "auto"; what a script or a recipe says comes first, and is no contradiction."""

    def found(env: str, **given: Any) -> RegionConfig:
        return RegionConfig(**BY_DEFAULT, **given).resolved({"HF_COCODC_ON_LOSS": env})

    assert (found("auto").on_loss, found("auto").min, found("auto").max) == ("auto", 2, 3)
    assert found("auto").elastic and found("continue").on_loss == "continue"
    assert found("auto", on_loss="stop") == RegionConfig(**BY_DEFAULT, on_loss="stop").resolved({})
    assert found("auto", min=1) == RegionConfig(**BY_DEFAULT, min=1).resolved({})
    assert found("stop", max=4).on_loss == "continue"
    assert found("stop") == RegionConfig(**BY_DEFAULT).resolved({})
    with pytest.raises(InputError, match="HF_COCODC_ON_LOSS='never' must be one of auto, stop, continue"):
        found("never")


def test_a_run_that_cannot_go_on_is_fixed_only_by_default() -> None:
    """By default it ends with a loss, like one with on_loss=stop; where it is asked to go on, it is refused with the way out."""
    auto = RegionConfig(**BY_DEFAULT).resolved({"HF_COCODC_ON_LOSS": "auto"})
    asked = RegionConfig(**BY_DEFAULT, min=2).resolved({})
    fixed = RegionConfig(**BY_DEFAULT, on_loss="stop").resolved({})
    assert auto.settled("") == asked
    assert dataclasses.replace(auto.settled("It saves every epoch."), join=None) == fixed
    assert fixed.settled("") == fixed.settled("It saves every epoch.") == fixed
    assert auto.settled("").compared == asked.compared != fixed.compared
    with pytest.raises(
        InputError, match=r"It saves every epoch. Or set regions.on_loss=stop, without regions.min, max"
    ):
        asked.settled("It saves every epoch.")
    alone = RegionConfig(region=0, count=1).resolved({"HF_COCODC_ON_LOSS": "auto"})
    assert not alone.settled("").elastic


@pytest.mark.parametrize("name", ELASTIC_ONLY)
def test_a_run_that_ends_with_a_lost_region_takes_nothing_of_one_that_goes_on(name: str) -> None:
    """No setting is accepted and ignored: the message names it, and what to remove."""
    said = "Nobody can join" if name == "join" else f"regions.{name}=.* has no meaning"
    with pytest.raises(InputError, match=said) as refused:
        RegionConfig(**{name: ELASTIC_ONLY[name]}, on_loss="stop")
    assert "regions.on_loss=stop" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"on_loss": "wait"}, "regions.on_loss='wait' must be one of auto, stop, continue"),
        ({"min": 0}, "regions.min=0 must lie in 1 .. 1024"),
        ({"min": "most"}, "regions.min='most' must lie in 1 .. 1024, or be auto"),
        ({"min": 3, "count": 2}, "regions.min=3 is larger than regions.count=2"),
        ({"min": 3, "max": 2}, "regions.min=3 is larger than regions.max=2"),
        ({"min": 1, "max": 2, "count": 3}, "regions.max=2 is smaller than regions.count=3"),
        ({"min": 1, "wait_s": 0}, "regions.wait_s=0.0 must be positive"),
        ({"min": 1, "grace_s": "soon"}, "regions.grace_s='soon' must be positive, .* or be auto"),
        ({"min": 1, "grace_s": "-1"}, "regions.grace_s=.* must be positive"),
    ],
)
def test_settings_of_an_elastic_run_that_do_not_go_together_are_refused(given: dict, message: str) -> None:
    """At once where all numbers are given, and as soon as the environment tells the number of regions."""
    with pytest.raises(InputError, match=message):
        RegionConfig(**given)
    if "count" in given:
        later = {name: value for name, value in given.items() if name != "count"}
        with pytest.raises(InputError, match=message):
            RegionConfig(**later, region=0, coordinator="h:1").resolved(
                {"HF_COCODC_REGIONS": str(given["count"])}
            )


def test_only_a_region_that_joins_may_have_a_number_beyond_the_first_ones() -> None:
    """From count to max - 1; or no number at all: it claims one."""
    regions = RegionConfig(count=2, min=1, max=4, coordinator="h:1")
    with pytest.raises(
        InputError, match=r"region 2 of 2: .* A region with a higher number joins: HF_COCODC_JOIN=1"
    ):
        regions.resolved({"HF_COCODC_REGION": "2"})
    joining = dataclasses.replace(regions, join=True)
    assert joining.resolved({"HF_COCODC_REGION": "3"}).region == 3
    assert regions.resolved({"HF_COCODC_REGION": "3", "HF_COCODC_JOIN": "1"}).join
    with pytest.raises(InputError, match="this process joins a run, but does not know as which region"):
        joining.resolved({})
    with pytest.raises(InputError, match=r"region 4 of 2: regions that join are numbered 0 \.\. 3"):
        joining.resolved({"HF_COCODC_REGION": "4"})
    with pytest.raises(InputError, match="regions.join=True but the environment says HF_COCODC_JOIN='0'"):
        joining.resolved({"HF_COCODC_JOIN": "0"})
    with pytest.raises(InputError, match="HF_COCODC_JOIN='yes' must be 0 or 1"):
        regions.resolved({"HF_COCODC_JOIN": "yes"})


@pytest.mark.parametrize(("count", "least"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_the_majority_of_the_regions(count: int, least: int) -> None:
    """`regions.min: auto` becomes a number once the number of regions is known."""
    regions = RegionConfig(min="auto", region=0, coordinator="h:1")
    assert regions.elastic
    found = regions.resolved({"HF_COCODC_REGIONS": str(count)})
    assert (found.min, found.least, found.max) == (least, least, count)


def test_a_run_of_one_region_that_others_may_join_needs_a_coordinator() -> None:
    """One that nobody can join does not."""
    assert RegionConfig(count=1, min=1).resolved({}).max == 1
    with pytest.raises(InputError, match="2 regions need a coordinator"):
        RegionConfig(count=1, min=1, max=2).resolved({})


def test_the_guard_is_given_as_a_mapping_or_a_line_or_not_at_all() -> None:
    """It is on by default; regions and checkpoints that do not say otherwise have the default."""
    for given, expected in (
        (None, Guard()),
        ({"clip": 3}, Guard()),
        ("clip=4, drop=30", Guard(clip=4, drop=30)),
        ({"history": 20}, Guard(history=20)),
        ({"history": LONGEST_HISTORY}, Guard(history=LONGEST_HISTORY)),
        ("none", None),
    ):
        config = OuterConfig(guard=given)  # type: ignore[arg-type]
        assert guard_of(config) == expected
        assert ("guard" in method_settings(config)) == (expected != Guard())
        assert dataclasses.replace(config, sync_interval=5).guard == config.guard
    parsed, _ = script_parser().parse_args_into_dataclasses(["--outer_guard", "history=9"])
    assert guard_of(parsed) == Guard(history=9)


def test_flags_and_recipes_take_the_settings_of_elastic_runs() -> None:
    """Numbers and the word auto, as text."""
    flags = "--region_count 3 --region_min 2 --region_max 4 --region_grace_s auto --region_wait_s 60 --region_join true"
    _, regions = script_parser().parse_args_into_dataclasses(flags.split())
    assert regions == RegionConfig(count=3, min=2, max=4, grace_s="auto", wait_s=60.0, join=True)
    _, regions = script_parser().parse_args_into_dataclasses(["--region_min", "1", "--region_grace_s", "30"])
    assert regions.grace_s == 30
    given = ["regions.min=2", "regions.grace_s=2.5", "regions.max=4", "regions.join=true"]
    recipe = Recipe.load(RECIPE, given)
    assert recipe.regions == RegionConfig(count=2, min=2, max=4, grace_s=2.5, join=True)


@pytest.mark.parametrize(
    ("given", "env"),
    [
        ({"coordinator": "h:1"}, {}),
        ({"region": 0}, {}),
        ({}, {"HF_COCODC_COORDINATOR": "h:1"}),
        ({}, {"HF_COCODC_REGION": "0"}),
    ],
)
def test_a_region_that_was_meant_to_have_company_does_not_train_alone(given: dict, env: dict) -> None:
    """A coordinator or a number, wherever it is given, without a number of regions is an error that names the missing setting."""
    with pytest.raises(
        InputError, match=r"not how many regions there are.*Set HF_COCODC_REGIONS \(regions.count\)"
    ):
        RegionConfig(**given).resolved(env)
    assert RegionConfig(**given, count=1).resolved(env).count == 1


def test_alone_without_a_word_from_the_user_is_said_where_it_is_seen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning with the lines to set; none where one region is what the user asked for."""
    settings.environment.warn_alone.cache_clear()
    RegionConfig(count=1).resolved({})
    RegionConfig().resolved({"HF_COCODC_REGIONS": "1"})
    assert not caplog.records
    for _ in range(2):
        RegionConfig().resolved({})
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert all(
        f"export {name}=" in record.getMessage()
        for name in (
            settings.environment.ENV_REGION,
            settings.environment.ENV_REGIONS,
            settings.environment.ENV_COORDINATOR,
        )
    )


@pytest.mark.parametrize("flags", [["--coordinator", "127.0.0.1:1"], ["--region", "0"]])
def test_the_command_does_not_train_alone_by_mistake(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe without regions.count, given a coordinator or a region, is one paragraph and exit code 2."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.read_text(encoding="utf-8").split("\nregions:")[0], encoding="utf-8")
    assert main(["train", str(recipe), *flags]) == 2
    assert "not how many regions there are" in capsys.readouterr().err


def test_every_setting_is_used_by_a_method_and_every_default_works() -> None:
    """No field of OuterConfig is accepted and ignored; each method's defaults make a method."""
    import inspect

    used = {name for method in known().values() for name in inspect.signature(method).parameters}
    assert {f.name for f in dataclasses.fields(OuterConfig)} == used | set(OF_EVERY_METHOD)
    for name in known():
        from_config(OuterConfig(method=name))


@pytest.mark.parametrize(
    ("announce", "expected"),
    [
        (None, ()),
        ("a.example", (("a.example", 40),)),
        ("a.example:7", (("a.example", 9),)),
        ("[::1]:7, 10.0.0.1", (("::1", 9), ("10.0.0.1", 40))),
        (["[fe80::2]"], (("fe80::2", 40),)),
    ],
    ids=str,
)
def test_addresses_that_are_announced(
    announce: list[str] | str | None, expected: tuple[tuple[str, int], ...]
) -> None:
    """Without a port, that on which the lane listens; a port that is given is that of lane 0."""
    assert RegionConfig(announce=announce).addresses(port=40, lane=2) == expected


@pytest.mark.parametrize(
    "announce", ["", "a:0", "a:65536", "a:b", "::1", "a:1:2", ["a", ":1"], "a..b"], ids=str
)
def test_what_is_no_address_is_refused(announce: list[str] | str) -> None:
    with pytest.raises(InputError, match=r"regions\.announce: "):
        RegionConfig(announce=announce)


def test_who_announces_more_than_others_take_hears_so() -> None:
    """The coordinator heeds no message with more: the region would wait for it in vain."""
    assert (MOST_ADDRESSES, LONGEST_HOST) == (members.MOST_ADDRESSES, members.LONGEST_HOST)
    longest = ".".join(["a" * 51] * 4 + ["b" * 47])
    assert RegionConfig(announce=[longest] * 16).addresses(port=1, lane=0) == ((longest, 1),) * 16
    with pytest.raises(InputError, match=r"regions\.announce: 17 addresses, .* at most 16 .* Announce fewer"):
        RegionConfig(announce=["a"] * 17)
    with pytest.raises(InputError, match=r"regions\.announce: .* has 256 characters, .* at most 255"):
        RegionConfig(announce=longest + "b")


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_no_machine_has_is_refused(port: int) -> None:
    with pytest.raises(InputError, match=r"regions\.port=.* must lie in 1 \.\. 65535"):
        RegionConfig(port=port)


@pytest.mark.parametrize("line", ["RegionConfig().resolved()", "region_shard([1, 2, 3])"])
@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("HF_COCODC_REGION", "which region this is (1) is given, but not how many regions there are"),
        ("HF_COCODC_REGIONS", "regions.count=2 but this process does not know which region it is"),
    ],
)
def test_a_script_whose_environment_is_incomplete_ends_with_one_sentence(
    line: str, told: str, message: str
) -> None:
    """No line of it is to blame: no traceback, and the exit code of the error."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_COCODC")}
    env[told] = "1" if told == "HF_COCODC_REGION" else "2"
    ended = subprocess.run(
        [sys.executable, "-c", f"import hf_cocodc\nhf_cocodc.{line}"], env=env, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(message)
    assert ended.stderr.count("\n") == 1
