"""Fragments: every trainable parameter in exactly one, blocks where they belong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_cocodc.errors import InputError
from hf_cocodc.parts.blocks import find_blocks
from hf_cocodc.parts.fragments import Fragment, Pattern, sequential, strided, whole
from tests.toys import Blocks, llama

SMALL = {
    "llama": {"num_key_value_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64},
    "gpt_neox": {},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "mamba2": {"head_dim": 8, "num_heads": 4, "state_size": 8, "n_groups": 1},
}


def causal_lm(kind: str) -> nn.Module:
    common = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    common |= {"num_attention_heads": 2, "max_position_embeddings": 64}
    given = SMALL[kind] if kind == "gpt2" else {**common, **SMALL[kind]}
    config = AutoConfig.for_model(
        kind, **({"vocab_size": 64} | given), bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    return AutoModelForCausalLM.from_config(config)


def covered(fragments: tuple[Fragment, ...]) -> list[str]:
    return sorted(name for fragment in fragments for name in fragment.names)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("pattern", [whole(), strided(2), strided(4), sequential(3)])
def test_every_trainable_parameter_travels_once(kind: str, pattern: object) -> None:
    """Exact cover, sizes that add up, in several architectures (tied ones too)."""
    model = causal_lm(kind)
    fragments = pattern(model)  # type: ignore[operator]
    assert covered(fragments) == sorted(name for name, _ in model.named_parameters())
    assert sum(f.numel for f in fragments) == sum(p.numel() for p in model.parameters())
    assert len(find_blocks(model)) == 4


def test_strided_and_sequential_place_blocks_as_the_paper_says() -> None:
    """Fragment f of P holds blocks f, f + P, ... (strided) or consecutive ones (sequential)."""

    def blocks(fragments: tuple[Fragment, ...]) -> list[list[int]]:
        layers = [{int(n.split(".")[2]) for n in f.names if ".layers." in n} for f in fragments]
        return [sorted(each) for each in layers]

    model = llama(layers=6)
    assert blocks(strided(3)(model)) == [[0, 3], [1, 4], [2, 5]]
    assert blocks(sequential(3)(model)) == [[0, 1], [2, 3], [4, 5]]
    assert blocks(sequential(4)(model)) == [[0, 1], [2], [3, 4], [5]]


def test_embedding_and_head_keep_fragments_even() -> None:
    """What lies outside the blocks fills up the smallest fragments."""
    sizes = [f.numel for f in strided(4)(llama())]
    assert max(sizes) < 1.7 * min(sizes)


@pytest.mark.parametrize("pattern", [strided, sequential])
@pytest.mark.parametrize("split_rows", [False, True])
def test_one_fragment_more_than_blocks_is_for_the_embedding(
    pattern: Callable[..., Pattern], split_rows: bool
) -> None:
    """A block in each of the others, in order, as in Streaming DiLoCo's paper; the head fills up the smallest one."""
    model = llama(layers=3)
    fragments = pattern(4, split_rows)(model)
    inside = [{name.split(".")[2] for name in each.names if ".layers." in name} for each in fragments]
    assert inside == [{"0"}, {"1"}, {"2"}, set()]
    assert "model.embed_tokens.weight" in fragments[3].names
    assert covered(fragments) == sorted(name for name, _ in model.named_parameters())
    frozen = llama(layers=3)
    for name, param in frozen.named_parameters():
        param.requires_grad_(".layers." in name)
    with pytest.raises(
        InputError, match=r"num_fragments=4 .* but the model has 3 trainable blocks with values, "
    ):
        pattern(4, split_rows)(frozen)


