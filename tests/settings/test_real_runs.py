"""The recipes of real runs, checked as far as a machine without GPUs, weights and a network can.

Not checked here: that the GPUs do bf16, that a batch fits into their memory, how fast a step is, that FSDP2 and NCCL work,
that the data sets, tokenizers and trained weights are where the recipes say, and what comes out.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from hf_cocodc.cli import coordinator, train
from hf_cocodc.cli.main import parse
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from hf_cocodc.settings.recipe import ModelSection, Recipe
from hf_cocodc.training import building
from hf_cocodc.training.preflight import check
from tests.settings.traffic import landings, step_time_s, traffic
from tests.toys import Region, llama_adamw, run, train_llama, with_known_names

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").partition("## Recipes for GPUs")[2]
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # peft asks for it


class Run(NamedTuple):
    """What a recipe is expected to be, and the GPUs that its rows assume in a region.

    Attributes:
        gpus: GPUs in a region.
        gpu: their name.
        peak_tflops: their dense bf16 peak.
        params: parameters of the model, in millions.
        trained: trainable ones, in millions.
        evenness: largest fragment over smallest, at most.
    """

    gpus: int
    gpu: str
    peak_tflops: float
    params: float
    trained: float
    evenness: float


LLAMA_150M = Run(
    1, "A100", 312, params=215.0, trained=215.0, evenness=1.9
)  # two fragments hold a vocabulary each
RUNS = {
    "llama-150m/diloco.yaml": LLAMA_150M,
    "llama-150m/streaming.yaml": LLAMA_150M,
    "llama-150m/cocodc.yaml": LLAMA_150M._replace(evenness=1.01),  # it splits the vocabularies
    "llama-1b/streaming.yaml": Run(8, "H100", 989, params=1194.4, trained=1194.4, evenness=1.5),
    "qwen3-8b-lora/streaming.yaml": Run(1, "RTX 4090", 165, params=8234.4, trained=43.6, evenness=1.0),
    "opt-1.3b/dilocox.yaml": Run(8, "A100", 312, params=1315.8, trained=1315.8, evenness=1.0),
}
BASES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-8B-Base": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    }
}
"""Configs of the models that a recipe loads by name."""


@cache
def load(name: str) -> Recipe:
    return with_known_names(Recipe.load(ROOT / "recipes" / name))


@cache
def model_of(name: str) -> nn.Module:
    """The recipe's model, adapter and all, without memory behind it."""
    recipe = load(name)
    if recipe.model.name_or_path is not None:
        section = ModelSection(config=BASES[recipe.model.name_or_path], dtype=recipe.model.dtype)
        recipe = dataclasses.replace(recipe, model=section)
    assert recipe.model.config is not None
    with torch.device("meta"):
        return building.model(recipe, recipe.model.config["vocab_size"])


def arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    """The recipe's TrainingArguments; use_cpu, as they refuse bf16 where there is no GPU."""
    return TrainingArguments(**{**recipe.training, "output_dir": str(folder), "use_cpu": True})


def test_every_real_run_is_tested() -> None:
    """The folders named above hold no other recipe."""
    folders = {name.partition("/")[0] for name in RUNS}
    found = [path for folder in folders for path in (ROOT / "recipes" / folder).rglob("*.yaml")]
    assert {path.relative_to(ROOT / "recipes").as_posix() for path in found} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_a_real_run_can_be_built(name: str, tmp_path: Path) -> None:
    """Its arguments are accepted, its model has the size it says, and its fragments cover that and are even."""
    recipe, expected, model = load(name), RUNS[name], model_of(name)
    check(recipe)
    assert arguments(recipe, tmp_path).mixed_precision == "bf16"
    trained = {key: param for key, param in model.named_parameters() if param.requires_grad}
    assert round(sum(param.numel() for param in model.parameters()) / 1e6, 1) == expected.params
    assert round(sum(param.numel() for param in trained.values()) / 1e6, 1) == expected.trained
    assert {param.dtype for param in trained.values()} == {torch.float32}
    fragments = from_config(recipe.outer).fragments(model)
    assert {key for fragment in fragments for key in fragment.names} == set(trained)
    assert sum(fragment.numel for fragment in fragments) == sum(param.numel() for param in trained.values())
    sizes = [fragment.numel for fragment in fragments]
    assert max(sizes) <= expected.evenness * min(sizes)


def test_settings_that_follow_from_a_paper() -> None:
    """Products and fits: 256 sequences a region and step, three blocks a fragment, the scaling laws' inner rate."""
    for method in ("diloco", "streaming", "cocodc"):
        recipe = load(f"llama-150m/{method}.yaml")
        batch = recipe.training["per_device_train_batch_size"] * RUNS[f"llama-150m/{method}.yaml"].gpus
        assert batch * recipe.training["gradient_accumulation_steps"] == 256
    for name in ("llama-1b/streaming.yaml", "qwen3-8b-lora/streaming.yaml"):
        recipe = load(name)
        blocks = (recipe.model.config or BASES[str(recipe.model.name_or_path)])["num_hidden_layers"]
        assert blocks == 3 * (recipe.outer.num_fragments or 0)
    recipe = load("llama-1b/streaming.yaml")
    fit = (
        22256
        * (RUNS["llama-1b/streaming.yaml"].params * 1e6) ** -0.8827
        * (recipe.regions.count or 0) ** 0.2929
    )
    assert recipe.training["learning_rate"] == pytest.approx(fit, rel=0.03)
    assert recipe.training["max_steps"] * 2 * tokens_a_step("llama-1b/streaming.yaml") == pytest.approx(
        25e9, rel=0.02
    )


