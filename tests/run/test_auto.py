"""`outer_lr: auto` and `outer_momentum: auto` are the values of our studies, and a momentum that is too much is said."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.auto import MEASURED, too_few_rounds, warnings_of
from hf_cocodc.errors import InputError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.methods import Method, diloco
from hf_cocodc.newer import known
from hf_cocodc.resolve import from_config, settings
from hf_cocodc.settings.outer import AUTO, AUTO_VALUES, FOLLOWING
from hf_cocodc.training.simulation import simulate
from tests.methods import of_paper
from tests.toys import llama, params_of, train_loop

BOTH: dict[str, Any] = {"outer_lr": AUTO, "outer_momentum": AUTO}
NUMBERS: dict[str, Any] = {**AUTO_VALUES["diloco"]}


def own(*, sync_interval: int = 10, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Method:
    """A method of a user's own, whose settings have the names of ours."""
    return diloco(sync_interval=sync_interval, outer_lr=outer_lr, outer_momentum=outer_momentum)


class Run:
    """A region of a plain loop."""

    def __init__(self, link: Link, steps: int, **config: Any) -> None:
        self.accelerator = Accelerator(cpu=True)
        model = llama(link.region)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        outer = OuterConfig(**{"sync_interval": 1, **config})
        self.outer = OuterOptimizer(
            self.accelerator, self.model, self.optimizer, outer, max_steps=steps, link=link
        )

    def train(self, until: int) -> Tensor:
        train_loop(self.accelerator, self.model, self.optimizer, self.outer, until)
        return params_of(self.model)


@pytest.mark.parametrize("method", known())
def test_runs_have_the_values_that_were_measured(method: str) -> None:
    """Of every method of this package, and only what the method has; in what regions compare, too."""
    takes = [name for name in FOLLOWING if name in settings(OuterConfig(method=method))]
    config = OuterConfig(method=method, sync_interval=10, **dict.fromkeys(takes, AUTO))
    assert list(AUTO_VALUES[method]) == takes
    numbers = OuterConfig(method=method, sync_interval=10, **AUTO_VALUES[method])
    assert settings(config) == settings(numbers)
    from_config(config)


@pytest.mark.parametrize("method", ["eager", "co2", "dilocox"])
def test_a_delay_of_one_round_never_has_the_momentum_of_papers(method: str) -> None:
    """At 128 rounds, eager updates reached 2.92 with 0.9, and 2.35 without momentum."""
    assert AUTO_VALUES[method]["outer_momentum"] == 0.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"outer_lr": AUTO, "outer_momentum": 0.9},
            "outer.outer_lr=auto, but outer.outer_momentum=0.9: one value is good only with",
        ),
        ({"outer_momentum": AUTO, "outer_lr": 1}, "outer.outer_momentum=auto, but outer.outer_lr=1.0"),
        (
            {**BOTH, "method": "sparseloco"},
            "outer.outer_momentum='auto' has no meaning for method=sparseloco",
        ),
        ({**BOTH, "method": f"{__name__}:own"}, "known of this package's methods"),
        ({"outer_lr": "much"}, "outer.outer_lr='much' must be positive, or auto"),
        ({"outer_momentum": 1}, r"outer.outer_momentum=1.0 must lie in \[0, 1\), or be auto"),
    ],
)
def test_auto_that_means_nothing_is_refused(given: dict[str, Any], message: str) -> None:
    """Before anything else happens."""
    with pytest.raises(InputError, match=message):
        from_config(OuterConfig(**given))


def test_a_run_with_auto_is_the_run_with_its_numbers() -> None:
    """Bit for bit; and they matter, or the test would mean nothing."""

    def trained(**config: Any) -> tuple[Tensor, dict[str, Any]]:
        def body(region: int, link: Link) -> tuple[Tensor, dict[str, Any]]:
            run = Run(link, 6, **config)
            run.train(6)
            run.outer.finish()
            return params_of(run.model), run.outer.settings

        return simulate(body, regions=2)[0]

    auto, of_auto = trained(**BOTH)
    numbers, of_numbers = trained(**NUMBERS)
    assert torch.equal(numbers, auto)
    assert of_numbers == of_auto
    assert torch.equal(trained()[0], auto)
    assert not torch.equal(trained(**of_paper("diloco"))[0], auto)


def test_one_region_may_write_auto_and_another_its_numbers() -> None:
    """They are the same settings."""

    def body(region: int, link: Link) -> Tensor:
        return Run(link, 3, **(BOTH if region else NUMBERS)).train(3)

    simulate(body, regions=2)


