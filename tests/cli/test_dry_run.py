"""`hf-cocodc train --dry-run` makes the checks of a run, says what it would start, and leaves no trace."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cocodc.cli.main import main
from hf_cocodc.coordinator.client import status as runs_at
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.errors import InputError
from hf_cocodc.run.lock import hold, region_lock
from hf_cocodc.settings.environment import ENV_COORDINATOR
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.training import launch, trial
from hf_cocodc.training.data import byte_tokenizer
from hf_cocodc.training.preflight import preflight
from tests.coordinator.regions import hello, meet, part


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[launch.Launch]:
    """What commands would start without --dry-run; the test runs in an empty folder."""
    found: list[launch.Launch] = []

    def start(program: launch.Program, planned: list[launch.Launch], **more: Any) -> None:
        found.extend(planned)
        raise InputError("this is a test")

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.chdir(tmp_path)
    return found


def train(*words: str) -> int:
    return main(["train", "quickstart/diloco", "--set", "training.output_dir=out", *words])


def test_it_names_the_commands_that_a_run_starts(
    started: list[launch.Launch], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the settings, with their defaults; nothing is started or written."""
    assert train("--resume", "--dry-run", "--set", "regions.count=3") == 0
    said = capsys.readouterr().out
    assert "would train  region 0, 1, 2 of 3\n" in said
    assert "parameters   1,0" in said and " to train\n" in said
    assert "from         the newest checkpoint that is good in every region" in said
    assert "method=diloco, sync_interval=20, num_fragments=1" in said
    assert "folder       out/region-2" in said
    assert not started and not list(tmp_path.iterdir())
    shown = [line.split(maxsplit=1)[1] for line in said.splitlines() if line.startswith("command")]
    assert train("--resume", "--set", "regions.count=3") == 2
    for line, each in zip(shown, started, strict=True):
        words = shlex.split(line)
        at = words.index("-m")
        assert words[at:] == each.command[1:]
        told = dict(word.split("=", 1) for word in words[: at - 1])
        assert {**told, ENV_COORDINATOR: each.env[ENV_COORDINATOR]} == each.env
        assert told["HF_COCODC_RESUME"] == "1"


