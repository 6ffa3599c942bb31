"""Writes the recipe of a plan, and reads what `bench link` has measured."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path

from ...errors import InputError, short
from ...settings.reading import override_key, read_chain, read_recipe
from ...settings.recipe import Recipe
from ...settings.writing import Notes, notes_of, written
from ..bench.report import read
from .flights import MSS, MTU
from .forecast import Forecast, Subject

_CHOSEN = (
    "method",
    "sync_interval",
    "num_fragments",
    "fragment_pattern",
    "overlap_steps",
    "codec",
    "error_feedback",
)
_HEAD = "# Written by `hf-cocodc plan`:"
_LINK_TITLE = "one mean over a link"


def recipe_of(
    path: str | os.PathLike, overrides: Sequence[str], chosen: Forecast, subject: Subject, head: str
) -> str:
    """A complete recipe with the settings of a plan, as YAML; other settings are those of the recipe that was planned.

    Comments of that recipe, and of those that it extends, stay with their keys. `overrides` are changes to it, each
    "section.key=value". The lines of `head` replace those of an earlier plan, which the recipe comes from. Raises InputError
    if the recipe cannot be read any more.
    """
    content, _ = read_recipe(path)
    for override in overrides:
        override_key(content, override)
    before = content.get("outer") or {}
    given = chosen.config.given()
    kept = {name: getattr(chosen.config, name) for name in before if name not in given}
    kept = {name: value for name, value in kept.items() if value is not None}
    shown = {name: chosen.shown[name] for name in _CHOSEN if name in chosen.shown}
    outer = {"method": chosen.config.method, **kept, **given, **shown}
    content["outer"] = {name: outer[name] for name in before if name in outer} | outer
    rate_limit = float(f"{subject.limit * 8 / 1e6:.4g}")
    of_tcp = {} if subject.is_group else {"connections": subject.connections, "rate_limit": rate_limit}
    content["regions"] = {**(content.get("regions") or {}), "count": subject.regions, **of_tcp}
    Recipe.from_dict(content)
    notes = functools.reduce(
        lambda base, each: notes_of(each[0]).over(base), reversed(read_chain(path)), Notes((), {}, ())
    )
    mine = [_HEAD, *(f"# {line}" for line in head.splitlines()), ""]
    return written(content, notes._replace(head=(*mine, *_without_plan(notes.head))))


def _without_plan(head: tuple[str, ...]) -> tuple[str, ...]:
    """The lines at the beginning of a recipe without those of an earlier plan, which end with an empty line."""
    return head[head.index("") + 1 :] if head[:1] == (_HEAD,) and "" in head else head


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
