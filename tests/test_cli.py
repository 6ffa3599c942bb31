"""The command line's own parsing; what the commands do is tested in tests/recipes and tests/processes."""

from __future__ import annotations

import pytest

from hf_cocodc.cli import train
from hf_cocodc.cli.main import parse

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
