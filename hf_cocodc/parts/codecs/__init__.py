"""What crosses the link, and how the mean is found: see `base` for the parts a codec has."""

from .block import fp4, int4, int8
from .cast import bf16, fp16, fp32
from .feedback import feedback, forget
from .lowrank import compression, lowrank
from .topk import topk

__all__ = [
    "bf16",
    "compression",
    "feedback",
    "forget",
    "fp16",
    "fp32",
    "fp4",
    "int4",
    "int8",
    "lowrank",
    "topk",
]
