"""Methods and codecs of a user's own: found by MODULE:NAME, and described so that regions can compare them."""

import copyreg
import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, nearest, reason, short, shown
from .codecs.base import Codec

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_OURS = __name__.partition(".")[0]
_LIBRARIES = {_OURS, "torch", "numpy", *sys.stdlib_module_names}
"""Packages whose source regions do not compare: of this one they compare the version, the others may differ."""
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
    """The settings of a function, with defaults (or `inspect.Parameter.empty`). Raises InputError if they have no names."""
    if not callable(function):
        raise InputError(f"{where} is {short(repr(function))}, and no function that returns one.")
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise InputError(
                f"{where} takes {parameter}: regions could not compare its settings. Name each of them, with its default."
            )
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


def told(value: Any) -> Any:
    """The value of a setting as it comes back from JSON; what JSON does not know is described."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return described(value)


def described(part: Any) -> str:
    """A part of a method, in words that are equal in two regions only if the parts are alike.

    They hold its class or function and its values, also those that a function remembers. The number at the end is a hash of
    these, and of the source of a user's own definitions.

    Raises:
        InputError: it holds what cannot be put into words.

    >>> class Mine:
    ...     def __init__(self, k): self.k = k
    >>> described(Mine(k=2)) == described(Mine(k=2)), described(Mine(k=2)) == described(Mine(k=3))
    (True, False)
    """
    sources: set[str] = set()
    words = _words(part, (), sources)
    text = "\n".join([words, *sorted(sources)])
    return f"{short(words, 160)} [{hashlib.sha256(text.encode()).hexdigest()[:12]}]"


def _words(value: Any, inside: tuple[int, ...], sources: set[str]) -> str:
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device):
        return repr(value)
    if id(value) in inside:
        return "..."

    def of(each: Any) -> str:
        return _words(each, (*inside, id(value)), sources)

    def named(pairs: Mapping[str, Any]) -> str:
        return ", ".join(f"{name}={of(each)}" for name, each in pairs.items())

    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"tensor({list(value.shape)}, {value.dtype}, {hashlib.sha256(data).hexdigest()[:12]})"
    if isinstance(value, functools.partial):
        return f"partial({', '.join([of(value.func), *map(of, value.args), named(value.keywords)])})"
    if isinstance(value, MethodType):
        return f"{of(value.__self__)}.{value.__name__}"
    if isinstance(value, FunctionType):
        _note_source(value, sources)
        kept = {name: cell.cell_contents for name, cell in _closure(value)} | (value.__kwdefaults__ or {})
        return f"{_name(value)}({', '.join([*map(of, value.__defaults__ or ()), named(kept)])})"
    if isinstance(value, type | BuiltinFunctionType):
        _note_source(value, sources)
        return _name(value)
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(of, value))) + "}"
    is_builtin = type(value).__module__ == "builtins"
    if isinstance(value, Mapping) and is_builtin:
        return "{" + ", ".join(f"{of(key)}: {of(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Sequence) and is_builtin:
        return f"[{', '.join(map(of, value))}]"
    _note_source(type(value), sources)
    if hasattr(value, "_asdict"):
        return f"{_name(type(value))}({named(value._asdict())})"
    made_of = _copied(value)
    if isinstance(made_of, str):
        return made_of
    make, args, state, items, pairs = (*made_of, None, None, None)[:5]
    made_by = [] if make in (type(value), copyreg.__newobj__) else [of(make)]  # type: ignore[attr-defined]
    # what __dict__ holds, and what __slots__ hold
    states = [each for each in (state if isinstance(state, tuple) else (state,)) if each is not None]
    inner = [*made_by, *(of(each) for each in args if each is not type(value))]
    inner += [named(dict(sorted(each.items()))) if isinstance(each, dict) else of(each) for each in states]
    inner += [*map(of, items or ()), *(f"{of(key)}: {of(each)}" for key, each in pairs or ())]
    return f"{_name(type(value))}({', '.join(filter(None, inner))})"


def _copied(value: Any) -> Any:
    """What an object is made of, as Python copies it: this includes values that are not attributes."""
    try:
        return value.__reduce_ex__(2)
    except Exception as error:
        raise InputError(
            f"a part of a method holds {short(repr(value))}, and regions cannot compare a {type(value).__qualname__}: it cannot "
            "be copied. Hold numbers, texts, tensors, functions, or objects with these, and make the rest where it is used."
        ) from error


def _closure(function: FunctionType) -> list[tuple[str, CellType]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [(name, cell) for name, cell in cells if cell != CellType()]


def _name(definition: Any) -> str:
    module = getattr(definition, "__module__", None) or ""
    short_module = module.rpartition(".")[2] if module.startswith(_OURS) else module
    return f"{short_module}.{definition.__qualname__}".lstrip(".")


def _note_source(definition: Any, sources: set[str]) -> None:
    """Note the source of a user's own definition: its module; in a script only itself, because regions may differ there."""
    module = getattr(definition, "__module__", None) or "builtins"
    if module.partition(".")[0] in _LIBRARIES:
        return
    code = getattr(definition, "__code__", None)
    try:
        if module == "__main__":
            text = inspect.getsource(definition)
        else:
            text = f"{Path(inspect.getfile(definition)).read_text(encoding='utf-8')} {getattr(code, 'co_firstlineno', '')}"
    except (OSError, TypeError, UnicodeDecodeError):  # typed in, or compiled
        text = "" if code is None else f"{code.co_code!r} {code.co_names!r}"
    sources.add(f"{_name(definition)} {hashlib.sha256(text.encode()).hexdigest()}")
