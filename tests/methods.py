"""Small settings for tests of every method, derived from what each function of `METHODS` takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from hf_cocodc.methods import METHODS
from hf_cocodc.newer import known
from hf_cocodc.settings.outer import FOLLOWING


def of_paper(method: str) -> dict[str, float]:
    """The learning rate and the momentum that a method has of its own; a config without them has those of our studies."""
    parameters = inspect.signature(known()[method]).parameters
    return {name: parameters[name].default for name in FOLLOWING if name in parameters}


def small(
    changes: Mapping[str, Mapping[str, Any]], num_fragments: int = 2, overlap_steps: int = 1
) -> dict[str, dict[str, Any]]:
    """Settings by method, for a tiny model and few inner steps: several fragments, a short overlap, a low rank.

    Only where the defaults of a method have such a thing. `changes` has settings of its own for some methods, instead of these.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, method in METHODS.items():
        default = {key: each.default for key, each in inspect.signature(method).parameters.items()}
        settings: dict[str, Any] = {}
        if default.get("num_fragments", 1) > 1:
            settings["num_fragments"] = num_fragments
        if default.get("overlap_steps", 0):
            settings["overlap_steps"] = overlap_steps
        if default.get("codec") == "lowrank":
            settings["rank"] = 2
        found[name] = dict(changes.get(name, settings))
    return found
