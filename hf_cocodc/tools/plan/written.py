"""Writes the recipe of a plan, and reads what `bench link` has measured."""

import copy
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import InputError, short
from ...net.mailbox import PIECE, PIECES
from ...settings.reading import override_key, read_recipe, yaml_of
from ...settings.recipe import Recipe
from ..bench import storage
from ..bench.report import read
from .choice import written_out
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
    content["outer"] = {"method": chosen.config.method, **kept, **written_out(chosen)}
    rate_limit = float(f"{subject.limit * 8 / 1e6:.4g}")
    is_tcp = subject.carrier == "tcp"
    of_tcp = {"connections": subject.connections, "rate_limit": rate_limit} if is_tcp else {}
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
    `rate_mbit` of a region to all others together. About a storage: `write_ms`, `read_ms`, `delete_ms`, `up_mbit`, `down_mbit`
    and `is_near`, 1 for a folder.

    Rates are without the round trip of the fastest transfer, with headers; of a storage, without its requests. Raises InputError
    if the file cannot be read, or holds no such measurement.
    """
    try:
        [report] = [each for each in read(path) if each["title"] in (_LINK_TITLE, storage.TITLE)]
        return _storage_of(report) if report["title"] == storage.TITLE else _network_of(report)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--link {short(path)} cannot be read: {error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"--link {short(path)} holds no measurement of a link. Make it with: hf-cocodc bench link --json {short(path)}."
        ) from error


def _network_of(report: Mapping[str, Any]) -> dict[str, float]:
    fastest = min(report["rows"], key=lambda row: row["seconds"])
    rtt_s = float(fastest["RTT ms"]) / 1e3
    rest_s = max(float(fastest["seconds"]) - rtt_s, float(fastest["seconds"]) / 10)
    network_ms = report["setting"].get("network_rtt_ms")
    network_s = rtt_s if network_ms is None else float(network_ms) / 1e3
    rate = float(fastest["MB sent"]) * 8 / rest_s * MTU / MSS
    return {"rtt_ms": 1e3 * rtt_s, "network_rtt_ms": 1e3 * network_s, "rate_mbit": rate}


def _storage_of(report: Mapping[str, Any]) -> dict[str, float]:
    took_s = {row["what"]: float(row["median ms"]) / 1e3 for row in report["rows"]}
    megabytes = float(report["setting"]["megabytes"])
    turns = math.ceil(megabytes * 1e6 / PIECE / PIECES)

    def rate(what: str, request: str) -> float:
        return megabytes * 8 / max(took_s[what] - turns * took_s[request], took_s[what] / 10)

    return {
        **{f"{what}_ms": 1e3 * took_s[what] for what in (storage.WRITE, storage.READ, storage.DELETE)},
        "up_mbit": rate(storage.UP, storage.WRITE),
        "down_mbit": rate(storage.DOWN, storage.READ),
        "is_near": float(report["setting"]["is_near"]),
    }
