"""What `outer_lr: auto` and `outer_momentum: auto` mean, the defaults, and a warning where a momentum is too much for a run.

The values come from studies that anyone can repeat: `python -m tests.studies parity`, `methods`, `rounds` and `auto`
(docs/evidence/studies.md). They were among the best over 10 to 120 outer rounds, from random weights, from trained ones and with
adapters. Papers train for hundreds or thousands of rounds: their momentum of 0.9 remembers ten.
"""

from .resolve import from_config, lost_steps, settings
from .settings import OuterConfig
from .settings.outer import AUTO_VALUES, FOLLOWING

MEASURED = 240
"""In runs of up to so many rounds a momentum of 0.9 was seen to cost more than it brings."""

_MEMORIES = 24
"""A momentum may be too much in runs of at most so many times the rounds that it remembers, 1 / (1 - momentum)."""
_FEWEST = 2
"""We warn of runs with fewer rounds."""
_TOO_FAR = 1.5
"""We warn if an outer gradient moves the params in all, outer_lr / (1 - momentum), by so many times what `auto` does."""


def rounds_of(config: OuterConfig, max_steps: int) -> int:
    """The outer rounds of a run of `max_steps` inner steps. DiLoCoX may make them shorter as it goes."""
    return max_steps // int(settings(config)["sync_interval"])


def too_few_rounds(config: OuterConfig, max_steps: int | None) -> str | None:
    """A warning if the outer momentum cannot work in a run of so many inner steps; None if it can, or if they are unknown."""
    shown = settings(config)
    lr, momentum = (shown.get(name) for name in FOLLOWING)
    method = str(shown["method"])
    if (
        method not in AUTO_VALUES
        or not isinstance(lr, float)
        or not isinstance(momentum, float)
        or not max_steps
    ):
        return None
    rounds, memory = rounds_of(config, max_steps), 1 / (1 - momentum)
    better = AUTO_VALUES[method]
    reach = better["outer_lr"] / (1 - better.get("outer_momentum", 0.0))
    # a delay of one round is worse with momentum, in runs of any length
    is_late = from_config(config).schedule.back_to_back
    is_short = rounds >= 0 and (is_late or rounds <= min(round(_MEMORIES * memory), MEASURED))
    if not momentum or not is_short or lr * memory < _TOO_FAR * reach:
        return None
    values = " and ".join(f"outer.{name}={value:g}" for name, value in better.items())
    return (
        f"outer.outer_lr={lr:g} with outer.outer_momentum={momentum:g}: the momentum remembers {memory:.3g} rounds, and "
        f"{max_steps} inner steps have {rounds or 'not even one'}. In so short a run such a momentum makes the result worse "
        "(docs/guides/which-method.md). "
        f"Set {values}, or leave both out; or make more rounds with a smaller outer.sync_interval."
    )


def never_seen(config: OuterConfig, max_steps: int | None) -> str | None:
    """A warning if a run is so short that what regions train hardly reaches the global weights before its end."""
    if not max_steps or max_steps <= 0 or str(settings(config)["method"]) not in AUTO_VALUES:
        return None
    rounds = rounds_of(config, max_steps)
    if rounds >= _FEWEST:
        return None
    interval = settings(config)["sync_interval"]
    return (
        f"{max_steps} inner steps are {'one round' if rounds else 'less than one round'} of outer.sync_interval={interval}: "
        "evaluations show the weights from before training until a fragment lands for the first time. Lower "
        "outer.sync_interval, or raise training.max_steps."
    )


def eager_fragments(config: OuterConfig) -> str | None:
    """A warning if eager updates are made fragment by fragment: their own paper found that worse than no overlap."""
    shown = settings(config)
    if shown["method"] != "eager" or shown["num_fragments"] == 1:
        return None
    return (
        f"outer.method=eager with outer.num_fragments={shown['num_fragments']}: in its paper (2502.12996, Table 3) eager updates "
        "of fragments ended with a loss of 2.71 against 2.67 without overlap, those of the whole model with 2.69 against 2.68. "
        "Set outer.num_fragments=1 and outer.fragment_pattern=whole, or take outer.method=streaming."
    )


def warnings_of(config: OuterConfig, max_steps: int | None) -> list[str]:
    """What the settings of a run of `max_steps` inner steps (None if unknown) throw away, or do in vain."""
    found = (
        lost_steps(config),
        eager_fragments(config),
        too_few_rounds(config, max_steps),
        never_seen(config, max_steps),
    )
    return [each for each in found if each is not None]
