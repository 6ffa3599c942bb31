"""Before a region is started, all that it will build is built without weights; what cannot work is one paragraph."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments, trainer_optimizer, training_args

from hf_cocodc.cli.main import main
from hf_cocodc.errors import InputError
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.training import preflight
from hf_cocodc.training.data import byte_tokenizer
from hf_cocodc.training.precheck import check_sections

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart" / "diloco.yaml"


@pytest.mark.parametrize(
    ("steps", "epochs", "refused"),
    [(0, 3, "max_steps=0"), (-1, 0, "num_train_epochs=0"), (5, 0, None), (-1, 1, None)],
)
def test_no_steps_are_refused_before_anything_is_loaded(steps: int, epochs: int, refused: str | None) -> None:
    """A region said so after it had loaded model and text, without the key's name."""
    recipe = Recipe.load(RECIPE, [f"training.max_steps={steps}", f"training.num_train_epochs={epochs}"])
    if refused is None:
        check_sections(recipe)
        return
    with pytest.raises(InputError, match=f"training.{refused}: there is nothing to train"):
        check_sections(recipe)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.config.hidden_size=130", "The hidden size (130) is not a multiple"),
        ("model.config.hidden_size=-4", "negative dimension"),
        ("model.config.hidden_size=100000000", "model: the weights need"),
        (
            "model.config.num_hidden_layers=two",
            "model.config: Validation error for field 'num_hidden_layers'",
        ),
        ("model.config.vocab_size=256", "model.config: Padding_idx must be within"),
        ("model.config.num_key_value_heads=3", "model.config: the model cannot compute: "),
        ("model.config.attention_dropout=5.0", "the model cannot compute: dropout probability"),
        ("model.config.hidden_act=gellu", "model.config: 'gellu' is not known"),
        (
            "model.config.hiden_size=192",
            "model.config.hiden_size is no setting of LlamaConfig. Did you mean 'hidden_size'?",
        ),
        (
            "model.config.model_type=lama",
            "model.config.model_type='lama' is not known. Did you mean 'llama'?",
        ),
        ("training.report_to=wandbb", "training.report_to: wandbb is not supported"),
        ("training.report_to=mlflow", "training.report_to: MLflowCallback requires mlflow"),
        ("training.learning_rate=.nan", "training.learning_rate=nan must be finite"),
        ("training.learning_rate=-1", "training.learning_rate=-1 must lie in 0 .. 1000"),
        ("training.adam_beta2=1.5", "training: Invalid beta"),
        ("training.optim=adamw_8bit", "training: You need to install `bitsandbytes`"),
        (
            "training.optim=schedule_free_adamw",
            "training.optim=schedule_free_adamw keeps two sets of weights",
        ),
        ("training.lr_scheduler_type=cosin", "'cosin' is not known. Did you mean 'cosine'? Known: "),
        ("training.optim=adamw_tocrh", "'adamw_tocrh' is not known. Did you mean 'adamw_torch'? Known: "),
        ("training.optim=moun", "'moun' is not known. Did you mean 'muon'?"),
        ("training.lr_scheduler_kwargs={nope: 1}", "unexpected keyword argument 'nope'"),
        ("training.per_device_train_batch_size=0", "training: batch_size should be a positive integer"),
        ("training.per_device_eval_batch_size=-1", "training: batch_size should be a positive integer"),
        ("training.dataloader_num_workers=-1", "training: num_workers option should be non-negative"),
        ("training.gradient_accumulation_steps=0", "must be at least 1"),
        ("training.seed=-1", "training: Seed must be between"),
        ("training.load_best_model_at_end=true", None),
        ("peft.r=0", "peft: `r` should be a positive integer"),
        ("peft.init_lora_weights=pisa", "peft: Unknown initialization init_lora_weights='pisa'"),
        ("peft.init_lora_weights=pissa_niter_x", "peft: "),
        ("peft.init_lora_weights=1.5", "peft.init_lora_weights=1.5 must be true or false or "),
        ("peft.lora_alpha=.nan", "peft.lora_alpha=nan must be finite"),
        ("peft.lora_alpha=[1]", "peft.lora_alpha=[1] must be a whole number or a number, not list"),
        ("training.fsdp=5", "training.fsdp=5 must be"),
        ("training.max_step=5", "error: unknown key training.max_step."),
        ("peft.target_modules=[nope]", "peft: Target modules {'nope'} not found"),
        ("outer.fragment_pattern=strided", None),
    ],
)
def test_what_a_region_would_find_after_half_a_minute(
    override: str, message: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is found by --dry-run, in a second, and nothing is written."""
    journal = tmp_path / "region-0" / "cocodc" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text("{}\n")
    words = ["train", str(RECIPE), "--set", f"training.output_dir={tmp_path}", "--set", override]
    words.append("--dry-run")
    if message is None:
        assert main(words) == 0
    else:
        assert main(words) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("error: ")
        assert message in errors
        assert errors.count("\n") == 1
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [journal]


@pytest.mark.parametrize(
    ("has_gpu", "overrides", "message"),
    [
        (False, ["fp16=true"], "needs a GPU, but this machine has no GPU. .*--set training.fp16=false"),
        (True, ["fp16=true", "use_cpu=true"], "needs a GPU, but training.use_cpu=true trains on the CPU"),
        (False, ["bf16=true"], "--set training.bf16=false. .* on the CPU: --set training.use_cpu=true"),
        (False, ["bf16_full_eval=true"], "--set training.bf16_full_eval=false"),
        (False, ["bf16=true", "use_cpu=true"], None),
        (True, ["fp16=true"], None),
    ],
)
def test_a_number_format_that_needs_a_gpu(
    has_gpu: bool, overrides: list[str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused on a CPU, with the format to take instead: Trainer ignores fp16 there without a word."""
    monkeypatch.setattr(preflight, "_has_accelerator", lambda: has_gpu)
    recipe = Recipe.load(RECIPE, [f"training.{each}" for each in overrides])
    if message is None:
        preflight._refuse_format(recipe)
    else:
        with pytest.raises(InputError, match=message):
            preflight.preflight(recipe)


@pytest.mark.parametrize(
    "overrides",
    [
        ["peft.r=4", "peft.init_lora_weights=pissa"],
        ["peft.r=4", "peft.init_lora_weights=pissa_niter_16", "peft.lora_alpha=22.5"],
        ["peft.r=4", "peft.use_dora=true", "peft.target_modules=all-linear"],
        ["training.optim=adafactor", "training.lr_scheduler_type=reduce_lr_on_plateau"],
        ["training.lr_scheduler_type=cosine_with_min_lr", "training.lr_scheduler_kwargs={min_lr: 1e-5}"],
        ["training.bf16=true", "training.use_cpu=true", "training.max_steps=-1", "model.dtype=bfloat16"],
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


def test_fsdp_may_be_true() -> None:
    """Trainer takes it, though its hint says text."""
    preflight.check(Recipe.load(RECIPE, ["training.fsdp=true"]))


def _trained(folder: Path, **changes: Any) -> list[str]:
    """Write the config of a small trained model into a folder; return the overrides of a recipe that names it."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        **changes,
    )
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    named = ["data.builtin=null", "data.path=/nowhere", "model.config=null", f"model.name_or_path={folder}"]
    return [*named, "tokenizer.builtin=null", f"tokenizer.name_or_path={folder}"]


def test_no_weights_no_data_and_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained weights are not read: the config beside them says enough. Devices are left to the regions."""
    named = _trained(tmp_path)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the weights were read, or a device was chosen")

    assert "_setup_devices" in vars(TrainingArguments)  # replaced in this process
    monkeypatch.setattr("accelerate.state.PartialState.__init__", never)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)
    monkeypatch.setattr(torch.cuda, "init", never)
    preflight.preflight(Recipe.load(RECIPE, named))
    for missing in ("model", "tokenizer"):
        with pytest.raises(InputError, match=rf"{missing}.name_or_path='/nowhere': there is no such"):
            preflight.preflight(Recipe.load(RECIPE, [*named, f"{missing}.name_or_path=/nowhere"]))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"model.name_or_path="):
        preflight.preflight(Recipe.load(RECIPE, named[:-2]))


def test_an_absurd_number_of_layers_ends_soon() -> None:
    """Without weights a model of any depth fits into memory, and would take minutes to build."""
    with pytest.raises(InputError, match=r"num_hidden_layers=100000000 must lie in 1 \.\. 1000"):
        preflight.preflight(Recipe.load(RECIPE, ["model.config.num_hidden_layers=100000000"]))


def _limit(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=num_bytes))