def tokens_a_step(name: str) -> int:
    """Tokens of a region's inner step."""
    training = load(name).training
    sequences = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"]
    return sequences * load(name).data.block_size * RUNS[name].gpus


@pytest.mark.parametrize("name", RUNS)
def test_the_readmes_figures_are_the_schedules(name: str) -> None:
    """Step time, bytes an hour, the largest transfer and the uplink that hides it are computed, not guessed."""
    expected, recipe = RUNS[name], load(name)
    seconds = step_time_s(
        round(expected.params * 1e6), tokens_a_step(name), expected.gpus, expected.peak_tflops
    )
    found = traffic(recipe.outer, model_of(name), recipe.regions.count or 1, seconds)
    hiding = f"{found.largest_bytes * 8e-6 / found.overlap_s:.3g} Mbit/s" if found.overlap_s else "it waits"
    cells = [
        f"`{name}`",
        f"{expected.gpus} x {expected.gpu}",
        f"{seconds:.2g} s",
        f"{found.hourly_bytes / 1e9:.3g} GB",
        f"{found.times_less:,.0f}",
        f"{found.largest_bytes / 1e6:.4g} MB",
        hiding,
    ]
    assert f"| {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize("num_regions", [2, 3])
@pytest.mark.parametrize(
    "config",
    [
        OuterConfig(method="diloco", sync_interval=4),
        OuterConfig(method="streaming", sync_interval=4, num_fragments=4, overlap_steps=2),
        OuterConfig(method="dilocox", sync_interval=4, rank=4),
        OuterConfig(method="cocodc", sync_interval=4, num_fragments=2, overlap_steps=1, sends_per_interval=2),
    ],
    ids=lambda config: config.method,
)
def test_figures_are_what_a_run_sends(config: OuterConfig, num_regions: int) -> None:
    """The computed bytes are those that regions count while they train, after the first parameters."""
    steps = 17

    def live(region: Region) -> tuple[int, nn.Module]:
        at_start = region.synchronizer.totals.bytes_sent
        for step in range(steps):
            train_llama(region, step)
        return region.synchronizer.totals.bytes_sent - at_start, region.model

    ended = run(num_regions, config, llama_adamw(), live)
    computed = landings(from_config(config), ended[0][1], num_regions, steps)
    assert sum(transfer.num_bytes for transfer in computed) == max(sent for sent, _ in ended)


def commands() -> list[list[str]]:
    """The words of each line of the section's code blocks, behind `hf-cocodc` and without comments."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)).replace("\\\n", " ")
    lines = [words for line in blocks.splitlines() if (words := shlex.split(line, comments=True))]
    assert {line[0] for line in lines} == {"export", "hf-cocodc"}, "a secret, and what needs it"
    return [line[1:] for line in lines if line[0] == "hf-cocodc" and line[1] != "secret"]


def test_every_region_has_its_launch_line() -> None:
    """For each model one line a region, one coordinator, and what stands behind -- is accelerate's."""
    from accelerate.commands.launch import launch_command_parser

    lines = [parse(words) for words in commands()]
    trains = [line for line in lines if line.run is train.run]
    regions: dict[str, list[int]] = {}
    for line in trains:
        assert line.coordinator == "10.0.0.1:29650"
        recipe = Recipe.load(ROOT / line.recipe, line.overrides)
        assert 0 <= line.region < (recipe.regions.count or 0)
        regions.setdefault(str(Path(line.recipe).relative_to("recipes")), []).append(line.region)
        launched = launch_command_parser().parse_args([*line.launcher, "-m", "hf_cocodc.train", line.recipe])
        assert launched.num_processes in (None, RUNS[str(Path(line.recipe).relative_to("recipes"))].gpus)
    assert {name.partition("/")[0] for name in regions} == {name.partition("/")[0] for name in RUNS}
    for name, found in regions.items():
        assert found == list(range(load(name).regions.count or 0)), name
    assert [line.port for line in lines if line.run is coordinator.run] == [29650]


def test_the_sharded_runs_launch_line_asks_for_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    """What accelerate makes of it: FSDP2, every decoder layer a unit of its own, whole weights in checkpoints."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    lines = [parse(words) for words in commands() if "--use_fsdp" in words]
    assert {line.recipe for line in lines} == {"recipes/llama-1b/streaming.yaml"}
    for line in lines:
        launched = launch_command_parser().parse_args([*line.launcher, "-m", "hf_cocodc.train", line.recipe])
        for key, value in prepare_multi_gpu_env(launched).items():
            if key.startswith(("FSDP_", "ACCELERATE_")):
                monkeypatch.setenv(key, value)
        plugin = FullyShardedDataParallelPlugin()
        assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)
        assert plugin.state_dict_type.name == "FULL_STATE_DICT"
        model = model_of("llama-1b/streaming.yaml")
        plugin.set_auto_wrap_policy(model)
        policy = plugin.auto_wrap_policy
        units = [
            module for module in model.modules() if policy(module=module, recurse=False, nonwrapped_numel=0)
        ]
        assert len(units) == 24
