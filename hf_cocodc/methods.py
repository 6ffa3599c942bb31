"""The methods, each one composition of the same five parts. Start reading here.

A method says which parameters travel together (`fragments`), when they are sent and landed (`schedule`), as what they
travel (`codec`), what the averaged outer gradient does to the global params (`outer`), and what becomes of the local
params when the new global params land (`merge`). The engine (`synchronizer.py`) knows none of their names.

Symbols: H = sync_interval, P = num_fragments, tau = overlap_steps, alpha = mixing_alpha, eta_o = outer_lr,
mu = outer_momentum; theta local params, Theta global params, Delta = Theta - theta the outer gradient (pseudo-gradient),
Dbar its mean over regions.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import codecs, fragments, merges, outer, schedules
from .codecs.base import Codec
from .config import OuterConfig
from .errors import InputError, nearest
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
    overlap_steps: int = 0,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    codec: str = "fp32",
    error_feedback: bool = False,
    rank: int = 64,
    merge: str = "replace",
) -> Method:
    """DiLoCo: every H steps all regions restart from one outer step on their mean outer gradient (2311.08105, alg. 1).

    ::

        Delta = 1/M sum_m (Theta - theta_m) ;  Theta = Nesterov(Theta, Delta; eta_o, mu) ;  theta_m = Theta

    Differs from the paper: nothing known. More than one fragment changes only how many transfers a round takes; with
    overlap_steps the transfer travels while training goes on, which needs a merge that keeps those steps.
    """
    _check_overlap(overlap_steps, sync_interval)
    chosen = _merge(merge)
    if overlap_steps and not chosen.keeps_local_steps:
        raise InputError(
            f"outer.overlap_steps={overlap_steps} with merge=replace would throw away the steps made while a transfer "
            "travels. Use merge=additive or merge=compensate, or overlap_steps=0."
        )
    return Method(
        fragments=_pattern(fragment_pattern, num_fragments),
        schedule=schedules.every(sync_interval, overlap_steps),
        codec=_codec(codec, error_feedback, rank),
        outer=outer.chain(nesterov=outer.nesterov(outer_momentum), lr=outer.scale(outer_lr)),
        merge=chosen,
    )


def streaming(
    *,
    sync_interval: int = 100,
    num_fragments: int = 4,
    fragment_pattern: str = "strided",
    overlap_steps: int = 1,
    mixing_alpha: float | None = None,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    codec: str = "fp4",
    error_feedback: bool = False,
    rank: int = 64,
    merge: str = "mix",
) -> Method:
    """Streaming DiLoCo: fragments take turns, travel while training goes on, and are mixed in (2501.18512, alg. 2).

    ::

        fragment p is sent at t with (t - p H / P) mod H = 0 and lands at t + tau:
        Theta_p = Nesterov(Theta_p, mean Delta_p; eta_o, mu) ;  theta_p = alpha theta_p + (1 - alpha) Theta_p

    By default alpha is 0.5, and 0 where tau is at most 1.

    Differs from the paper: the embedding and the head join the smallest fragments instead of forming one of their own, and
    blocks of unlike sizes (dense and MoE layers) are dealt out evenly; the 4-bit format's block of 64 values with a scale is
    ours, the paper does not give one.
    """
    _check_overlap(overlap_steps, sync_interval)
    return Method(
        fragments=_pattern(fragment_pattern, num_fragments),
        schedule=schedules.staggered(sync_interval, overlap_steps),
        codec=_codec(codec, error_feedback, rank),
        outer=outer.chain(nesterov=outer.nesterov(outer_momentum), lr=outer.scale(outer_lr)),
        merge=_merge(merge, _alpha(mixing_alpha, overlap_steps)),
    )


def eager(
    *,
    sync_interval: int = 30,
    num_fragments: int = 1,
    fragment_pattern: str = "whole",
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    codec: str = "fp32",
    error_feedback: bool = False,
    rank: int = 64,
) -> Method:
    """Eager updates: a delay of one round, in which a region's own stale part gives way to its fresh one (2502.12996).

    ::

        g_m(t) = Dbar(t-H) + (Delta_m(t) - Delta_m(t-H)) / M
        Theta_m(t) = Nesterov(Theta_m(t-H), g_m(t); eta_o, mu) ;  theta_m = Theta_m(t)

    Global params and momentum differ between regions; they are averaged at the end, for evaluation and for export. Several
    fragments take turns, each with a delay of one H.

    Differs from the paper: at a fragment's first send, where nothing has landed, Dbar and Delta_m(t-H) are taken as zero.
    """
    schedule = schedules.every if num_fragments == 1 else schedules.staggered
    return Method(
        fragments=_pattern(fragment_pattern, num_fragments),
        schedule=schedule(sync_interval, sync_interval, primed=True),
        codec=_codec(codec, error_feedback, rank),
        outer=outer.chain(
            eager=outer.eager(), nesterov=outer.nesterov(outer_momentum), lr=outer.scale(outer_lr)
        ),
        merge=merges.replace(),
    )


def co2(
    *,
    sync_interval: int = 48,
    num_fragments: int = 1,
    fragment_pattern: str = "whole",
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    staleness_penalty: float | str = "gap",
    clip_momentum: float = 1.0,
    codec: str = "fp32",
    error_feedback: bool = False,
    rank: int = 64,
) -> Method:
    """CO2: the all-reduce of one round travels during the next; SlowMo's outer step one round late (2401.16265).

    ::

        m_t = clip(beta m_{t-1} + Dbar_{t-1} / (gamma_t Lambda_t), -phi, phi)      x: Theta, m: outer momentum
        x_{t+1} = x_t - alpha gamma_t m_t ;  theta = x_{t+1}

    Symbols: the paper's tau is sync_interval, alpha is outer_lr, beta is outer_momentum (the authors: 0 up to 16 workers,
    0.2 up to 32, 0.5 up to 64, 0.6 above), phi is clip_momentum, Lambda the staleness penalty; gamma is a round's mean
    inner learning rate.

    Differs from the paper: Lambda in its gap-aware form (its printed form was not seen), anchored at x_t; gamma is that of
    the round t-1 whose outer gradient lands, for it has travelled with it and is the same in all regions. After the first
    round nothing lands and theta goes on, so that the second outer gradient spans both rounds.
    """
    penalty = {} if staleness_penalty == "none" else {"penalty": _penalty(staleness_penalty)}
    return Method(
        fragments=_pattern(fragment_pattern, num_fragments),
        schedule=schedules.every(sync_interval, sync_interval),
        codec=_codec(codec, error_feedback, rank),
        outer=outer.chain(
            per_lr=outer.scale(lambda info: 1 / info.round_lr if info.round_lr else 0.0),
            **penalty,
            momentum=outer.momentum(outer_momentum, clip_momentum),
            lr=outer.scale(lambda info: outer_lr * info.round_lr),
        ),
        merge=merges.replace(),
    )


def dilocox(
    *,
    sync_interval: int = 125,
    num_fragments: int = 1,
    fragment_pattern: str = "whole",
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    codec: str = "lowrank",
    error_feedback: bool = True,
    rank: int = 64,
) -> Method:
    """DiLoCoX: a delay of one round, low rank and int4 with error feedback, rounds that follow the rank (2506.21263).

    ::

        delta_t = Theta_{t-1} - theta + e_t ;  Theta_t = Nesterov(Theta_{t-1}, Dbar_{t-1}; eta_o, mu) ;  theta = Theta_t
        rank r_t <= r_1 the mean effective rank of the last rounds ;  H_t = H_1 r_t / r_1

    Symbols: H_1 is sync_interval, r_1 is rank, e the error feedback's residual.

    Differs from the paper: the rank counts the directions that hold 95 % of the energy, over 5 rounds, in every stage of a
    pipeline for itself; the outer learning rate and momentum are DiLoCo's, the paper gives none that we have seen. After the
    first round nothing lands and theta goes on, so that the second outer gradient spans both rounds.
    """
    return Method(
        fragments=_pattern(fragment_pattern, num_fragments),
        schedule=schedules.rounds(sync_interval),
        codec=_codec(codec, error_feedback, rank, adaptive_rank=True),
        outer=outer.chain(nesterov=outer.nesterov(outer_momentum), lr=outer.scale(outer_lr)),
        merge=merges.replace(),
    )


def cocodc(
    *,
    sync_interval: int = 100,
    num_fragments: int = 4,
    fragment_pattern: str = "strided",
    overlap_steps: int | str = "auto",
    sends_per_interval: int | None = None,
    utilization: float = 0.4,
    compensation: str = "adaptive",
    compensation_strength: float = 0.5,
    mixing_alpha: float | None = None,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    codec: str = "fp32",
    error_feedback: bool = False,
    rank: int = 64,
    merge: str = "compensate",
) -> Method:
    """CoCoDC: fragments go as often as the link allows, the fastest changing first, and delay is compensated (2504.17672).

    ::

        N = max(K, floor(gamma H T_c / T_s)) ;  h = floor(H / N) ;  tau = ceil(T_s / T_c)
        Theta_p = Nesterov(Theta_p, mean Delta_p; eta_o, mu)
        theta_p = Theta_p - tau (u + lambda u u D) ;  u = (theta(send) - theta) / tau ;  D = Theta_p - theta(send)

    Symbols: K is num_fragments, gamma is utilization, N is sends_per_interval, lambda is compensation_strength.

    Differs from the paper: lambda is scaled for each tensor by default (compensation=fixed is the printed form); mixing_alpha
    counts only with merge=mix.
    """
    if overlap_steps != "auto":
        _check_overlap(overlap_steps, sync_interval)
    if sends_per_interval is not None and not num_fragments <= sends_per_interval <= sync_interval:
        raise InputError(
            f"outer.sends_per_interval={sends_per_interval} must lie between outer.num_fragments={num_fragments} (each goes "
            f"once) and outer.sync_interval={sync_interval} (one a step)."
        )
    return Method(
        fragments=_pattern(fragment_pattern, num_fragments),
        schedule=schedules.adaptive(
            sync_interval,
            None if overlap_steps == "auto" else int(overlap_steps),
            utilization,
            sends_per_interval,
        ),
        codec=_codec(codec, error_feedback, rank),
        outer=outer.chain(nesterov=outer.nesterov(outer_momentum), lr=outer.scale(outer_lr)),
        merge=_merge(merge, _alpha(mixing_alpha, overlap_steps), compensation, compensation_strength),
    )


METHODS: dict[str, Callable[..., Method]] = {
    "diloco": diloco,
    "streaming": streaming,
    "eager": eager,
    "co2": co2,
    "dilocox": dilocox,
    "cocodc": cocodc,
}


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
        found["mixing_alpha"] = _alpha(found["mixing_alpha"], found["overlap_steps"])
    idle = {name for name, part, needed in NEEDS if found.get(part) != needed}
    return {name: value for name, value in found.items() if name not in idle}


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


CODECS: dict[str, Callable[[], Codec]] = {
    "fp32": codecs.fp32,
    "bf16": codecs.bf16,
    "fp16": codecs.fp16,
    "int8": codecs.int8,
    "int4": codecs.int4,
    "fp4": codecs.fp4,
    "topk": codecs.topk,
}


def _codec(name: str, error_feedback: bool, rank: int, adaptive_rank: bool = False) -> Codec:
    if name not in (*CODECS, "lowrank"):
        raise InputError(f"outer.codec={name!r} is not known.{nearest(name, [*CODECS, 'lowrank'])}")
    if name == "lowrank":
        chosen: Codec = codecs.lowrank(rank, rank_min=1 if adaptive_rank else None)
    else:
        chosen = CODECS[name]()
    if error_feedback and name == "fp32":
        raise InputError(
            "outer.error_feedback=True with codec=fp32: fp32 loses nothing, so there is no error to feed back."
        )
    if name == "topk" and not error_feedback:
        raise InputError(
            "outer.codec=topk without outer.error_feedback would drop all but a few values for good. Set error_feedback=true."
        )
    return codecs.feedback(chosen) if error_feedback else chosen


def _alpha(given: float | None, overlap_steps: int | str) -> float:
    """Streaming DiLoCo's weight of the local params: of a single step in flight nothing is kept (2501.18512)."""
    if given is not None:
        return given
    return 0.0 if overlap_steps in (0, 1) else 0.5


