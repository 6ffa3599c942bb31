"""Radial-directional averaging: the mean of norms, and the direction of the mean direction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import Vector


def radial_mean(tensors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """One parameter's outer gradients of M regions, weighted.

    R = sum_m w_m ||v_m|| / sum_m w_m ; D = sum_m w_m v_m / ||v_m|| ; R D / ||D||, and 0 where D is

    Source: arXiv 2604.21428; METHODS 7.
    """
    total = sum(weights)
    norms = [float(np.sqrt((v.ravel() ** 2).sum())) for v in tensors]
    length = sum(w * n for w, n in zip(weights, norms, strict=True)) / total
    direction = np.zeros_like(tensors[0])
    for v, w, n in zip(tensors, weights, norms, strict=True):
        if n:
            direction = direction + w * v / n
    size = float(np.sqrt((direction.ravel() ** 2).sum()))
    return length * direction / size if size else direction


def plain_mean(tensors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """The weighted mean, for parameters outside the blocks."""
    return sum((w * v for v, w in zip(tensors, weights, strict=True)), np.zeros_like(tensors[0])) / sum(
        weights
    )
