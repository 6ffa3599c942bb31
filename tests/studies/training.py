"""One run of a study: M regions in one process, or data-parallel training on the same batches."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from hf_cocodc import Recipe, simulate
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import InputError
from hf_cocodc.link.base import Link
from hf_cocodc.methods import Method
from hf_cocodc.parts.codecs.base import message_bytes
from hf_cocodc.parts.codecs.cast import Cast
from hf_cocodc.parts.tensors.flat import digest
from hf_cocodc.resolve import from_config, guard_of

from .absences import Absences
from .inner import Inner, base, held_out_loss
from .probe import Probe
from .text import Text

STUDY: dict[str, Any] = {
    "data_parallel": False,
    "absences": None,
    "probe": False,
    "base_steps": 0,
    "trained_steps": 0,
}
"""The section `study` of a run's settings, which recipes do not have, with its defaults.

- data_parallel: one model on the batches of all regions together; the section `outer` has no effect.
- absences: `Absences`; none by default.
- probe: whether region 0 measures the merge against inner steps that are truly redone (`Probe`).
- base_steps: steps that the model has been trained on other text before (`inner.base`).
- trained_steps: the first of `training.max_steps`, which are data-parallel in every arm: regions begin with the weights and the
  inner optimizer of that moment, and go on in the same learning rate schedule.
"""
FIRST = range(1, 9)
"""The inner steps whose batches a run's line has a checksum of."""


def recipe_of(settings: Mapping[str, Any]) -> Recipe:
    """The recipe in a run's settings. Raises InputError if it cannot work."""
    return Recipe.from_dict({name: part for name, part in settings.items() if name not in ("study", "seed")})


class Run:
    """What a run's settings say.

    Args:
        settings: the sections of a recipe, and `study` and `seed`.

    Raises:
        InputError: the recipe cannot work.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.recipe, self.seed = recipe_of(settings), settings["seed"]
        self.study = {**STUDY, **settings["study"]}
        self.regions = self.recipe.regions.count or 1
        training = self.recipe.training
        self.steps, self.every = training["max_steps"], training["eval_steps"]
        self.start = self.study["trained_steps"]
        if not 0 <= self.start < self.steps:
            raise InputError(
                f"study.trained_steps={self.start}: it must be at least 0, and less than training.max_steps={self.steps}."
            )
        self.text = Text(self.recipe, self.regions, self.seed, training["per_device_train_batch_size"])
        self.absences: Absences | None = None
        if self.study["absences"] is not None:
            interval = self.recipe.outer.sync_interval or self.every
            self.absences = Absences(self.study["absences"], self.regions, self.steps, interval, self.seed)
        self.curve: list[tuple[int, float | None]] = []
        self.weights = ""

    def here(self, region: int, step: int) -> bool:
        """Whether a region trains in an inner step."""
        return self.absences is None or self.absences.here(region, step)

    def method(self) -> Method:
        """The method of the run. Raises InputError if it cannot work."""
        method = from_config(self.recipe.outer)
        if self.absences is not None and method.merge.reads_local:
            raise InputError(
                "study.absences: a region comes back with the global params, but this merge keeps local ones. Use merge=replace."
            )
        return method

    def inner(self) -> Inner:
        """The model and the inner optimizer of a region, at the start of the comparison."""
        return copy.deepcopy(self._trained)

    @functools.cached_property
    def _trained(self) -> Inner:
        inner = Inner(self.recipe, self._base, self.seed)
        self.weights = _weights(inner)
        for step in range(1, self.start + 1):
            inner.train(torch.cat([self.text.batch(region, step) for region in range(self.regions)]))
        return inner

    @functools.cached_property
    def _base(self) -> torch.nn.Module:
        return base(self.recipe, self.study["base_steps"], self.seed)

    def evaluate(self, model: torch.nn.Module, step: int) -> None:
        """Add a point to the run's curve; a loss that is not finite is None."""
        loss = held_out_loss(model, self.text.held_out())
        self.curve.append((step, loss if math.isfinite(loss) else None))


def run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train once, and return what a line of the results holds of it.

    Returns:
        `curve`: (inner step, held-out loss of the global model) pairs; the last one is of the finished model. `bytes`: that
        region 0 has sent in transfers. `weights`: checksum of the first weights. `batches`: of the first batches, by region.
        `trained`: the share of all inner steps that were trained. `seconds`: of processor time. `probe`: if there was one.
    """
    began, this = time.process_time(), Run(settings)
    found = _data_parallel(this) if this.study["data_parallel"] else _in_regions(this)
    steps = [step for step in FIRST if step <= this.steps]
    return {
        "curve": this.curve,
        **found,
        "batches": [this.text.digest(region, steps) for region in range(this.regions)],
        "trained": 1.0 if this.absences is None else this.absences.trained,
        "seconds": round(time.process_time() - began, 2),
    }


def _weights(inner: Inner) -> str:
    return f"{digest(*(param.detach().view(-1) for param in inner.model.parameters())):08x}"


def _data_parallel(this: Run) -> dict[str, Any]:
    inner = this.inner()
    for step in range(this.start + 1, this.steps + 1):
        batches = [this.text.batch(r, step) for r in range(this.regions) if this.here(r, step)]
        if batches:
            inner.train(torch.cat(batches))
        if step % this.every == 0:
            this.evaluate(inner.model, step)
    this.evaluate(inner.model, this.steps)
    numel = sum(param.numel() for param in inner.model.parameters() if param.requires_grad)
    sent = (this.steps - this.start) * message_bytes(Cast(torch.float32), numel, 0, this.regions)
    return {"weights": this.weights, "bytes": sent, "params": numel}


def _in_regions(this: Run) -> dict[str, Any]:
    return simulate(lambda region, link: _region(this, region, link), regions=this.regions)[0]


def _region(this: Run, region: int, link: Link) -> dict[str, Any]:
    """Train one region; region 0 evaluates the global model."""
    inner, sent = this.inner(), 0

    def record(kind: str, **facts: Any) -> None:
        nonlocal sent
        sent += facts["bytes_sent"] if kind in ("land", "void") else 0
        if probe is not None:
            probe.note(kind, facts)

    config = this.recipe.outer
    method = this.method()
    probe = Probe(inner, this.text) if this.study["probe"] and region == 0 else None
    outer = Synchronizer(
        inner.model,
        method,
        link,
        record=record,
        weights=config.weights,
        guard=guard_of(config),
        digest_interval=config.digest_interval,
    )
    evaluates = region == 0 or not method.outer.regions_agree
    was_here = True
    for step in range(this.start + 1, this.steps + 1):
        here = this.here(region, step)
        if here and not was_here:
            inner.restart()
        if was_here and not here:
            outer.give_up_unsent()
        was_here, rate = here, inner.lr
        if here:
            batch = this.text.batch(region, step)
            inner.train(batch)
        else:
            inner.step += 1
        if probe is not None:
            probe.before(step)
        outer.step(rate, trained=here, tokens=batch.numel() if here else None)
        if probe is not None:
            probe.after(step, outer.fragments)
        if evaluates and step % this.every == 0:
            with outer.global_weights():
                if region == 0:
                    this.evaluate(inner.model, step)
    outer.finish()
    if region == 0:
        this.evaluate(inner.model, this.steps)
    found = {"weights": this.weights, "bytes": sent, "params": outer.num_params}
    return found if probe is None else {**found, "probe": probe.found(this.steps)}