def _merge(
    name: str, mixing_alpha: float = 0.5, compensation: str = "adaptive", compensation_strength: float = 0.5
) -> Merge:
    known: dict[str, Callable[[], Merge]] = {
        "replace": merges.replace,
        "mix": lambda: merges.mix(mixing_alpha),
        "additive": merges.additive,
        "compensate": lambda: merges.compensate_delay(compensation, compensation_strength),
    }
    if name not in known:
        raise InputError(f"outer.merge={name!r} is not known.{nearest(name, list(known))}")
    return known[name]()


def _penalty(value: float | str) -> OuterTransform:
    try:
        constant = None if value == "gap" else float(value)
    except ValueError:
        constant = 0.0
    if constant is not None and not constant >= 1:
        raise InputError(f"outer.staleness_penalty={value!r} must be gap, none, or a number of at least 1.")
    return outer.staleness_penalty(constant)


def _check_overlap(overlap_steps: int | str, sync_interval: int) -> None:
    if overlap_steps == "auto":
        raise InputError(
            "outer.overlap_steps=auto follows measured times, as method=cocodc alone does. Give a number of steps: as many as a "
            "transfer takes (hf-cocodc bench link)."
        )
    if int(overlap_steps) >= sync_interval:
        raise InputError(
            f"outer.overlap_steps={overlap_steps} must be smaller than outer.sync_interval={sync_interval}: a fragment has "
            "to land before it is sent again. Lower overlap_steps or raise sync_interval."
        )
