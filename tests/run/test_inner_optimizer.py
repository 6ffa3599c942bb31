"""Inner optimizers of any kind: which ones train, what their learning rate is, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.errors import InputError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import loopback, run_in_lockstep
from hf_cocodc.run.about import of_loop
from hf_cocodc.run.inner_optimizer import InnerOptimizer
from tests.toys import batch, llama, params_of

STEPS = 10
# its outer momentum is in units of the learning rate: wrong rates change the weights
CO2 = OuterConfig(method="co2", sync_interval=2, outer_momentum=0.5, staleness_penalty="none")
COMPENSATED = OuterConfig(
    method="cocodc",
    sync_interval=4,
    num_fragments=2,
    overlap_steps=2,
    sends_per_interval=2,
    compensation="lr_normalized",
)


class Duck:
    """Is no optimizer of PyTorch's, has no hooks, and updates as one does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._update, self._clear = optimizer.step, optimizer.zero_grad
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self) -> None:
        self._update()

    def zero_grad(self) -> None:
        self._clear()


class Container:
    """Holds several optimizers, as pipelines' containers do, and has nothing else."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()


class TwoSets(torch.optim.SGD):
    """Has train() and eval(), as schedule-free optimizers do."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    params = list(model.parameters())
    return params[: len(params) // 2], params[len(params) // 2 :]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    first, second = halves(model)
    return [{"params": first, "lr": 1e-2}, {"params": second, "lr": 3e-2}]


def one(model: nn.Module) -> Any:
    return torch.optim.SGD(groups(model), momentum=0.9)


def several(model: nn.Module) -> list[Any]:
    return [torch.optim.SGD([group], momentum=0.9) for group in groups(model)]


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "one": one,
    "duck": lambda model: Duck(one(model)),
    "list": several,
    "container": lambda model: Container(*several(model)),
    "list of ducks": lambda model: [Duck(each) for each in several(model)],
}


def train(make: Callable[[nn.Module], Any], config: OuterConfig) -> list[torch.Tensor]:
    """Two regions with a learning rate that falls, set by hand before every step."""

    def live(region: int, link: Link) -> torch.Tensor:
        accelerator, model = Accelerator(cpu=True), llama(layers=2)
        optimizer = make(model)
        optimizer = (
            [accelerator.prepare(each) for each in optimizer] if isinstance(optimizer, list) else optimizer
        )
        each_of = optimizer if isinstance(optimizer, list) else getattr(optimizer, "optimizers", [optimizer])
        with OuterOptimizer(accelerator, model, optimizer, config, max_steps=STEPS, link=link) as outer:
            for step in range(STEPS):
                for part in each_of:
                    for group in part.param_groups:
                        group["lr"] *= 0.9
                tokens = batch(region, step)
                model(input_ids=tokens, labels=tokens).loss.backward()
                for part in each_of:
                    part.step()
                    part.zero_grad()
                outer.step()
        return params_of(model)

    return run_in_lockstep(2, live)


@pytest.mark.parametrize("config", [CO2, COMPENSATED], ids=["co2", "lr_normalized"])
def test_every_kind_trains_alike(config: OuterConfig) -> None:
    """An optimizer, one without hooks, a list, a container: the same bits in both regions and of all kinds."""
    found = {kind: train(make, config) for kind, make in KINDS.items()}
    for first, second in found.values():
        assert torch.equal(first, second)
        assert torch.equal(first, found["one"][0])


def inner(optimizer: Any, model: nn.Module, **more: Any) -> InnerOptimizer:
    return InnerOptimizer(optimizer, model, **{"reads_lr": True, "begins_anew": True, **more})


def model_of(*sizes: int) -> nn.Module:
    return nn.ParameterList([torch.ones(size) for size in sizes])


