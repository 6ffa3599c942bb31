"""How a region comes back, and how long a round is for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.errors import DonorLost, LeftBehind
from hf_cocodc.methods import Method, diloco
from hf_cocodc.run.elastic import Elastic
from hf_cocodc.run.newcomer import JoiningRank
from tests.toys import Blocks


def own() -> Method:
    return diloco(sync_interval=4)


def own_or_never(*, sync_interval: int | None = None) -> Method:
    return diloco(sync_interval=4)


CASES = [
    (OuterConfig(sync_interval=4), 4.0),
    (OuterConfig(method=own), 4.5),
    (OuterConfig(method=own_or_never), 4.5),
]


@pytest.mark.parametrize(("config", "after_9"), CASES)
def test_a_round_is_as_long_as_its_setting_or_as_rounds_were(config: Any, after_9: float) -> None:
    """A method of a user's own need have no sync_interval: then landings say it; and before the first one, nothing is 0."""
    model = Blocks([torch.zeros(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = OuterOptimizer(Accelerator(cpu=True), model, optimizer, config, max_steps=20)
    assert outer.training.round_steps >= 1
    for _ in range(9):
        outer.step()
    assert outer.training.round_steps == after_9
    outer.close()


def test_a_region_that_is_missed_again_as_it_comes_in_comes_back_once_more() -> None:
    """The others wait for more regions, and have gone on without this one while it waited with them."""
    marker = SimpleNamespace(held=True, members=(1,))
    holds = [LeftBehind("late once"), LeftBehind("late twice"), None]
    behind: list[str] = []

    def hold() -> None:
        error = holds.pop(0)
        if error is not None:
            raise error

    def come_back(error: LeftBehind) -> Any:
        behind.append(str(error))
        return marker

    newcomer = SimpleNamespace(come_back=come_back, stand_in=lambda: None)
    elastic: Any = SimpleNamespace(_least=3, _hold=hold, _newcomer=newcomer)
    Elastic._is_in(elastic, marker)  # type: ignore[arg-type]
    assert behind == ["late once", "late twice"]


def test_a_newcomer_whose_donor_is_gone_before_its_first_batch_asks_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch may take long, and the ranks of a sharded region open their logs only then."""
    training: Any = SimpleNamespace(link=SimpleNamespace(region=1), inner_step=7)
    rank, done = JoiningRank(training, tmp_path), []

    def follow_log() -> None:
        raise DonorLost("region 0 sends this rank no log.")

    monkeypatch.setattr(rank, "_forget_base", lambda: None)
    monkeypatch.setattr(rank, "_follow_log", follow_log)
    monkeypatch.setattr(rank, "_begin_again", lambda keep: done.append(keep))
    monkeypatch.setattr(rank, "_follow", lambda before, is_new: done.append((before, is_new)))
    rank.begin()
    assert done == [False, (7, True)]
