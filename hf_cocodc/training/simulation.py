"""Train many regions in one process, without a cluster."""

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InputError
from ..link.lockstep import LockstepLink, VirtualLink, run_in_lockstep
from ..settings.fields import converted
from ..settings.recipe import Recipe
from .building import output_dir

logger = logging.getLogger(__name__)

T = TypeVar("T")


def simulate(
    what: Recipe | str | os.PathLike | Callable[[int, LockstepLink], T],
    regions: int | None = None,
    overrides: Sequence[str] = (),
    link: VirtualLink | None = None,
) -> list[Any]:
    """Train all regions of a run in this process. The regions take turns; nothing depends on timing.

    Regions compare what they are, as those of a real run do at the coordinator, and refuse the same differences. The numbers
    are exactly those of a real run if the schedule does not follow measured times, as CoCoDC's does unless `overlap_steps` and
    `sends_per_interval` are given, and DiLoCoX's as soon as its rank has fallen so far that a round would be shorter than a
    transfer. A recipe's regions write under `{output_dir}/simulated`, apart from those of a real run.

    Args:
        what: a recipe, its path, or a function body(region, link) that trains one region. The function may use a Trainer with
            `CoCoDCCallback(config, link=link)`, a loop with `OuterOptimizer(..., link=link)`, or a `Synchronizer`.
        regions: number of regions M; default: the recipe's regions.count.
        overrides: changes to a recipe that is given by its path, each "section.key=value".
        link: simulates time: T_c (step time), latency and bandwidth decide when transfers arrive; and regions that are lost and
            come back (`away`). Without it a transfer takes no time, a schedule that follows measured times has no times to
            follow, and journals have no times.

    Returns:
        One value per region: its Trainer (the model holds the global weights), or the value that the function returned.

    Raises:
        InputError: the recipe cannot work, or the number of regions is unknown.
        HandshakeError: regions of a function differ in something that must be equal.
    """
    if isinstance(what, (str, os.PathLike)):
        what = Recipe.load(what, overrides)
    regions = converted(regions, int | None, "simulate: regions")
    link = converted(link, VirtualLink | None, "simulate: link")
    if regions is not None and regions < 1:
        raise InputError(f"simulate(..., regions={regions}): the number of regions must be at least 1.")
    if isinstance(what, Recipe):
        return _simulate_recipe(what, regions, link)
    if regions is None:
        raise InputError(
            "simulate(function) needs the number of regions, for example simulate(function, regions=2)."
        )
    return run_in_lockstep(regions, what, link)


def simulated_dir(recipe: Recipe) -> Path:
    """The folder where simulated regions write, each to `region-{r}`."""
    return output_dir(recipe) / "simulated"


def _simulate_recipe(recipe: Recipe, regions: int | None, virtual: VirtualLink | None) -> list[Any]:
    from . import train

    count = regions or recipe.regions.count or 1
    training = {**recipe.training, "output_dir": str(simulated_dir(recipe))}
    if training.pop("enable_jit_checkpoint", False):
        logger.warning(
            "training.enable_jit_checkpoint is off in a simulation: it waits for a signal, and those go to the whole process."
        )
    recipe = dataclasses.replace(
        recipe, training=training, regions=dataclasses.replace(recipe.regions, count=count)
    )
    return run_in_lockstep(count, lambda region, link: train.run(recipe, link), virtual)
