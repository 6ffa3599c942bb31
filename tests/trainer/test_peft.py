"""Adapters across regions: what crosses the link, what may differ between regions, what is exported."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import Trainer, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig, region_shard, simulate
from hf_cocodc.coordinator.hello import compare
from hf_cocodc.errors import HandshakeError, InputError
from hf_cocodc.link.base import Handle, Link, MeanRequest
from hf_cocodc.link.lockstep import LockstepLink
from hf_cocodc.resolve import from_config
from hf_cocodc.run.about import function_of
from hf_cocodc.run.connect import hello
from hf_cocodc.trainer.weights import refuse_unsaved
from tests.processes.worker import Tokens
from tests.toys import RECOMPUTING, llama
from tests.trainer.test_training_variants import CONFIG, STEPS, global_params, train, trained_params

pytestmark = [  # PEFT's: names of transformers 4, what it saves beside an adapter, and those of older releases
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

ATTENTION = ["q_proj", "v_proj"]


class Int8Linear(nn.Linear):
    """A linear layer with a frozen int8 weight; like bitsandbytes' it saves scales that are no parameter and no buffer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), False)
        self.scale = scale
        self.register_buffer("zeros", torch.zeros(linear.out_features, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, (self.weight - self.zeros[:, None]) * self.scale)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = self.scale


class Packed(Tensor):
    """A frozen weight in parts, like torchao's: it has a shape and a type, but no bytes of its own."""

    def __new__(cls, values: Tensor, scale: Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values_, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values_, args[0].scale)
        raise NotImplementedError(func)


def quantized(seed: int = 0) -> nn.Module:
    """A Llama whose MLPs and value projections hold int8 weights."""
    model = llama(seed)
    for layer in model.model.layers:
        for part, names in (
            (layer.mlp, ("gate_proj", "up_proj", "down_proj")),
            (layer.self_attn, ("v_proj",)),
        ):
            for name in names:
                setattr(part, name, Int8Linear(getattr(part, name)))
    return model


def lora(seed: int, base: nn.Module | None = None, **more: Any) -> PeftModel:
    """A LoRA on a Llama; `seed` is the adapter's."""
    torch.manual_seed(seed)
    given: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "init_lora_weights": "gaussian"}
    config = LoraConfig(**(given | {"task_type": "CAUSAL_LM"} | more))
    return get_peft_model(llama() if base is None else base, config)


def two_adapters(seed: int) -> PeftModel:
    """An adapter to train, and one that stays as it is, as a reference of DPO does."""
    model = lora(seed)
    torch.manual_seed(7)
    model.add_adapter("reference", LoraConfig(r=2, target_modules=ATTENTION, init_lora_weights="gaussian"))
    return model


KINDS: dict[str, Callable[[int], PeftModel]] = {
    "lora": lora,
    "dora": lambda seed: lora(seed, use_dora=True),
    "vera": lambda seed: _adapted(seed, VeraConfig(r=4, target_modules=ATTENTION, projection_prng_key=3)),
    "ia3": lambda seed: _adapted(seed, IA3Config()),
    "tokens": lambda seed: lora(seed, trainable_token_indices=[1, 2, 3]),
    "modules_to_save": lambda seed: lora(seed, target_modules=ATTENTION, modules_to_save=["lm_head"]),
    "tied modules_to_save": lambda seed: lora(
        seed,
        llama(tie=True),
        target_modules=ATTENTION,
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
    ),
    "tied adapters": lambda seed: lora(
        seed, llama(tie=True), target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True
    ),
    "two adapters": two_adapters,
    "quantized": lambda seed: lora(seed, quantized()),
}


def _adapted(seed: int, config: Any) -> PeftModel:
    torch.manual_seed(seed)
    config.task_type = "CAUSAL_LM"
    return get_peft_model(llama(), config)


class Tap(LockstepLink):
    """A link that notes the length of everything that goes through it."""

    def __init__(self, link: Link) -> None:
        self.__dict__ = link.__dict__
        self.means: list[int] = []
        self.broadcasts: list[int] = []

    def mean(self, parcel: MeanRequest) -> Handle:
        self.means.append(parcel.numel)
        return super().mean(parcel)

    def broadcast(self, flat: Tensor, what: str, source: int = 0) -> None:
        if not what.startswith("what it is"):  # they compare what they are before the run
            self.broadcasts.append(flat.numel())
        super().broadcast(flat, what, source)


