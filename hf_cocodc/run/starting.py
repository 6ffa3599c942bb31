"""Regions agree on a run's length and intervals before step 1 of training."""

import logging
import platform
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from .. import __version__
from ..engine.footprint import in_words
from ..engine.replicas import Engine, Replicas
from ..engine.synchronizer import Synchronizer
from ..errors import HandshakeError
from ..link.base import Link
from ..link.ranks import SharedLink
from ..link.spreading import gather
from ..resolve import from_config, guard_of, method_of
from ..settings import OuterConfig
from ..snapshot.checkpoint import Saved
from .journal import Journal, name_of
from .session import session_of
from .supported import home_of

logger = logging.getLogger(__name__)

_NOTHING: Mapping[int, Any] = MappingProxyType({})
UNEVEN = 1.5
"""The log names a largest fragment that is more than this many times the mean."""

NEVER, UNKNOWN = 0, -1


class Beginning(NamedTuple):
    """What a region begins with: inner steps that it would make, whether its learning rate schedule is made over them already,
    and a number for the run, of which the lowest region's counts for all.
    """

    max_steps: int
    is_fixed: bool
    run: int


class Habits(NamedTuple):
    """When a region saves and evaluates. What is not named here is Trainer's setting.

    Attributes:
        saves: inner steps between two checkpoints; NEVER, or UNKNOWN after epochs of unknown length.
        evaluates: inner steps between two evaluations; as `saves`.
        averages: whether it evaluates the mean of the regions' own global weights (eager updates).
        metric: checksum of the metric by which Trainer decides, and of which values are better; 0 if there is none.
        saves_best: whether it saves where an evaluation was the best.
    """

    saves: int
    evaluates: int
    eval_delay: float
    eval_on_start: bool
    averages: bool
    metric: int
    load_best_model_at_end: bool
    saves_best: bool


def agree_on_start(link: Link, own: Beginning, before: Mapping[int, Beginning] = _NOTHING) -> Beginning:
    """The smallest `max_steps` of all regions, and the lowest region's number for the run. A collective call.

    Shards of different lengths make epochs of different lengths. `before` is what a member tells a newcomer, by region: the run
    keeps its length and its number. Raises HandshakeError if a region cannot make fewer steps any more, or a newcomer not as
    many.
    """
    for member, agreed in before.items():
        if own.max_steps < agreed.max_steps:
            raise HandshakeError(
                f"region {link.region} would make {own.max_steps} inner steps, but the run that it joins makes "
                f"{agreed.max_steps} (region {member} says so). Give it as much data, or the same max_steps."
            )
        own = own._replace(run=agreed.run)
    by_region = {**before, **gather(link, own, "the number of inner steps")}
    max_steps = min(other.max_steps for other in by_region.values())
    for region, other in by_region.items():
        if other.is_fixed and other.max_steps > max_steps:
            raise HandshakeError(
                f"region {region} would make {other.max_steps} inner steps, another region {max_steps}. Its learning rate "
                "schedule is longer, and made already: its Trainer was told of CoCoDCCallback too late. Give the callback to "
                "Trainer's constructor, or call callback.attach(trainer) before trainer.train()."
            )
    if max_steps < own.max_steps:
        logger.warning(
            "region %d would make %d inner steps, another region %d: all make %d.",
            *(link.region, own.max_steps, max_steps, max_steps),
        )
    return Beginning(max_steps, own.is_fixed, by_region[min(by_region)].run)


def check_same_habits(link: Link, own: Habits, before: Mapping[int, Habits] = _NOTHING) -> None:
    """Check that all regions save at the same inner steps, and evaluate if they need each other for it. A collective call.

    `before` is what a member tells a newcomer, by region. Raises HandshakeError if two regions differ.
    """
    by_region = {**before, **gather(link, own, "when a region saves and evaluates")}
    _check_same_interval({r: habits.saves for r, habits in by_region.items()}, "saves", "save")
    if len(by_region) == 1 or not any(habits.averages or habits.metric for habits in by_region.values()):
        return
    _check_same(
        "load_best_model_at_end", {r: habits.load_best_model_at_end for r, habits in by_region.items()}
    )
    _check_same("save_strategy=best", {r: habits.saves_best for r, habits in by_region.items()})
    if any(habits.averages for habits in by_region.values()):
        uses = {r: "global" if habits.averages else "local" for r, habits in by_region.items()}
        _check_same("evaluate_on", uses)
    lowest = min(by_region)
    other = next((r for r, habits in by_region.items() if habits.metric != by_region[lowest].metric), None)
    if other is not None:
        raise HandshakeError(
            f"region {lowest} and region {other} have different metrics to decide by. Give eval_strategy, "
            "metric_for_best_model and greater_is_better the same values in every region."
        )
    evaluates = {r: habits.evaluates for r, habits in by_region.items()}
    unknown = next((r for r, steps in evaluates.items() if steps == UNKNOWN), None)
    if unknown is not None:
        raise HandshakeError(
            f"region {unknown} evaluates after epochs of unknown length, but all regions must do it together. "
            "Set eval_strategy=steps, and the same eval_steps in every region."
        )
    _check_same_interval(evaluates, "evaluates", "eval")
    _check_same("eval_on_start", {r: habits.eval_on_start for r, habits in by_region.items()})
    if any(evaluates.values()):
        _check_same("eval_delay", {r: f"{habits.eval_delay:g}" for r, habits in by_region.items()})


