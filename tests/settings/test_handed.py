"""The recipe that a run hands over to machines that join: nothing is lost, no secret is in it, and no code comes with it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hf_cocodc import RegionConfig
from hf_cocodc.errors import InputError
from hf_cocodc.settings.handed import (
    MOST_BYTES,
    Handed,
    content_of,
    doubtful,
    handed_over,
    read_handed,
    received,
)
from hf_cocodc.settings.reading import read_yaml, shipped, yaml_of
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


def passed_on(recipe: Recipe, regions: RegionConfig = REGIONS) -> dict[str, Any]:
    """The sections that a machine gets of a recipe of another one."""
    return read_handed(received(handed_over(recipe, regions, 8)), "it")


@pytest.mark.parametrize("name", shipped())
def test_a_machine_gets_the_recipe_of_the_run(name: str) -> None:
    """All of it but the folder and the place of the region that has told it; with the number of regions, which it need not say
    itself; and a file of it is the same recipe.
    """
    recipe = Recipe.load(name)
    got = Recipe.from_dict(passed_on(recipe))
    own = {"region": None, "coordinator": None, "join": None}
    assert got.regions == dataclasses.replace(REGIONS, **own)
    kept = {key: value for key, value in recipe.training.items() if key != "output_dir"}
    assert got == dataclasses.replace(recipe, training=kept, regions=got.regions)
    assert Recipe.from_dict(read_yaml(yaml_of(content_of(got)), name)) == got
    assert doubtful(got, []) == {}, "a recipe of this package can be taken without its file"


def test_what_is_of_a_machine_or_an_account_stays_there() -> None:
    """Also if the text says it: whoever joins does not rely on those that told it."""
    own = {
        "output_dir": "/root/out",
        "resume_from_checkpoint": "/tmp/pickles",
        "push_to_hub": True,
        "hub_token": "private",
        "hub_model_id": "them/theirs",
        "trackio_space_id": "them/theirs",
    }
    regions = dataclasses.replace(
        REGIONS, secret_file="/root/secret", interface="wg0", port=29700, announce="10.0.0.2", run="mine"
    )
    told = handed_over(small(training=own), regions, 8)
    assert "private" not in str(told) and "secret" not in str(told)
    mine = {"training": {**SMALL["training"], **own}, "regions": {"secret_file": "/root/secret", "count": 2}}
    got = read_handed(Handed(text=json.dumps({**SMALL, **mine})), "it")
    assert (got["training"], got["regions"]) == (SMALL["training"], {"count": 2})


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (small(training={"run_name": "hf_" + "a" * 30}), "it holds a token"),
        (small(data={"builtin": None, "path": "s3://me:pass@host/data"}), "an address with a password"),
        (small(training={"run_name": "x" * MOST_BYTES}), f"and a run keeps at most {MOST_BYTES}"),
        (small(training={"optim_args": object()}), "values that JSON cannot express"),
    ],
)
def test_a_recipe_that_cannot_be_handed_over_says_why(recipe: Recipe, why: str) -> None:
    """The run itself does not mind."""
    handed = received(handed_over(recipe, REGIONS, 8))
    assert not handed.text
    assert why in handed.why


@pytest.mark.parametrize(
    "told", [{"text": 1}, {"text": "x" * (MOST_BYTES + 1)}, {"other": 1}, {"folders": ["x"] * 100}]
)
def test_what_is_no_recipe_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="the coordinator gives what is no recipe"):
        received(told)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "section model is missing"),
        ("[" * 9999, "not valid JSON"),
        ("model: !!python/object/apply:os.system [ls]", "not valid JSON"),
        (json.dumps({**SMALL, "extends": "/etc/passwd"}), "unknown key extends"),
        (json.dumps({**SMALL, "regions": {"count": "x"}}), "regions.count='x'"),
    ],
)
def test_what_is_no_recipe_in_json_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match="^it") as refused:
        read_handed(Handed(text=text), "it")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("key", "section", "value"),
    [
        ("outer.method", "outer", {"method": "evil:method"}),
        ("outer.codec", "outer", {"codec": "evil:codec"}),
        ("training.deepspeed", "training", {"deepspeed": "ds.json"}),
        ("training.accelerator_config", "training", {"accelerator_config": "/tmp/a.json"}),
        ("training.fsdp_config", "training", {"fsdp_config": {"path": "/tmp/a.json"}}),
        ("training.torch_compile_backend", "training", {"torch_compile_backend": "evil"}),
        ("training.of_tomorrow", "training", {"of_tomorrow": "text"}),
        ("training.trust_remote_code", "training", {"trust_remote_code": True}),
        ("peft.megatron_core", "peft", {"megatron_core": "evil"}),
        ("peft.corda_config", "peft", {"corda_config": {"cache_file": "x.pt"}}),
        ("peft.auto_mapping", "peft", {"auto_mapping": {"parent_library": "evil"}}),
    ],
)
def test_settings_that_can_run_code_do_not_count(key: str, section: str, value: dict[str, Any]) -> None:
    """Unless the user gives them: the names of modules, files that libraries read, and text in keys that nobody knows."""
    recipe = small(**{section: value})
    assert list(doubtful(recipe, [])) == [key]
    assert doubtful(recipe, [f"{key}=mine"]) == {}
    assert doubtful(recipe, [f"{section}=null"]) == {}
    assert list(doubtful(recipe, [f"{key}_too=1", "data.path=x"])) == [key]


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("auto_map", {"auto_map": {"AutoModelForCausalLM": "code.Model"}}),
        ("trust_remote_code", {"trust_remote_code": True}),
        ("attn_implementation", {"attn_implementation": "them/kernel"}),
        ("text_config.attn_implementation", {"text_config": {"attn_implementation": "msa"}}),
        ("kernel", {"kernel": "them/kernel@v1"}),
        ("rope_parameters.file", {"rope_parameters": {"file": "/tmp/x"}}),
        ("layer_types", {"layer_types": ["full_attention", "them:layer"]}),
    ],
)
def test_a_config_names_no_code(key: str, config: dict[str, Any]) -> None:
    """Transformers runs the kernels of a repository that a config names."""
    assert list(doubtful(small(model={"config": {"model_type": "llama", **config}}), [])) == [
        f"model.config.{key}"
    ]


def test_an_ordinary_recipe_can_be_taken() -> None:
    recipe = small(
        model={"config": {"model_type": "qwen3", "rope_parameters": {"rope_type": "default"}, "x": None}},
        training={
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "report_to": ["wandb"],
            "optim_args": "momentum=0.9,nesterov=true",
            "bf16": True,
        },
        peft={"r": 8, "target_modules": ["q_proj", r".*\.v_proj"], "layers_to_transform": [1, 2]},
        outer={"method": "streaming", "guard": {"clip": 4, "drop": 8}},
    )
    assert doubtful(recipe, []) == {}


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
