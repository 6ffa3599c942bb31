"""From an `OuterConfig` to a method: which one it is, and with which settings."""

import inspect
from typing import Any

from .errors import InputError, nearest
from .methods import METHODS, Method
from .parts import choose
from .settings import OuterConfig

NEEDS = (
    ("rank", "codec", "lowrank"),
    ("mixing_alpha", "merge", "mix"),
    ("compensation", "merge", "compensate"),
    ("compensation_strength", "merge", "compensate"),
    ("utilization", "sends_per_interval", None),
)
"""Settings that mean something only with a certain choice of another."""


def from_config(config: OuterConfig) -> Method:
    """The method that `config` describes.

    Raises:
        InputError: unknown method or part, a setting that the method has no use for, values that exclude each other.
    """
    if config.method not in METHODS:
        raise InputError(
            f"outer.method={config.method!r} is not known.{nearest(config.method, list(METHODS))}"
        )
    method = METHODS[config.method]
    takes = {name: parameter.default for name, parameter in inspect.signature(method).parameters.items()}
    given = config.given()
    for name, value in given.items():
        if name not in takes:
            raise InputError(
                f"outer.{name}={value} has no meaning for method={config.method}, which takes {', '.join(takes)}. "
                "Remove it, or choose a method that uses it."
            )
    settings = {**takes, **given}
    for name, part, needed in NEEDS:
        if name in given and settings.get(part) != needed:
            remedy = "one of them" if needed is None else f"it, or set outer.{part}={needed}"
            raise InputError(
                f"outer.{name}={given[name]} has a meaning only with outer.{part}={needed}, here it is {settings.get(part)}. "
                f"Remove {remedy}."
            )
    if settings["sync_interval"] < settings["num_fragments"]:
        raise InputError(
            f"outer.sync_interval={settings['sync_interval']} is smaller than outer.num_fragments="
            f"{settings['num_fragments']}, but each fragment is sent once in sync_interval inner steps. Raise "
            "sync_interval or lower num_fragments."
        )
    return method(**given)


def settings(config: OuterConfig) -> dict[str, object]:
    """Every setting of the configured method, defaults filled in: what regions compare, and what the log says."""
    takes = inspect.signature(METHODS[config.method]).parameters
    defaults = {name: parameter.default for name, parameter in takes.items()}
    found: dict[str, Any] = {"method": config.method, **defaults, **config.given()}
    found["digest_interval"] = config.digest_interval
    if "mixing_alpha" in found:
        found["mixing_alpha"] = choose.mixing_alpha(found["mixing_alpha"], found["overlap_steps"])
    idle = {name for name, part, needed in NEEDS if found.get(part) != needed}
    return {name: value for name, value in found.items() if name not in idle}
