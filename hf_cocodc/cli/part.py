"""Which part of a run a machine has, as `hf-cocodc train`, `launch` and `doctor` read and check it."""

import argparse
import dataclasses
import os

from ..errors import InputError
from ..settings import ENV_COORDINATOR, ENV_REGION, ENV_REGIONS, RegionConfig, check_alone, from_env


@dataclasses.dataclass(frozen=True)
class MachinePart:
    """The part of a run that this machine has.

    Attributes:
        regions: what a recipe, the options and the environment say of them; of a script, what it says itself is not known yet.
        region: the one that trains here; None for all.
        is_told: something says how many regions there are.
        join: it enters a run that trains.
        name: of the run; None if only the script knows.
    """

    regions: RegionConfig
    region: int | None
    is_told: bool
    join: bool
    name: str | None

    @property
    def count(self) -> int:
        """Number of regions with which the run begins."""
        return self.regions.count or 1

    @property
    def has_company(self) -> bool:
        """Whether the run has several regions, or may get them."""
        return self.join or max(self.count, self.regions.max or 1) > 1

    def check(self, may_join: bool, is_script: bool = False) -> None:
        """Raise InputError if the region does not exist, or cannot find the others. If it `may_join`, it may have any number
        below regions.max, which only the script knows that has it.
        """
        if self.region is None:
            return
        largest = self.regions.max if may_join else None
        most = largest or self.count
        if self.region < 0 or (self.region >= most and not (is_script and may_join)):
            setting = f"regions.{'count' if largest is None else 'max'}={most}"
            raise InputError(
                f"--region {self.region} does not exist: with {setting}, regions are numbered 0 .. {most - 1}. Correct one of "
                "the two."
            )
        if self.has_company and self.regions.coordinator is None:
            raise InputError(
                f"--region {self.region} of {self.count} needs a coordinator. Run `hf-cocodc coordinator` where every region can "
                "reach it, and pass --coordinator HOST:PORT."
            )


def part_of(here: RegionConfig, options: argparse.Namespace, default_name: str | None = None) -> MachinePart:
    """The part that the options, or else the environment, give this machine, beside what a recipe says of its regions (`here`).
    `default_name`: of the run, if nothing else names it. Raises InputError if they contradict each other.
    """
    coordinator = options.coordinator or here.coordinator or os.environ.get(ENV_COORDINATOR)
    given = getattr(options, "regions", None)
    wanted = here.count if given is None else given
    count = from_env(wanted, os.environ, ENV_REGIONS, "regions.count")
    wanted = options.region if options.region is not None else here.region
    region = from_env(wanted, os.environ, ENV_REGION, "--region")
    if count is None:
        check_alone(region, coordinator)
    join = bool(getattr(options, "join", False)) or here.joins(os.environ)
    regions = dataclasses.replace(
        here,
        count=1 if count is None else count,
        coordinator=coordinator,
        run=here.run if options.run_name is None else options.run_name,
        secret_file=options.secret_file or here.secret_file,
    )
    name = regions.name_of_run(os.environ) or default_name
    return MachinePart(regions, region, count is not None, join, name)
