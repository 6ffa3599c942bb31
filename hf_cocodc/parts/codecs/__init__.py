"""Codecs: the bytes that cross the link, and how regions find the mean. `base` describes the parts of a codec.

A new one is a file here, exported below, with its name in `CODECS` of `settings/outer.py`. If it needs error feedback, add it to
`LOSSY` of `tools/plan/choice.py`; if it has settings of its own, add a branch to `parts/choose.py`.
"""

from .block import fp4, int4, int8
from .cast import bf16, fp16, fp32, unrounded
from .codebook import codebook_2bit
from .feedback import feedback, square_of_residuals, with_residuals_of, without_residuals
from .lowrank import has_rank, lowrank, share_of_rank
from .radial import has_radial, radial
from .tiles import topk_2bit
from .topk import topk

__all__ = [
    "bf16",
    "codebook_2bit",
    "feedback",
    "fp16",
    "fp32",
    "fp4",
    "has_radial",
    "has_rank",
    "int4",
    "int8",
    "lowrank",
    "radial",
    "share_of_rank",
    "square_of_residuals",
    "topk",
    "topk_2bit",
    "unrounded",
    "with_residuals_of",
    "without_residuals",
]