def _num_bytes(folder: Path, dtype: torch.dtype, **changes: Any) -> int:
    """The size of the weights of the model in a folder."""
    _trained(folder, **changes)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return sum(param.nbytes for param in model.parameters())


def test_trained_weights_are_counted_as_they_will_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the dtype of their config; the recipe's dtype is stronger. Advice names only what would help."""
    num_bytes = _num_bytes(tmp_path, torch.bfloat16)
    named = _trained(tmp_path, dtype="bfloat16")
    _limit(monkeypatch, num_bytes)
    preflight.preflight(Recipe.load(RECIPE, named))
    with pytest.raises(InputError, match=r"the weights need .*bfloat16 \(model.dtype\)"):
        preflight.preflight(Recipe.load(RECIPE, [*named, "model.dtype=float32"]))
    _limit(monkeypatch, num_bytes - 1)
    with pytest.raises(InputError, match="the weights need") as caught:
        preflight.preflight(Recipe.load(RECIPE, named))
    assert "bfloat16" not in str(caught.value)


def test_tied_weights_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output layer that is the embedding needs no memory of its own."""
    num_bytes = _num_bytes(tmp_path, torch.bfloat16, tie_word_embeddings=True)
    _limit(monkeypatch, num_bytes)
    preflight.preflight(Recipe.load(RECIPE, _trained(tmp_path, dtype="bfloat16", tie_word_embeddings=True)))


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}, "dtype": "bfloat16"},
        {"quantization_config": {"quant_method": "fp8"}, "dtype": "bfloat16"},
        {},
    ],
    ids=["4 bit", "fp8", "no dtype"],
)
def test_weights_of_an_unknown_format_are_not_limited(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantized model takes less than its shapes say; without a dtype in the config only the weights tell."""
    _limit(monkeypatch, 1)
    preflight.preflight(Recipe.load(RECIPE, _trained(tmp_path, **changes)))


