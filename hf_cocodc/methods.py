"""The methods, each one composition of the same five parts. Start reading here.

A method says which parameters travel together (`fragments`), when they are sent and landed (`schedule`), as what they
travel (`codec`), what the averaged outer gradient does to the global params (`outer`), and what becomes of the local
params when the new global params land (`merge`). The engine (`synchronizer.py`) knows none of their names.

Symbols: H = sync_interval, P = num_fragments, tau = overlap_steps, alpha = mixing_alpha, eta_o = outer_lr,
mu = outer_momentum; theta local params, Theta global params, Delta = Theta - theta the outer gradient (pseudo-gradient),
Dbar its mean over regions.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .errors import InputError
from .parts import choose, merges, outer, schedules
from .parts.codecs.base import Codec
from .parts.fragments import Pattern
from .parts.merges import Merge
from .parts.outer import OuterTransform
from .parts.schedules import Schedule


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
    choose.check_overlap(overlap_steps, sync_interval)
    chosen = choose.merge(merge)
    if overlap_steps and not chosen.keeps_local_steps:
        raise InputError(
            f"outer.overlap_steps={overlap_steps} with merge=replace would throw away the steps made while a transfer "
            "travels. Use merge=additive or merge=compensate, or overlap_steps=0."
        )
    return Method(
        fragments=choose.pattern(fragment_pattern, num_fragments),
        schedule=schedules.every(sync_interval, overlap_steps),
        codec=choose.codec(codec, error_feedback, rank),
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
    choose.check_overlap(overlap_steps, sync_interval)
    return Method(
        fragments=choose.pattern(fragment_pattern, num_fragments),
        schedule=schedules.staggered(sync_interval, overlap_steps),
        codec=choose.codec(codec, error_feedback, rank),
        outer=outer.chain(nesterov=outer.nesterov(outer_momentum), lr=outer.scale(outer_lr)),
        merge=choose.merge(merge, choose.mixing_alpha(mixing_alpha, overlap_steps)),
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
        fragments=choose.pattern(fragment_pattern, num_fragments),
        schedule=schedule(sync_interval, sync_interval, primed=True),
        codec=choose.codec(codec, error_feedback, rank),
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
    penalty = {} if staleness_penalty == "none" else {"penalty": choose.penalty(staleness_penalty)}
    return Method(
        fragments=choose.pattern(fragment_pattern, num_fragments),
        schedule=schedules.every(sync_interval, sync_interval),
        codec=choose.codec(codec, error_feedback, rank),
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
        fragments=choose.pattern(fragment_pattern, num_fragments),
        schedule=schedules.rounds(sync_interval),
        codec=choose.codec(codec, error_feedback, rank, adaptive_rank=True),
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
        choose.check_overlap(overlap_steps, sync_interval)
    if sends_per_interval is not None and not num_fragments <= sends_per_interval <= sync_interval:
        raise InputError(
            f"outer.sends_per_interval={sends_per_interval} must lie between outer.num_fragments={num_fragments} (each goes "
            f"once) and outer.sync_interval={sync_interval} (one a step)."
        )
    return Method(
        fragments=choose.pattern(fragment_pattern, num_fragments),
        schedule=schedules.adaptive(
            sync_interval,
            None if overlap_steps == "auto" else int(overlap_steps),
            utilization,
            sends_per_interval,
        ),
        codec=choose.codec(codec, error_feedback, rank),
        outer=outer.chain(nesterov=outer.nesterov(outer_momentum), lr=outer.scale(outer_lr)),
        merge=choose.merge(
            merge, choose.mixing_alpha(mixing_alpha, overlap_steps), compensation, compensation_strength
        ),
    )


METHODS: dict[str, Callable[..., Method]] = {
    "diloco": diloco,
    "streaming": streaming,
    "eager": eager,
    "co2": co2,
    "dilocox": dilocox,
    "cocodc": cocodc,
}
