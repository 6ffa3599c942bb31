"""The ranks of a region wait for their leader at a store of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from hf_cocodc.errors import HandshakeError, LinkError, RegionLostError
from hf_cocodc.meeting.region_store import RegionStore
from hf_cocodc.meeting.store import serve_store

RANKS = 3


def on_ranks(call: Callable[[], Any], turns: int = 1) -> tuple[list[Future], Any]:
    """`lead` with this call, on a leader and two other ranks; what each came to, and the store."""
    server = serve_store("127.0.0.1")

    def live(rank: int) -> list[Any]:
        store = RegionStore(f"127.0.0.1:{server.port}", rank, RANKS, server if rank == 0 else None)
        return [store.lead(call, "the transfer") for _ in range(turns)]

    with ThreadPoolExecutor(RANKS) as pool:
        return [pool.submit(live, rank) for rank in range(RANKS)], server


def test_ranks_wait_until_the_leader_is_ready() -> None:
    """Turn by turn; no turn leaves a key in the store."""
    ended: list[float] = []

    def slow() -> str:
        time.sleep(0.05)
        ended.append(time.monotonic())
        return "done"

    (leader, *others), server = on_ranks(slow, turns=3)
    assert leader.result() == ["done"] * 3
    assert all(other.result() == [None] * 3 for other in others)
    assert len(ended) == 3, "only the leader makes the call"
    assert server.num_keys() <= 1, "torch keeps one of its own"


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

    (leader, *others), _ = on_ranks(fail)
    assert isinstance(leader.exception(), type(error))
    for other in others:
        with pytest.raises(heard, match=message):
            other.result()


def test_a_leader_that_dies_is_noticed() -> None:
    """Ranks that wait for it name it."""
    servers = [serve_store("127.0.0.1")]
    store = RegionStore(f"127.0.0.1:{servers[0].port}", 1, RANKS)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(store.lead, lambda: None, "fragment 0")
        time.sleep(0.05)
        servers.clear()
        with pytest.raises(LinkError, match=r"the leader \(rank 0\) .* while rank 1 waited for fragment 0"):
            waits.result(timeout=30)
