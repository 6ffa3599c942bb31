"""The parts of a method, as pure algorithms. They know nothing about clusters, files or Hugging Face."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import choose, closings, fragments, merges, outer, own

__all__ = ["choose", "closings", "fragments", "merges", "outer", "own"]


def __getattr__(name: str) -> ModuleType:
    """Import a part at its first use: torch takes seconds to import, and commands check settings before that."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)
