"""Which part of a run a machine has, as `hf-cocodc train`, `launch` and `doctor` read and check it."""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InputError, shown
from ..settings import RegionConfig
from ..settings.environment import (
    ENV_COORDINATOR,
    ENV_LAUNCH,
    ENV_REGION,
    ENV_REGIONS,
    ENV_SPLIT,
    check_alone,
    from_env,
)

if TYPE_CHECKING:
    from ..training.split import Split


@dataclasses.dataclass(frozen=True)
class MachinePart:
    """The part of a run that this machine has.

    Attributes:
        regions: what a recipe, the options and the environment say of them; of a script, what it says itself is not known yet.
        region: the one that trains here; None for all.
        is_told: something says how many regions there are.
        join: it enters a run that trains.
        name: of the run; None if only the script knows.
        split: this machine's part of one launch that is divided into regions; None if each region has a launch of its own.
    """

    regions: RegionConfig
    region: int | None
    is_told: bool
    join: bool
    name: str | None
    split: "Split | None" = None

    @property
    def count(self) -> int:
        """Number of regions with which the run begins."""
        return self.regions.count or 1

    @property
    def has_company(self) -> bool:
        """Whether the run has several regions, or may get them."""
        return self.join or max(self.count, self.regions.max or 1) > 1

    @property
    def here(self) -> Sequence[int]:
        """The regions that train here."""
        if self.split is not None:
            return self.split.regions
        return range(self.count) if self.region is None else [self.region]

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
    split = _split_of(options)
    coordinator = options.coordinator or here.coordinator or os.environ.get(ENV_COORDINATOR)
    given = getattr(options, "regions", None)
    wanted = here.count if given is None else given
    count = from_env(wanted, os.environ, ENV_REGIONS, "regions.count")
    wanted = options.region if options.region is not None else here.region
    region = from_env(wanted, os.environ, ENV_REGION, "--region")
    join = bool(getattr(options, "join", False)) or here.joins(os.environ)
    if split is not None:
        _refuse_beside(split, count, region, coordinator, join)
        count = split.count
    if count is None:
        check_alone(region, coordinator)
    regions = dataclasses.replace(
        here,
        count=1 if count is None else count,
        coordinator=coordinator,
        run=here.run if options.run_name is None else options.run_name,
        secret_file=options.secret_file or here.secret_file,
    )
    name = regions.name_of_run(os.environ) or default_name
    return MachinePart(regions, region, count is not None, join, name, split)


def _split_of(options: argparse.Namespace) -> "Split | None":
    """What --split, or else the environment, makes of one launch."""
    wish, said = getattr(options, "split", None), "--split"
    if wish is None and hasattr(options, "split") and ENV_LAUNCH not in os.environ:
        wish, said = os.environ.get(ENV_SPLIT), ENV_SPLIT
    if wish is None:
        return None
    from ..training.split import split_of

    return split_of(wish, f"{said}={shown(wish)}", options.launcher)


def _refuse_beside(
    split: "Split", count: int | None, region: int | None, coordinator: str | None, join: bool
) -> None:
    """Raise InputError if anything beside a split numbers the regions, or names their coordinator."""
    said = f"{split.said} divides one launch into {split.count} region(s)"
    if count is not None and count != split.count:
        raise InputError(
            f"{said}, but regions.count={count}. Make the numbers equal, or remove regions.count (--regions)."
        )
    others = {"--region": region is not None, "--coordinator": coordinator is not None, "--join": join}
    others[ENV_REGIONS] = ENV_REGIONS in os.environ
    also = next((name for name, is_given in others.items() if is_given), None)
    if also is not None:
        raise InputError(
            f"{said}, which begin and end together, and starts their coordinator. {also} (or a variable or a key of the recipe "
            "that says the same) is for regions that each have a command of their own. Remove one of the two."
        )
