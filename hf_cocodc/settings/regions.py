"""The section `regions` of a recipe: which regions take part, and how they reach each other."""

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import InputError, shown
from .environment import ENV_REGION, ENV_REGIONS, ENV_RUN, ENV_STORE, check_alone, from_env, warn_alone
from .rules import check_host, require, setting, take_number

ENDINGS = ("auto", "finish", "stop", "continue")


@dataclass(frozen=True, kw_only=True)
class RegionConfig:
    """Which region this is, and how it reaches the others. Fields that are None take the value from the environment."""

    region: int | None = setting(f"Number of this region, from 0 (environment {ENV_REGION}).")
    count: int | None = setting(f"M: number of regions (environment {ENV_REGIONS}).")
    store: str | None = setting(f"HOST:PORT of the store that all regions reach (environment {ENV_STORE}).")
    run: str | None = setting(
        f"Name of the run, equal in all its regions: runs of different names can meet at one store (environment {ENV_RUN}). "
        "By default the name of the output folder; of the script where there is no output folder."
    )
    interface: str | None = setting(
        "Network interface of the link, for example wg0; by default the interface that reaches the store."
    )
    connections: int | str | None = setting(
        "TCP connections to each other region; auto chooses the number by the round-trip time.", "auto"
    )
    rate_limit: float | None = setting(
        "Highest rate in Mbit/s at which this region sends, to leave room on a shared link; no limit by default."
    )
    start_timeout_s: float = setting("Seconds to wait at the start until all regions are there.", 600.0)
    timeout_s: float = setting("A region is lost after this many seconds without a sign of life.", 120.0)
    stuck_timeout_s: float = setting(
        "A region that is alive but makes no inner step is lost after this many seconds.", 1200.0
    )
    may_differ: list[str] | str | None = setting(
        "Names of training and data settings that may differ between regions, and change at a resume: a list, or separated "
        "by commas. For example learning_rate,batch."
    )
    when_one_ends: str = setting(
        "What happens when one region ends early. auto: all regions finish if its training is over, and all stop with a "
        "checkpoint if it was interrupted. finish or stop: always that. continue: like auto, but the others go on if its "
        "training is over.",
        "auto",
    )

    def __post_init__(self) -> None:
        require(self, "count", lambda v: v >= 1, "must be at least 1", "regions")
        take_number(self, "connections")
        require(
            self,
            "connections",
            lambda v: v == "auto" or (isinstance(v, int) and 1 <= v <= 64),
            "must lie in 1 .. 64, or be auto",
            "regions",
        )
        require(self, "rate_limit", lambda v: v > 0, "must be positive", "regions")
        for name in ("start_timeout_s", "timeout_s", "stuck_timeout_s"):
            require(
                self, name, lambda v: 0 < v <= 1e6, "must be positive, and at most 1e6 (11 days)", "regions"
            )
        require(
            self,
            "may_differ",
            lambda v: isinstance(v, str) or all(isinstance(name, str) for name in v),
            "must be names",
            "regions",
        )
        require(self, "run", lambda v: 0 < len(v) <= 100, "must have 1 .. 100 characters", "regions")
        require(self, "region", lambda v: v >= 0, "must not be negative", "regions")
        require(
            self, "when_one_ends", lambda v: v in ENDINGS, f"must be one of {', '.join(ENDINGS)}", "regions"
        )
        if self.store is not None:
            found = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+):(\d{1,5})", self.store)
            if found is None or not 1 <= int(found[2]) <= 65_535:
                raise InputError(
                    f"regions.store={shown(self.store)} must be HOST:PORT, for example 10.0.0.1:29650, with a port in 1 .. 65535."
                )
            check_host("regions.store", found[1].strip("[]"))

    @property
    def allowed(self) -> list[str]:
        """The names in `may_differ`, sorted."""
        names = self.may_differ.split(",") if isinstance(self.may_differ, str) else self.may_differ or []
        return sorted({name.strip() for name in names} - {""})

    def resolved(self, env: Mapping[str, str] | None = None) -> "RegionConfig":
        """A checked copy in which the environment fills the fields that are None. A single region needs no store.

        Raises:
            InputError: a value contradicts the environment, or a needed value is missing.
        """
        env = os.environ if env is None else env
        region = from_env(self.region, env, ENV_REGION, "regions.region")
        count = from_env(self.count, env, ENV_REGIONS, "regions.count")
        store = self.store or env.get(ENV_STORE)
        if count is None:
            check_alone(region, store)
            warn_alone()
            count = 1
        if region is None:
            if count > 1:
                raise InputError(
                    f"regions.count={count} but this process does not know which region it is. Set {ENV_REGION} to "
                    f"0 .. {count - 1} (hf-cocodc train sets it for you)."
                )
            region = 0
        if region >= count:
            raise InputError(
                f"region {region} of {count}: regions are numbered 0 .. {count - 1}. Lower {ENV_REGION} or raise "
                f"{ENV_REGIONS} (regions.count)."
            )
        if count > 1 and store is None:
            raise InputError(
                f"{count} regions need a store to find each other. Start one with `hf-cocodc store` on a "
                f"machine that all regions can reach, and set {ENV_STORE}=HOST:PORT (regions.store, --store)."
            )
        return dataclasses.replace(self, region=region, count=count, store=store, run=self.name_of_run(env))

    def name_of_run(self, env: Mapping[str, str]) -> str | None:
        """`run`, or the name in the environment if it is None.

        Raises:
            InputError: the two names differ.
        """
        if self.run is not None and env.get(ENV_RUN, self.run) != self.run:
            raise InputError(
                f"regions.run={shown(self.run)} but the environment says {ENV_RUN}={shown(env[ENV_RUN])}. Make them equal, or "
                "unset one."
            )
        return self.run or env.get(ENV_RUN)
