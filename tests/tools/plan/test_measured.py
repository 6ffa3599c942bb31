"""Forecasts against the trainings of `tests.benchmarks.plan`, as they were measured."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hf_cocodc.tools.bench.report import read
from hf_cocodc.tools.plan.forecast import Subject
from hf_cocodc.tools.plan.speeds import Speeds
from tests.benchmarks.plan import CELLS, LINKS, PACE_S, RESULTS, Cell, config_of, subject_of

SPEEDS = Speeds(
    encode={"fp32": 4e-11, "bf16": 3e-10, "int8": 1e-9, "fp4": 2e-9, "lowrank": 5e-9},
    decode={"fp32": 2e-10, "bf16": 4e-10, "int8": 6e-10, "fp4": 2e-9, "lowrank": 2e-9},
    send=1.5e-9,
    land={"replace": 1.5e-9, "mix": 4e-9, "compensate": 8e-9},
)
"""Of a core of that machine while nothing else ran: the benchmark does not keep what it has measured of them."""
ROWS: list[dict[str, Any]] = read(RESULTS)[0]["rows"]


@functools.cache
def subject(link: str) -> Subject:
    place = LINKS[link]
    return subject_of(place.link, PACE_S, SPEEDS, place.regions)


@pytest.mark.parametrize(("cell", "row"), list(zip(CELLS, ROWS, strict=True)))
def test_a_forecast_is_within_a_tenth_of_what_was_measured(cell: Cell, row: dict[str, Any]) -> None:
    config = config_of(cell)
    assert (row["link"], row["method"], row["overlap"]) == (cell.link, config.method, config.overlap_steps)
    assert subject(cell.link).course(config).utilization == pytest.approx(row["measured"], rel=0.1)
