"""Methods and codecs of a user's own: found by MODULE:NAME, made of their settings, and compared by their source."""

import hashlib
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import InputError, nearest, reason, short, shown
from .codecs.base import Codec

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_OURS = __name__.partition(".")[0]
_CODEC = ("init", "converse", "wire_bytes")


def found(setting: str, name: str) -> Any:
    """The object called MODULE:NAME, looked up where the process runs and where Python looks; messages call it `setting`.

    Raises InputError if there is no such module or name, the import fails, or the module is of this package.
    """
    where = f"{setting}={shown(name)}"
    if not _NAME.fullmatch(name):
        raise InputError(f"{where} must be MODULE:NAME, for example my_module:my_function.")
    module_name, _, attribute = name.partition(":")
    if module_name.partition(".")[0] == _OURS:
        raise InputError(f"{where} is of this package. Write {setting}={attribute}.")
    try:
        with _from_here():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(f"{where}: importing {module_name} fails: {reason(error)}.") from error
        raise InputError(
            f"{where}: there is no module {error.name}. It is looked for in {short(os.getcwd(), 200)}, where this process "
            "runs, in PYTHONPATH and among the installed packages. Every machine needs it."
        ) from error
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{where}: importing {module_name} fails: {type(error).__name__}: {reason(error)}."
        ) from error
    if not hasattr(module, attribute):
        known = [each for each, value in vars(module).items() if callable(value) and each[0] != "_"]
        raise InputError(
            f"{where}: the module {module_name} ({getattr(module, '__file__', None)}) has no {attribute}."
            f"{nearest(attribute, known)}"
        )
    return getattr(module, attribute)


@contextmanager
def _from_here() -> Iterator[None]:
    """Look for modules first where the process runs, as `python -m` does, also in a command installed elsewhere."""
    here = os.getcwd()
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)


def takes(where: str, function: Any) -> dict[str, Any]:
    """The settings of a function, with defaults (or `inspect.Parameter.empty`).

    Raises InputError if they have no names, or a default is no plain value: regions could not compare them.
    """
    if not callable(function):
        raise InputError(f"{where} is {short(repr(function))}, and no function that returns one.")
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise InputError(
                f"{where} takes {parameter}: regions could not compare its settings. Name each of them, with its default."
            )
        try:
            json.dumps(None if parameter.default is parameter.empty else parameter.default, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{where} takes {name}={short(repr(parameter.default))}: regions compare settings as JSON, and this is no finite "
                "number, text, true, false, null, or list or mapping of them. Take a plain value, for example a name, and make "
                "the object in the function."
            ) from error
    return {name: parameter.default for name, parameter in parameters.items()}


def made(where: str, function: Any, settings: Mapping[str, Any]) -> Any:
    """What a user's function makes of its settings. Raises InputError if a setting is missing, or the function raises."""
    missing = [
        name
        for name, default in takes(where, function).items()
        if default is inspect.Parameter.empty and name not in settings
    ]
    if missing:
        raise InputError(
            f"{where} needs {', '.join(missing)}. Give each a value (outer.options for settings that only it has), or a default "
            "in the function."
        )
    try:
        return function(**settings)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{where}: {type(error).__name__}: {reason(error)}.") from error


def codec(name: str, options: Mapping[str, Any]) -> Codec:
    """The codec that MODULE:NAME names, or makes of the options. Raises InputError if it is none, or cannot be made."""
    where = f"outer.codec={shown(name)}"
    thing = found("outer.codec", name)
    made_of = thing if _is_codec(thing) else made(where, thing, options)
    if not _is_codec(made_of):
        lacks = [each for each in _CODEC if not callable(getattr(made_of, each, None))]
        raise InputError(
            f"{where} makes {short(repr(made_of))}, which is no codec: it has no {', '.join(lacks) or 'instance'} (see Codec in "
            "hf_cocodc/parts/codecs/base.py)."
        )
    return made_of


def _is_codec(thing: object) -> bool:
    return not isinstance(thing, type) and all(callable(getattr(thing, each, None)) for each in _CODEC)


def options_of_codec(name: str) -> dict[str, Any]:
    """The options that a user's codec takes, with their defaults."""
    thing = found("outer.codec", name)
    return {} if _is_codec(thing) else takes(f"outer.codec={shown(name)}", thing)


def sources(setting: str, name: str) -> dict[str, str]:
    """Hashes of the source of MODULE:NAME: of MODULE, and of the modules whose functions and classes it uses by name.

    Not of installed packages, which may differ between regions, unless MODULE is in one. Of a script only the definition of NAME
    counts, because regions may run different scripts. What has no source (compiled, typed in) is not compared.
    """
    thing, module = found(setting, name), name.partition(":")[0]
    if module == "__main__":
        return {name: _hash(thing)}
    hashes, waiting = {}, {module}
    while waiting:
        name = waiting.pop()
        hashes[name] = _hash(sys.modules[name])
        for value in vars(sys.modules[name]).values():
            used = str(getattr(value, "__module__", None))
            if (inspect.isroutine(value) or inspect.isclass(value)) and _is_of_user(used, module):
                waiting.add(used)
        waiting -= hashes.keys()
    return dict(sorted(hashes.items()))


def _is_of_user(module: str, beside: str) -> bool:
    """Whether a module is of the package of `beside`, or of no package that is installed."""
    package, file = module.partition(".")[0], getattr(sys.modules.get(module), "__file__", None)
    is_installed = file is None or {"site-packages", "dist-packages"} & {*Path(file).parts}
    is_other = is_installed or package in (_OURS, "__main__", *sys.stdlib_module_names)
    return package == beside.partition(".")[0] or not is_other


def _hash(thing: Any) -> str:
    try:
        return hashlib.sha256(inspect.getsource(thing).encode()).hexdigest()[:12]
    except (OSError, TypeError):
        return "no source"