@pytest.mark.parametrize(
    ("given", "steps", "warns"),
    [
        ({"outer_momentum": 0.9}, 10 * MEASURED, True),
        ({"outer_momentum": 0.9}, 10 * (MEASURED + 1), False),
        ({"outer_momentum": 0.9, "method": "eager"}, 10 * MEASURED, True),
        (BOTH, 10 * MEASURED, False),
        ({"outer_momentum": 0.6}, 10, False),
        ({"outer_momentum": 0.6, "outer_lr": 0.4}, 10, False),
        ({"outer_momentum": 0.0, "outer_lr": 2.0}, 10, False),
        (BOTH, 10, False),
        ({}, 10, False),
        (of_paper("diloco"), 10, True),
        ({"outer_lr": 0.7}, 10, True),
        ({}, None, False),
        ({}, -1, False),
        ({"method": "co2"}, 10, False),
        ({"method": "muloco"}, 10, False),
        ({"method": f"{__name__}:own"}, 10, False),
    ],
)
def test_a_momentum_that_is_too_much_for_the_run_is_said(
    given: dict[str, Any], steps: int | None, warns: bool
) -> None:
    """With the values that were measured to be better."""
    said = too_few_rounds(OuterConfig(**{"sync_interval": 10, **given}), steps)
    assert (said is not None) == warns
    if said is not None:
        assert steps is not None
        values = AUTO_VALUES[given.get("method", "diloco")]
        better = " and ".join(f"outer.{name}={value:g}" for name, value in values.items())
        assert f"inner steps have {steps // 10 or 'not even one'}. In so short a run" in said
        assert better in said


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (60, "60 inner steps are less than one round of outer.sync_interval=100"),
        (199, "are one round"),
        (200, None),
    ],
)
def test_a_run_of_hardly_any_round_is_said(steps: int, said: str | None) -> None:
    """Its held-out loss stays as it was before training, and nothing else tells why."""
    found = " ".join(warnings_of(OuterConfig(method="streaming", outer_lr=0.6, outer_momentum=0.4), steps))
    assert (said is None) == (found == "")
    assert said is None or (said in found and "Lower outer.sync_interval" in found)
    assert not warnings_of(OuterConfig(method=f"{__name__}:own"), steps)


def test_the_first_region_alone_warns(caplog: pytest.LogCaptureFixture) -> None:
    """All have the same settings, and one person reads what they say."""

    def body(region: int, link: Link) -> None:
        Run(link, 6, outer_lr=0.7, outer_momentum=0.9)

    with caplog.at_level(logging.WARNING, "hf_cocodc"):
        simulate(body, regions=3)
    assert caplog.text.count("the momentum remembers 10 rounds") == 1, caplog.text


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        ({"method": "eager", "num_fragments": 2, "fragment_pattern": "strided"}, True),
        ({"method": "eager", "num_fragments": 1, "fragment_pattern": "strided"}, False),
        ({"method": "eager"}, False),
        ({"method": "streaming", "num_fragments": 2}, False),
        ({"method": f"{__name__}:own"}, False),
    ],
)
def test_eager_updates_of_fragments_are_said_once(
    given: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With what their paper measured: overlap costs loss there, and hardly any on the whole model."""
    config = {"sync_interval": 2, "outer_lr": 0.6, "outer_momentum": 0.0, **given}
    [said] = warnings_of(OuterConfig(**config), 100) or [""]
    assert said.startswith("outer.method=eager with outer.num_fragments=2: in its paper (2502.12996") == warns
    assert ("2.71 against 2.67" in said and "2.69 against 2.68" in said) == warns
    if given["method"] != "eager":
        return

    def body(region: int, link: Link) -> None:
        Run(link, 6, **config)

    with caplog.at_level(logging.WARNING, "hf_cocodc"):
        simulate(body, regions=2)
    assert caplog.text.count("2.71 against 2.67") == int(warns), caplog.text


def test_a_run_warns_before_it_trains(caplog: pytest.LogCaptureFixture) -> None:
    """DiLoCo's own values are for many rounds."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "hf_cocodc"):
        OuterOptimizer(
            Accelerator(cpu=True),
            model,
            optimizer,
            OuterConfig(sync_interval=10, **of_paper("diloco")),  # type: ignore[arg-type]
            max_steps=100,
            link=loopback(),
        ).close()
    assert "the momentum remembers 10 rounds, and 100 inner steps have 10." in caplog.text
