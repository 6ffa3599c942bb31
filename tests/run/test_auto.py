"""`outer_lr: auto` and `outer_momentum: auto` follow the rounds of a run, and stay as they are when it is made longer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.auto import MEASURED, MEDIUM, MEDIUM_RUN, SHORT_RUN, for_rounds, too_few_rounds, values_for
from hf_cocodc.errors import HandshakeError, InputError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.methods import Method, diloco
from hf_cocodc.newer import known
from hf_cocodc.resolve import from_config, settings
from hf_cocodc.settings.outer import AUTO, FOLLOWING
from hf_cocodc.snapshot import checkpoint as disk
from hf_cocodc.training.simulation import simulate
from tests.toys import llama, params_of, train_loop

BOTH: dict[str, Any] = {"outer_lr": AUTO, "outer_momentum": AUTO}
SHORT = tuple(SHORT_RUN["diloco"].values())


def own(*, sync_interval: int = 10, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Method:
    """A method of a user's own, whose settings have the names of ours."""
    return diloco(sync_interval=sync_interval, outer_lr=outer_lr, outer_momentum=outer_momentum)


def values(config: OuterConfig) -> tuple[Any, ...]:
    return config.outer_lr, config.outer_momentum


class Run:
    """A region of a plain loop, which begins with a checkpoint or loads it."""

    def __init__(
        self, link: Link, steps: int, folder: Path | None = None, how: str = "", **config: Any
    ) -> None:
        self.accelerator = Accelerator(cpu=True)
        model = llama(link.region)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        given: dict[str, Any] = {"max_steps": steps, "link": link}
        checkpoint = "" if folder is None else str(folder / f"{link.region}")
        if how == "saved":
            self.accelerator.load_state(checkpoint)
            given["saved"] = disk.read(Path(checkpoint))
        outer = OuterConfig(sync_interval=1, **config)
        self.outer = OuterOptimizer(self.accelerator, self.model, self.optimizer, outer, **given)
        if how == "load_state":
            self.accelerator.load_state(checkpoint)

    def train(self, until: int) -> Tensor:
        train_loop(self.accelerator, self.model, self.optimizer, self.outer, until)
        return params_of(self.model)


@pytest.mark.parametrize("method", known())
def test_runs_have_the_values_that_were_measured(method: str) -> None:
    """Of every method of this package, and only what the method has. No study says when the papers' values are better."""
    takes = [name for name in FOLLOWING if name in settings(OuterConfig(method=method))]
    config = OuterConfig(method=method, sync_interval=10, **dict.fromkeys(takes, AUTO))
    assert list(SHORT_RUN[method]) == takes
    medium = MEDIUM.get(method, SHORT_RUN[method])
    for steps, expected in (
        (10**6, medium),
        (10 * MEDIUM_RUN, medium),
        (10 * MEDIUM_RUN - 1, SHORT_RUN[method]),
    ):
        found = for_rounds(config, steps)
        assert {name: getattr(found, name) for name in takes} == {name: expected[name] for name in takes}
        assert for_rounds(found, None) is found
        from_config(found)


@pytest.mark.parametrize("method", ["eager", "co2", "dilocox"])
def test_a_delay_of_one_round_never_has_the_momentum_of_papers(method: str) -> None:
    """At 128 rounds, eager updates reached 2.92 with 0.9, and 2.35 without momentum."""
    for rounds in (1, 127, 128, 129, 10**6):
        assert values_for(method, rounds)["outer_momentum"] == 0.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"outer_lr": AUTO},
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


