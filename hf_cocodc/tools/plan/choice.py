"""The choice of settings: for a method and a codec, those that reach a utilization with the least staleness."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...auto import too_few_rounds
from ...errors import InputError, shown
from ...methods import METHODS
from ...newer import known
from ...resolve import from_config, lost_steps, settings
from ...settings import OF_EVERY_METHOD, OuterConfig
from ...settings.outer import AUTO, CODECS, alpha_of, idle
from .forecast import Forecast, Subject
from .transfers import MARGIN

LOSSY = ("int4", "codebook_2bit", "topk", "topk_2bit", "lowrank")
"""Codecs that need error feedback."""
CAREFUL = ("fp32", "bf16", "int8", "fp4")
"""Codecs that are chosen unasked, the most exact first: Streaming DiLoCo found no difference down to 4-bit floats (2501.18512).
Others are chosen only where the recipe or the method's paper has them."""
CHOSEN = (
    *("method", "sync_interval", "num_fragments", "fragment_pattern", "overlap_steps", "codec"),
    "error_feedback",
)
"""Settings that a plan chooses."""
LONGEST = 5000
"""Most inner steps in a round that are tried."""


def variants(recipe: OuterConfig) -> Iterator[OuterConfig]:
    """The recipe's settings with each method and codec that go together: the six, and the recipe's own.

    Other methods than the recipe's have their paper's defaults, apart from sync_interval and what belongs to no method. Raises
    InputError if the recipe has a method or a codec of a user's own, which is not forecast.
    """
    for name, ours in (("method", list(known())), ("codec", list(CODECS))):
        given = getattr(recipe, name)
        if given is not None and given not in ours:
            raise InputError(
                f"outer.{name}={shown(given)} is not one of this package's, and only those are planned. Plan with one of them: "
                f"--set outer.{name}={ours[0]} --set outer.options=null."
            )
    for method in dict.fromkeys((*METHODS, str(recipe.method))):
        base = recipe
        if method != recipe.method:
            general = {name: getattr(recipe, name) for name in OF_EVERY_METHOD}
            interval = max(_interval(recipe), _fragments(OuterConfig(method=method)))
            base = OuterConfig(**general | {"method": method, "sync_interval": interval})
        takes = settings(base)
        own = takes["codec"]
        for codec in CODECS:
            if codec == "fp16" != own:
                continue  # as large as bf16
            if codec in LOSSY and codec != own and "error_feedback" not in takes:
                continue
            changed = base if codec == own else _with_codec(base, codec)
            try:
                from_config(changed)
            except InputError:
                continue
            yield changed


def _with_codec(config: OuterConfig, codec: str) -> OuterConfig:
    feedback = codec in LOSSY if "error_feedback" in settings(config) else None
    changed = dataclasses.replace(config, codec=codec, error_feedback=feedback)
    without: dict[str, Any] = dict.fromkeys(idle(changed.given()))
    return dataclasses.replace(changed, **without)


def choose(subject: Subject, config: OuterConfig, target: float) -> Forecast | None:
    """The settings with this method and codec that reach a utilization; None if none do.

    They reach it also if each transfer during which training goes on takes `MARGIN` times as long as by itself.

    `sync_interval` stays as it is if the target can be reached with it. Else it is longer: an inner step reaches the other
    regions after at most sync_interval and the overlap, and this sum is kept small. A method that is a round late has the
    shortest round in any case, as its staleness is that round. Overlap and number of fragments are then as small as possible.
    """
    chosen = _search(subject, config, target)
    return None if chosen is None else subject.forecast(_sound(chosen, subject.steps))


def _sound(config: OuterConfig, steps: int | None) -> OuterConfig:
    """The same, with our values in place of those that a longer round or an overlap makes wrong."""
    if too_few_rounds(config, steps) is not None:
        config = dataclasses.replace(config, outer_lr=AUTO, outer_momentum=AUTO)
    if lost_steps(config) is not None and settings(config).get("merge") == "mix":
        config = dataclasses.replace(config, mixing_alpha=None)
    return config


