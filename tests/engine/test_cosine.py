"""The mean cosine of outer gradients, against the gradients themselves."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_cocodc.engine.account import LOW, ROUNDS, mean_cosine
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.methods import METHODS, Method
from hf_cocodc.parts.codecs import has_radial
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.methods import small
from tests.toys import Blocks

SMALL = small({})


def method_of(name: str) -> Method:
    codec = {} if name == "dilocox" else {"codec": "fp32", "error_feedback": None}
    return from_config(OuterConfig(method=name, sync_interval=6, **{**SMALL[name], **codec}))


def by_hand(gradients: np.ndarray, weights: np.ndarray) -> float:
    """The mean of the cosines of all pairs, each weighted by both lengths and weights."""
    pairs = list(itertools.permutations(range(len(gradients)), 2))
    lengths = weights * np.linalg.norm(gradients, axis=1)
    dots = [weights[i] * weights[j] * gradients[i] @ gradients[j] for i, j in pairs]
    return float(sum(dots) / sum(lengths[i] * lengths[j] for i, j in pairs))


@given(st.integers(2, 5), st.integers(0, 10**6))
def test_the_formula_is_that_of_the_pairs(regions: int, seed: int) -> None:
    draws = np.random.default_rng(seed)
    gradients, weights = draws.normal(size=(regions, 7)), draws.uniform(0.1, 1, size=regions)
    mean = (weights[:, None] * gradients).sum(0) / weights.sum()
    norms = np.linalg.norm(gradients, axis=1).tolist()
    found = mean_cosine(norms, weights.tolist(), weights.sum(), float(np.linalg.norm(mean)))
    assert found == pytest.approx(by_hand(gradients, weights), abs=1e-9)


def test_what_says_nothing() -> None:
    assert mean_cosine([1.0], [1.0], 1.0, 1.0) is None
    assert mean_cosine([1.0, 1.0], [1.0, 0.0], 1.0, 1.0) is None
    assert mean_cosine([1.0, 1.0], [1.0, 1.0], 2.0, 1.0 + 1e-9) == 1.0


def steps_of(region: int, rounds: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(region)
    return torch.randn(rounds, 8, generator=draws) + 1.0


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_knows_its_cosine_or_says_nothing(name: str) -> None:
    """All regions have the same number. The oracle knows that of the first transfer, by the moves of its fragment until then."""
    regions, rounds = 3, 40

    def live(region: int, link: Link) -> list[dict[str, Any]]:
        model = Blocks([torch.zeros(8)] * 4)
        events: list[dict[str, Any]] = []

        def record(kind: str, **facts: Any) -> None:
            if kind == "land":
                events.append(facts)

        sync = Synchronizer(model, method_of(name), link, record=record)
        for step in steps_of(region, rounds):
            with torch.no_grad():
                for vector in model.vectors():
                    vector -= 0.01 * step
            sync.step(0.01)
        return events

    found = run_in_lockstep(regions, live)
    cosines = [[event["cosine"] for event in events] for events in found]
    assert cosines[0] == cosines[1] == cosines[2] and cosines[0]
    if name == "dilocox" or has_radial(method_of(name).codec):  # its codec remembers what it lost
        assert set(cosines[0]) == {None}
        return
    first = found[0][0]
    if name == "eager":  # there is no landing of which only the regions' own steps are known
        assert first["sent_at"] == 0 and None not in cosines[0][1:]
        return
    moves = np.stack(
        [steps_of(region, rounds)[: first["sent_at"]].sum(0).numpy() for region in range(regions)]
    )
    assert cosines[0][0] == pytest.approx(by_hand(moves, np.ones(regions)), abs=1e-4)


@pytest.mark.parametrize("angle", ["apart", "together"])
def test_regions_that_pull_apart_for_long_are_named_once(
    angle: str, caplog: pytest.LogCaptureFixture
) -> None:
    def live(region: int, link: Link) -> list[Any]:
        model = Blocks([torch.zeros(2)])
        notes: list[Any] = []

        def record(kind: str, **facts: Any) -> None:
            notes.extend([facts["message"]] if kind == "note" else [])

        sync = Synchronizer(
            model, from_config(OuterConfig(sync_interval=1, outer_lr=0.1)), link, record=record
        )
        for _ in range(3 * ROUNDS):
            with torch.no_grad():
                model.vectors()[0][region if angle == "apart" else 0] += 1.0
            sync.step(0.01)
        return notes

    with caplog.at_level(logging.WARNING):
        notes = run_in_lockstep(2, live)
    said = [each for each in caplog.messages if "hardly agree" in each]
    assert LOW > 0
    assert len(said) == (angle == "apart")
    assert [len([n for n in each if "hardly agree" in n]) for each in notes] == [len(said)] * 2