def test_it_says_that_regions_share_a_gpu(
    started: list[launch.Launch], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a run does, in one line. With training.use_cpu none is used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for words, lines, commands in ([], 1, 2), (["--set", "training.use_cpu=true"], 0, 0):
        assert train("--dry-run", *words) == 0
        said = capsys.readouterr().out
        assert said.count("2 regions share 1 GPU(s): an inner step takes up to 2 times as long") == lines
        assert said.count("CUDA_VISIBLE_DEVICES=0 ") == commands
        assert said.count("CUDA_VISIBLE_DEVICES='' ") == 2 - commands
        assert train(*words) == 2
        assert capsys.readouterr().out.count("2 regions share 1 GPU(s)") == lines
    assert [each.env["CUDA_VISIBLE_DEVICES"] for each in started] == ["0", "0", "", ""]


def test_it_refuses_what_a_run_refuses(
    started: list[launch.Launch], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value, a region without a coordinator, a folder in use: in the same words."""
    wrong: list[list[str]] = [
        ["--set", "outer.codec=nonsense"],
        ["--region", "1"],
        ["--join"],
        ["--", "--multi_gpu"],
    ]
    for words in wrong:
        said = []
        for more in ([], ["--dry-run"]):
            assert train(*more, *words) == 2
            said.append(capsys.readouterr().err)
        assert said[0] == said[1] != ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("regions.may_differ=learning_rat", "regions.may_differ='learning_rat' is not a setting in which"),
        ("regions.interface=nope0", "regions.interface='nope0' is not a network interface of this machine"),
        ("model.config.num_hidden_layers=-1", "model.config.num_hidden_layers=-1 must lie in 1 .. 1000"),
        ("model.config.num_attention_heads=1", "model.config: the model cannot compute: "),
        ("training.label_smoothing_factor=2.0", "training.label_smoothing_factor=2.0 must lie in [0, 1)"),
        ("training.neftune_noise_alpha=-1", "training.neftune_noise_alpha=-1 must lie in 0 .. 1000"),
        ("training.weight_decay=-1", "training.weight_decay=-1 must lie in 0 .. 1000"),
        ("training.learning_rate=1e30", "training.learning_rate=1e+30 must lie in 0 .. 1000"),
        ("training.adam_epsilon=1e9", "training.adam_epsilon=1000000000.0 must lie in 0 .. 1"),
        ("training.max_grad_norm=-1", "training.max_grad_norm=-1 must not be negative"),
        ("training.eval_accumulation_steps=0", "training.eval_accumulation_steps=0 must be at least 1"),
        ("training.train_sampling_strategy=sorted", "'sorted' is not known. Known: batch_rebalance, "),
        ("peft.lora_alpha=0", "peft.lora_alpha=0 must be positive"),
        ("peft.lora_dropout=-1", "peft.lora_dropout=-1 must lie in [0, 1)"),
        ("model.config.rope_theta=.inf", "model.config.rope_theta=inf must be finite"),
        ("model.config.rope_parameters={factor: .inf}", "model.config.rope_parameters.factor=inf must be"),
        ("model.config.rope_theta=0", "model: the loss of a first step is nan"),
        ("model.config.rms_norm_eps=1e300", "model: a first step changes nothing, because every gradient is"),
        (
            "model.config.hidden_sizes=null",
            "no model.config.hidden_sizes to remove. Did you mean 'hidden_size'",
        ),
        ("outr=null", "the recipe has no outr to remove. Did you mean 'outer'"),
        ("training.max_step=null", "no training.max_step to remove. Did you mean 'max_steps'"),
        ("outer.sync_interval.x=null", "outer.sync_interval is not a mapping"),
        ("peft.r=null", "the recipe has no peft.r to remove. Known: ."),
    ],
)
def test_it_refuses_what_would_train_on_nonsense(
    override: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Or would end at step 1."""
    monkeypatch.chdir(tmp_path)
    assert train("--dry-run", "--set", override) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("large", [False, True])
def test_it_makes_a_step_of_a_small_model(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only numbers on a CPU show that a model has too few positions; a large model is not built."""
    monkeypatch.setattr(trial, "MOST_WORK", 0 if large else trial.MOST_WORK)
    config = "{model_type: gpt2, n_positions: 16, n_embd: 16, n_head: 2, n_layer: 1, bos_token_id: 1, eos_token_id: 1}"
    recipe = Recipe.load("quickstart/diloco", [f"model.config={config}", "data.block_size=16"])
    assert preflight(recipe, tries=True)
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, block_size=17))
    if large:
        assert preflight(recipe, tries=True)
        return
    assert preflight(recipe)
    with pytest.raises(InputError, match="data.block_size=17 is more than the 16 positions of the model"):
        preflight(recipe, tries=True)


def test_it_wants_a_tokenizer_that_ends_documents(tmp_path: Path) -> None:
    """In words that name keys of a recipe."""
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    changes = ["tokenizer.builtin=null", f"tokenizer.name_or_path={tmp_path}"]
    with pytest.raises(InputError, match=r"no eos token .* \(tokenizer.name_or_path\)"):
        preflight(Recipe.load("quickstart/diloco", changes))


def test_it_refuses_a_folder_that_another_run_has(
    started: list[launch.Launch], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = region_lock(tmp_path / "out" / "region-1")
    with hold(lock):
        before = lock.read_bytes()
        assert train("--dry-run") == 2
        assert "out/region-1 is in use by process" in capsys.readouterr().err
        assert lock.read_bytes() == before
    assert train("--dry-run") == 0


def test_it_changes_nothing_at_the_coordinator(
    started: list[launch.Launch], capsys: pytest.CaptureFixture[str]
) -> None:
    """It claims no number there; it says which number a region that joins would take."""
    served = serve_in_thread()
    address = served.address
    assert train("--dry-run", "--region", "1", "--coordinator", address) == 0
    assert f"coordinator  {address}\n" in capsys.readouterr().out
    assert runs_at(address, None, None, 5.0) == []
    joins = ["--join", "--coordinator", address, "--run", "mine"]
    joins += ["--set", "regions.min=1", "--set", "regions.max=5"]
    assert train("--dry-run", *joins) == 2
    assert "no run named 'mine' trains at" in capsys.readouterr().err
    regions = meet(address, *(hello(region, elastic=True) for region in (0, 1)), run="mine")
    for _ in range(2):
        assert train("--dry-run", *joins) == 0
        said = capsys.readouterr().out
        assert "would train  region 2\n" in said and "HF_COCODC_JOIN=1" in said
    part(*regions)
    served.close()


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("steps", ["-1", "null"])
def test_steps_that_epochs_decide_are_no_number(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Trainer takes no positive number for none."""
    assert train("--dry-run", "--set", f"training.max_steps={steps}") == 0
    assert "steps        by training.num_train_epochs" in capsys.readouterr().out
