"""What the environment tells a process about its region."""

import contextlib
import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import InputError, shown

logger = logging.getLogger(__name__)

ENV_REGION = "HF_COCODC_REGION"
ENV_REGIONS = "HF_COCODC_REGIONS"
ENV_COORDINATOR = "HF_COCODC_COORDINATOR"
ENV_RUN = "HF_COCODC_RUN"
ENV_JOIN = "HF_COCODC_JOIN"
ENV_ON_LOSS = "HF_COCODC_ON_LOSS"
"""What `regions.on_loss` is where nothing says so. Our commands set it to AUTO."""
AUTO_LOSS = "auto"
ENV_RESUME = "HF_COCODC_RESUME"
"""1 where `hf-cocodc train` or `launch` has --resume."""
ENV_SECRET = "HF_COCODC_SECRET"
ENV_SECRET_FILE = "HF_COCODC_SECRET_FILE"
ENV_SPLIT = "HF_COCODC_SPLIT"
MACHINES = "machines"
"""The value of ENV_SPLIT that makes each machine a region."""
ENV_LAUNCH = "HF_COCODC_LAUNCH"
"""Where a launch is split into regions: its name, equal in all its processes."""
_TORCH_LOGS = "TORCH_CPP_LOG_LEVEL"


def quiet_torch() -> None:
    """Hide the warnings of torch's C++, here and in child processes, unless the user has chosen a level. They are about a host
    without a name, of which we say more ourselves; torch reads the level when it is imported, and offers no other way.
    """
    os.environ.setdefault(_TORCH_LOGS, "ERROR")


def check_alone(region: int | None, coordinator: str | None) -> None:
    """Raise InputError if a region that was not told how many there are has a number or a coordinator: it would train alone."""
    known = f"which region this is ({region})" if region is not None else f"a coordinator ({coordinator})"
    if region is not None or coordinator is not None:
        raise InputError(
            f"{known} is given, but not how many regions there are: this region would train alone. Set {ENV_REGIONS} "
            f"(regions.count) in every region; to train alone, set it to 1."
        )


def check_split(env: Mapping[str, str]) -> None:
    """Raise InputError if the user asks to split a launch into regions, and this process is not split from others."""
    if ENV_SPLIT not in env or ENV_LAUNCH in env:
        return
    why = (
        "its launcher started it after the import of hf_cocodc. Call split_world(N) first in the function that it runs"
        if "RANK" in env
        else "no launcher of several processes started it. Start it with accelerate launch --multi_gpu, or torchrun"
    )
    raise InputError(
        f"{ENV_SPLIT}={shown(env[ENV_SPLIT])} splits one launch into regions, and this process is in none: {why}, or unset "
        f"{ENV_SPLIT}."
    )


@functools.cache
def warn_alone() -> None:
    """Warn, once in a process, that nothing told this region of others."""
    env = os.environ
    if env.get("RANK", "0") != "0":
        return
    world, local = env.get("WORLD_SIZE", "1"), env.get("LOCAL_WORLD_SIZE")
    if local is not None and world != local:
        logger.warning(
            "training as a single region of all %s processes, on several machines: each step needs the network between them. "
            "%s=%s in front of the launcher, on every machine, makes each machine a region; %s=N makes N regions of equal size. "
            "If you mean a single region, say so: %s=1, or RegionConfig(count=1).",
            *(world, ENV_SPLIT, MACHINES, ENV_SPLIT, ENV_REGIONS),
        )
    else:
        logger.warning(
            "training as a single region: nobody else takes part, because nothing says how many regions there are. For several "
            "regions, set in each of them:\n    export %s=2\n    export %s=0    # 1 in the next region\n    export %s=HOST:PORT"
            "    # of `hf-cocodc coordinator`\nIf you mean to train alone, say so: %s=1, or RegionConfig(count=1).",
            *(ENV_REGIONS, ENV_REGION, ENV_COORDINATOR, ENV_REGIONS),
        )


def from_env(value: Any, env: Mapping[str, str], key: str, name: str, kind: type = int) -> Any:
    """`value`, or that of `key` in the environment if it is None. Raises InputError if they differ, or `key` has another kind."""
    if key not in env:
        return value
    given = shown(env[key])
    told: Any = None
    with contextlib.suppress(msgspec.ValidationError):
        told = msgspec.convert(env[key], kind, strict=False)
    if told is None or (kind is int and told < 0):
        raise InputError(f"{key}={given} must be {'0 or 1' if kind is bool else 'a whole number from 0'}.")
    if value is not None and value != told:
        raise InputError(
            f"{name}={shown(value)} but the environment says {key}={given}. Make them equal, or unset one."
        )
    return told