ADAPTER = 4 * (4 * 4 * (16 + 16) + 3 * 4 * (16 + 32))
"""Parameters of `lora`: 4 layers, rank 4, four square projections and the MLP's three."""


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp4"])
def test_only_the_adapter_crosses_the_link(codec: str, tmp_path: Path) -> None:
    """Once at the start, then the codec's bytes of half the adapter in each of seven transfers; nothing else."""
    config = OuterConfig(method="streaming", **(CONFIG.given() | {"codec": codec}))
    taps: list[Tap] = []

    def through(link: Link) -> Tap:
        taps.append(Tap(link))
        return taps[-1]

    outcomes = train(tmp_path, lora, config=config, through=through)
    for region, (tap, outcome) in enumerate(zip(taps, outcomes, strict=True)):
        assert sum(tap.broadcasts) == outcome.params.numel() == ADAPTER
        assert tap.means == [ADAPTER // 2] * 7
        outer = outcome.callback.outer
        assert outer is not None
        fragments = [each.fragment for each in outer.synchronizer.fragments]
        wire = [from_config(config).codec.wire_bytes(fragment, region, 2) for fragment in fragments]
        assert outer.synchronizer.totals.bytes_sent == 4 * wire[0] + 3 * wire[1] + (
            4 * ADAPTER if region == 0 else 0
        )
        if codec != "fp4":
            assert wire == [ADAPTER // 2 * {"fp32": 4, "bf16": 2}[codec]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(kind: str, tmp_path: Path) -> None:
    """Regions that start from adapters of their own end with one; frozen weights stay; what is saved loads as it is."""
    build = KINDS[kind]
    config = OuterConfig(method="streaming", **(CONFIG.given() | {"codec": "int8"}))
    outcomes = train(tmp_path, build, config=config, save_strategy="steps", save_steps=STEPS)
    frozen = "frozen parameters and buffers (digest)"
    for region, (trainer, callback, params) in enumerate(outcomes):
        before = build(region)
        assert not torch.equal(params, trained_params(before))
        assert hello(trainer.model, {}, None, 1)[frozen] == hello(before, {}, None, 1)[frozen]
        assert callback.outer is not None
        for fragment in callback.outer.synchronizer.fragments:
            held = torch.cat([param.reshape(-1) for param in fragment.local.params])
            assert torch.equal(held, fragment.global_params), "a weight that lies in two places"
        assert global_params(trainer).numel() == memory_of(trainer.model)
    folder = tmp_path / "region-1" / f"checkpoint-{STEPS}"
    assert all(
        tensor.is_floating_point() for tensor in load_file(folder / "adapter_model.safetensors").values()
    )
    base = {"tied": llama(tie=True), "quantized": quantized()}.get(kind.split()[0], llama())
    loaded, trained = PeftModel.from_pretrained(base, str(folder)).eval(), outcomes[0].trainer.model.eval()
    tokens = torch.arange(1, 33).view(2, 16)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, trained(input_ids=tokens).logits)


def memory_of(model: nn.Module) -> int:
    """Values in memory that training changes: of tensors that share it, one."""
    shared = {param.data_ptr(): param.numel() for param in model.parameters() if param.requires_grad}
    return sum(shared.values())


@pytest.mark.slow
def test_gradient_checkpointing_of_a_quantized_base(tmp_path: Path) -> None:
    """What QLoRA does to fit: the same bits as without."""
    plain, saving = (
        train(tmp_path, lambda seed: lora(seed, quantized()), **{RECOMPUTING: recomputes})
        for recomputes in (False, True)
    )
    assert torch.equal(plain[0].params, saving[0].params)


def test_prompts_have_no_blocks(tmp_path: Path) -> None:
    """Prompt tuning travels whole, and who asks for fragments is told so."""

    def build(seed: int) -> PeftModel:
        return _adapted(seed, PromptTuningConfig(num_virtual_tokens=4))

    with pytest.raises(InputError, match="0 trainable blocks.*Use fragment_pattern=whole."):
        train(tmp_path, build)
    outcomes = train(tmp_path, build, config=OuterConfig(method="diloco", sync_interval=4))
    assert outcomes[0].params.numel() == 4 * 16


def unfrozen(*names: str, **more: Any) -> PeftModel:
    """A LoRA whose base is trained as well, in modules of these names."""
    model = lora(0, **more)
    for name, param in model.named_parameters():
        param.requires_grad_(param.requires_grad or any(each in name for each in names))
    return model


def test_what_peft_would_not_save_is_not_trained(tmp_path: Path) -> None:
    """It would be trained and sent, and missing in every export: refused before the regions meet."""
    lost = "base_model.model.model.norm.weight"
    with pytest.raises(
        InputError, match=rf"save_pretrained leaves out.*{lost}.*modules=\['norm'\]: modules_to_save"
    ):
        train(tmp_path, lambda region: unfrozen("model.norm"))
    assert not list(tmp_path.rglob("journal.jsonl"))


@pytest.mark.parametrize(
    "build",
    [
        *(KINDS[name] for name in ("lora", "dora", "tokens", "modules_to_save", "tied adapters")),
        lambda seed: lora(seed, biased(), bias="lora_only"),
        lambda seed: lora(seed, biased(), bias="all"),
        lambda seed: _adapted(seed, PromptEncoderConfig(num_virtual_tokens=4)),
    ],
)
def test_what_peft_saves_is_trained(build: Callable[[int], nn.Module]) -> None:
    """Biases too, since PEFT 0.21."""
    refuse_unsaved(build(0))


def biased() -> nn.Module:
    """A Llama whose layers have biases."""
    model = llama()
    for layer in model.model.layers:
        layer.mlp.up_proj.bias = nn.Parameter(torch.zeros(layer.mlp.up_proj.out_features))
    return model


def test_a_trained_weight_that_a_model_does_not_save_is_refused() -> None:
    """A model without adapters says so itself."""
    model = llama()
    refuse_unsaved(model)
    model._keys_to_ignore_on_save = {"lm_head.weight"}
    with pytest.raises(InputError, match="this run trains \\(lm_head.weight\\)"):
        refuse_unsaved(model)
    model.lm_head.requires_grad_(False)
    refuse_unsaved(model)


def changed(model: nn.Module, name: str) -> nn.Module:
    """The model, the first value of one of its tensors another."""
    with torch.no_grad():
        attrgetter(name)(model).view(-1)[0] += 1
    return model


def packed() -> nn.Module:
    """A Llama, one of whose weights lies in parts."""
    model = lora(0)
    linear = model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    values, scale = torch.ones(32, 16, dtype=torch.int8), torch.ones(32)
    linear.weight = nn.Parameter(Packed(values, scale), requires_grad=False)
    return model


UP = "base_model.model.model.layers.0.mlp.up_proj"
DIFFERENT: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "base": (lambda: lora(0), lambda: lora(0, llama(1))),
    "int8 weight": (
        lambda: lora(0, quantized()),
        lambda: changed(lora(0, quantized()), f"{UP}.base_layer.weight"),
    ),
    "buffer": (lambda: lora(0, quantized()), lambda: changed(lora(0, quantized()), f"{UP}.base_layer.zeros")),
    "part of a weight": (packed, lambda: changed(packed(), f"{UP}.base_layer.weight.scale")),
    "projection": (
        lambda: KINDS["vera"](0),
        lambda: _adapted(0, VeraConfig(r=4, target_modules=ATTENTION, projection_prng_key=4)),
    ),
    "reference adapter": (
        lambda: two_adapters(0),
        lambda: changed(
            two_adapters(0), "base_model.model.model.layers.0.self_attn.q_proj.lora_A.reference.weight"
        ),
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_frozen_weights_that_differ_are_refused(what: str) -> None:
    """What is not synchronized has to be equal, in whatever form it is kept."""
    hellos = [hello(build(), {}, None, 1) for build in DIFFERENT[what]]
    compare([hellos[0], hello(DIFFERENT[what][0](), {}, None, 1)])
    with pytest.raises(
        HandshakeError, match=r"region 0 and region 1 disagree on frozen parameters and buffers"
    ):
        compare(hellos)


def offloaded(model: nn.Module, folder: Path | None = None) -> nn.Module:
    """The model; of two layers of its base, Accelerate keeps the frozen weights on the host, or in a folder."""
    for place, name in enumerate(("mlp.up_proj", "self_attn.q_proj")):
        layer = model.get_submodule(f"base_model.model.model.layers.{place}.{name}.base_layer")
        if folder is None:
            cpu_offload(layer, "cpu", offload_buffers=True)
        else:
            disk_offload(layer, str(folder / name), "cpu", offload_buffers=True)
    assert any(param.is_meta for param in model.parameters())
    model.hf_device_map = {"model": "cpu", "lm_head": "cpu"}  # Trainer does not move it then
    return model


def test_weights_that_are_offloaded_are_compared(tmp_path: Path) -> None:
    """They are read where they are, and are equal to those of a region that holds them: when regions meet, and at a resume."""
    models = lora(0), offloaded(lora(1)), offloaded(lora(2), tmp_path)
    compare([hello(each, {}, None, 1) for each in models])
    assert len({function_of(each)["frozen base (digest)"] for each in models}) == 1
    other = offloaded(changed(lora(0), f"{UP}.base_layer.weight"))
    with pytest.raises(HandshakeError, match=r"disagree on frozen.*mlp.up_proj.base_layer.weight \[32, 16\]"):
        compare([hello(models[1], {}, None, 1), hello(other, {}, None, 1)])
    assert function_of(other)["frozen base (digest)"] != function_of(models[0])["frozen base (digest)"]


def test_a_region_trains_with_an_offloaded_base(tmp_path: Path) -> None:
    """Beside one that holds all of it; it resumes, too."""
    more = {"save_strategy": "steps", "save_steps": 7}

    def build(region: int) -> nn.Module:
        return offloaded(lora(region)) if region else lora(region)

    whole = train(tmp_path, build, **more)
    for region in range(2):
        shutil.rmtree(tmp_path / f"region-{region}" / f"checkpoint-{STEPS}")
    assert torch.equal(train(tmp_path, build, resume=True, **more)[0].params, whole[0].params)


def test_scales_that_differ_may_be_allowed(tmp_path: Path) -> None:
    """GPUs of different kinds may round those of a double quantization differently: the refusal names the way out."""

    def build(region: int) -> nn.Module:
        model = lora(0, quantized())
        return changed(model, f"{UP}.base_layer.scale") if region else model

    def body(regions: RegionConfig, region: int, link: Link) -> CoCoDCCallback:
        callback = CoCoDCCallback(CONFIG, regions, link=link)
        args = TrainingArguments(
            str(tmp_path), max_steps=4, report_to="none", save_strategy="no", use_cpu=True
        )
        trainer = Trainer(
            build(region), args, train_dataset=region_shard(Tokens(64), region, 2), callbacks=[callback]
        )
        trainer.train()
        return callback

    way_out = r"disagree on quantization.scales: .*set regions.may_differ=quantization.scales in all"
    with pytest.raises(HandshakeError, match=way_out):
        simulate(partial(body, RegionConfig()), regions=2)
    simulate(partial(body, RegionConfig(may_differ="quantization.scales")), regions=2)


def test_adapters_may_start_different_but_not_of_another_shape() -> None:
    """Region 0's are taken everywhere; a rank that differs is refused by name."""
    compare([hello(lora(seed), {}, None, 1) for seed in range(2)])
    with pytest.raises(HandshakeError, match=r"q_proj.lora_A.default.weight \[4, 16\].*\[2, 16\]"):
        compare([hello(lora(0, r=r), {}, None, 1) for r in (4, 2)])


def test_adapters_that_scale_otherwise_are_refused() -> None:
    """LoRA's alpha is no parameter, and yet decides what a step is worth; where the base model lies does not."""
    model = lora(0)
    elsewhere = lora(1)
    elsewhere.peft_config["default"].base_model_name_or_path = "another/folder"
    compare([hello(each, {}, None, 1) for each in (model, elsewhere)])
    with pytest.raises(
        HandshakeError, match=r"adapter settings: region 0 has 'default.lora_alpha=\d+', region 1 has"
    ):
        compare([hello(each, {}, None, 1) for each in (model, lora(0, lora_alpha=99))])
