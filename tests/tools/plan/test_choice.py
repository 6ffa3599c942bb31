"""The planner's choice of settings, and the recipe that it writes; with the times of a made-up machine."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.errors import InputError
from hf_cocodc.link.backends import expected
from hf_cocodc.methods import METHODS
from hf_cocodc.newer import known
from hf_cocodc.resolve import from_config, lost_steps, settings
from hf_cocodc.settings import OuterConfig
from hf_cocodc.settings.outer import CODECS
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.tools.plan import choice, table, written
from hf_cocodc.tools.plan.forecast import Subject
from hf_cocodc.tools.plan.speeds import Speeds
from hf_cocodc.tools.plan.transfers import MARGIN, LinkFigures
from hf_cocodc.training.preflight import on_meta
from hf_cocodc.training.starter import starter

SPEEDS = Speeds(
    encode=dict.fromkeys(CODECS, 1e-9),
    decode=dict.fromkeys(CODECS, 1e-9),
    send=1e-9,
    land={"replace": 3e-9, "mix": 3e-9, "compensate": 5e-9},
)
RECIPE = "quickstart/diloco"
QUICKSTARTS = Path(__file__).parents[3] / "recipes" / "quickstart"


def subject(rate_mbit: float, *overrides: str, regions: int = 2) -> Subject:
    """The quickstart over 50 ms and a rate, with an inner step of 0.1 s."""
    recipe = Recipe.load(RECIPE, overrides)
    link = LinkFigures(0.05, rate_mbit * 1e6)
    return Subject(recipe, on_meta(recipe), link, 0.1, regions, SPEEDS)


def plan(planned: Subject, target: float = 0.95, **changes: Any) -> Any:
    """The settings for the recipe's method, or for others."""
    return choice.choose(planned, OuterConfig(**{**planned.recipe.outer.given(), **changes}), target)


def test_a_setting_is_the_least_that_reaches_the_target() -> None:
    """One step of overlap, or of a round, less would not reach it; the recipe's round stays where it can."""
    planned = subject(20)
    found = plan(planned, 0.9, method="diloco", codec="fp32")
    assert found.shown["sync_interval"] > 20
    assert found.course.utilization >= 0.9
    shorter = dataclasses.replace(found.config, sync_interval=found.shown["sync_interval"] - 1)
    assert planned.course(shorter).utilization < 0.9
    streaming = OuterConfig(method="streaming", sync_interval=20, codec="int8")
    found = choice.choose(planned, streaming, 0.9)
    assert found is not None and found.shown["sync_interval"] == 20
    assert 0 < found.course.staleness <= found.course.needs
    less = dataclasses.replace(found.config, overlap_steps=found.shown["overlap_steps"] - 1)
    assert planned.course(less).utilization < 0.9


def test_settings_can_be_pasted_and_have_no_warning() -> None:
    """A longer round is too short for the recipe's momentum: then it is our own. The printed line makes the same settings."""
    planned = subject(15, "outer.outer_lr=0.7", "outer.outer_momentum=0.9", "training.max_steps=800")
    found = plan(planned, 0.9, codec="fp32")
    assert found.shown["sync_interval"] > planned.recipe.outer.sync_interval
    lines = table.in_words(planned, found, "diloco", 0.9)
    words = " ".join(lines)
    assert "warning:" not in words
    line = words.partition("settings: ")[2].partition(" link: ")[0]
    assert "outer_lr='auto', outer_momentum='auto'" in line
    pasted = eval(line, {"OuterConfig": OuterConfig})
    assert settings(pasted) == settings(found.config)


def test_an_overlap_has_a_margin() -> None:
    """It hides 1.3 times the transfer, and the plan says both figures."""
    planned = subject(100)
    found = plan(planned, 0.95, method="streaming", sync_interval=20, codec="fp32")
    overlap = found.shown["overlap_steps"]
    assert overlap and planned.course(found.config, MARGIN).utilization >= 0.95
    words = " ".join(table.in_words(planned, found, "streaming", 0.95)).partition("margin: ")[2]
    assert f"the slowest transfer takes {found.course.slowest_s:.3g} s by itself" in words
    assert f"training goes on for {overlap * 0.1:.3g} s meanwhile" in words


def test_a_method_that_is_a_round_late_has_the_shortest_round_that_hides() -> None:
    """Its staleness is the round: a round shorter than the recipe's is better, if the link carries it."""
    fast, slow = subject(1000), subject(2)
    late = OuterConfig(method="co2", sync_interval=20)
    quick, long = choice.choose(fast, late, 0.95), choice.choose(slow, late, 0.95)
    assert quick is not None and long is not None
    assert quick.course.staleness < 20 < long.course.staleness == long.shown["sync_interval"]


