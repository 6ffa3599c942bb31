"""The settings that a script hands to a callback or an outer optimizer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import InputError, shown
from .fields import build
from .outer import OuterConfig
from .regions import RegionConfig


def settings_of(
    where: str, config: Any, regions: Any, changes: Mapping[str, Any] | None = None
) -> tuple[OuterConfig, RegionConfig]:
    """The config that is given or that a method's name stands for, with changes; and the regions, by default the environment's.

    Raises InputError, which begins with `where`, for anything else.
    """
    if isinstance(config, str):
        config = OuterConfig(method=config)
    if config is None:
        config = OuterConfig()
    for name, value, kind, more in (
        ("config", config, OuterConfig, " or the name of a method"),
        ("regions", regions, RegionConfig, ""),
    ):
        if not isinstance(value, kind | None):
            example = (
                f"{kind.__name__}(**settings)" if isinstance(value, Mapping) else f"{kind.__name__}(...)"
            )
            raise InputError(
                f"{where}: {name}={shown(value)} must be {kind.__name__}(...){more}, not {type(value).__name__}. Give "
                f"{name}={example}."
            )
    if changes:
        before = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
        config = build(OuterConfig, {**before, **changes}, "outer")
    return config, regions or RegionConfig()
