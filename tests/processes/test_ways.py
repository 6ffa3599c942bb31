"""Regions that others cannot call, in real processes: training, and joining, over connections that the other end has made."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.net.storages import folder_url
from tests.processes.coming_worker import events, loop
from tests.processes.test_coming_and_going import Run
from tests.processes.test_storage import InStorage
from tests.secret import secret

STEPS = 200
NOWHERE = "127.0.0.1:1"


def behind_a_router(hidden: int, *arguments: Any, **regions: Any) -> None:
    """A region; the one with the number `hidden` announces an address that answers nobody."""
    is_hidden = os.environ["HF_COCODC_REGION"] == str(hidden)
    loop(*arguments, announce=NOWHERE if is_hidden else None, max=3, **regions)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [0, 2])
def test_a_region_that_nobody_can_call_trains_and_joins(hidden: int, tmp_path: Path) -> None:
    """It gives a base to the newcomer, or is the newcomer: all end equal."""
    run = Run(tmp_path, 2, partial(behind_a_router, hidden), STEPS, 0.2, "streaming", 1)
    run.wait_for_step(0, 3)
    run.start(2, join=True)
    run.wait_for_join(2)
    found = run.results(0, 1, 2)
    for other in found[1:]:
        assert torch.equal(found[0]["weights"], other["weights"])


def behind_routers(*arguments: Any, **regions: Any) -> None:
    """A region that nobody can call."""
    loop(*arguments, announce=NOWHERE, max=3, **regions)


@pytest.mark.slow
def test_regions_that_nobody_can_call_train_and_join_through_a_storage(tmp_path: Path) -> None:
    """The journal says so."""
    file, url = tmp_path / "secret", folder_url(tmp_path / "storage")
    file.write_text(secret())
    file.chmod(0o600)
    body = partial(behind_routers, secret_file=str(file))
    run = Run(tmp_path, 2, body, STEPS, 0.2, "streaming", 1, coordinator=InStorage(url))
    run.wait_for_step(0, 3)
    run.start(2, join=True)
    run.wait_for_join(2)
    found = run.results(0, 1, 2)
    for other in found[1:]:
        assert torch.equal(found[0]["weights"], other["weights"])
    for region in range(3):
        told = [each["ways"] for each in events(tmp_path, region, "ways")]
        assert told[-1] == {str(other): "storage" for other in range(3) if other != region}
    assert [each["members"] for each in events(tmp_path, 0, "epoch")] == [[0, 1], [0, 1, 2]]
