"""Writes the recipe of a plan, and reads what `bench link` has measured."""

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import InputError, short
from ...settings.reading import override_key, read_recipe, yaml_of
from ...settings.recipe import Recipe
from ..bench.report import read
from .choice import CHOSEN
from .forecast import Forecast, Subject
from .transfers import MSS, MTU

_LINK_TITLE = "one mean over a link"


def recipe_of(
    path: str | os.PathLike,
    overrides: Sequence[str],
    chosen: Forecast,
    subject: Subject,
    head: str,
    out: Path,
) -> str:
    """A recipe for the file `out`: it extends the one that was planned, and holds what the plan changes.

    `overrides` are changes to that recipe, each "section.key=value". The lines of `head` stand above as comments. Raises
    InputError if the recipe cannot be read any more.
    """
    before, _ = read_recipe(path)
    content = copy.deepcopy(before)
    for override in overrides:
        override_key(content, override)
    outer = content.get("outer") or {}
    given = chosen.config.given()
    kept = {name: getattr(chosen.config, name) for name in outer if name not in given}
    kept = {name: value for name, value in kept.items() if value is not None}
    shown = {name: chosen.shown[name] for name in CHOSEN if name in chosen.shown}
    content["outer"] = {"method": chosen.config.method, **kept, **given, **shown}
    rate_limit = float(f"{subject.limit * 8 / 1e6:.4g}")
    of_tcp = {} if subject.is_group else {"connections": subject.connections, "rate_limit": rate_limit}
    content["regions"] = {**(content.get("regions") or {}), "count": subject.regions, **of_tcp}
    Recipe.from_dict(content)
    base = os.path.relpath(path, out.parent) if Path(path).is_file() else os.fspath(path)
    lines = "".join(f"# {line}\n" for line in head.splitlines())
    return (
        f"# Written by `hf-cocodc plan`:\n{lines}\n{yaml_of({'extends': base, **_changes(before, content)})}"
    )


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe holds that extends `before` and is `after`."""
    found: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            value = _changes(old, value)
            if value:
                found[name] = value
        elif name not in before or value != old:
            found[name] = value
    return found


def link_of(path: Path) -> dict[str, float]:
    """What a file of `bench link --json` says about the link: `rtt_ms`, that of the network alone as `network_rtt_ms`, and
    `rate_mbit` of a region to all others together.

    The rate is that of the fastest transfer without its round trip, with headers. Raises InputError if the file cannot be
    read, or holds no such measurement.
    """
    try:
        [report] = [each for each in read(path) if each["title"] == _LINK_TITLE]
        fastest = min(report["rows"], key=lambda row: row["seconds"])
        rtt_s = float(fastest["RTT ms"]) / 1e3
        rest_s = max(float(fastest["seconds"]) - rtt_s, float(fastest["seconds"]) / 10)
        network_ms = report["setting"].get("network_rtt_ms")
        network_s = rtt_s if network_ms is None else float(network_ms) / 1e3
        rate = float(fastest["MB sent"]) * 8 / rest_s * MTU / MSS
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--link {short(path)} cannot be read: {error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"--link {short(path)} holds no measurement of a link. Make it with: hf-cocodc bench link --json {short(path)}."
        ) from error
    return {"rtt_ms": 1e3 * rtt_s, "network_rtt_ms": 1e3 * network_s, "rate_mbit": rate}
