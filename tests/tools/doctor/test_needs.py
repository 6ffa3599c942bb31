"""What a run takes is what a run then takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_cocodc import CoCoDCCallback, Recipe, simulate
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from hf_cocodc.tools.doctor.needs import most_in_flight, needs
from hf_cocodc.training.preflight import on_meta

SHORT = ["training.max_steps=4", "outer.sync_interval=2", "training.eval_strategy=no", "data.block_size=32"]
SHORT += ["training.eval_on_start=false", "training.warmup_steps=1", "training.save_strategy=steps"]


@pytest.mark.parametrize(
    ("saving", "checkpoints"),
    [
        (["training.save_steps=1"], 4),
        (["training.save_steps=1", "training.save_total_limit=1"], 2),
        (["training.save_steps=3", "training.save_total_limit=9"], 2),
        (["training.save_steps=500"], 1),
        (["training.save_steps=0.3"], 2),
        (["training.save_steps=0.25"], 4),
        (["training.save_steps=0"], 1),
        (["training.save_strategy=no"], 0),
        (["training.save_strategy=epoch"], None),
    ],
)
def test_checkpoints_that_are_there_at_once(saving: list[str], checkpoints: int | None) -> None:
    """By save_steps, or by save_total_limit and the one that is being written."""
    recipe = Recipe.load("quickstart/diloco", [*SHORT, "training.save_total_limit=null", *saving])
    found = needs(recipe, on_meta(recipe), 2)
    assert found.checkpoints == checkpoints


@pytest.mark.parametrize(
    ("settings", "num_fragments", "most"),
    [
        ({"method": "diloco"}, 1, 1),
        ({"method": "diloco", "num_fragments": 3, "fragment_pattern": "strided"}, 3, 3),
        ({"method": "streaming"}, 4, 1),
        ({"method": "streaming", "overlap_steps": 60}, 4, 3),
        ({"method": "eager"}, 1, 2),  # sent again where it lands
        ({"method": "cocodc"}, 4, 2),
    ],
)
def test_transfers_in_flight(settings: dict[str, Any], num_fragments: int, most: int) -> None:
    """By the schedule's own events."""
    assert most_in_flight(from_config(OuterConfig(**settings)), num_fragments) == most


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diloco", "co2"])
def test_a_checkpoint_is_as_large(name: str, tmp_path: Path) -> None:
    """Within a fifth of what lies on the disk; and the memory of outer state is what the run itself says."""
    overrides = [*SHORT, "training.save_steps=4", f"training.output_dir={tmp_path}"]
    recipe = Recipe.load(f"quickstart/{name}", overrides)
    found = needs(recipe, on_meta(recipe), 2)
    first, _ = simulate(recipe)
    [checkpoint] = Path(first.args.output_dir).glob("checkpoint-*")
    size = sum(each.stat().st_size for each in checkpoint.rglob("*") if each.is_file())
    assert 0.8 < size / found.checkpoint < 1.2
    [callback] = [each for each in first.callback_handler.callbacks if isinstance(each, CoCoDCCallback)]
    synchronizer = callback.outer.synchronizer
    [kept] = synchronizer.memory().values()
    flying = most_in_flight(synchronizer.method, len(synchronizer.fragments))
    assert found.outer_on_host == kept.kept + flying * kept.per_transfer + kept.staged
    assert found.params == sum(param.numel() for param in first.model.parameters())