def test_auto_needs_the_length_of_the_run() -> None:
    """Nobody else could say how many rounds there are."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="outer.outer_lr and outer.outer_momentum=auto follows the number"):
        OuterOptimizer(Accelerator(cpu=True), model, optimizer, OuterConfig(**BOTH), link=loopback())


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
    numbers, of_numbers = trained(**dict(zip(FOLLOWING, SHORT, strict=True)))
    assert torch.equal(numbers, auto)
    assert of_numbers == of_auto
    assert not torch.equal(trained()[0], auto)


def test_regions_write_auto_alike() -> None:
    """In a run that is made longer auto is what the checkpoint says, and a number is a number: they would part in silence."""

    def body(region: int, link: Link) -> None:
        Run(link, 6, **(BOTH if region else dict(zip(FOLLOWING, SHORT, strict=True))))

    with pytest.raises(HandshakeError, match=r"outer.outer_(lr|momentum)"):
        simulate(body, regions=2)


@pytest.mark.parametrize("how", ["load_state", "saved"])
def test_a_run_that_is_made_longer_keeps_its_values(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As if the numbers stood in its recipe; the run warns of no change."""

    def first(region: int, link: Link) -> None:
        run = Run(link, 3, **BOTH)
        run.train(2)
        run.accelerator.save_state(str(tmp_path / f"{region}"))
        run.train(3)
        run.outer.finish()

    def longer(region: int, link: Link) -> tuple[Tensor, dict[str, Any]]:
        run = Run(link, MEDIUM_RUN, tmp_path, how, **BOTH)
        assert run.outer.inner_step == 2
        return run.train(5), run.outer.settings

    def with_numbers(region: int, link: Link) -> Tensor:
        given = dict(zip(FOLLOWING, SHORT, strict=True))
        return Run(link, MEDIUM_RUN, tmp_path, how, **given).train(5)

    simulate(first, regions=2)
    written = json.loads((tmp_path / "0" / "cocodc" / "state.json").read_text(encoding="utf-8"))["settings"]
    assert tuple(written[name] for name in FOLLOWING) == SHORT
    with caplog.at_level(logging.INFO, "hf_cocodc"):
        end, found = simulate(longer, regions=2)[0]
    assert "when the checkpoint was written" not in caplog.text
    assert "outer.outer_momentum=auto is 0.0, as in the checkpoint" in caplog.text
    assert found == written
    assert torch.equal(end, simulate(with_numbers, regions=2)[0])
    assert values(for_rounds(OuterConfig(sync_interval=1, **BOTH), MEDIUM_RUN)) == tuple(
        MEDIUM["diloco"].values()
    )


@pytest.mark.parametrize(
    ("given", "steps", "warns"),
    [
        ({"outer_momentum": 0.9}, 10 * MEASURED, True),
        ({"outer_momentum": 0.9}, 10 * (MEASURED + 1), False),
        ({"outer_momentum": 0.9, "method": "eager"}, 10 * MEASURED, True),
        (BOTH, 10 * MEASURED, False),
        ({"outer_momentum": 0.6}, 10 * MEDIUM_RUN - 10, True),
        ({"outer_momentum": 0.6}, 10 * MEDIUM_RUN, False),
        ({"outer_momentum": 0.6, "outer_lr": 0.4}, 10, False),
        ({"outer_momentum": 0.0, "outer_lr": 2.0}, 10, False),
        (BOTH, 10, False),
        ({}, 10, True),
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
        values = values_for(given.get("method", "diloco"), steps // 10)
        better = " and ".join(f"outer.{name}={value:g}" for name, value in values.items())
        assert f"inner steps are {steps // 10 if steps else 0}. In so short a run" in said
        assert better in said


def test_the_first_region_alone_warns(caplog: pytest.LogCaptureFixture) -> None:
    """All have the same settings, and one person reads what they say."""

    def body(region: int, link: Link) -> None:
        Run(link, 6, outer_lr=0.7, outer_momentum=0.9)

    with caplog.at_level(logging.WARNING, "hf_cocodc"):
        simulate(body, regions=3)
    assert caplog.text.count("the momentum remembers 10 rounds") == 1, caplog.text


def test_a_run_warns_before_it_trains(caplog: pytest.LogCaptureFixture) -> None:
    """DiLoCo's own values are for many rounds, and someone who fine-tunes gives none."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "hf_cocodc"):
        OuterOptimizer(
            Accelerator(cpu=True),
            model,
            optimizer,
            OuterConfig(sync_interval=10),
            max_steps=100,
            link=loopback(),
        ).close()
    assert "the momentum remembers 10 rounds, and 100 inner steps are 10." in caplog.text
