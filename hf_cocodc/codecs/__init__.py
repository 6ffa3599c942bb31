"""What crosses the link, and how the mean is found: see `base` for the parts a codec has."""

from .cast import bf16, fp16, fp32

__all__ = ["bf16", "fp16", "fp32"]