def test_the_best_of_a_method_keeps_its_round_then_is_least_stale_then_most_exact() -> None:
    """On a fast link nothing need be lost; on a slow one a smaller codec saves the round."""
    for rate, codec in ((1000, "fp32"), (60, "int8"), (40, "fp4")):
        planned = subject(rate)
        configs = [each for each in choice.variants(planned.recipe.outer) if each.method == "diloco"]
        found = [each for each in (choice.choose(planned, config, 0.83) for config in configs) if each]
        best = choice.best(found, planned.recipe.outer)
        assert best is not None and (best.shown["codec"], best.shown["sync_interval"]) == (codec, 20), rate


def test_a_link_that_is_too_slow_has_no_settings() -> None:
    """Within half of the run's steps nothing reaches the target."""
    assert plan(subject(0.01)) is None


def test_every_method_is_tried_with_every_codec_that_it_takes() -> None:
    """Nine codecs, or those without error feedback; what needs it has it; another method than the recipe's has its defaults."""
    found = list(choice.variants(Recipe.load(RECIPE).outer))
    assert len(found) == len({(each.method, each.codec) for each in found})
    for method, function in METHODS.items():
        codecs = 9 if "error_feedback" in inspect.signature(function).parameters else 4
        assert sum(each.method == method for each in found) == codecs, method
    assert all(each.error_feedback for each in found if each.codec in choice.LOSSY)
    assert {each.outer_lr for each in found if each.method == "diloco"} == {1.0}
    assert {each.outer_lr for each in found if each.method == "streaming"} == {None}
    newer = list(choice.variants(Recipe.load("quickstart/sparseloco").outer))
    assert {each.codec for each in newer if each.method == "sparseloco"} >= {None, "topk", "int4", "fp32"}
    assert len({each.method for each in newer}) == len(METHODS) + 1


def test_more_regions_send_more_and_need_more_time() -> None:
    """Each of three regions sends 4/3 of a payload in two messages, over the same line."""
    config = OuterConfig(method="diloco", sync_interval=20)
    two, three = subject(20).course(config), subject(20, regions=3).course(config)
    assert three.utilization < two.utilization
    num_bytes = 4 * subject(20).num_params
    period_s = 20 * 0.1 / three.utilization
    assert three.bytes_per_s * period_s == pytest.approx(num_bytes * 4 / 3, rel=1e-3)


def near(*overrides: str) -> Subject:
    """The quickstart inside a cluster."""
    recipe = Recipe.load(RECIPE, overrides)
    return Subject(recipe, on_meta(recipe), LinkFigures(0.0002, 1e10), 0.1, 2, SPEEDS)