def _search(subject: Subject, config: OuterConfig, target: float) -> OuterConfig | None:
    longest = max(_longest(subject), _interval(config))

    def at(interval: int) -> OuterConfig | None:
        return _with_interval(subject, config, interval, target)

    is_late = from_config(config).schedule.back_to_back
    first = _fragments(config) if is_late else _interval(config)
    shortest = _smallest(first, longest, lambda each: at(each) is not None)
    if shortest is None:
        return None
    tried = [shortest]
    if shortest > _interval(config):
        # on a link that is full transfers need much overlap; in a round that is a little longer, far less
        tried += [min(shortest + shortest * quarter // 4, longest) for quarter in (1, 2, 4)]
    reaching = [each for each in map(at, tried) if each is not None]
    return min(reaching, key=lambda each: _interval(each) + subject.course(each).staleness)


def best(forecasts: list[Forecast], recipe: OuterConfig) -> Forecast | None:
    """Of forecasts that reach the target, that to use with the recipe's method; None if none has a codec that is chosen for it.

    A round that need not be longer counts first, then staleness, then how exact the codec is.
    """
    mine = [each for each in forecasts if each.config.method == recipe.method]
    first = min(mine, default=None, key=lambda each: _order(each, recipe))
    return first if first is not None and first.shown["codec"] in _codecs_of(first, recipe) else None


def written_out(forecast: Forecast) -> dict[str, Any]:
    """Its settings as a script or a recipe gives them: those that a plan chooses, then others that the recipe has given."""
    chosen = {name: forecast.shown[name] for name in CHOSEN if name in forecast.shown}
    return {**chosen, **forecast.config.given(), **chosen}


def foremost(forecasts: Sequence[Forecast], recipe: OuterConfig, count: int) -> list[Forecast]:
    """The `count` settings that matter most, in their given order: the best of each method, then more of the recipe's."""
    ordered = sorted(forecasts, key=lambda each: (each.config.method != recipe.method, *_order(each, recipe)))
    methods = [each.config.method for each in ordered]
    bests = [each for place, each in enumerate(ordered) if methods.index(each.config.method) == place]
    chosen = [*bests, *(each for each in ordered if each not in bests)][:count]
    return [each for each in forecasts if each in chosen]


def _order(forecast: Forecast, recipe: OuterConfig) -> tuple[bool, int, int, int]:
    """What counts first, second and so on between settings of one method; less is better."""
    codecs, codec = _codecs_of(forecast, recipe), forecast.shown["codec"]
    is_exact = codec in codecs
    interval = max(forecast.shown["sync_interval"], _interval(recipe))
    return not is_exact, interval, forecast.course.staleness, codecs.index(codec) if is_exact else 0


def _codecs_of(forecast: Forecast, recipe: OuterConfig) -> list[str]:
    """The codecs that are chosen for its method, the most exact first."""
    method = forecast.config.method
    own = recipe if method == recipe.method else OuterConfig(method=method)
    return list(dict.fromkeys((*CAREFUL, settings(own)["codec"])))


def _with_interval(subject: Subject, config: OuterConfig, interval: int, target: float) -> OuterConfig | None:
    """The settings with this `sync_interval` that reach the target with the least staleness; None if none do."""
    config = dataclasses.replace(config, sync_interval=interval)
    counts = [_fragments(config)]
    if settings(config).get("fragment_pattern", "whole") != "whole":
        counts += [counts[0] * factor for factor in (2, 4) if counts[0] * factor <= subject.num_blocks]
    reaching = []
    for count in counts:
        if count > interval:
            continue
        cut = config if count == counts[0] else dataclasses.replace(config, num_fragments=count)
        candidate = _with_overlap(subject, cut, target)
        if candidate is not None:
            reaching.append((subject.course(candidate).staleness, count, candidate))
    return min(reaching, key=lambda each: each[:2])[2] if reaching else None


def _with_overlap(subject: Subject, config: OuterConfig, target: float) -> OuterConfig | None:
    """The settings with the least overlap that reaches the target, if the method has a choice."""
    shown = settings(config)
    overlap = shown.get("overlap_steps")
    may_overlap = isinstance(overlap, int) and overlap > 0 and not from_config(config).schedule.back_to_back
    if not may_overlap:
        tried = [config]
        if (
            shown.get("sends_per_interval", 0) is None
        ):  # as often as the link allows may be more than training affords
            tried.append(dataclasses.replace(config, sends_per_interval=_fragments(config), utilization=None))
        return next((each for each in tried if subject.course(each, MARGIN).utilization >= target), None)

    alpha = config.mixing_alpha
    if alpha == alpha_of(None, overlap or 0):  # it followed from the overlap, and follows from the new one
        alpha = None

    def with_overlap(steps: int) -> OuterConfig:
        return dataclasses.replace(config, overlap_steps=steps, mixing_alpha=alpha)

    def reaches(steps: int) -> bool:
        return subject.course(with_overlap(steps), MARGIN).utilization >= target

    most = shown["sync_interval"] - 1
    if not reaches(most):  # most rounds that are tried are too short in any case
        return None
    steps = _smallest(0, most, reaches)
    return None if steps is None else with_overlap(steps)


def _smallest(first: int, last: int, holds: Callable[[int], bool]) -> int | None:
    """The smallest number in first .. last for which something holds, as for all larger ones; None if there is none."""
    if first > last:
        return None
    if holds(first):
        return first
    low, step = first, 1  # does not hold for low
    while low + step < last and not holds(low + step):
        low, step = low + step, 2 * step
    high = min(low + step, last)
    if high == last and not holds(last):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def _interval(config: OuterConfig) -> int:
    return int(settings(config)["sync_interval"])


def _fragments(config: OuterConfig) -> int:
    """The number of fragments; 1 if the method has no choice."""
    return int(settings(config).get("num_fragments", 1))


def _longest(subject: Subject) -> int:
    """The longest round to try: two fit into the run, if the recipe says how long it is."""
    return LONGEST if subject.steps is None else min(max(subject.steps // 2, 1), LONGEST)
