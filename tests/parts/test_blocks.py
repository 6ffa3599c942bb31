"""The blocks of many kinds of models: all of their layers, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_cocodc.parts.blocks import find_blocks
from hf_cocodc.parts.fragments import strided
from tests.toys import llama

TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
BERT = {name: value for name, value in TEXT.items() if name not in ("num_key_value_heads", "head_dim")}
BERT |= {"is_decoder": True}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "image_size": 16,
    "patch_size": 8,
}
XLM = {"emb_dim": 16, "n_layers": 4, "n_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
BART = {
    "vocab_size": 64,
    "d_model": 16,
    "decoder_layers": 4,
    "decoder_ffn_dim": 32,
    "decoder_attention_heads": 2,
}
TYPES: dict[str, tuple[dict[str, Any], int]] = {
    "bart": (BART, 4),  # the decoder alone
    "bert": (BERT, 4),
    "bert-generation": (BERT, 4),
    "camembert": (BERT, 4),
    "data2vec-text": (BERT, 4),
    "gemma3": ({"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4}, 4 + 3),
    "gemma3_text": (TEXT, 4),
    "gemma4": ({"text_config": TEXT, "vision_config": VISION}, 4 + 3),
    "git": (BERT | {"vision_config": VISION}, 4 + 3),
    "gpt2": ({"vocab_size": 64, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64}, 4),
    "llama": (TEXT, 4),
    "mixtral": (TEXT | {"num_local_experts": 4}, 4),
    "roberta": (BERT, 4),
    "roberta-prelayernorm": (BERT, 4),
    "xlm": (XLM, 4),
    "xlm-roberta": (BERT, 4),
    "xlm-roberta-xl": (BERT, 4),
}
"""Config of each model type, and its number of layers; those of vision parts too."""


def built(kind: str) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TYPES[kind][0]))


@pytest.mark.parametrize("kind", TYPES)
def test_every_layer_is_a_block_and_nothing_else_is(kind: str) -> None:
    """Blocks hold all linear layers but heads and projections, and no embedding of tokens."""
    model = built(kind)
    blocks = find_blocks(model)
    assert len(blocks) == TYPES[kind][1]
    prefixes = tuple(f"{name}." for block in blocks for name in block)
    outside = {name: module for name, module in model.named_modules() if not name.startswith(prefixes)}
    words = ("query", "q_proj", "q_lin", "lin1", "fc1", "c_attn", "experts", "intermediate")
    assert not [name for name in outside if name.endswith(words) and ".head." not in name]
    [embedding] = {model.get_input_embeddings()}
    assert any(module is embedding for module in outside.values())


@pytest.mark.parametrize("kind", ["bert", "gemma3", "xlm"])
def test_fragments_of_such_models_are_even(kind: str) -> None:
    """Split by rows, no fragment is much larger than the mean, whatever kinds of blocks there are."""
    sizes = [fragment.numel for fragment in strided(2, split_rows=True)(built(kind))]
    assert max(sizes) <= 1.1 * sum(sizes) / 2


class Layer(nn.Module):
    """A block with experts in a list of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(2, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(5))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.ModuleDict({"layers": nn.ModuleDict({"3": Layer(), "4": Layer()})}), ["layers.3", "layers.4"]),
        (nn.Sequential(nn.Embedding(4, 2), Layer(), Layer(), nn.Linear(2, 4)), ["1", "2"]),
        (
            nn.ModuleDict(
                {
                    "embeds": nn.ModuleList([nn.Embedding(4, 2)] * 2),
                    "layers": nn.ModuleList([Layer()]),
                    "heads": nn.ModuleList(nn.Linear(2, 4) for _ in range(3)),
                }
            ),
            ["layers.0"],
        ),
        (nn.Linear(2, 2), []),
    ],
    ids=["a pipeline stage", "a sequence", "lists of embeddings and heads", "no list"],
)
def test_models_of_other_libraries(model: nn.Module, expected: list[str]) -> None:
    """Numbered children count, whatever holds them; experts, embeddings and heads do not."""
    assert find_blocks(model) == [(name,) for name in expected]


def test_a_model_that_is_wrapped_keeps_its_blocks() -> None:
    """A sequence around a whole model (as of sentence-transformers) is no list of blocks."""
    wrapped = nn.Sequential(llama(layers=3), nn.Identity())
    assert find_blocks(wrapped) == [(f"0.model.layers.{i}",) for i in range(3)]
