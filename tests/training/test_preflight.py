"""Before a region is started, all that it will build is built without weights; what cannot work is one paragraph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from hf_cocodc.cli.main import main
from hf_cocodc.errors import InputError
from hf_cocodc.recipes.recipe import Recipe
from hf_cocodc.training import launch, preflight
from hf_cocodc.training.data import byte_tokenizer

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart" / "diloco.yaml"


class Started(Exception):
    """The command came to the point where regions are started."""


@pytest.fixture
def _no_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **kwargs: Any) -> None:
        raise Started

    monkeypatch.setattr(launch, "start", start)


@pytest.mark.usefixtures("_no_regions")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.config.hidden_size=130", "The hidden size (130) is not a multiple"),
        ("model.config.hidden_size=-4", "negative dimension"),
        ("model.config.hidden_size=100000000", "on this machine need more than"),
        (
            "model.config.num_hidden_layers=two",
            "model.config: Validation error for field 'num_hidden_layers'",
        ),
        ("model.config.vocab_size=256", "model.config: Padding_idx must be within"),
        ("model.config.num_key_value_heads=3", "model.config: the model cannot compute: The size of tensor"),
        ("model.config.attention_dropout=5.0", "the model cannot compute: dropout probability"),
        ("model.config.hidden_act=gellu", "model.config: 'gellu' is not known"),
        ("model.config.model_type=lama", "model.config: Unrecognized model identifier"),
        ("training.report_to=wandbb", "training.report_to: wandbb is not supported"),
        ("training.report_to=mlflow", "training.report_to: MLflowCallback requires mlflow"),
        ("training.learning_rate=.nan", ".nan is not a number"),
        ("training.learning_rate=-1", "training: Invalid learning rate: -1"),
        ("training.adam_beta2=1.5", "training: Invalid beta"),
        ("training.optim=adamw_8bit", "training: You need to install `bitsandbytes`"),
        ("training.lr_scheduler_type=cosin", "training: cosin is not a valid SchedulerType"),
        ("training.lr_scheduler_kwargs={nope: 1}", "unexpected keyword argument 'nope'"),
        ("training.per_device_train_batch_size=0", "training: batch_size should be a positive integer"),
        ("training.per_device_eval_batch_size=-1", "training: batch_size should be a positive integer"),
        ("training.dataloader_num_workers=-1", "training: num_workers option should be non-negative"),
        ("training.gradient_accumulation_steps=0", "must be at least 1"),
        ("training.seed=-1", "training: Seed must be between"),
        ("training.load_best_model_at_end=true", "load_best_model_at_end=True would load the best local"),
        ("peft.r=0", "peft: `r` should be a positive integer"),
        ("peft.target_modules=[nope]", "peft: Target modules {'nope'} not found"),
        ("outer.fragment_pattern=strided", None),
    ],
)
def test_what_a_region_would_find_after_half_a_minute(
    override: str, message: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is found before a region is started and before the folder of an earlier run is touched."""
    journal = tmp_path / "region-0" / "cocodc" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text("{}\n")
    words = ["train", str(RECIPE), "--set", f"training.output_dir={tmp_path}", "--set", override]
    if message is None:
        with pytest.raises(Started):
            main(words)
    else:
        assert main(words) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("error: ")
        assert message in errors
        assert errors.count("\n") == 1
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [journal]


@pytest.mark.parametrize(
    "overrides",
    [
        ["peft.r=4", "peft.init_lora_weights=pissa"],
        ["peft.r=4", "peft.use_dora=true", "peft.target_modules=all-linear"],
        ["training.optim=adafactor", "training.lr_scheduler_type=reduce_lr_on_plateau"],
        ["training.lr_scheduler_type=cosine_with_min_lr", "training.lr_scheduler_kwargs={min_lr: 1e-5}"],
        ["training.fp16=true", "training.max_steps=-1", "model.dtype=bfloat16"],
        ["model.config={model_type: mamba, hidden_size: 16, num_hidden_layers: 1}"],
        ["model.config={model_type: mixtral, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1}"],
        ["training.full_determinism=true", "training.report_to=[]", "training.dataloader_num_workers=2"],
        ["training.resume_from_checkpoint=true"],  # the command adds it for --resume
    ],
    ids=" ".join,
)
def test_what_a_region_can_train_is_not_refused(overrides: list[str]) -> None:
    """Adapters whose start needs the weights, other optimizers and schedules, and numbers of other formats."""
    preflight.preflight(Recipe.load(RECIPE, overrides))


def test_no_weights_no_data_and_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained weights are not read: the config beside them says enough. Devices are left to the regions."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    config.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    named = ["data.builtin=null", "data.path=/nowhere", "model.config=null", f"model.name_or_path={tmp_path}"]
    named += ["tokenizer.builtin=null", f"tokenizer.name_or_path={tmp_path}"]

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the weights were read, or a device was chosen")

    assert "_setup_devices" in vars(TrainingArguments)  # replaced in this process
    monkeypatch.setattr("accelerate.state.PartialState.__init__", never)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)
    monkeypatch.setattr(torch.cuda, "init", never)
    preflight.preflight(Recipe.load(RECIPE, named))
    for missing in ("model", "tokenizer"):
        with pytest.raises(InputError, match=rf"{missing}.name_or_path='/nowhere': .*nowhere"):
            preflight.preflight(Recipe.load(RECIPE, [*named, f"{missing}.name_or_path=/nowhere"]))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"model.name_or_path="):
        preflight.preflight(Recipe.load(RECIPE, named[:-2]))


def test_an_absurd_number_of_layers_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without weights a model of any depth fits into memory: the number of tensors is limited, too."""
    monkeypatch.setattr(preflight, "MOST_TENSORS", 500)
    with pytest.raises(InputError, match="more than 500 parameter tensors"):
        preflight.preflight(Recipe.load(RECIPE, ["model.config.num_hidden_layers=100000000"]))
    torch.nn.Linear(2, 2)  # models that are built afterwards are not counted
