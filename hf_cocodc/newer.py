"""Methods newer than the six of `methods.py`, composed of the same parts. The symbols are those explained there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import parts
from .methods import METHODS, Method, diloco
from .settings.outer import check_settings

if TYPE_CHECKING:
    from .parts.codecs.base import Codec

INNER = {"muloco": "muon"}
"""The inner optimizer of methods named for it, as `training.optim` calls it; the names of its classes contain this word."""


def sparseloco(
    *,
    sync_interval: int = 30,
    num_fragments: int = 1,
    fragment_pattern: str = "whole",
    split_rows: bool = False,
    overlap_steps: int = 0,
    outer_lr: float = 1.0,
    codec: str | Codec = "topk_2bit",
    top_k: int = 64,
    error_feedback: bool = True,
    feedback_decay: float = 0.95,
    rank: int = 64,
    merge: str = "replace",
    mean: str = "average",
) -> Method:
    """SparseLoCo: regions send the largest values of each small block, in two bits; error feedback keeps the rest (2508.15706).

    ::

        a_m = beta e_m + Theta - theta_m ;  s_m = quantize(top-k(a_m)) ;  e_m <- a_m - s_m
        Theta <- Theta - eta_o 1/M sum_m s_m ;  theta_m <- Theta

    Symbols of the paper: beta is feedback_decay, k is top_k, for each block of 64 x 64 values. e is the residual of the error
    feedback, which takes the place of an outer momentum: there is none.

    Differs from the paper: blocks at the edges of a matrix are smaller, and the codebook of the two bits is our own
    (`codecs.topk_2bit`). sync_interval and outer_lr are among those that the authors' code uses. num_fragments and overlap_steps
    go beyond the paper, as with DiLoCo.
    """
    check_settings(locals())
    base = diloco(
        sync_interval=sync_interval,
        num_fragments=num_fragments,
        fragment_pattern=fragment_pattern,
        split_rows=split_rows,
        overlap_steps=overlap_steps,
        merge=merge,
    )
    return dataclasses.replace(
        base,
        codec=parts.choose.codec(codec, error_feedback, rank, mean=mean, decay=feedback_decay, top_k=top_k),
        outer=parts.outer.chain(lr=parts.outer.scale(outer_lr)),
    )


def muloco(
    *,
    sync_interval: int = 30,
    num_fragments: int = 1,
    fragment_pattern: str = "whole",
    split_rows: bool = False,
    overlap_steps: int = 0,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.6,
    codec: str | Codec = "int4",
    error_feedback: bool = True,
    feedback_decay: float = 0.9,
    rank: int = 64,
    merge: str = "replace",
    mean: str = "average",
) -> Method:
    """MuLoCo: DiLoCo with Muon as the inner optimizer, whose outer gradients bear 4 bits and need less momentum (2505.23725).

    ::

        theta_m <- H steps of Muon (matrices in blocks) and AdamW (embeddings, head, norms, biases)
        a_m = beta e_m + Theta - theta_m ;  s_m = Q(a_m) ;  e_m <- a_m - s_m
        Dbar = Q(1/M sum_m s_m) ;  Theta <- Nesterov(Theta, Dbar; eta_o, mu) ;  theta_m <- Theta

    Q quantizes, e is the residual of the error feedback, and beta is feedback_decay. With two regions the mean is not quantized
    a second time: they swap what they send whole.

    You choose the inner optimizer: `training.optim: muon` in a recipe, `hf_cocodc.muon(model, lr=...)` in a script.
    `run/muon.py` has Muon's equations. Everything else is DiLoCo.

    Differs from the paper: 4 bits are integers with a scale for each block of 256 values; the paper's scale is of a whole
    tensor, or its codes have a codebook. Embeddings and norms are quantized, too. Muon's learning rate is scaled to steps as
    large as AdamW's. num_fragments and overlap_steps are options, as with DiLoCo. docs/methods/muloco.md has all differences.
    """
    check_settings(locals())
    base = diloco(
        sync_interval=sync_interval,
        num_fragments=num_fragments,
        fragment_pattern=fragment_pattern,
        split_rows=split_rows,
        overlap_steps=overlap_steps,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        merge=merge,
    )
    return dataclasses.replace(
        base, codec=parts.choose.codec(codec, error_feedback, rank, mean=mean, decay=feedback_decay)
    )


NEWER: dict[str, Callable[..., Method]] = {"sparseloco": sparseloco, "muloco": muloco}


def known() -> dict[str, Callable[..., Method]]:
    """Every method of this package by its name: the six, then the newer ones."""
    return {**METHODS, **NEWER}
