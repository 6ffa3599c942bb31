"""Forecasts against the trainings of `tests.benchmarks.plan`, as they were measured on CPUs."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hf_cocodc.tools.bench.report import read
from hf_cocodc.tools.plan.forecast import Subject
from hf_cocodc.tools.plan.speeds import CORE
from tests.benchmarks.plan import CELLS, LINKS, PACE_S, RESULTS, Cell, config_of, subject_of

ROWS: list[dict[str, Any]] = read(RESULTS)[0]["rows"]


@functools.cache
def subject(link: str) -> Subject:
    place = LINKS[link]
    return subject_of(place.link, PACE_S, CORE, place.regions)


@pytest.mark.parametrize(("cell", "row"), list(zip(CELLS, ROWS, strict=True)))
def test_a_forecast_is_within_a_tenth_of_what_was_measured(cell: Cell, row: dict[str, Any]) -> None:
    config = config_of(cell)
    assert (row["link"], row["method"], row["overlap"]) == (cell.link, config.method, config.overlap_steps)
    assert subject(cell.link).course(config).utilization == pytest.approx(row["measured"], rel=0.1)
