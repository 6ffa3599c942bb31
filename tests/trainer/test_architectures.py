"""Fragments of tiny models of many causal-LM families, built from their configs: they hold every weight, and are even.

`test_model_types` trains, resumes and loads models of every type.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_cocodc.parts.blocks import find_blocks
from hf_cocodc.parts.fragments import strided

EVEN = 1.5
"""Largest fragment over smallest, of two. An uneven placement of the experts below comes to 1.8 to 4.1."""
LAYERS = 4
COMMON = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
HEAD = {"head_dim": 8}
SHORT = {"sliding_window": 8}  # shorter than a batch, so that it counts
FAMILIES: dict[str, dict[str, Any]] = {
    # dense transformers
    "bloom": {},
    "cohere2": SHORT,
    "falcon": {"ffn_hidden_size": 32},
    "gemma3_text": HEAD | SHORT | {"layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    "gpt2": {"n_inner": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "gpt_neox": {},
    "gptj": {"n_inner": 32, "rotary_dim": 4},
    "granite": {},
    "llama": {},
    "mistral": SHORT,
    "mpt": {"expansion_ratio": 2, "max_seq_len": 64},
    "olmo2": {},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "phi": {},
    "phi3": {},
    "qwen3": HEAD,
    "smollm3": {},
    "stablelm": {},
    # mixtures of experts; dense layers stand first, or by turns with MoE layers
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
    "ernie4_5_moe": {
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
    },
    "gpt_oss": HEAD | SHORT | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None},
    "llama4_text": HEAD
    | {"interleave_moe_layer_step": 2, "num_local_experts": 8, "intermediate_size_mlp": 32},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": HEAD | {"decoder_sparse_step": 2, "num_experts": 16, "moe_intermediate_size": 16},
    # state space models and hybrids
    "bamba": MAMBA | {"attn_layer_indices": [2]},
    "falcon_h1": MAMBA | HEAD | {"mamba_d_ssm": 32},
    "jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 8,
        "mamba_dt_rank": 4,
        "mamba_d_state": 8,
    },
    "mamba2": {"head_dim": 8, "num_heads": 4, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "nemotron_h": HEAD
    | {
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "qwen3_next": HEAD
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "rwkv": {"attention_hidden_size": 16, "context_length": 64},
    "zamba2": {  # both hybrid layers share one transformer block, which counts once; wide Mamba layers outweigh it
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
        "adapter_rank": 4,
        "intermediate_size": 16,
        "mamba_expand": 4,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "chunk_size": 8,
    },
}


def causal_lm(family: str, seed: int = 0) -> PreTrainedModel:
    """A model of the family with 8 to 90 thousand random parameters."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON | FAMILIES[family]))


QUICK = ("llama", "gpt2", "qwen3_moe", "mamba2", "jamba")
CHOSEN = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES]


@pytest.mark.parametrize(
    ("family", "num_fragments"),
    [
        *itertools.product(QUICK, [2, LAYERS]),
        *(pytest.param(*each.values, 3, marks=each.marks) for each in CHOSEN),
    ],
)
def test_every_weight_travels_once(family: str, num_fragments: int) -> None:
    """Every layer is a block; every trainable tensor is in one fragment, under one name where several share it."""
    model = causal_lm(family)
    assert len(find_blocks(model)) == LAYERS
    fragments = strided(num_fragments)(model)
    placed = [name for fragment in fragments for name in fragment.names]
    named = model.named_parameters(remove_duplicate=False)
    every_name = {name: param for name, param in named if param.requires_grad}
    tensors = {id(param): param for param in every_name.values()}
    assert {id(every_name[name]) for name in placed} == set(tensors)
    assert len(placed) == len(tensors)
    assert sum(fragment.numel for fragment in fragments) == sum(p.numel() for p in tensors.values())
    memory = {param.untyped_storage().data_ptr() for param in tensors.values()}
    assert len(memory) == len(tensors)  # nor do two tensors share memory


@pytest.mark.parametrize("family", CHOSEN)
def test_fragments_are_even(family: str) -> None:
    """No fragment is EVEN times as large as another, wherever the experts sit."""
    sizes = [fragment.numel for fragment in strided(2)(causal_lm(family))]
    assert max(sizes) <= EVEN * min(sizes), sizes
