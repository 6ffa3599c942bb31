"""The six methods: each function composes one method from the same six parts. Start reading here.

Each region trains its own copy of the model, the local params. Each region also holds the global params, which only the
outer optimizer changes. The outer gradient is their difference, global minus local. A send starts a transfer: the regions
average the outer gradients of one fragment. When the transfer lands, the outer optimizer moves the global params of this
fragment, and the merge updates the local params. The methods differ only in their parts:

- `fragments`: which parameters travel together.
- `schedule`: when a fragment is sent, and when it lands.
- `codec`: how an outer gradient becomes bytes, and how the regions find the mean.
- `outer`: how the mean outer gradient changes the global params.
- `merge`: how the local params take in the new global params.
- `closing`: how a run ends, so that its last inner steps reach the global params.

The engine (`engine/synchronizer.py`) runs these parts and knows no method by name. The defaults of each function are those of
its paper, unless its docstring says otherwise.

Symbols in the docstrings below:

- theta: local params, Theta: global params. Subscript m: of region m. Subscript p: of fragment p.
- Delta = Theta - theta: outer gradient (pseudo-gradient), taken at the send. Dbar: its mean over the M regions. If nothing
  has landed since the last send, Delta = theta(last send) - theta: every inner step counts once.
- H = sync_interval, P = num_fragments, tau = overlap_steps, alpha = mixing_alpha, eta_o = outer_lr, mu = outer_momentum.
- Nesterov(Theta, g; eta_o, mu): one step of SGD with Nesterov momentum from Theta with the gradient g.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import parts
from .parts import schedules
from .settings.outer import alpha_of, check_settings

if TYPE_CHECKING:
    from .parts.closings import Closing
    from .parts.codecs.base import Codec
    from .parts.fragments import Pattern
    from .parts.merges import Merge
    from .parts.outer import OuterTransform
    from .parts.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method: one choice for each of the six parts. Parts keep their state in what `init` returns, and none in themselves."""

    fragments: Pattern
    schedule: Schedule
    codec: Codec
    outer: OuterTransform
    merge: Merge
    closing: Callable[[Merge], Closing]

    @property
    def reads_lr(self) -> bool:
        """Whether a part computes with the inner learning rate."""
        return self.outer.reads_lr or self.merge.reads_lr


def diloco(
    *,
    sync_interval: int = 500,
    num_fragments: int = 1,
    fragment_pattern: str = "whole",
    split_rows: bool = False,
    overlap_steps: int = 0,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    codec: str | Codec = "fp32",
    error_feedback: bool = False,
    rank: int = 64,
    merge: str = "replace",
    mean: str = "average",
) -> Method:
    """DiLoCo: every H steps, all regions take one outer step together and restart from its result (2311.08105, alg. 1).

    ::

        Dbar = 1/M sum_m (Theta - theta_m) ;  Theta <- Nesterov(Theta, Dbar; eta_o, mu) ;  theta_m <- Theta

    Differs from the paper: nothing known. Two options go beyond it: num_fragments > 1 changes only the number of transfers in a
    round; with overlap_steps > 0 training goes on during a transfer, which needs a merge that keeps the inner steps made
    meanwhile.
    """
    check_settings(locals())
    return Method(
        fragments=parts.choose.pattern(fragment_pattern, num_fragments, split_rows),
        schedule=schedules.every(sync_interval, overlap_steps),
        codec=parts.choose.codec(codec, error_feedback, rank, mean=mean),
        outer=parts.outer.chain(
            nesterov=parts.outer.nesterov(outer_momentum), lr=parts.outer.scale(outer_lr)
        ),
        merge=parts.choose.merge(merge),
        closing=parts.closings.one_more_round,
    )


def streaming(
    *,
    sync_interval: int = 100,
    num_fragments: int = 4,
    fragment_pattern: str = "strided",
    split_rows: bool = False,
    overlap_steps: int = 1,
    mixing_alpha: float | None = None,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    codec: str | Codec = "fp4",
    error_feedback: bool = False,
    rank: int = 64,
    merge: str = "mix",
    mean: str = "average",
) -> Method:
    """Streaming DiLoCo: fragments take turns, travel during training, and are mixed into the local params (2501.18512, alg. 2).

    ::

        fragment p is sent after each inner step t with (t - floor(p H / P)) mod H = 0, and lands after step t + tau:
        Theta_p <- Nesterov(Theta_p, Dbar_p; eta_o, mu) ;  theta_p <- alpha theta_p + (1 - alpha) Theta_p

    The default alpha is 0.5, but 0 if tau is 0 or 1.

    Differs from the paper: the embedding and the head join the smallest fragments, undivided by default; in the paper they
    form a fragment of their own. Blocks of different sizes (dense and MoE layers) are spread evenly over the fragments. In
    the 4-bit format 64 values share one scale; the paper gives no number.
    """
    check_settings(locals())
    return Method(
        fragments=parts.choose.pattern(fragment_pattern, num_fragments, split_rows),
        schedule=schedules.staggered(sync_interval, overlap_steps),
        codec=parts.choose.codec(codec, error_feedback, rank, mean=mean),
        outer=parts.outer.chain(
            nesterov=parts.outer.nesterov(outer_momentum), lr=parts.outer.scale(outer_lr)
        ),
        merge=parts.choose.merge(merge, alpha_of(mixing_alpha, overlap_steps)),
        closing=parts.closings.one_more_round,
    )


