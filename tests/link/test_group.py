"""The ranks of a region wait for their leader, and hear of its end."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hf_cocodc.errors import HandshakeError, LinkError, RegionLostError
from hf_cocodc.link import group as module
from hf_cocodc.link.group import RegionGroup
from tests.link.ranks import ThreadGroup, groups, on_ranks
from tests.processes.forks import TIMEOUT_S, fork, rank_env, torch_master

RANKS = 3
HASTY_S = 1.0


def test_ranks_wait_until_the_leader_is_ready() -> None:
    """Turn by turn; they hear what it tells, however long."""
    ended: list[str] = []

    def slow() -> str:
        time.sleep(0.05)
        ended.append("x" * 10_000)
        return ended[-1]

    def live(group: ThreadGroup) -> list[Any]:
        return [(group.lead(slow, "the transfer", list), group.heard) for _ in range(3)]

    leader, *others = [rank.result() for rank in on_ranks(RANKS, live)]
    heard = list("x" * 10_000)
    assert leader == [("x" * 10_000, heard)] * 3
    assert others == [[(None, heard)] * 3] * 2
    assert len(ended) == 3, "only the leader makes the call"


def test_every_rank_may_speak() -> None:
    def live(group: ThreadGroup) -> list[Any]:
        said = [group.say(rank, {"rank": group.rank}, "a word") for rank in range(RANKS)]
        return [*said, group.begin_largest([group.rank, -group.rank], "numbers").wait()]

    for rank in on_ranks(RANKS, live):
        assert rank.result() == [{"rank": 0}, {"rank": 1}, {"rank": 2}, [2, 0]]


@pytest.mark.parametrize(
    ("error", "heard", "message"),
    [
        (HandshakeError("regions differ"), HandshakeError, "^regions differ$"),
        (RegionLostError(1, "region 1 is lost"), LinkError, "^region 1 is lost$"),
        (ValueError("no such host"), LinkError, "^ValueError: no such host$"),
        (KeyboardInterrupt(), LinkError, "^KeyboardInterrupt: $"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_ranks_hear_of_the_leaders_failure(
    error: BaseException, heard: type[Exception], message: str
) -> None:
    """As the same kind of error where it tells the command what to do, as a failure of the link else."""

    def fail() -> None:
        raise error

    leader, *others = on_ranks(RANKS, lambda group: group.lead(fail, "the transfer"))
    assert leader.exception() is error
    for other in others:
        with pytest.raises(heard, match=message):
            other.result()


def test_a_leader_that_fails_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises its own error soon; a rank that comes later hears of it, too."""
    monkeypatch.setattr(module, "_LAST_MOMENT_S", 0.1)
    raised = threading.Event()

    def live(group: ThreadGroup) -> None:
        if group.rank:
            assert raised.wait(TIMEOUT_S)
        try:
            group.lead(lambda: 1 / 0, "the transfer")
        finally:
            raised.set()

    leader, other = on_ranks(2, live)
    assert isinstance(leader.exception(), ZeroDivisionError)
    with pytest.raises(LinkError, match="ZeroDivisionError"):
        other.result()


def test_a_leader_that_waits_for_the_others_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where only one rank makes a call, nothing else would tell why the region stands still. Of a late leader it does not."""
    monkeypatch.setattr(module, "_LATE_S", 0.3)

    def live(group: ThreadGroup, late: int) -> None:
        if group.rank == late and group.rank:
            time.sleep(1.0)
        group.lead(lambda: time.sleep(0.0 if late else 1.0), "the global weights")

    for late, expected in (
        (0, []),
        (1, ["rank 0 has waited 0.3 s for other ranks of its region to come to the global weights."]),
    ):
        caplog.clear()
        for rank in on_ranks(2, functools.partial(live, late=late)):
            rank.result()
        assert [line.split(" All ranks")[0] for line in caplog.messages] == expected


def test_signals_are_heard_while_a_rank_waits() -> None:
    """The leader's call ends only after the handler of another rank has run."""
    heard = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.set())

    def call() -> bool:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        return heard.wait(TIMEOUT_S)

    leader, other = groups(2)
    try:
        with ThreadPoolExecutor(1) as pool:
            leads = pool.submit(lambda: leader().lead(call, "the transfer"))
            other().lead(call, "the transfer")
            assert leads.result()
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_long(folder: str) -> None:
    """A rank of a region that does not know patience; its leader waits for longer."""
    distributed_c10d.default_pg_timeout = timedelta(seconds=HASTY_S)
    Path(folder, f"begun-{os.environ['RANK']}").touch()
    while len(list(Path(folder).glob("begun-*"))) < 2:  # the meeting itself has no longer than any operation
        time.sleep(0.001)
    dist.init_process_group("gloo", timeout=timedelta(seconds=HASTY_S))
    group = RegionGroup()
    group.lead(lambda: time.sleep(3 * HASTY_S), "a late region")
    if group.rank:
        time.sleep(2 * HASTY_S)
    assert group.begin_largest([group.rank], "a late rank").wait() == [1]
    dist.all_reduce(torch.ones(1))
    Path(folder, str(group.rank)).touch()
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_leader_that_waits_long_ends_no_rank(tmp_path: Path) -> None:
    """For longer than any operation of the region's own processes may take."""
    live(wait_long, 2, tmp_path)
    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}


def outlive(folder: str, victim: int, call: str) -> None:
    """A rank of a region that loses one while the others wait. None ends before all have heard of it."""
    dist.init_process_group("gloo")
    group, began = RegionGroup(), time.monotonic()
    for turn in range(2):
        if turn and group.rank == victim:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if call == "lead":
                group.lead(lambda: None, "fragment 0")
            else:
                group.begin_largest([0], "the end of step 7").wait()
        except LinkError as error:
            Path(folder, str(group.rank)).write_text(str(error))
    with contextlib.suppress(OSError):
        while time.monotonic() < began + TIMEOUT_S / 3 and len(list(Path(folder).glob("?"))) < 3:
            time.sleep(0.02)
    os._exit(0)


@pytest.mark.parametrize(("victim", "call"), [(0, "lead"), (2, "step")])
def test_a_rank_that_is_killed_is_noticed_by_all(victim: int, call: str, tmp_path: Path) -> None:
    """At once, and by each without the help of another. Of four ranks, some are no neighbors."""
    live(outlive, 4, tmp_path, victim, call, exitcodes={0: -signal.SIGKILL if call == "lead" else 0})
    others = [rank for rank in range(4) if rank != victim]
    said = {rank: (tmp_path / str(rank)).read_text() for rank in others}
    if call == "lead":
        what = "the leader (rank 0) of this region has ended while rank {} waited for fragment 0. Look at its last output."
    else:
        what = "another rank of this region has ended while rank {} waited for the end of step 7. Look at its last output."
    assert said == {rank: what.format(rank) for rank in others}


def live(
    body: Callable[..., None],
    num_ranks: int,
    folder: Path,
    *args: Any,
    exitcodes: dict[int, int] | None = None,
) -> None:
    """Run a region's ranks, in processes of their own."""
    master, log = torch_master(), folder / "log"
    ranks = [
        fork(body, str(folder), *args, log=log, **rank_env(master, rank, num_ranks))
        for rank in range(num_ranks)
    ]
    for rank, process in enumerate(ranks):
        process.join(TIMEOUT_S)
        expected = {0: 0, **(exitcodes or {})}.get(rank)
        assert process.exitcode == expected or expected is None, log.read_text()[-4000:]
