"""What regions must have in common before they train: each difference is found, named and shown with both values."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from torch import nn

from hf_cocodc.coordinator.hello import _ONLY_SHOWN, FROZEN, compare, side_by_side
from hf_cocodc.errors import HandshakeError, InputError
from hf_cocodc.run import connect
from hf_cocodc.run.about import About, function_of
from hf_cocodc.run.connect import hello
from tests.toys import llama

MODEL = llama()
FACTS = {"training.learning_rate": 1e-3, "training.seed": 0, "data.block_size": 128, "batch": 4}


def says(allowed: list[str] | None = None, samples: str = "", **changes: Any) -> dict[str, Any]:
    """The hello of a region; `changes` of its model's config, or of its training."""
    config = function_of(MODEL)
    facts = dict(FACTS)
    for name, value in changes.items():
        [key] = [key for key in (*config, *facts) if key.rpartition(".")[2] == name]
        (config if key in config else facts)[key] = value
    return hello(
        MODEL,
        {"sync_interval": 10},
        100,
        1,
        About(model=config, facts=facts, first_samples=samples),
        allowed or [],
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rope_theta", "model.config.rope_parameters.rope_theta"),
        ("num_attention_heads", "model.config.num_attention_heads"),
        ("attention_dropout", "model.config.attention_dropout"),
        ("learning_rate", "training.learning_rate"),
        ("seed", "training.seed"),
        ("block_size", "data.block_size"),
        ("batch", "batch"),
    ],
)
def test_another_function_data_or_training_is_refused(name: str, said: str) -> None:
    """Nothing that changes the model's function, the data or a step differs without a word."""
    changed = says(**{name: 0.5})
    with pytest.raises(HandshakeError, match=f"region 0 and region 2 disagree on {said}: .*region 2 has 0.5"):
        compare([says(), says(), changed])


@pytest.mark.parametrize("name", ["learning_rate", "training.learning_rate"])
def test_what_may_differ_is_shown_side_by_side(name: str) -> None:
    """regions.may_differ names it, with or without its section; nothing else may differ then."""
    regions = [says([name]), says([name], learning_rate=2e-3)]
    compare(regions)
    [sentence] = side_by_side(regions)
    assert sentence == "training.learning_rate, which may differ: 0.001 in region 0, 0.002 in region 1."
    with pytest.raises(
        HandshakeError,
        match="disagree on training.seed.*regions.may_differ=.*learning_rate,training.seed in all",
    ):
        compare([says([name]), says([name], learning_rate=2e-3, seed=1)])
    with pytest.raises(HandshakeError, match="disagree on regions.may_differ"):
        compare([says([name]), says([])])


@pytest.mark.parametrize("name", ["learning_rat", "sync_interval", "rope_theta"])
def test_only_facts_may_differ(name: str) -> None:
    """A name without effect is refused, and so is a setting in which regions must never differ."""
    with pytest.raises(
        InputError, match=f"regions.may_differ='{name}' is not a setting in which regions may"
    ):
        says([name])


def test_a_difference_names_regions_field_and_values() -> None:
    """A difference in settings, parameters or frozen weights is found and said."""
    settings = {"sync_interval": 10}
    base = hello(llama(), settings, 100, 1)
    compare([base, hello(llama(seed=1), settings, 100, 1)])
    with pytest.raises(
        HandshakeError, match="region 0 and region 1 disagree on outer.sync_interval: region 0 has 10"
    ):
        compare([base, hello(llama(), {"sync_interval": 20}, 100, 1)])
    with pytest.raises(HandshakeError, match="region 2 disagree on max_steps"):
        compare([base, base, hello(llama(), settings, 99, 1)])
    wider = hello(llama(layers=3), settings, 100, 1)
    with pytest.raises(HandshakeError, match="disagree on trainable parameters"):
        compare([base, wider])
    frozen = [hello(freeze(seed), settings, 100, 1) for seed in (0, 1)]
    with pytest.raises(
        HandshakeError,
        match=r"frozen parameters and buffers \(digest\): region 0 has 'model\.embed_tokens\.weight \[64, 16\] float32 \w{8}', "
        r"region 1 has 'model\.embed_tokens\.weight \[64, 16\] float32 \w{8}'",
    ):
        compare(frozen)


def test_frozen_tensors_are_named_whatever_another_region_sends() -> None:
    """Names that cannot be read leave the digests, and equal names the number of tensors."""
    mine, theirs = (hello(freeze(seed), {}, 100, 1) for seed in (0, 1))
    [field] = [name for name, value in mine.items() if mine[name] != theirs[name] and name not in _ONLY_SHOWN]
    for wrong in ("", "x", 7, None, [], mine[FROZEN][:40], base64.b64encode(b"abc").decode()):
        with pytest.raises(
            HandshakeError, match=f"region 0 has {mine[field]!r}, region 1 has {theirs[field]!r}"
        ):
            compare([mine, {**theirs, FROZEN: wrong}])
    assert len(mine[FROZEN]) < 200


def test_the_names_of_frozen_tensors_take_little_room() -> None:
    """A quantized base has thousands, and a coordinator hands out the hellos of all regions in one line."""
    base = nn.ModuleList(
        nn.ModuleDict({"q_proj": nn.Linear(2, 2), "k_proj": nn.Linear(2, 2)}) for _ in range(500)
    )
    told = hello(base.requires_grad_(False), {}, 1, 1)[FROZEN]
    assert len(told) < 12 * 2000


def freeze(seed: int) -> nn.Module:
    model = llama(seed)
    model.model.embed_tokens.requires_grad_(False)
    return model


def test_a_setting_has_the_name_that_it_has_in_a_recipe() -> None:
    """What a message names can be found in the recipe."""
    theirs = hello(MODEL, {"sync_interval": 10, "timeout_s": 5.0, "device": "cpu"}, 100, 1)
    assert {"outer.sync_interval", "regions.timeout_s", "outer.device"} <= theirs.keys()


def test_the_version_of_the_package_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of hf_cocodc is refused; another version of Transformers, with new fields in its configs, is shown."""
    ours = says()
    monkeypatch.setattr(connect, "version", lambda name: "99")
    theirs = says()
    theirs["model"]["model.config.new_field"] = 1
    compare([ours, theirs])
    assert any(
        sentence.startswith("other versions of transformers: ") for sentence in side_by_side([ours, theirs])
    )
    monkeypatch.setattr(connect, "__version__", "99")
    with pytest.raises(HandshakeError, match="disagree on hf_cocodc: .* region 1 has '99'"):
        compare([ours, says()])


def test_regions_that_train_on_the_same_data_are_told() -> None:
    """Equal first samples are a warning with the remedy; unknown ones are none."""
    assert side_by_side([says(), says()]) == []
    assert side_by_side([says(samples="a"), says(samples="b")]) == []
    [sentence] = side_by_side([says(samples="a"), says(samples="b"), says(samples="a")])
    assert sentence.startswith("regions 0 and 2 begin with the same training samples")
    assert "region_shard(dataset" in sentence