def eager(
    *,
    sync_interval: int = 30,
    num_fragments: int = 1,
    fragment_pattern: str = "whole",
    split_rows: bool = False,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    codec: str | Codec = "fp32",
    error_feedback: bool = False,
    rank: int = 64,
) -> Method:
    """Eager updates: means land one round late, but each region replaces its own stale share by a fresh one (2502.12996).

    ::

        g_m(t) = Dbar(t-H) + (Delta_m(t) - Delta_m(t-H)) / M
        Theta_m(t) = Nesterov(Theta_m(t-H), g_m(t); eta_o, mu) ;  theta_m <- Theta_m(t)

    The global params and the momentum differ between regions, which average their global params for evaluation, for export and
    at the end. What is in flight at the end lands before that: of its mean, the other regions' parts are missing. Several
    fragments take turns; each mean lands H steps after its send.

    Differs from the paper: at the first send of a fragment no mean has landed yet, and Dbar(t-H) and Delta_m(t-H) count as
    zero.
    """
    check_settings(locals())
    schedule = schedules.every if num_fragments == 1 else schedules.staggered
    return Method(
        fragments=parts.choose.pattern(fragment_pattern, num_fragments, split_rows),
        schedule=schedule(sync_interval, sync_interval, primed=True),
        codec=parts.choose.codec(codec, error_feedback, rank),
        outer=parts.outer.chain(
            eager=parts.outer.eager(),
            nesterov=parts.outer.nesterov(outer_momentum),
            lr=parts.outer.scale(outer_lr),
        ),
        merge=parts.merges.replace(),
        closing=parts.closings.other_parts,
    )


def co2(
    *,
    sync_interval: int = 48,
    num_fragments: int = 1,
    fragment_pattern: str = "whole",
    split_rows: bool = False,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    staleness_penalty: float | str = "gap",
    clip_momentum: float | str = "none",
    codec: str | Codec = "fp32",
    error_feedback: bool = False,
    rank: int = 64,
    mean: str = "average",
) -> Method:
    """CO2: the mean of one round travels during the next round; the outer step is SlowMo's, one round late (2401.16265).

    ::

        m_t = clip(beta m_{t-1} + Dbar_{t-1} / (gamma_t Lambda_t), -phi H, phi H)
        x_{t+1} = x_t - alpha gamma_t m_t ;  theta <- x_{t+1}

    Symbols of the paper: t counts rounds, x is Theta, m is the outer momentum buffer, alpha is outer_lr, beta is
    outer_momentum, phi is clip_momentum, tau is sync_interval. Lambda is the staleness penalty. gamma is the mean inner
    learning rate of a round. The authors set beta by the number M of model copies: 0 up to 16, 0.2 up to 32, 0.5 up to 64,
    0.6 above.

    phi is in units of one round's steps: phi = 1 lets m move a weight by at most H inner learning rates. By default nothing
    is clipped, as in the authors' code. By its construction the measured Lambda is about 2 in a steady run, which in effect
    halves outer_lr; staleness_penalty=none is their default, Lambda = 1.

    Differs from the paper: Lambda has the gap-aware form and is anchored at x_t; we have not seen the paper's printed form.
    gamma_t is the learning rate of round t-1, whose outer gradient lands: the rate travels with the transfer, and is thus
    equal in all regions. Nothing lands at the end of the first round: theta then goes on unchanged.
    """
    check_settings(locals())
    penalty = {} if staleness_penalty == "none" else {"penalty": parts.choose.penalty(staleness_penalty)}
    return Method(
        fragments=parts.choose.pattern(fragment_pattern, num_fragments, split_rows),
        schedule=schedules.every(sync_interval, sync_interval),
        codec=parts.choose.codec(codec, error_feedback, rank, mean=mean),
        outer=parts.outer.chain(
            per_lr=parts.outer.scale(lambda info: 1 / info.round_lr if info.round_lr else 0.0),
            **penalty,
            momentum=parts.outer.momentum(outer_momentum, parts.choose.clip(clip_momentum, sync_interval)),
            lr=parts.outer.scale(lambda info: outer_lr * info.round_lr),
        ),
        merge=parts.merges.replace(),
        closing=parts.closings.one_more_round,
    )


