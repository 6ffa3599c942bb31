"""Which part of a run a machine has, as both `hf-cocodc train` and `hf-cocodc doctor` read and check it."""

import argparse
import dataclasses
import os

from ..errors import InputError
from ..settings import ENV_COORDINATOR, ENV_REGION, ENV_REGIONS, check_alone, from_env
from ..settings.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class MachinePart:
    """The part of a run that this machine has. `recipe.regions` has what the options and the environment say; `region` trains
    here, or all do if it is None; `is_told`: something says how many regions there are.
    """

    recipe: Recipe
    region: int | None
    is_told: bool

    @property
    def count(self) -> int:
        """Number of regions with which the run begins."""
        return self.recipe.regions.count or 1

    @property
    def has_company(self) -> bool:
        """Whether the run has several regions, or may get them."""
        return max(self.count, self.recipe.regions.max or 1) > 1

    def check(self, may_join: bool) -> None:
        """Raise InputError if the region does not exist, or cannot find the others. If it `may_join`, it may have any number
        below regions.max.
        """
        if self.region is None:
            return
        largest = self.recipe.regions.max if may_join else None
        most = largest or self.count
        if not 0 <= self.region < most:
            setting = f"regions.{'count' if largest is None else 'max'}={most}"
            raise InputError(
                f"--region {self.region} does not exist: with {setting}, regions are numbered 0 .. {most - 1}. Correct one of "
                "the two."
            )
        if self.has_company and self.recipe.regions.coordinator is None:
            raise InputError(
                f"--region {self.region} of {self.count} needs a coordinator. Run `hf-cocodc coordinator` where every region can "
                "reach it, and pass --coordinator HOST:PORT."
            )


def part_of(recipe: Recipe, options: argparse.Namespace, join: bool = False) -> MachinePart:
    """The part that --region, --coordinator, --run and --secret-file, or else the environment, give this machine. Raises
    InputError if they contradict the recipe or the environment.
    """
    here = recipe.regions
    coordinator = options.coordinator or here.coordinator or os.environ.get(ENV_COORDINATOR)
    count = from_env(here.count, os.environ, ENV_REGIONS, "regions.count")
    wanted = options.region if options.region is not None else here.region
    region = from_env(wanted, os.environ, ENV_REGION, "--region")
    if count is None:
        check_alone(region, coordinator)
    name = here.run if options.run_name is None else options.run_name
    join = join or here.joins(os.environ)
    secret = options.secret_file or here.secret_file
    regions = dataclasses.replace(
        here, count=count or 1, coordinator=coordinator, run=name, join=join or None, secret_file=secret
    )
    regions.name_of_run(os.environ)
    return MachinePart(dataclasses.replace(recipe, regions=regions), region, count is not None)