@pytest.mark.parametrize(
    ("sizes", "rates", "lr"),
    [
        ((3,), (0.1,), 0.1),
        ((3, 7), (0.1, 0.1), 0.1),
        ((3, 1), (0.1, 0.3), 0.15),
        ((3, 1), (0.0, 0.3), 0.3),
        ((3, 1), (0.0, 0.0), 0.0),
        ((3, 1, 1), (0.0, 0.1, 0.3), 0.2),
        ((3, 1), (torch.tensor(0.5), 0.5), 0.5),
        ((3, 1), (None, 0.25), 0.25),
    ],
)
def test_one_rate_for_all_groups(sizes: tuple[int, ...], rates: tuple[Any, ...], lr: float) -> None:
    """The mean by the number of values that move; a group that stands still says nothing."""
    model = model_of(*sizes)
    optimizer = torch.optim.SGD([{"params": [each], "lr": 1.0} for each in model.parameters()])
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    assert inner(optimizer, model).take_lr() == pytest.approx(lr, abs=0 if len(set(rates)) < 2 else 1e-12)


def test_what_the_model_does_not_train_has_no_rate() -> None:
    """Frozen parameters, and those of another model, in groups with rates of their own."""
    model, other = model_of(3, 5), model_of(9)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(
        [{"params": [params[0]], "lr": 0.1}, {"params": [params[1]], "lr": 0.7}, {"params": list(other)}],
        lr=0.4,
    )
    params[1].requires_grad_(False)
    assert inner(optimizer, model).take_lr() == 0.1