@pytest.mark.parametrize(
    ("overrides", "link", "why"),
    [
        ((), "gloo", "link: gloo (round trips take 0.2 ms), forecast as one connection"),
        (("regions.link=nccl",), "nccl", "link: nccl (regions.link=nccl), forecast as one connection"),
        (("regions.link=tcp",), "tcp", "link: tcp (regions.link=tcp)."),
        (("regions.rate_limit=9000",), "tcp", "link: tcp (regions.rate_limit is set)."),
        (("regions.secret_file=mine",), "tcp", "link: tcp (a secret is set, and a process group does not encrypt)."),
    ],
)  # fmt: skip
def test_the_link_of_a_cluster_is_planned_as_it_is(
    overrides: tuple[str, ...], link: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process group has one connection and no limit; what only TCP follows is neither said nor written then."""
    monkeypatch.delenv("HF_COCODC_SECRET", raising=False)
    planned = near(*overrides)
    found = choice.choose(planned, planned.recipe.outer, 0.5)
    assert found is not None
    said = table.in_words(planned, found, "diloco", 0.5)
    assert " ".join(said).count(why) == 1
    path = tmp_path / "out.yaml"
    path.write_text(written.recipe_of(RECIPE, overrides, found, planned, "", path))
    again = Recipe.load(path).regions
    assert (planned.carrier, table.report(planned, [found], [], 0.5).setting["link"]) == (link, link)
    if link == "tcp":
        assert planned.limit <= 0.9 * 1e10 / 8 and again.rate_limit is not None
        assert any(line.startswith("regions: RegionConfig(connections=") for line in said)
    else:
        assert (planned.connections, planned.limit, again.of_tcp) == (1, planned.link.goodput, {})
        assert not any(line.startswith("regions:") for line in said)
    assert expected(again, "regions.secret_file=mine" in overrides, 0.0002)[0] == link


def test_a_link_over_a_distance_is_tcp_whoever_plans() -> None:
    assert (subject(60).carrier, subject(60).why) == (
        "tcp",
        "round trips take 50 ms, and those of a cluster less than 2 ms",
    )
    assert subject(60, "regions.link=gloo").carrier == "gloo"


def test_memory_is_that_of_the_engine() -> None:
    """Global params, momentum and a transfer rest on the host or on the device; an adapter needs less."""
    size = 4 * subject(1000).num_params
    host, model = (
        subject(1000).forecast(OuterConfig(method="diloco", device=each)) for each in ("host", "model")
    )
    assert host.host_bytes - model.host_bytes >= 5 * size
    assert model.device_bytes - host.device_bytes >= 5 * size
    adapter = subject(1000, "peft.r=4", "peft.target_modules=all-linear")
    assert adapter.num_params < subject(1000).num_params / 5


@pytest.mark.parametrize("method", known())
def test_a_written_recipe_is_the_plan(method: str, tmp_path: Path) -> None:
    """It loads, with the chosen settings, the overrides and what the recipe says besides."""
    name, overrides = f"quickstart/{method}", ["training.max_steps=400", "outer.weights=tokens"]
    if not (QUICKSTARTS / f"{method}.yaml").is_file():  # a method without a recipe yet
        name, overrides = RECIPE, [*overrides, f"outer.method={method}"]
    recipe = Recipe.load(name, overrides)
    planned = Subject(recipe, on_meta(recipe), LinkFigures(0.05, 40e6), 0.1, 3, SPEEDS)
    found = choice.choose(planned, recipe.outer, 0.9)
    assert found is not None
    path = tmp_path / "out.yaml"
    path.write_text(written.recipe_of(name, overrides, found, planned, "two\nlines", path))
    assert path.read_text().startswith("# Written by `hf-cocodc plan`:\n# two\n# lines\n\nextends: ")
    again = Recipe.load(path)
    assert settings(again.outer) == found.shown
    assert (again.regions.count, again.regions.rate_limit, again.training["max_steps"]) == (3, 36.0, 400)
    assert (again.model, again.outer.weights) == (recipe.model, "tokens")


def test_an_alpha_that_follows_from_the_overlap_goes_on_to_follow() -> None:
    """The default of a short overlap, 0, would throw away all steps of a long one. Another alpha stays."""
    planned = subject(40)
    for overlap, given, alpha in ((1, 0.0, None), (5, 0.5, None), (1, None, None), (1, 0.3, 0.3)):
        config = OuterConfig(
            method="streaming", sync_interval=20, codec="fp32", overlap_steps=overlap, mixing_alpha=given
        )
        found = choice.choose(planned, config, 0.9)
        assert found is not None and found.shown["overlap_steps"] > 1
        assert found.config.mixing_alpha == alpha
        assert found.shown["mixing_alpha"] == alpha or found.shown["mixing_alpha"] == 0.5


def test_a_starter_that_is_planned_keeps_its_inner_steps(tmp_path: Path) -> None:
    """`recipe new`, `plan --write`: a longer overlap mixes, and nothing is lost."""
    path, out = tmp_path / "mine.yaml", tmp_path / "out.yaml"
    path.write_text(starter("m", "d", method="streaming"))
    recipe = Recipe.load(path)
    planned = Subject(recipe, on_meta(Recipe.load(RECIPE)), LinkFigures(0.05, 4e6), 0.1, 2, SPEEDS)
    found = choice.choose(planned, recipe.outer, 0.95)
    assert found is not None and found.shown["overlap_steps"] > 1
    out.write_text(written.recipe_of(path, [], found, planned, "", out))
    outer = Recipe.load(out).outer
    assert lost_steps(outer) is None and from_config(outer).merge.keeps_local_steps


def test_what_is_known_of_the_loss_is_said_and_nothing_else() -> None:
    """The law of DiLoCo for M up to 8; what Streaming DiLoCo says of its overlap; that nothing is known of a longer round."""
    [said] = table.loss("diloco", 4, 0, 30, 30)
    assert (
        "4 regions are expected to cost 1.6%, 8 regions are expected to cost 2.4%" in said
        and "2503.09799" in said
    )
    assert "12 regions" not in table.loss("diloco", 6, 0, 30, 30)[0]
    assert table.loss("diloco", 9, 0, 30, 30) == table.loss("eager", 2, 30, 30, 30) == []
    assert table.loss("streaming", 2, 0, 30, 100) == []
    [said] = table.loss("cocodc", 2, 5, 348, 100)
    assert "no source" in said and "H = 348" in said and "100" in said
    words = [table.loss("streaming", 2, overlap, 30, 30)[0] for overlap in (5, 10, 11)]
    assert ["advises" in words[0], "less than 0.2 %" in words[1], "more than the paper" in words[2]] == [
        True
    ] * 3


@pytest.mark.parametrize("own", [{"method": "my_module:mine"}, {"codec": "my_module:mine"}])
def test_what_is_a_users_own_is_not_planned(own: dict[str, str]) -> None:
    """Neither a method nor a codec that the planner does not know is left out without a word."""
    [name] = own
    with pytest.raises(
        InputError, match=rf"outer\.{name}='my_module:mine' is not one .* --set outer\.{name}="
    ):
        next(choice.variants(OuterConfig(**own)))
