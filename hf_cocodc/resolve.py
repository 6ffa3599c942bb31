"""From an `OuterConfig` to a method: choose the method and check its settings."""

import dataclasses
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import InputError, nearest, shown
from .methods import METHODS, Method
from .parts import choose
from .parts.fragments import kept
from .settings import OuterConfig

logger = logging.getLogger(__name__)

NEEDS: tuple[tuple[str, str, tuple[str | None, ...]], ...] = (
    ("rank", "codec", ("lowrank",)),
    ("mixing_alpha", "merge", ("mix",)),
    ("compensation", "merge", ("compensate",)),
    ("compensation_strength", "merge", ("compensate",)),
    ("utilization", "sends_per_interval", (None,)),
    ("split_rows", "fragment_pattern", ("strided", "sequential")),
)
"""(setting, other setting, values): the setting has an effect only if the other setting has one of these values."""

OF_FRAGMENTS = ("num_fragments", "fragment_pattern", "split_rows")
"""Settings that say what travels together."""
BEFORE = {"split_rows": False, "weights": "equal"}
"""What older versions did that did not have these settings yet; as `weights` does, where a checkpoint says nothing of it."""


def from_config(config: OuterConfig) -> Method:
    """The method that `config` describes.

    Raises:
        InputError: the method or a part is unknown, the method does not use a setting, or two values contradict each other.
    """
    if config.method not in METHODS:
        raise InputError(
            f"outer.method={shown(config.method)} is not known.{nearest(config.method, list(METHODS))}"
        )
    method = METHODS[config.method]
    takes = {name: parameter.default for name, parameter in inspect.signature(method).parameters.items()}
    given = config.given()
    for name, value in given.items():
        if name not in takes:
            raise InputError(
                f"outer.{name}={shown(value)} has no meaning for method={config.method}. This method takes {', '.join(takes)}. "
                f"Remove outer.{name} (--set outer.{name}=null), or choose a method that uses it."
            )
    settings = {**takes, **given}
    for name, part, needed in NEEDS:
        if name in given and part in takes and settings[part] not in needed:
            values = " or ".join("null" if value is None else value for value in needed)
            other = f"outer.{part} in the same way" if None in needed else f"set outer.{part}={values}"
            raise InputError(
                f"outer.{name}={shown(given[name])} has an effect only with outer.{part}={values}, "
                f"but outer.{part} is {settings[part]}. Remove outer.{name} (--set outer.{name}=null), or {other}."
            )
    num_fragments = settings.get("num_fragments", 1)
    if settings["sync_interval"] < num_fragments:
        raise InputError(
            f"outer.sync_interval={settings['sync_interval']} is smaller than outer.num_fragments="
            f"{num_fragments}, but each fragment is sent once every sync_interval inner steps. "
            "Raise sync_interval or lower num_fragments."
        )
    return method(**given)


def settings(config: OuterConfig) -> dict[str, object]:
    """All settings of the configured method, with its defaults. Regions compare them before step 1, and the log shows them."""
    takes = inspect.signature(METHODS[config.method]).parameters
    defaults = {name: parameter.default for name, parameter in takes.items()}
    found: dict[str, Any] = {"method": config.method, **defaults, **config.given()}
    found["digest_interval"] = config.digest_interval
    if config.weights != BEFORE["weights"]:
        found["weights"] = config.weights
    if "mixing_alpha" in found:
        found["mixing_alpha"] = choose.mixing_alpha(found["mixing_alpha"], found.get("overlap_steps", 0))
    idle = {name for name, part, needed in NEEDS if part in found and found[part] not in needed}
    return {name: value for name, value in found.items() if name not in idle}


def continuing(config: OuterConfig, written: Mapping[str, Any]) -> OuterConfig:
    """`config` for a run that continues from a checkpoint with the settings `written`.

    Fragments keep their layout: if `config` does not give `split_rows`, it has the value of the checkpoint.
    """
    default, theirs = settings(config).get("split_rows"), value_in(written, "split_rows")
    if config.split_rows is not None or default in (None, theirs):
        return config
    logger.info(
        "outer.split_rows is %s by default, but fragments stay as in the checkpoint, which has split_rows=%s.",
        *(default, theirs),
    )
    return dataclasses.replace(config, split_rows=theirs)


def method_of(config: OuterConfig, written: Mapping[str, Any], layout: Sequence[Any]) -> Method:
    """The method for a run that continues from a checkpoint with the settings `written`: fragments stay as they are there.

    Where settings of fragments have changed, they are those of `config`, which will not fit the checkpoint.
    """
    method, ours = from_config(config), settings(config)
    if any(value_in(written, name) != value_in(ours, name) for name in OF_FRAGMENTS):
        return method
    return dataclasses.replace(method, fragments=kept(layout, method.fragments))


def value_in(written: Mapping[str, Any], name: str) -> Any:
    """A setting among those of a checkpoint, which an older version may have written; None if it had no meaning."""
    return written.get(name, BEFORE.get(name))
