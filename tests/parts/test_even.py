"""Fragments of real models are even where large parameters are split by rows, and every value is placed exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from hf_cocodc.parts.fragments import EVEN, Fragment, sequential, strided
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.toys import llama

GEMMA3_270M = {
    "vocab_size": 262_144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
QWEN25_05B = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
LLAMA32_1B = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
LLAMA31_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
REAL: dict[str, tuple[str, dict[str, Any], float, float]] = {
    "Gemma3-270m": ("gemma3_text", GEMMA3_270M, 0.268, 2.84),
    "GPT-2": ("gpt2", {}, 0.1244, 1.92),
    "Qwen2.5-0.5B": ("qwen2", QWEN25_05B, 0.494, 1.83),
    "Llama-3.2-1B": ("llama", LLAMA32_1B, 1.236, 1.64),
    "Llama-3.1-8B": ("llama", LLAMA31_8B, 8.030, 1.13),
}
"""Model type, config, billions of parameters, and largest over mean fragment at the default of 4 if nothing is split."""


def built(kind: str, settings: dict[str, Any]) -> nn.Module:
    """A model without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))


def unevenness(fragments: Sequence[Fragment]) -> float:
    """Largest over mean."""
    sizes = [fragment.numel for fragment in fragments]
    return max(sizes) * len(sizes) / sum(sizes)


@pytest.mark.parametrize("name", REAL)
def test_cocodc_has_even_fragments_at_its_defaults(name: str) -> None:
    """The embedding alone made one fragment up to 2.84 times as large as the mean. Streaming keeps it whole by default."""
    kind, settings, billions, undivided = REAL[name]
    model = built(kind, settings)
    assert sum(param.numel() for param in model.parameters()) == pytest.approx(1e9 * billions, rel=1e-3)
    by_default = {
        method: from_config(OuterConfig(method=method)).fragments(model) for method in ("cocodc", "streaming")
    }
    assert unevenness(by_default["streaming"]) == pytest.approx(undivided, abs=0.01)
    assert not any(fragment.rows for fragment in by_default["streaming"])
    assert unevenness(by_default["cocodc"]) < 1.02


def covered(fragments: Sequence[Fragment], name: str) -> list[tuple[int, int]]:
    """The rows of a parameter in each fragment that has some."""
    return [f.rows[i] for f in fragments for i, each in enumerate(f.names) if each == name]


@pytest.mark.parametrize("pattern", [strided, sequential])
def test_pieces_cover_every_value_once_and_are_views(pattern: Any) -> None:
    """Each value of a split model is in one flat vector; writing to the views of the model moves every value of it."""
    model = llama()
    fragments = pattern(4, split_rows=True)(model)
    assert unevenness(fragments) <= EVEN
    assert covered(fragments, "model.embed_tokens.weight") == [(0, 16), (16, 32), (32, 48), (48, 64)]
    params = {name: param.detach() for name, param in model.named_parameters()}
    for fragment in fragments:
        views = fragment.views_of(params)
        assert [tuple(view.shape) for view in views] == list(fragment.shapes)
        assert all(view.is_contiguous() for view in views)
        assert sum(view.numel() for view in views) == fragment.numel
        for view in views:
            view.fill_(fragment.index)
    numbers = torch.cat([param.reshape(-1) for param in params.values()])
    assert [int((numbers == f.index).sum()) for f in fragments] == [f.numel for f in fragments]


def test_a_tied_embedding_is_split_once() -> None:
    """The head that shares its memory travels with it; a frozen embedding nowhere."""
    tied = llama(tie=True, layers=2)
    tied.resize_token_embeddings(512)
    fragments = strided(2, split_rows=True)(tied)
    assert covered(fragments, "model.embed_tokens.weight") == [(0, 256), (256, 512)]
    assert not any(name.startswith("lm_head") for fragment in fragments for name in fragment.names)
    assert sum(f.numel for f in fragments) == sum(param.numel() for param in tied.parameters())
    tied.model.embed_tokens.weight.requires_grad_(False)
    assert not any(fragment.rows for fragment in strided(2, split_rows=True)(tied))


def test_nothing_is_split_where_it_does_not_help() -> None:
    """A model whose fragments are even keeps the layout that it has without the option, as does one with uneven blocks."""
    for model, num_fragments in ((llama(), 2), (llama(layers=5), 4)):
        assert strided(num_fragments, split_rows=True)(model) == strided(num_fragments)(model)


@contextmanager
def rank_of(rank: int, num_ranks: int) -> Iterator[DeviceMesh]:
    """This process as one of several ranks that are not there."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (num_ranks,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rows", [64, 70, 3])
def test_each_rank_has_its_share_of_a_piece(rows: int, dim: int) -> None:
    """FSDP2 over 4 ranks: shards may be uneven or empty; each is covered once, and the lanes have the same parameters."""
    lanes = []
    for rank in range(4):
        with rank_of(rank, 4) as mesh:
            model = nn.ModuleDict(
                {
                    "embed": nn.Embedding(rows, 64),
                    "blocks": nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3)),
                }
            )
            for module in (model["embed"], *model["blocks"]):
                sharded = distribute_tensor(module.weight.detach(), mesh, [Shard(dim)])
                module.weight = nn.Parameter(sharded)
            fragments = strided(3, split_rows=True)(model)
            pieces = covered(fragments, "embed.weight")
            length = len(model["embed"].weight.to_local())
            assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
            assert pieces[-1][1] == length
            assert all(abs(stop - start - length / 3) <= 1 for start, stop in pieces)
            lanes.append([fragment.names for fragment in fragments])
    assert all(lane == lanes[0] for lane in lanes)