@pytest.mark.parametrize("num_fragments", [2, 4])
@pytest.mark.parametrize("period", [2, 4])
def test_strided_deals_out_large_blocks(num_fragments: int, period: int) -> None:
    """Experts in every second or fourth layer are spread over the fragments; each stride still gives every fragment one."""
    layers = [9 if i % period == period - 1 else 1 for i in range(16)]
    fragments = strided(num_fragments)(Blocks([torch.zeros(size) for size in layers]))
    sizes = [fragment.numel for fragment in fragments]
    assert max(sizes) == min(sizes)
    for fragment in fragments:
        strides = [int(name.split(".")[1]) // num_fragments for name in fragment.names]
        assert strides == list(range(16 // num_fragments))


def test_frozen_parameters_stay_at_home_and_tied_ones_travel_once() -> None:
    """requires_grad=False is left out; a tied head is the embedding."""
    model = llama(tie=True)
    names = covered(whole()(model))
    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names
    model.model.layers[0].requires_grad_(False)
    assert not [name for name in covered(strided(3)(model)) if ".layers.0." in name]


def test_views_are_the_flat_vector() -> None:
    """Writing to a view writes to the flat vector, in the order of the names."""
    [fragment] = whole()(Blocks([torch.zeros(2), torch.zeros(3)]))
    flat = torch.arange(5.0)
    first, second = fragment.views(flat)
    second.fill_(7)
    assert flat.tolist() == [0, 1, 7, 7, 7]
    assert first.shape == (2,)


def test_too_many_fragments_and_nothing_to_train_are_refused() -> None:
    """The messages name the number, the rule and the way out."""
    with pytest.raises(
        InputError,
        match=r"num_fragments=6 .* but the model has 4 trainable blocks with values and one fragment for what is outside "
        r"them.*num_fragments <= 5",
    ):
        strided(6)(llama())
    with pytest.raises(InputError, match=r"has 3 trainable blocks with values, and each.*num_fragments <= 3"):
        sequential(4)(Blocks([torch.zeros(3) for _ in range(3)]))
    with pytest.raises(InputError, match="no trainable parameter"):
        whole()(llama().requires_grad_(False))


@pytest.mark.parametrize("pattern", [strided(2), sequential(2), strided(2, split_rows=True)])
@pytest.mark.parametrize("sizes", [(3, 4, 0), (3, 0, 4), (0, 3, 0, 4)])
def test_a_block_without_values_makes_no_fragment(sizes: tuple[int, ...], pattern: Pattern) -> None:
    """Its parameters travel with others."""
    model = Blocks([torch.zeros(size) for size in sizes])
    fragments = pattern(model)
    assert covered(fragments) == sorted(name for name, _ in model.named_parameters())
    assert sorted(fragment.numel for fragment in fragments) == [3, 4]


def test_models_without_a_value_to_train_are_refused() -> None:
    empty = Blocks([torch.zeros(0), torch.zeros(0)])
    with pytest.raises(InputError, match="no trainable parameter with a value"):
        whole()(empty)
    with pytest.raises(
        InputError, match=r"num_fragments=2 .* but the model has 1 trainable blocks with values"
    ):
        strided(2)(Blocks([torch.zeros(3), torch.zeros(0)]))


def test_parameters_that_overlap_in_memory_are_refused() -> None:
    """Both are named: two fragments would have the shared values, and move them twice."""
    model = llama()
    model.lm_head.weight.data = model.model.embed_tokens.weight.data[:40]
    with pytest.raises(
        InputError,
        match=r"model\.embed_tokens\.weight \[64, 16\] and lm_head\.weight \[40, 16\] share a part",
    ):
        strided(2)(model)


def test_views_of_one_memory_that_share_no_value_may_be_trained() -> None:
    """The columns of a fused weight lie between each other. The same values, seen otherwise, travel once."""
    fused = torch.zeros(6, 4)
    columns, rows = (fused[:, :2], fused[:, 2:]), (fused[:2], fused[2:])
    assert sum(fragment.numel for fragment in whole()(Parts(*columns))) == 24
    assert sum(fragment.numel for fragment in whole()(Parts(*rows))) == 24
    assert sum(fragment.numel for fragment in whole()(Parts(fused, fused.T))) == 24
    with pytest.raises(InputError, match=r"parts\.0 \[6, 3\] and parts\.1 \[6, 2\] share a part"):
        whole()(Parts(fused[:, :3], fused[:, 2:]))


def test_an_expanded_parameter_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"parts\.0 \[5, 4\] .* one place in memory, .*clone\(\)"):
        whole()(Parts(torch.zeros(4).expand(5, 4)))
    assert whole()(Parts(torch.zeros(4).expand(1, 4)))[0].numel == 4


class Parts(nn.Module):
    """Parameters in the memory of these tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.parts = nn.ParameterList(map(nn.Parameter, tensors))
