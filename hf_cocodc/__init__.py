"""Low-communication training across regions, for the Hugging Face stack.

Each region trains on its own for many inner steps. Only an outer optimizer uses the link between regions.
"""

import importlib
import os

TYPE_CHECKING = False  # typing would be most of the time in which Ctrl-C is not yet handled (see __main__)
if TYPE_CHECKING:
    from .errors import (
        CheckpointError,
        CocodcError,
        DonorLost,
        HandshakeError,
        InputError,
        LeftBehind,
        LinkError,
        MeetingError,
        MeetingRefused,
        RegionLostError,
        RunFinished,
        RunLeft,
        RunOver,
        RunStopped,
    )
    from .methods import Method
    from .run.muon import muon
    from .run.outer_optimizer import OuterOptimizer
    from .run.shards import region_shard
    from .run.split_world import split_world
    from .settings import OuterConfig, RegionConfig
    from .settings.recipe import Recipe
    from .trainer.callback import CoCoDCCallback
    from .trainer.flags import script_parser
    from .training.simulation import simulate

__version__ = "0.1.0"

_HOMES = {
    "CoCoDCCallback": ".trainer.callback",
    "Method": ".methods",
    "OuterConfig": ".settings",
    "OuterOptimizer": ".run.outer_optimizer",
    "Recipe": ".settings.recipe",
    "RegionConfig": ".settings",
    "muon": ".run.muon",
    "region_shard": ".run.shards",
    "script_parser": ".trainer.flags",
    "simulate": ".training.simulation",
    "split_world": ".run.split_world",
}
"""Modules of public names; the others are exceptions, of `errors`."""

__all__ = [
    "CheckpointError",
    "CoCoDCCallback",
    "CocodcError",
    "DonorLost",
    "HandshakeError",
    "InputError",
    "LeftBehind",
    "LinkError",
    "MeetingError",
    "MeetingRefused",
    "Method",
    "OuterConfig",
    "OuterOptimizer",
    "Recipe",
    "RegionConfig",
    "RegionLostError",
    "RunFinished",
    "RunLeft",
    "RunOver",
    "RunStopped",
    "muon",
    "region_shard",
    "script_parser",
    "simulate",
    "split_world",
]


if not TYPE_CHECKING:  # or a type checker would believe every name to be there

    def __getattr__(name: str) -> object:
        """Import a public name at its first use, because importing torch and transformers takes seconds."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES.get(name, ".errors"), __name__), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _split_if_asked() -> None:
    """Split this process's launch into regions if HF_COCODC_SPLIT says so, before anything knows the launch as one world."""
    if "HF_COCODC_SPLIT" not in os.environ or "RANK" not in os.environ or "HF_COCODC_LAUNCH" in os.environ:
        return
    import multiprocessing

    if multiprocessing.parent_process() is None:  # a child is no rank: its parent is
        from .run.split_world import split_as_asked

        split_as_asked()


_split_if_asked()
