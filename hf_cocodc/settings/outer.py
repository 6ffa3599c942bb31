"""The section `outer` of a recipe: how regions synchronise."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from .rules import require, setting, take_number

DEVICES = ("host", "model")
ON_NONFINITE = ("restart", "stop")
WEIGHTS = ("equal", "steps", "tokens")
OF_EVERY_METHOD = ("method", "weights", "digest_interval", "on_nonfinite", "nonfinite_rounds", "device")
"""Fields of `OuterConfig` that are no settings of a method."""


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """How regions synchronise. A field that is None takes the default of the method, which comes from its paper."""

    method: str = setting("Method: diloco, streaming, eager, co2, dilocox or cocodc.", "diloco")
    sync_interval: int | None = setting("H: each fragment is sent once every H inner steps.")
    num_fragments: int | None = setting("P: number of parts of the model that are sent separately.")
    fragment_pattern: str | None = setting("Which blocks form a fragment: whole, strided or sequential.")
    split_rows: bool | None = setting(
        "Split large parameters outside the blocks (embedding, head) by rows, so that fragments have similar sizes."
    )
    overlap_steps: int | str | None = setting(
        "tau: inner steps between the send and the landing of a transfer; auto follows the link (cocodc only)."
    )
    merge: str | None = setting(
        "How local params take in global params at a landing: replace, mix, additive or compensate."
    )
    mixing_alpha: float | None = setting(
        "Weight of the local params at a landing (merge=mix): 0 means only global, 1 only local."
    )
    outer_lr: float | None = setting("Learning rate of the outer optimizer.")
    outer_momentum: float | None = setting("Nesterov momentum of the outer optimizer.")
    codec: str | None = setting(
        "Format in which outer gradients travel: fp32, bf16, fp16, int8, int4, fp4, topk or lowrank."
    )
    error_feedback: bool | None = setting(
        "Add the values that the codec loses in one transfer to the next one."
    )
    rank: int | None = setting("Rank r_1 of the low-rank codec.")
    staleness_penalty: float | str | None = setting(
        "CO2's staleness penalty Lambda, which divides the update: gap (measured; about 2 in a steady run, as if outer_lr "
        "were half), none, or a constant of at least 1."
    )
    clip_momentum: float | str | None = setting(
        "CO2's bound phi on each element of the outer momentum, in units of one round's steps: 1 means sync_interval inner "
        "learning rates. none: no bound."
    )
    compensation: str | None = setting("CoCoDC's compensation: adaptive, fixed, lr_normalized or additive.")
    compensation_strength: float | None = setting("CoCoDC's lambda (lambda_0 with compensation=adaptive).")
    utilization: float | None = setting("CoCoDC's gamma: share of the link's time to use.")
    sends_per_interval: int | None = setting(
        "CoCoDC's N: transfers per sync_interval inner steps; by default as many as the link allows."
    )
    weights: str = setting(
        "Share of a region in a mean: equal; steps (inner steps that it has trained since the last send / steps that were due); "
        "or tokens (that it has trained on since the last send). A region that comes into a running run counts by steps at "
        "first, also with equal.",
        "equal",
    )
    digest_interval: int = setting(
        "Rounds between two checks that all regions hold the same global params. A check adds a checksum to the transfer.",
        10,
    )
    on_nonfinite: str = setting(
        "What a region does after nonfinite_rounds: restart (take the global params and a fresh state of the inner optimizer) "
        "or stop (all regions stop with a checkpoint).",
        "restart",
    )
    nonfinite_rounds: int = setting(
        "Rounds in a row with an outer gradient that is not finite, after which a region does what on_nonfinite says.",
        3,
    )
    device: str = setting(
        "Memory for global params and outer state: host (CPU memory) or model (the device of the model's parameters).",
        "host",
    )

    def __post_init__(self) -> None:
        for name in ("sync_interval", "num_fragments", "digest_interval", "rank", "sends_per_interval"):
            require(self, name, lambda v: v >= 1, "must be at least 1")
        require(self, "nonfinite_rounds", lambda v: v >= 1, "must be at least 1")
        require(
            self, "on_nonfinite", lambda v: v in ON_NONFINITE, f"must be one of {', '.join(ON_NONFINITE)}"
        )
        take_number(self, "overlap_steps")
        take_number(self, "staleness_penalty")
        take_number(self, "clip_momentum")
        require(
            self,
            "overlap_steps",
            lambda v: v == "auto" or (isinstance(v, int) and v >= 0),
            "must be a whole number from 0, or auto",
        )
        require(self, "compensation_strength", lambda v: v >= 0, "must not be negative")
        require(self, "utilization", lambda v: 0 < v <= 1, "must lie in (0, 1]")
        require(self, "outer_lr", lambda v: v > 0, "must be positive")
        require(self, "outer_momentum", lambda v: 0 <= v < 1, "must lie in [0, 1)")
        require(self, "mixing_alpha", lambda v: 0 <= v <= 1, "must lie in [0, 1]")
        require(self, "weights", lambda v: v in WEIGHTS, f"must be one of {', '.join(WEIGHTS)}")
        require(self, "device", lambda v: v in DEVICES, f"must be one of {', '.join(DEVICES)}")

    def given(self) -> dict[str, Any]:
        """The arguments for the method, without the fields that are None."""
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value is not None and name not in OF_EVERY_METHOD
        }
