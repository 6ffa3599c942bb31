"""One run of a study: M regions in one process, or data-parallel training on the same batches."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_cocodc import Recipe, simulate
from hf_cocodc.engine.balance import Batch
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import InputError
from hf_cocodc.link.lockstep import LockstepLink, VirtualLink
from hf_cocodc.methods import Method
from hf_cocodc.parts.codecs.base import message_bytes
from hf_cocodc.parts.codecs.cast import Cast
from hf_cocodc.parts.deal import Portion
from hf_cocodc.parts.tensors.flat import digest
from hf_cocodc.resolve import from_config, guard_of

from .absences import Absences
from .inner import CPU, Inner, base
from .probe import Probe
from .text import Text, Tokens, tokens_of

STUDY: dict[str, Any] = {
    "data_parallel": False,
    "absences": None,
    "probe": False,
    "base_steps": 0,
    "trained_steps": 0,
    "speeds": None,
    "streams": None,
}
"""The section `study` of a run's settings, which recipes do not have, with its defaults.

- data_parallel: one model on the batches of all regions together; the section `outer` has no effect.
- absences: `Absences`; none by default.
- probe: whether region 0 measures the merge against inner steps that are truly redone (`Probe`).
- base_steps: steps that the model has been trained on other text before (`inner.base`).
- trained_steps: the first of `training.max_steps`, which are data-parallel in every arm: regions begin with the weights and the
  inner optimizer of that moment, and go on in the same learning rate schedule.
- speeds: of the regions in simulated time, in which a transfer takes none; an inner step at speed 1 takes a second. By default
  there is no time. With `regions.balance: auto` regions share the batch of all, in the order of the regions.
- streams: parts of the text, by default one a region (`Text`). Runs with other numbers of regions, and as many streams and blocks
  in all, train on the same tokens.
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
        tokens: the text, if it is not the one that the recipe names.
        device: to train on.
        watch: takes the inner step and the loss of every evaluation.

    Raises:
        InputError: the recipe cannot work.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        tokens: Tokens | None = None,
        device: torch.device = CPU,
        watch: Callable[[int, float], object] = lambda step, loss: None,
    ) -> None:
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
        text = tokens or tokens_of(self.recipe)
        self._vocabulary, self._device, self._watch = text.vocabulary, device, watch
        batch_size, streams = training["per_device_train_batch_size"], self.study["streams"]
        self.text = Text(self.recipe, text, self.regions, self.seed, batch_size, streams)
        self.absences: Absences | None = None
        if self.study["absences"] is not None:
            interval = self.recipe.outer.sync_interval or self.every
            self.absences = Absences(self.study["absences"], self.regions, self.steps, interval, self.seed)
        self.virtual: VirtualLink | None = None
        if self.study["speeds"] is not None:
            speeds = tuple(self.study["speeds"])
            self.virtual = VirtualLink(step_time_s=1.0, latency_s=0.0, bandwidth=1e15, speeds=speeds)
        self.curve: list[tuple[int, float | None]] = []
        self.weights = ""

    def here(self, region: int, step: int) -> bool:
        """Whether a region trains in an inner step."""
        return self.absences is None or self.absences.here(region, step)

    def batch(self, region: int, step: int, portion: Portion) -> Tensor:
        """The batch of a region in an inner step: its own, or its portion of that of all regions."""
        if not portion.stride:
            return self.text.batch(region, step)
        together = torch.cat([self.text.batch(each, step) for each in range(self.regions)])
        if portion.stride != len(together):
            raise AssertionError(f"{portion} is dealt of {len(together)} samples")
        return together[portion.first % portion.stride :][: portion.samples]

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
        inner = Inner(self.recipe, self._base, self.seed, self._vocabulary, self._device)
        self.weights = _weights(inner)
        for step in range(1, self.start + 1):
            inner.train(torch.cat([self.text.batch(region, step) for region in range(self.regions)]))
        return inner

    @functools.cached_property
    def _base(self) -> torch.nn.Module:
        return base(self.recipe, self.study["base_steps"], self.seed, self._vocabulary)

    def evaluate(self, inner: Inner, step: int) -> None:
        """Add a point to the run's curve; a loss that is not finite is None."""
        loss = inner.held_out_loss(self.text.held_out())
        self.curve.append((step, loss if math.isfinite(loss) else None))
        self._watch(step, loss)


def run(settings: Mapping[str, Any], *more: Any) -> dict[str, Any]:
    """Train once, and return what a line of the results holds of it.

    Args:
        settings, more: of a `Run`.

    Returns:
        `curve`: (inner step, held-out loss of the global model) pairs; the last one is of the finished model. `bytes`: that
        region 0 has sent in transfers. `weights`: checksum of the first weights. `batches`: of the first batches, by region.
        `trained`: the share of all inner steps that were trained. `seconds`: of processor time. `probe`: if there was one.
        `simulated_s`: the time of the run in regions, if time was simulated.
    """
    began, this = time.process_time(), Run(settings, *more)
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
            this.evaluate(inner, step)
    this.evaluate(inner, this.steps)
    numel = sum(param.numel() for param in inner.model.parameters() if param.requires_grad)
    sent = (this.steps - this.start) * message_bytes(Cast(torch.float32), numel, 0, this.regions)
    return {"weights": this.weights, "bytes": sent, "params": numel}


def _in_regions(this: Run) -> dict[str, Any]:
    def body(region: int, link: LockstepLink) -> dict[str, Any]:
        return _region(this, region, link)

    return simulate(body, regions=this.regions, link=this.virtual)[0]


def _region(this: Run, region: int, link: LockstepLink) -> dict[str, Any]:
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
        balance=this.recipe.regions.rule_of_batch,
        batch=Batch(this.recipe.training["per_device_train_batch_size"], 1),
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
            batch = this.batch(region, step, outer.portion)
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
                    this.evaluate(inner, step)
    outer.finish()
    if region == 0:
        this.evaluate(inner, this.steps)
    found = {"weights": this.weights, "bytes": sent, "params": outer.num_params}
    found |= {} if this.virtual is None else {"simulated_s": link.now}
    return found if probe is None else {**found, "probe": probe.found(this.steps)}
