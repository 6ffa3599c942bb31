"""A tiny model of every type that AutoModelForCausalLM knows, made from the type's default config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.toys import VOCAB

KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every type of the installed Transformers."""

_SIZES = {
    1: "topk_group n_shared_experts num_shared_experts first_k_dense_replace moe_layer_start_index num_dense_layers n_groups "
    "mamba_n_groups mamba_ngroups num_mem_blocks num_codebooks num_nextn_predict_layers num_kv_shared_layers",
    2: "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers "
    "num_layers_per_stack conf_num_hidden_layers num_blocks depth num_attention_heads num_key_value_heads num_heads n_head "
    "n_heads num_kv_heads kv_n_heads attention_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads conf_num_attention_heads linear_num_heads linear_num_key_heads "
    "linear_num_value_heads swa_num_attention_heads swa_num_key_value_heads index_n_heads altup_num_inputs mamba_expand "
    "n_group num_expert_group num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k",
    4: "num_experts n_routed_experts num_local_experts moe_num_experts mamba_n_heads mamba_num_heads mamba_dt_rank "
    "time_step_rank index_topk rotary_dim laurel_rank adapter_rank",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim d_kv d_head dim_head kv_channels swa_head_dim index_head_dim "
    "linear_head_dim linear_key_head_dim linear_value_head_dim attention_head_size mamba_d_head mamba_head_dim mamba_headdim "
    "q_lora_rank kv_lora_rank mamba_d_state state_size ssm_state_size query_pre_attn_scalar hidden_size_per_layer_input "
    "sliding_window sliding_window_size window_size attention_window_size local_attention block_size chunk_size "
    "mamba_chunk_size",
    16: "hidden_size hidden_size_global d_model n_embd embed_dim emb_dim embedding_dim embedding_size word_embed_proj_dim "
    "input_embedding_size output_embedding_size attention_hidden_size backbone_hidden_size lru_width qk_head_dim "
    "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    32: "intermediate_size intermediate_size_mlp dense_intermediate_size shared_intermediate_size "
    "shared_experts_intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size expert_ffn_hidden_size "
    "feed_forward_size d_ff dff dim_ff mlp_dim d_inner n_inner mamba_d_ssm",
    VOCAB: "vocab_size unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size audio_vocab_size codebook_size "
    "max_position_embeddings original_max_position_embeddings max_target_positions n_positions n_ctx max_seq_len context_length",
}
_AT_MOST = {name: size for size, names in _SIZES.items() for name in names.split()}

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
_INDEXER |= {"indexer_budget": 4, "indexer_compress_ratio": 2}
_FULL_LAYER = {"per_layer_config": {1: {"head_dim": 16}}}
_SLIDING_LAYER = {"per_layer_config": {2: {"head_dim": 16}}}
_PADDED_VOCAB = {"vocab_size": VOCAB + 8}  # the head has VOCAB rows, and is padded in files
_OTHERWISE: dict[str, dict[str, Any]] = {
    # where defaults build no model, or none that can be shrunk by names; a whole kind of layer would be missing; and so on
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"block_size": 1, "num_random_blocks": 1},
    "blt": {"encoder_hash_byte_group_vocab": VOCAB, "patch_size": 2},
    "codegen": {"n_head": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dory": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": _SLIDING_LAYER,
        "vision_config": {"adapter_in_dim": 16, "adapter_out_dim": 16},
        "audio_config": {"adapter_input_size": 16, "adapter_out_dim": 16},
    },
    "dots3_note_text": _SLIDING_LAYER,
    "gemma3n_text": {"intermediate_size": 32},
    "gemma4": {"text_config": _FULL_LAYER},
    "gemma4_text": _FULL_LAYER,
    "gemma4_unified": {"text_config": _FULL_LAYER},
    "gemma4_unified_text": _FULL_LAYER,
    "git": {"vision_config": {"image_size": 32}},
    "got_ocr2": {"vision_config": {"image_size": 32, "output_channels": 8}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "inkling2_loop_text": _PADDED_VOCAB
    | {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2},
    "inkling2_text": _PADDED_VOCAB,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 4},
    "mimo_v2_flash": {"head_dim": 24, "num_key_value_heads": 1},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "phi4_multimodal": {
        "vision_config": {"image_size": 28, "crop_size": 28},
        "audio_config": {
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
        },
    },
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [2, 4],
        "axial_pos_embds_dim": [8, 8],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": VOCAB,
        "shape_embed_dim": 8,
        "shape_vocab_size": VOCAB,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 32,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "hybrid_layer_ids": [1],
        "attention_hidden_size": 32,
        "attention_head_dim": 16,
        "mamba_headdim": 4,
    },
}


def causal_lm(kind: str, seed: int = 0) -> PreTrainedModel:
    """A model of the type with 3 to 600 thousand random parameters. It has at least two layers, and one of each kind.

    Raises:
        Exception: whatever Transformers raises where it cannot build one.
    """
    torch.manual_seed(seed)
    given = AutoConfig.for_model(kind).to_dict()
    small = _merged(_shrunk(given), _OTHERWISE.get(kind, {}))
    small.pop("model_type")
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small))


def more_inputs(kind: str) -> dict[str, Tensor]:
    """What a sample of 8 tokens needs beside them."""
    if kind == "git":
        return {"pixel_values": torch.zeros(3, 32, 32)}
    return {"token_type_ids": torch.zeros(8, dtype=torch.long)} if kind == "gemma3" else {}


def _shrunk(given: Mapping[str, Any]) -> dict[str, Any]:
    """A config's fields with sizes by their names, sub-configs included; special tokens are 0."""
    layers = _layers_to_keep(given)
    small = {}
    for name, value in given.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = _shrunk(value)
        elif name == "per_layer_config":
            small[name] = {layers.index(int(i)): _shrunk(own) for i, own in value.items() if int(i) in layers}
        elif isinstance(value, list) and layers and len(value) == given["num_hidden_layers"]:
            small[name] = [value[layer] for layer in layers]
        elif name.endswith(("token_id", "token_index")) and value is not None:
            small[name] = 0
        elif name == "is_decoder":
            small[name] = True
        elif isinstance(value, int) and name in _AT_MOST:
            small[name] = min(value, _AT_MOST[name])
        else:
            small[name] = value
    return small | ({"num_hidden_layers": len(layers)} if layers else {})


def _layers_to_keep(given: Mapping[str, Any]) -> list[int]:
    """The first layer of each kind, where lists have one item a layer; else none, and `_AT_MOST` says how many."""
    count = given.get("num_hidden_layers") or 0
    lists = [
        v for v in given.values() if isinstance(v, list) and len(v) == count > _AT_MOST["num_hidden_layers"]
    ]
    layers = {each.index(item) for each in lists for item in each}
    return sorted(layers | {count - 1} if len(layers) == 1 else layers)


def _merged(fields: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with those of `others`; mappings are merged."""
    for name, value in others.items():
        old = fields.get(name)
        fields[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return fields