def test_layer_wise_optimizers_are_found() -> None:
    """Transformers' stand-in for them holds a parameter of its own."""
    model = model_of(3, 5)
    parts = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in model.parameters()}
    found = inner(LayerWiseDummyOptimizer(optimizer_dict=parts, lr=7.0), model)
    assert found.take_lr() == 0.1
    for param, part in parts.items():
        param.grad = torch.ones_like(param)
        part.step()
    found.begin_anew()
    assert not any(part.state for part in parts.values())


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "nothing": (lambda model: None, r"optimizer=None \(NoneType\) has no param_groups"),
    "a class": (lambda model: torch.optim.AdamW, "optimizer=AdamW is a class. Give the optimizer"),
    "a schedule": (
        lambda model: torch.optim.lr_scheduler.ConstantLR(one(model)),
        "ConstantLR is a learning rate schedule, no optimizer. Give the optimizer",
    ),
    "no optimizers": (lambda model: [], r"optimizer=\[\] \(list\) has no param_groups"),
    "parameters": (lambda model: list(model.parameters()), "has no param_groups"),
    "the model": (lambda model: model, "has no param_groups"),
    "another model's": (
        lambda model: one(llama(layers=2)),
        r"SGD holds none of the model's 21 trainable parameters \(the first is model.embed_tokens.weight\)",
    ),
    "two sets of weights": (
        lambda model: TwoSets(model.parameters(), lr=0.1),
        "the optimizer TwoSets keeps two sets of weights.*Use an optimizer with one set",
    ),
    "no state": (
        lambda model: type("Bare", (), {"param_groups": one(model).param_groups})(),
        "Bare has no `state` that can be cleared, as outer.on_nonfinite=restart does. Give the optimizers that it combines",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("listed", [False, True])
def test_what_cannot_train_is_refused(kind: str, listed: bool) -> None:
    """By name and with the way out, before regions meet: also in a list, and under Accelerate's wrapper."""
    make, message = REFUSED[kind]
    accelerator, model = Accelerator(cpu=True), llama(layers=2)
    optimizer = make(model)
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = accelerator.prepare(optimizer)
    with pytest.raises(InputError, match=message):
        OuterOptimizer(accelerator, model, [optimizer] if listed and optimizer != [] else optimizer, CO2)


@pytest.mark.parametrize(("config", "is_refused"), [(CO2, True), (COMPENSATED, True), (OuterConfig(), False)])
def test_a_method_that_reads_the_rate_needs_one(config: OuterConfig, is_refused: bool) -> None:
    """Adafactor may have none; DiLoCo does not ask."""
    accelerator, model = Accelerator(cpu=True), model_of(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.param_groups[0]["lr"] = None
    if is_refused:
        with pytest.raises(InputError, match='no parameter group of SGD has a number as "lr"'):
            OuterOptimizer(accelerator, model, optimizer, config, link=loopback())
    else:
        OuterOptimizer(accelerator, model, optimizer, config, link=loopback()).close()


def test_parameters_that_no_optimizer_holds_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """They cross the link for nothing."""
    model = llama(layers=2)
    optimizer = torch.optim.SGD([model.model.norm.weight], lr=0.1)
    with caplog.at_level(logging.WARNING):
        inner(optimizer, model)
    assert (
        "SGD does not hold 20 of the model's 21 trainable parameters (model.embed_tokens.weight, "
        in caplog.text
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        inner([optimizer, one(model)], model)
    assert not caplog.text


def test_a_copy_of_the_state_cannot_be_cleared() -> None:
    """A property that merges dicts would keep every moment, and the region would never be finite again."""

    class Merged(Duck):
        @property
        def state(self) -> dict[Any, Any]:
            return dict(self._state)

        @state.setter
        def state(self, state: dict[Any, Any]) -> None:
            self._state = state

    model = model_of(3)
    optimizer = Merged(torch.optim.AdamW(model.parameters()))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(InputError, match="Merged gives a copy of its state"):
        inner(optimizer, model).begin_anew()


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_begins_anew(kind: str) -> None:
    """After rounds that were not finite every optimizer of the region forgets its moments, and regions end finite and equal."""

    def live(region: int, link: Link) -> torch.Tensor:
        accelerator, model = Accelerator(cpu=True), llama(layers=2)
        optimizer = KINDS[kind](model)
        each_of = optimizer if isinstance(optimizer, list) else [optimizer]
        config = OuterConfig(method="diloco", sync_interval=1)
        with OuterOptimizer(accelerator, model, optimizer, config, max_steps=STEPS, link=link) as outer:
            for step in range(STEPS):
                tokens = batch(region, step)
                loss = model(input_ids=tokens, labels=tokens).loss
                (loss * float("nan") if (region, step) == (1, 2) else loss).backward()
                for part in each_of:
                    part.step()
                    part.zero_grad()
                outer.step()
        return params_of(model)

    first, second = run_in_lockstep(2, live)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)


def rates_of(outer: OuterOptimizer) -> list[float]:
    """Collects the learning rates that the engine is told from now on."""
    found, step = [], outer.synchronizer.step

    def told(inner_lr: float = 0.0, *args: Any, **kwargs: Any) -> Any:
        found.append(inner_lr)
        return step(inner_lr, *args, **kwargs)

    outer.synchronizer.step = told  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("kind", [float, numpy.float32, torch.tensor, int])
def test_any_number_is_a_rate(kind: Callable[[int], Any]) -> None:
    """A schedule of one's own may compute with NumPy."""
    model = nn.Linear(2, 2)
    optimizer = Duck(torch.optim.SGD(model.parameters(), lr=1.0))
    inner = InnerOptimizer(optimizer, model, reads_lr=True, begins_anew=False)
    optimizer.param_groups[0]["lr"] = kind(2)
    assert inner.take_lr() == 2.0


def test_the_rate_that_a_checkpoint_brings_is_no_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The schedule stands elsewhere than when the outer optimizer was made."""

    def outer_and_loop() -> tuple[OuterOptimizer, Accelerator, Callable[[], None]]:
        accelerator = Accelerator(cpu=True)
        model = llama(layers=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        outer = OuterOptimizer(accelerator, model, optimizer, CO2, link=loopback())

        def step() -> None:
            optimizer.step()
            outer.step()
            schedule.step()

        return outer, accelerator, step

    outer, accelerator, step = outer_and_loop()
    for _ in range(3):
        step()
    accelerator.save_state(str(tmp_path))
    outer.close()
    outer, accelerator, step = outer_and_loop()
    accelerator.load_state(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        step()
    outer.close()
    assert "before the first outer.step()" not in caplog.text


@pytest.mark.parametrize("order", ["outer first", "schedule first", "noted"])
def test_the_rate_of_each_step_in_a_loop(order: str, caplog: pytest.LogCaptureFixture) -> None:
    """A schedule is stepped after outer.step(), or the rate is noted before; otherwise a warning says what to do."""
    accelerator, model = Accelerator(cpu=True), llama(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
    used = []
    with caplog.at_level(logging.WARNING):
        outer = OuterOptimizer(accelerator, model, optimizer, CO2, link=loopback())
        found = rates_of(outer)
        for _ in range(4):
            used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if order == "noted":
                outer.note_lr()
            if order != "outer first":
                schedule.step()
            outer.step()
            if order == "outer first":
                schedule.step()
        outer.close()
    assert (found == used) == (order != "schedule first")
    assert ("the learning rate went from 1 to 0.875 before the first outer.step()" in caplog.text) == (
        order == "schedule first"
    )
    assert caplog.text.count("outer.note_lr()") == (order == "schedule first"), "said once"


def test_regions_know_each_others_rates(tmp_path: Path) -> None:
    """Whatever the method: the guard judges no norms where rates differ, or it would clip the region with the largest."""

    def body(region: int, link: Link) -> None:
        accelerator, model = Accelerator(cpu=True), llama(layers=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3 if region == 3 else 1e-3)
        config, differ = OuterConfig(method="diloco", sync_interval=2), ["training.learning_rate"]
        settings, journal = RegionConfig(may_differ=differ), tmp_path / str(region)
        outer = OuterOptimizer(accelerator, model, optimizer, config, settings, link=link, journal=journal)
        for step in range(8):
            tokens = batch(region, step)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
        outer.finish()

    run_in_lockstep(4, body)
    for region in range(4):
        text = (tmp_path / str(region)).read_text()
        assert "regions have different learning rates" in text
        assert '"clipped"' not in text


def test_facts_of_several_optimizers() -> None:
    """Regions compare kinds and learning rates of all; those of one optimizer are written as they were."""
    accelerator, model = Accelerator(cpu=True), llama(layers=2)
    assert of_loop(accelerator, model, one(model)).facts["training.optimizer"] == "SGD"
    first, second = halves(model)
    facts = of_loop(
        accelerator, model, [torch.optim.SGD(first, lr=0.5), torch.optim.AdamW(second, lr=0.25)]
    ).facts
    assert facts["training.optimizer"] == ["SGD", "AdamW"]
    assert facts["training.learning_rate"] == [0.5, 0.25]


class Saved(Duck):
    """An optimizer of one's own that can be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("kind", [*KINDS, "registered"])
@pytest.mark.parametrize("prepared", [True, False])
def test_state_that_no_checkpoint_keeps_is_named(
    kind: str, prepared: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Accelerate saves the optimizers that it has prepared, and the objects that were registered."""
    accelerator, model = Accelerator(cpu=True), llama(layers=2)
    made = (KINDS | {"registered": lambda model: Saved(one(model))})[kind](model)
    if prepared and kind == "container":
        made.optimizers = [accelerator.prepare(each) for each in made.optimizers]
    elif prepared:
        made = (
            [accelerator.prepare(each) for each in made]
            if isinstance(made, list)
            else accelerator.prepare(made)
        )
    if kind == "registered":
        accelerator.register_for_checkpointing(made)
    outer = OuterOptimizer(accelerator, model, made, CO2, link=loopback())
    with caplog.at_level(logging.WARNING):
        accelerator.save_state(str(tmp_path / "checkpoint"))
    outer.close()
    is_kept = kind == "registered" or (prepared and "duck" not in kind)
    assert ("save_state does not save all state of" in caplog.text) != is_kept
