"""Strangers who reach the ports of a run that trains: they end nothing, and change no number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.processes.coming_worker import events, loop
from tests.processes.coordinators import CoordinatorProcess
from tests.processes.strangers import (
    FEW_FILES,
    GARBAGE,
    HALF_OPEN,
    knocking,
    ports_of,
    strangers,
    with_few_files,
)
from tests.processes.test_coming_and_going import Run
from tests.secret import secret

STEPS = 30


def weights(run: Run) -> list[torch.Tensor]:
    return [each["weights"] for each in run.results(0, 1)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """What two regions come to that nobody else reaches."""
    return weights(Run(tmp_path_factory.mktemp("undisturbed"), 2, loop, STEPS, 0.0, "streaming", None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("least", "body", "link"),
    [(None, with_few_files, "tcp"), (1, with_few_files, "tcp"), (1, loop, "gloo")],
    ids=["fixed", "elastic", "gloo"],
)
def test_strangers_change_no_number(
    least: int | None,
    body: Callable[..., None],
    link: str,
    undisturbed: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    """Garbage and silence at every port of both processes and of the coordinator, while they train: the same bits as without.

    At each port there are more strangers than a process may open files; but gloo ends a process that can open no more.
    """
    assert GARBAGE + HALF_OPEN > FEW_FILES
    run = Run(tmp_path, 2, body, STEPS, 0.2, "streaming", least, link=link)
    for region in range(2):
        run.wait_for_step(region, 3)
    ports = ports_of(*(process.pid for process in run.processes.values()))
    assert len(ports) >= 2, "that of each region"
    with strangers([*ports, run.coordinator.port]) as answered:
        for region in range(2):
            run.wait_for_step(region, 20)
        found = weights(run)
    assert all(each > FEW_FILES for each in answered.values()), "the strangers were there"
    for ours, theirs in zip(found, undisturbed, strict=True):
        assert torch.equal(ours, theirs)


def calm(folder: Path, *regions: int) -> bool:
    """Whether nobody was late or had to come back, and nobody missed the coordinator."""
    logs = [(folder / f"log-{region}.txt").read_text() for region in regions]
    late = [event for region in regions for event in events(folder, region, "late", "retry")]
    return not late and not any("does not answer" in log for log in logs)


@pytest.mark.slow
def test_a_newcomer_joins_while_strangers_knock(tmp_path: Path) -> None:
    """At every port of the members, of the newcomer and of the coordinator, from before it starts until it is in: all end
    equal, and the strangers make nobody late."""
    own = secret()
    (tmp_path / "secret").write_text(own)
    (tmp_path / "secret").chmod(0o600)
    body = partial(loop, secret_file=str(tmp_path / "secret"), max=3)
    with CoordinatorProcess(tmp_path, secret=own) as coordinator:
        run = Run(tmp_path, 2, body, 400, 0.1, "streaming", 1, coordinator=coordinator)
        run.wait_for_step(1, 8)

        def ports() -> list[int]:
            pids = [process.pid for process in run.processes.values() if process.is_alive()]
            return [coordinator.port, *ports_of(*filter(None, pids))]

        with strangers([coordinator.port], 1000, 1000), knocking(ports) as came:
            run.start(2, join=True)
            run.wait_for_join(2)
        assert len(came) >= 4, "the coordinator, and each region"
        found = [each["weights"] for each in run.results(0, 1, 2)]
    assert all(torch.equal(found[0], each) for each in found)
    assert [each["members"] for each in events(tmp_path, 0, "epoch")] == [[0, 1], [0, 1, 2]]
    assert calm(tmp_path, 0, 1, 2)
