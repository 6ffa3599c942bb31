"""What a region tells the others of itself before step 1, and what they say of it."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from torch import nn

from ..meeting.handshake import hello, side_by_side
from ..resolve import settings
from ..settings import OuterConfig, RegionConfig
from ..tensors.pools import HOST
from .about import About

logger = logging.getLogger(__name__)


def own_hello(
    accelerator: Accelerator,
    model: nn.Module,
    config: OuterConfig,
    regions: RegionConfig,
    max_steps: int | None,
    about: About,
    num_lanes: int,
    frozen: str | None,
) -> dict[str, Any]:
    """What this region tells the others (`handshake.hello`); `frozen`: a digest of the rest of a sharded model."""
    shared = {
        **regions.compared,
        # other kinds of devices round differently; the kind is Accelerate's, as the model may not be there yet
        "device": (accelerator.device if config.device == "model" else HOST).type,
    }
    return hello(
        model,
        {**settings(config), **shared},
        max_steps,
        num_lanes,
        config=about.model,
        facts=about.facts,
        first_samples=about.first_samples,
        allowed=regions.allowed,
        frozen=frozen,
    )


def show_differences(hellos: Sequence[Mapping[str, Any]]) -> None:
    """Say in the log what regions have otherwise than the others."""
    for sentence in side_by_side(hellos):
        logger.warning(sentence)
