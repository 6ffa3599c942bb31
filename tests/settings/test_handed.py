"""The recipe that a run hands over to machines that join: nothing is lost, and no secret is in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hf_cocodc import RegionConfig
from hf_cocodc.settings.handed import MOST_BYTES, handed_over
from hf_cocodc.settings.reading import read_yaml, shipped
from hf_cocodc.settings.recipe import Recipe, facts_of_data

REGIONS = RegionConfig(region=1, count=3, min="auto", coordinator="10.0.0.1:29650", max=4).resolved({})
SMALL: dict[str, Any] = {
    "model": {"config": {"model_type": "llama", "hidden_size": 32}},
    "tokenizer": {"builtin": "bytes"},
    "data": {"builtin": "python-stdlib"},
    "training": {"max_steps": 10},
}


def small(**sections: Any) -> Recipe:
    """A recipe with other keys in some of its sections."""
    content = {**SMALL, **{name: {**SMALL.get(name, {}), **given} for name, given in sections.items()}}
    return Recipe.from_dict(content)


@pytest.mark.parametrize("name", shipped())
def test_a_machine_gets_the_recipe_of_the_run(name: str) -> None:
    """All of it but the folder and the place of the region that has told it; with the number of regions and the name of the run,
    which it need not say itself.
    """
    recipe = Recipe.load(name)
    got = Recipe.from_dict(read_yaml(handed_over(recipe, REGIONS, "mine")["text"], name))
    own = {"region": None, "coordinator": None, "join": None, "run": "mine"}
    assert got.regions == dataclasses.replace(REGIONS, **own)
    training = {**recipe.training, "output_dir": "runs/mine"}
    assert got == dataclasses.replace(recipe, training=training, regions=got.regions)


def test_what_is_of_a_machine_or_an_account_stays_there() -> None:
    own = {
        "output_dir": "/root/out",
        "resume_from_checkpoint": "/tmp/pickles",
        "push_to_hub": True,
        "hub_token": "private",
        "hub_model_id": "them/theirs",
        "trackio_space_id": "them/theirs",
    }
    regions = dataclasses.replace(
        REGIONS, secret_file="/root/secret", interface="wg0", port=29700, announce="10.0.0.2"
    )
    text = handed_over(small(training=own), regions, "mine")["text"]
    assert Recipe.from_dict(read_yaml(text, "it")).training == {
        **SMALL["training"],
        "output_dir": "runs/mine",
    }
    for word in ("private", "root", "wg0", "29700", "10.0.0", "them", "tmp"):
        assert word not in text


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (small(training={"run_name": "hf_" + "a" * 30}), "it holds a token"),
        (small(data={"builtin": None, "path": "s3://me:pass@host/data"}), "an address with a password"),
        (small(training={"run_name": "x" * MOST_BYTES}), f"and a run keeps at most {MOST_BYTES}"),
        (small(training={"optim_args": object()}), "values that YAML cannot express"),
    ],
)
def test_a_recipe_that_cannot_be_handed_over_says_why(recipe: Recipe, why: str) -> None:
    """The run itself does not mind."""
    told = handed_over(recipe, REGIONS, "mine")
    assert "text" not in told
    assert why in told["why"]


def test_a_folder_may_lie_elsewhere_on_each_machine(tmp_path: Any) -> None:
    """Regions compare its name; a name on the Hub is compared in full."""
    for place in ("a", "b"):
        (tmp_path / place / "texts").mkdir(parents=True)
    facts = [
        facts_of_data(
            small(
                data={"builtin": None, "path": str(tmp_path / place / "texts")},
                tokenizer={"builtin": None, "name_or_path": name},
            )
        )
        for place, name in (("a", "them/texts"), ("b", f"{tmp_path}/b/../b/texts/"))
    ]
    assert [each["data.path"] for each in facts] == ["texts", "texts"]
    assert [each["tokenizer.name_or_path"] for each in facts] == ["them/texts", "texts"]