def _check_same(setting: str, values: Mapping[int, Any]) -> None:
    """Raises HandshakeError if the regions' values of a setting differ."""
    lowest = min(values)
    for region, value in values.items():
        if value != values[lowest]:
            raise HandshakeError(
                f"{setting}={values[lowest]} in region {lowest}, but {value} in region {region}: all regions must evaluate "
                "together. Give it the same value in every region."
            )


def _check_same_interval(by_region: Mapping[int, int], verb: str, setting: str) -> None:
    """Raises HandshakeError if intervals differ. `setting` is the prefix of Trainer's settings: "save" or "eval"."""
    known = {region: steps for region, steps in by_region.items() if steps != UNKNOWN}
    for region, steps in known.items():
        first = min(known)
        if steps == known[first]:
            continue
        way_out = f"Give {setting}_strategy and {setting}_steps the same values in every region."
        if NEVER not in known.values():
            way_out = (
                f"If the interval is an epoch, their shards differ in length: set {setting}_strategy=steps and "
                f"{setting}_steps={min(known.values())} in every region."
            )
        often = [f"every {each}" if each else "never" for each in (known[first], steps)]
        unit = " inner steps" if known[first] else ""
        raise HandshakeError(
            f"region {first} {verb} {often[0]}{unit}, region {region} {often[1]}, but all regions must do it together. {way_out}"
        )


def engine_for(
    model: nn.Module,
    config: OuterConfig,
    link: Link,
    journal: Journal,
    saved: Saved | None,
    is_bounded: Callable[[], bool] = lambda: True,
) -> Engine:
    """The engine for a model as it is, at the start of a run or where it was saved. A collective call."""
    method, home = from_config(config), home_of(model, config)
    if saved is not None:
        method = method_of(config, saved.facts.settings, saved.state["layout"])

    def build(link: Link) -> Synchronizer:
        return Synchronizer(
            model,
            method,
            link,
            record=journal.write,
            digest_interval=config.digest_interval,
            weights=config.weights,
            guard=guard_of(config),
            is_bounded=is_bounded,
            state=None if saved is None else saved.state,
            home=home,
        )

    return Replicas(build, model, method, link, home.rest) if isinstance(link, SharedLink) else build(link)


def run_of(link: Link) -> str | None:
    """The name of an elastic run in its journals; known to leaders."""
    session = session_of(link)
    return None if session is None or not link.is_elastic else session.link.run


def record_of(saved: Saved | None, path: Path | None = None, run: str | None = None) -> str:
    """The name of the record that goes on in a journal from `saved`; empty if a new one begins. A region that comes back to the
    elastic run `run` goes on with its own.
    """
    if saved is None:
        return ""
    if not saved.facts.taken_over:
        return saved.facts.journal
    return "" if path is None or run is None else name_of(path, run)


def versions() -> dict[str, str]:
    """The versions that a run's numbers may depend on."""
    packages = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    return {"hf_cocodc": __version__, **packages, "python": platform.python_version()}


def note_start(
    journal: Journal,
    synchronizer: Engine,
    saved: Saved | None,
    max_steps: int | None,
    settings: Mapping[str, Any],
    training: Mapping[str, Any],
    run: str | None = None,
) -> None:
    """Write into the journal what begins, or goes on from `saved`; log its memory, and that fragments are uneven."""
    link = synchronizer.link
    clock = {"at": round(time.time(), 3)} if link.timing == "measured" else {}
    journal.write(
        "start" if saved is None else "resume",
        step=synchronizer.inner_step,
        region=link.region,
        num_regions=link.num_regions if link.takes_part() else link.most_regions,
        num_params=synchronizer.num_params,
        num_fragments=len(synchronizer.facts),
        max_steps=max_steps,
        timing=link.timing,
        bytes_sent=synchronizer.totals.bytes_sent,
        outer=settings,
        **({} if run is None else {"run": run}),
        **({} if saved is None or not saved.facts.taken_over else {"from_region": saved.facts.region}),
        **clock,
        versions=versions(),
        training=dict(training),
    )
    for sentence in in_words(synchronizer.memory()):
        logger.info(sentence)
    sizes = [each.numel for each in synchronizer.facts]
    if (
        settings.get("split_rows") is False
        and saved is None
        and max(sizes) * len(sizes) > UNEVEN * sum(sizes)
    ):
        logger.info(
            "the largest of %d fragments is %.3g times as large as the mean, and the link must carry it in the same time. "
            "outer.split_rows=true splits an embedding or a head over all fragments.",
            *(len(sizes), max(sizes) * len(sizes) / sum(sizes)),
        )