def test_with_a_gpu_only_random_weights_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory holds them while they are built. Trained ones are read from files that need not lie in it."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    _limit(monkeypatch, 1)
    gpu = "training.use_cpu=false"
    preflight.preflight(Recipe.load(RECIPE, [*_trained(tmp_path, dtype="bfloat16"), gpu]))
    with pytest.raises(InputError, match="the weights need"):
        preflight.preflight(Recipe.load(RECIPE, [gpu]))


def test_bf16_and_tf32_do_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA that is started here would hold memory of the GPU for as long as the command runs."""

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("CUDA was started")

    names = ("is_torch_bf16_gpu_available", "is_torch_tf32_available")
    before = [getattr(training_args, name) for name in names]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("is_bf16_supported", "_lazy_init", "current_device", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, never)
    monkeypatch.setattr(training_args, "enable_tf32", lambda enable: None)
    for each in before:
        each.cache_clear()
    overrides = ["training.use_cpu=false", "training.bf16=true", "training.tf32=true"]
    try:
        preflight.preflight(Recipe.load(RECIPE, overrides))
    finally:
        for each in before:
            each.cache_clear()
    assert [getattr(training_args, name) for name in names] == before  # a region asks its own GPU


class _Projected(torch.optim.AdamW):
    """Stands for an optimizer that knows which weights it projects."""

    def __init__(self, params: Any, **settings: Any) -> None:
        self.num_groups = len(params)
        assert [group.pop("rank", None) for group in params] == [None, 128]
        for group in params:
            for name in ("update_proj_gap", "scale", "proj_type"):
                group.pop(name, None)
        super().__init__(params, **settings)


def test_an_optimizer_that_needs_the_model_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """GaLore projects the weights of some modules: they must exist."""
    galore = ModuleType("galore_torch")
    for name in ("GaLoreAdamW", "GaLoreAdamW8bit", "GaLoreAdafactor"):
        setattr(galore, name, _Projected)
    monkeypatch.setitem(sys.modules, "galore_torch", galore)
    monkeypatch.setattr(trainer_optimizer, "is_galore_torch_available", lambda: True)
    overrides = ["training.optim=galore_adamw", "training.optim_target_modules=[mlp]"]
    preflight.preflight(Recipe.load(RECIPE, overrides))
    with pytest.raises(InputError, match="training: No target modules found for .*nope"):
        preflight.preflight(Recipe.load(RECIPE, [overrides[0], "training.optim_target_modules=[nope]"]))


def test_an_adapter_on_the_hub_has_its_optimizer_checked(tmp_path: Path) -> None:
    """Only its region finds its base model. An optimizer that needs no model is checked all the same."""
    named = _trained(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/nowhere"}')
    preflight.preflight(Recipe.load(RECIPE, [*named, "training.optim=lomo"]))
    with pytest.raises(InputError, match="training: Invalid beta"):
        preflight.preflight(Recipe.load(RECIPE, [*named, "training.adam_beta2=1.5"]))


def test_samples_of_a_stream_cannot_be_dealt() -> None:
    """Known before anything is loaded."""
    recipe = Recipe.load(RECIPE, ["data.streaming=true", "regions.shards=dealt"])
    with pytest.raises(InputError, match=r"regions\.shards=dealt with data\.streaming=true"):
        check_sections(recipe)


def test_rotary_positions_beyond_those_of_the_model_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """It trains, and may be meant so."""
    for positions, lines in (64, 1), (128, 0):
        caplog.clear()
        overrides = ["data.block_size=128", f"model.config.max_position_embeddings={positions}"]
        preflight.preflight(Recipe.load(RECIPE, overrides), tries=True)
        assert caplog.text.count("is more than the 64 positions that the model is made for") == lines
