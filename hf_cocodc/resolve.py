"""From an `OuterConfig` to a method: choose the method and check its settings."""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import parts
from .errors import InputError, short, shown
from .methods import Method
from .newer import known
from .parts.guard import Guard
from .settings import OuterConfig
from .settings.fields import is_own
from .settings.outer import AUTO, AUTO_VALUES, FOLLOWING, GUARD, alpha_of, check_settings, idle

SOURCE = "source."
"""How the names of modules of a user's own begin, among the settings."""


class _Composer(NamedTuple):
    """A method's name, the settings that it takes with their defaults, and the function that makes it of them."""

    name: str
    takes: dict[str, Any]
    compose: Callable[..., Method]


def _composer(config: OuterConfig) -> _Composer:
    name, ours = str(config.method), known()
    if name in ours:
        parameters = inspect.signature(ours[name]).parameters.items()
        return _Composer(name, {each: parameter.default for each, parameter in parameters}, ours[name])
    where, thing = f"outer.method={shown(name)}", parts.own.found("outer.method", name)
    if isinstance(thing, Method):
        return _Composer(name, {}, lambda: thing)
    takes = parts.own.takes(where, thing)
    return _Composer(name, takes, lambda **given: parts.own.made(where, thing, given))


def _options(config: OuterConfig, takes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options for a method that takes settings, and those for its codec, with defaults: what the method does not take."""
    options: dict[str, Any] = config.options or {}  # type: ignore[assignment]
    mine = {name: value for name, value in options.items() if name in takes}
    others = {name: value for name, value in options.items() if name not in takes}
    of_codec = parts.own.options_of_codec(config.codec) if is_own(config.codec) else {}
    for name, value in others.items():
        if name not in of_codec:
            taken = ", ".join([*takes, *of_codec]) or "nothing"
            raise InputError(
                f"outer.options: {name}={shown(value)} has no meaning for method={config.method} and codec="
                f"{config.codec or 'its default'}, which take {taken}. Only those of your own have options."
            )
    given = {name: value for name, value in of_codec.items() if value is not inspect.Parameter.empty}
    return mine, given | others


def check(config: OuterConfig) -> None:
    """Check the settings as `from_config` does, but without importing torch, and thus no methods and codecs of a user's own."""
    if is_own(config.method):
        return
    composer = _composer(config)
    _check(composer, config.given())
    if not is_own(config.codec):
        _options(config, composer.takes)


def from_config(config: OuterConfig) -> Method:
    """The method that `config` describes.

    Raises InputError if the method or a part is unknown, the method does not use a setting, or two values contradict.
    """
    composer, given = _composer(config), config.given()
    _check(composer, given)
    mine, for_codec = _options(config, composer.takes)
    given = _numbers(composer, given)
    if is_own(given.get("codec")):
        given["codec"] = parts.own.codec(given["codec"], for_codec)
    method = composer.compose(**given, **mine)
    if not isinstance(method, Method):
        raise InputError(
            f"outer.method={composer.name} returns {short(repr(method))}, and no Method (see hf_cocodc/methods.py)."
        )
    return method


def _numbers(composer: _Composer, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, with the numbers of `auto` where nothing else is given for any of FOLLOWING."""
    is_auto = all(given.get(name, AUTO) == AUTO for name in FOLLOWING)
    return {**given, **(AUTO_VALUES.get(composer.name, {}) if is_auto else {})}


def _check(composer: _Composer, given: Mapping[str, Any]) -> None:
    """Check the settings that are given, and those of one of our methods with its defaults."""
    takes = composer.takes
    for name, value in given.items():
        if name not in takes:
            way_out = "choose a method that uses it"
            uses = f"This method takes {', '.join(takes)}."
            if not takes:
                uses, way_out = "It is composed already.", "compose the method with it"
            raise InputError(
                f"outer.{name}={shown(value)} has no meaning for method={composer.name}. {uses} "
                f"Remove outer.{name} (--set outer.{name}=null), or {way_out}."
            )
    if not is_own(composer.name):
        check_settings({**takes, **_numbers(composer, given)}, list(given))
        return
    for name in FOLLOWING:
        if given.get(name, takes.get(name)) == AUTO:
            raise InputError(
                f"outer.{name}=auto is known of this package's methods, and method={composer.name} is your own. Give a number."
            )


def settings(config: OuterConfig) -> dict[str, Any]:
    """All settings of the configured method, with its defaults. Regions compare them before step 1, and the log shows them.

    Of a user's own method or codec also the options, by their names in a recipe, and hashes of the source (`source.MODULE`).
    """
    composer = _composer(config)
    chosen: dict[str, Any] = {"method": composer.name, **composer.takes, **_numbers(composer, config.given())}
    chosen["digest_interval"] = config.digest_interval
    for name in ("weights", "on_nonfinite", "nonfinite_rounds"):
        if getattr(config, name) != getattr(OuterConfig, name):
            chosen[name] = getattr(config, name)
    if config.guard not in (None, GUARD):
        chosen["guard"] = config.guard
    own = [name for name in ("method", "codec") if is_own(getattr(config, name))]
    if own:
        from_config(config)  # raises what is missing
        mine, for_codec = _options(config, composer.takes)
        keys = {each.name for each in dataclasses.fields(OuterConfig)}
        every = {**for_codec, **chosen, **mine}.items()
        named = {name if name in keys else f"options.{name}": value for name, value in every}
        chosen = json.loads(json.dumps(named))  # as other regions see them
        for name in own:
            hashes = parts.own.sources(f"outer.{name}", getattr(config, name))
            chosen |= {f"{SOURCE}{module}": each for module, each in hashes.items()}
    if is_own(config.method):
        return chosen
    if chosen.get("mean") == "average":
        del chosen["mean"]
    if "mixing_alpha" in chosen:
        chosen["mixing_alpha"] = alpha_of(chosen["mixing_alpha"], chosen.get("overlap_steps", 0))
    without_effect = idle(chosen)
    return {name: value for name, value in chosen.items() if name not in without_effect}


def lost_steps(config: OuterConfig) -> str | None:
    """A warning if each landing throws away inner steps that were made during its transfer; None if none are lost.

    One lost step is Streaming DiLoCo's default (2501.18512); with more of them a long overlap trains for nothing.
    """
    chosen, method = settings(config), from_config(config)
    steps = chosen.get("overlap_steps", 0)
    late = method.schedule.back_to_back  # then fragments are sent again before they land: nothing is lost
    if steps in (0, 1) or late or method.merge.keeps_local_steps:
        return None
    given, way_out = "merge", "Set outer.merge=additive."
    if chosen.get("merge") == "mix":
        given, way_out = (
            "mixing_alpha",
            "Remove outer.mixing_alpha (--set outer.mixing_alpha=null): then it is 0.5.",
        )
    return (
        f"outer.overlap_steps={steps} with outer.{given}={chosen.get(given)}: each landing throws away all inner steps that its "
        f"fragment has made since the send. {way_out}"
    )


def paper_of(method: str) -> tuple[str, str] | None:
    """The name of a method and the arXiv number of its paper, from its function's docstring; None if it has none.

    >>> paper_of("streaming")
    ('Streaming DiLoCo', '2501.18512')
    """
    function = parts.own.found("outer.method", method) if is_own(method) else known().get(method)
    lines = (inspect.getdoc(function) or "").splitlines() if inspect.isfunction(function) else []
    number = re.search(r"\b\d{4}\.\d{5}\b", lines[0]) if lines else None
    return None if number is None else (lines[0].partition(":")[0], number[0])


def guard_of(config: OuterConfig) -> Guard | None:
    """The norm guard; None if there is none."""
    given = GUARD if config.guard is None else config.guard
    return Guard(**given) if isinstance(given, dict) else None


def value_in(written: Mapping[str, Any], name: str) -> Any:
    """A setting of a checkpoint, which leaves out some defaults (`settings`); None if it had no meaning."""
    return written.get(name, getattr(OuterConfig, name, None))