def dilocox(
    *,
    sync_interval: int = 125,
    num_fragments: int = 1,
    fragment_pattern: str = "whole",
    split_rows: bool = False,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    codec: str | Codec = "lowrank",
    error_feedback: bool = True,
    rank: int = 64,
    mean: str = "average",
) -> Method:
    """DiLoCoX: the mean lands one round late, at low rank in int4 with error feedback; rounds follow the rank (2506.21263).

    ::

        delta_t = Theta_{t-1} - theta + e_t ;  Theta_t = Nesterov(Theta_{t-1}, Dbar_{t-1}; eta_o, mu) ;  theta <- Theta_t
        H_t = H_1 r_t / r_1 ,  r_t = the mean effective rank of the last rounds, at most r_1

    Symbols: t counts rounds. delta is the outer gradient plus the residual e of the error feedback. Dbar is the mean of
    the compressed delta. H_1 is sync_interval, r_1 is rank.

    Follows measured times once the rank has fallen below r_1: a round is never shorter than a transfer, or the transfer
    would no longer hide. `schedules.rounds` says which landing's rank and times a round follows.

    Differs from the paper: the effective rank is the number of directions that hold 95 % of the energy, averaged over 5
    rounds; each pipeline stage has its own. The outer learning rate and momentum are DiLoCo's; we have seen none in the
    paper. Nothing lands at the end of the first round: theta then goes on unchanged.
    """
    check_settings(locals())
    return Method(
        fragments=parts.choose.pattern(fragment_pattern, num_fragments, split_rows),
        schedule=schedules.rounds(sync_interval),
        codec=parts.choose.codec(codec, error_feedback, rank, adaptive_rank=True, mean=mean),
        outer=parts.outer.chain(
            nesterov=parts.outer.nesterov(outer_momentum), lr=parts.outer.scale(outer_lr)
        ),
        merge=parts.merges.replace(),
        closing=parts.closings.one_more_round,
    )


def cocodc(
    *,
    sync_interval: int = 100,
    num_fragments: int = 4,
    fragment_pattern: str = "strided",
    split_rows: bool = True,
    overlap_steps: int | str = "auto",
    sends_per_interval: int | None = None,
    utilization: float = 0.4,
    compensation: str = "adaptive",
    compensation_strength: float = 0.5,
    mixing_alpha: float | None = None,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    codec: str | Codec = "fp32",
    error_feedback: bool = False,
    rank: int = 64,
    merge: str = "compensate",
    mean: str = "average",
) -> Method:
    """CoCoDC: fragments travel as often as the link allows; the merge compensates for the delay (2504.17672).

    The fragment that changes fastest is sent first.

    ::

        N = max(K, floor(gamma H T_c / T_s)) ;  h = floor(H / N) ;  tau = ceil(T_s / T_c)
        every h inner steps one fragment p is sent; it lands tau inner steps later:
        Theta_p <- Nesterov(Theta_p, Dbar_p; eta_o, mu)
        theta_p <- Theta_p - tau (u + lambda u u D) ;  u = (theta_p(send) - theta_p) / tau ;  D = Theta_p - theta_p(send)

    Symbols of the paper (2504.17672): K is num_fragments, N is sends_per_interval, gamma is utilization, lambda is
    compensation_strength. T_c is the time of an inner step, T_s the time to synchronize one fragment. Products of tensors
    are element-wise.

    Follows measured times: T_s and T_c, unless overlap_steps and sends_per_interval are given.

    Differs from the paper: by default lambda is scaled for each tensor (compensation=fixed is the printed form). By default
    split_rows makes fragments even, because T_s is the time of any fragment. mixing_alpha has an effect only with merge=mix.
    """
    check_settings(locals())
    return Method(
        fragments=parts.choose.pattern(fragment_pattern, num_fragments, split_rows),
        schedule=schedules.adaptive(
            sync_interval,
            None if overlap_steps == "auto" else int(overlap_steps),
            utilization,
            sends_per_interval,
        ),
        codec=parts.choose.codec(codec, error_feedback, rank, mean=mean),
        outer=parts.outer.chain(
            nesterov=parts.outer.nesterov(outer_momentum), lr=parts.outer.scale(outer_lr)
        ),
        merge=parts.choose.merge(
            merge, alpha_of(mixing_alpha, overlap_steps), compensation, compensation_strength
        ),
        closing=parts.closings.one_more_round,
    )


METHODS: dict[str, Callable[..., Method]] = {
    "diloco": diloco,
    "streaming": streaming,
    "eager": eager,
    "co2": co2,
    "dilocox": dilocox,
    "cocodc": cocodc,
}
