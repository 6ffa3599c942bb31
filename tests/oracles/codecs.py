"""Block codecs: what a vector is after encode and decode.

All three: x is flattened row by row and cut into blocks of `block` values (the last may be shorter); each
block has its own absmax; a block of zeros stays zero; the result has x's shape. All float64, the scale too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from .problem import Vector

E3M0_MAGNITUDES = np.array([0.0] + [2.0**power for power in range(-6, 1)])
"""Code 0 is zero, codes 1..7 are 2^-6 .. 2^0, in units of the block's absmax; the sign is its own bit."""


def int8_roundtrip(x: ArrayLike, block: int) -> Vector:
    """8-bit integers with one scale a block.

    scale = absmax / 127 ; q = clip(round_half_even(x / scale), -127, 127) ; q scale

    Source: METHODS 2 and 5 (no paper; decided here).
    """
    return _by_block(x, block, lambda part, absmax: _integer(part, absmax, 127))


def int4_roundtrip(x: ArrayLike, block: int) -> Vector:
    """4-bit integers -7..7 with one scale a block.

    scale = absmax / 7 ; q = clip(round_half_even(x / scale), -7, 7) ; q scale

    Source: arXiv 2506.21263; METHODS 5 (scale and range are decided here).
    """
    return _by_block(x, block, lambda part, absmax: _integer(part, absmax, 7))


def e3m0_roundtrip(x: ArrayLike, block: int) -> Vector:
    """4-bit float of 1 sign and 3 exponent bits with one scale a block.

    sign(x) absmax v, v in {0, 2^-6, 2^-5, ..., 2^0} the one nearest to |x| / absmax

    Nearest in value, not in exponent: the borders are 2^-7 and 1.5 2^k; a tie goes to the smaller magnitude.
    Source: arXiv 2501.18512; METHODS 2 (zero code, scale and ties are decided here).
    """
    return _by_block(x, block, _e3m0)


def _integer(part: Vector, absmax: float, top: int) -> Vector:
    scale = absmax / top
    q: Vector = np.clip(np.rint(part / scale), -top, top)
    return q * scale


def _e3m0(part: Vector, absmax: float) -> Vector:
    distance = np.abs(np.abs(part)[:, None] / absmax - E3M0_MAGNITUDES[None, :])
    code = np.argmin(distance, axis=1)  # the first of equals
    return np.asarray(np.sign(part) * E3M0_MAGNITUDES[code] * absmax)


def _by_block(x: ArrayLike, block: int, roundtrip: Callable[[Vector, float], Vector]) -> Vector:
    values = np.asarray(x, dtype=np.float64)
    flat = values.ravel()
    out = np.zeros_like(flat)
    for start in range(0, flat.size, block):
        part = flat[start : start + block]
        absmax = float(np.max(np.abs(part)))
        if absmax > 0:
            out[start : start + block] = roundtrip(part, absmax)
    return out.reshape(values.shape)
