"""The recipe of a plan of which only the size of the model is known."""

import math
import re
from collections.abc import Sequence
from typing import Any

from ...errors import InputError
from ...settings.reading import override_key
from ...settings.recipe import Recipe

LEAST, MOST = 10**5, 10**12
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_HEAD, _WIDTH_OF_A_LAYER, _LEAST_LAYERS = 64, 128, 4
"""A Llama has heads of 64 values, and about one layer for each 128 values of its width."""
_FEED_FORWARD = 8 / 3
"""Width of a Llama's feed-forward layers, as a multiple of the model's."""


def params_in(text: str) -> int:
    """A number of parameters. Raises InputError if it is none, or out of range.

    >>> params_in("1.2B"), params_in("350m")
    (1200000000, 350000000)
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([kmbt]?)", text.strip().lower())
    count = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not LEAST <= count <= MOST:
        raise InputError(
            f"--params {text[:40]} must be a number of parameters from 100k to 1T, for example 350M or 1.2B."
        )
    return count


def recipe_of(params: int, overrides: Sequence[str]) -> Recipe:
    """A recipe of a Llama of about so many parameters with Streaming DiLoCo, changed by `overrides`.

    Raises InputError if an override is wrong.
    """
    content: dict[str, Any] = {
        "model": {"config": _llama(params)},
        "tokenizer": {"builtin": "bytes"},
        "data": {"builtin": "python-stdlib"},
        "training": {},
        "outer": {"method": "streaming"},
    }
    for override in overrides:
        override_key(content, override)
    return Recipe.from_dict(content, "--params")


def _llama(params: int) -> dict[str, Any]:
    """The configuration that has this size with the most usual shape."""
    vocabulary = 32_000 if params >= 20 * 10**6 else 256
    tied = params < 2 * 10**9

    def shape(width: int) -> tuple[int, int]:
        layers = max(round(width / _WIDTH_OF_A_LAYER), _LEAST_LAYERS)
        rest = params - vocabulary * width * (1 if tied else 2) - layers * 4 * width**2
        return layers, round(rest / (3 * width * layers))

    def oddness(width: int) -> float:
        _, feed_forward = shape(width)
        return abs(math.log(feed_forward / (_FEED_FORWARD * width))) if feed_forward > 0 else math.inf

    width = min(range(_HEAD, 32_768, _HEAD), key=oddness)
    layers, feed_forward = shape(width)
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": width // _HEAD,
        "tie_word_embeddings": tied,
    }
