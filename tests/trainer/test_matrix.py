"""Every method on every kind of model that the documentation's matrix names, with Trainer and in a plain loop, in one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_cocodc import CoCoDCCallback, OuterConfig, OuterOptimizer, simulate
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.base import Link
from tests.matrix import SETTINGS, STEPS, arguments, config
from tests.processes.worker import Tokens
from tests.toys import llama

ROOT = Path(__file__).parents[2]
VARIANTS = ("fp32", "bf16 autocast", "bf16 parameters", "LoRA")


def build(variant: str) -> nn.Module:
    if variant == "bf16 parameters":
        return llama(dtype=torch.bfloat16)
    if variant == "LoRA":
        torch.manual_seed(0)
        return get_peft_model(
            llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
    return llama()


def with_trainer(
    variant: str, outer: OuterConfig, link: Link, folder: Path
) -> tuple[nn.Module, Synchronizer]:
    callback = CoCoDCCallback(outer, link=link)
    data = Tokens(16, seed=link.region)
    trainer = Trainer(
        model=build(variant),
        args=arguments(folder, bf16=variant == "bf16 autocast"),
        train_dataset=data,
        callbacks=[callback],
    )
    trainer.train()
    assert callback.outer is not None
    return trainer.model, callback.outer.synchronizer


def with_loop(variant: str, outer: OuterConfig, link: Link, folder: Path) -> tuple[nn.Module, Synchronizer]:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if variant == "bf16 autocast" else "no")
    model = build(variant)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    loader = DataLoader(Tokens(2 * STEPS, seed=link.region), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with OuterOptimizer(accelerator, model, optimizer, outer, max_steps=STEPS, link=link) as regions:
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            regions.step()
    return accelerator.unwrap_model(model), regions.synchronizer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("train", [with_trainer, with_loop], ids=["trainer", "plain loop"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", SETTINGS)
def test_every_method_on_every_kind_of_model(method: str, variant: str, train, tmp_path: Path) -> None:
    """Two regions with data of their own end with the same global weights; what is not trained has not moved."""

    def body(region: int, link: Link) -> tuple[dict[str, Tensor], int]:
        model, synchronizer = train(variant, config(method), link, tmp_path)
        return {
            name: param.detach().clone() for name, param in model.named_parameters()
        }, synchronizer.num_params

    (first, num_params), (second, _) = simulate(body, regions=2)
    before = dict(build(variant).named_parameters())
    moved = {name for name, param in before.items() if not torch.equal(param, first[name])}
    trainable = {name: param for name, param in before.items() if param.requires_grad}
    assert moved <= set(trainable)
    assert len(moved) > len(trainable) // 3
    assert num_params == sum(param.numel() for param in trainable.values())
    for name, param in first.items():
        assert torch.isfinite(param).all(), name
        assert torch.equal(param, second[name]), name


def test_the_documentation_names_tests_that_exist() -> None:
    """What the page says has been tried with what stands on tests; the page names them."""
    page = (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8")
    matrix = page.split("<!-- matrix -->")[1].split("<!-- /matrix -->")[0]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", matrix)
    assert len(named) >= 3
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{test}"
    assert len(SETTINGS) == 6
    assert matrix.count("all six") == 2
