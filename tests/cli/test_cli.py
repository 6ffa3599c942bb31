"""The command line's own parsing; what the commands do is tested in tests/recipes and tests/processes."""

from __future__ import annotations

import pytest
import torch

from hf_cocodc.cli import train
from hf_cocodc.cli.main import parse
from hf_cocodc.errors import InputError
from hf_cocodc.training import launch

ARGS = ["--num_processes", "2", "--", "--multi_gpu"]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "recipe.yaml", "--region", "0", "--store", "10.0.0.1:29650", "--resume"],
        ["train", "--region", "0", "--store", "10.0.0.1:29650", "--resume", "recipe.yaml"],
    ],
)
def test_what_stands_behind_dashes_is_for_the_launcher(words: list[str]) -> None:
    """Wherever the recipe stands among the options, all behind the first -- goes on untouched."""
    options = parse([*words, "--", *ARGS])
    assert (options.run, options.recipe, options.region) == (train.run, "recipe.yaml", 0)
    assert options.launcher == ARGS
    assert parse(words).launcher == []


def test_only_train_starts_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    """Other commands refuse arguments that nobody would read."""
    with pytest.raises(SystemExit):
        parse(["store", "--", *ARGS])
    assert "hf-cocodc train" in capsys.readouterr().err


def test_regions_share_the_gpus_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evenly; more regions than GPUs would train on the CPU without a word, and are refused with the ways out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    env: dict[str, str] = {}
    assert "--multi_gpu" in launch._launcher_arguments(1, 2, env)
    assert env == {"CUDA_VISIBLE_DEVICES": "2,3"}
    with pytest.raises(
        InputError,
        match=r"3 regions on this machine, but it has 2 GPU.* CUDA_VISIBLE_DEVICES= hf-cocodc train",
    ):
        launch._launcher_arguments(0, 3, {"CUDA_VISIBLE_DEVICES": "4,6"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # what hiding them does
    assert "--cpu" in launch._launcher_arguments(0, 3, {"CUDA_VISIBLE_DEVICES": ""})
