"""Low-communication training across regions, for the Hugging Face stack.

A region trains on its own for many inner steps; only an outer optimizer crosses the link between regions.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import OuterConfig, Recipe, RegionConfig
    from .data import region_shard
    from .integrations.accelerate import OuterOptimizer
    from .integrations.trainer import CoCoDCCallback
    from .regions import split_world
    from .simulation import simulate

__version__ = "0.1.0"

_HOMES = {
    "CoCoDCCallback": ".integrations.trainer",
    "OuterConfig": ".config",
    "OuterOptimizer": ".integrations.accelerate",
    "Recipe": ".config",
    "RegionConfig": ".config",
    "region_shard": ".data",
    "simulate": ".simulation",
    "split_world": ".regions",
}

__all__ = [
    "CoCoDCCallback",
    "OuterConfig",
    "OuterOptimizer",
    "Recipe",
    "RegionConfig",
    "region_shard",
    "simulate",
    "split_world",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: torch and transformers take seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
