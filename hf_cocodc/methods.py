"""The methods, each one composition of the same five parts. Start reading here.

A method says which parameters travel together (`fragments`), when they are sent and landed (`schedule`), as what they
travel (`codec`), what the averaged outer gradient does to the global params (`outer`), and what becomes of the local
params when the new global params land (`merge`). The engine (`synchronizer.py`) knows none of their names.

Symbols: H = sync_interval, P = num_fragments, tau = overlap_steps, alpha = mixing_alpha, eta_o = outer_lr,
mu = outer_momentum; theta local params, Theta global params, Delta = Theta - theta the outer gradient
(pseudo-gradient).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from . import codecs, fragments, merges, outer, schedules
from .codecs.base import Codec
from .config import OuterConfig, nearest
from .errors import InputError
from .fragments import Pattern
from .merges import Merge
from .outer import OuterTransform
from .schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class Method:
    """One part for each of the five slots."""

    fragments: Pattern
    schedule: Schedule
    codec: Codec
    outer: OuterTransform
    merge: Merge


def diloco(
    *,
    sync_interval: int = 500,
    num_fragments: int = 1,
    fragment_pattern: str = "whole",
    codec: str = "fp32",
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
) -> Method:
    """DiLoCo: every H steps all regions restart from one outer step on their mean outer gradient (2311.08105, alg. 1).

    ::

        Delta = 1/M sum_m (Theta - theta_m) ;  Theta = Nesterov(Theta, Delta; eta_o, mu) ;  theta_m = Theta

    Differs from the paper: nothing known. More than one fragment changes only how many transfers a round takes.
    """
    return Method(
        fragments=_pattern(fragment_pattern, num_fragments),
        schedule=schedules.every(sync_interval),
        codec=_codec(codec),
        outer=outer.chain(nesterov=outer.nesterov(outer_momentum), lr=outer.scale(outer_lr)),
        merge=merges.replace(),
    )


def streaming(
    *,
    sync_interval: int = 100,
    num_fragments: int = 4,
    fragment_pattern: str = "strided",
    overlap_steps: int = 1,
    mixing_alpha: float = 0.5,
    codec: str = "bf16",
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
) -> Method:
    """Streaming DiLoCo: fragments take turns, travel while training goes on, and are mixed in (2501.18512, alg. 2).

    ::

        fragment p is sent at t with (t - p H / P) mod H = 0 and lands at t + tau:
        Theta_p = Nesterov(Theta_p, mean Delta_p; eta_o, mu) ;  theta_p = alpha theta_p + (1 - alpha) Theta_p

    Differs from the paper: outer gradients travel in bf16 by default, where the paper sends 4-bit floats (it finds no
    loss with either); the embedding and the head join the smallest fragments instead of forming one of their own.
    """
    if overlap_steps >= sync_interval:
        raise InputError(
            f"outer.overlap_steps={overlap_steps} must be smaller than outer.sync_interval={sync_interval}: a "
            "fragment has to land before it is sent again. Lower overlap_steps or raise sync_interval."
        )
    return Method(
        fragments=_pattern(fragment_pattern, num_fragments),
        schedule=schedules.staggered(sync_interval, overlap_steps),
        codec=_codec(codec),
        outer=outer.chain(nesterov=outer.nesterov(outer_momentum), lr=outer.scale(outer_lr)),
        merge=merges.mix(mixing_alpha),
    )


METHODS: dict[str, Callable[..., Method]] = {"diloco": diloco, "streaming": streaming}


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
    return {"method": config.method, **defaults, **config.given(), "digest_interval": config.digest_interval}


def _pattern(name: str, num_fragments: int) -> Pattern:
    if name == "whole":
        if num_fragments != 1:
            raise InputError(
                f"outer.num_fragments={num_fragments} with fragment_pattern=whole: the whole model is one fragment. "
                "Use fragment_pattern=strided, or num_fragments=1."
            )
        return fragments.whole()
    by_blocks = {"strided": fragments.strided, "sequential": fragments.sequential}
    if name not in by_blocks:
        raise InputError(
            f"outer.fragment_pattern={name!r} is not known.{nearest(name, ['whole', *by_blocks])}"
        )
    return by_blocks[name](num_fragments)


def _codec(name: str) -> Codec:
    if name not in codecs.__all__:
        raise InputError(f"outer.codec={name!r} is not known.{nearest(name, codecs.__all__)}")
    return getattr(codecs, name)()
