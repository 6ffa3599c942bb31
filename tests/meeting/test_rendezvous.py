"""How regions find each other at a store that outlives runs."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from hf_cocodc.meeting.rendezvous import ACK_S, Roster, rendezvous
from hf_cocodc.meeting.store import connect_store, serve_store


def meet(address: str, late_s: dict[int, float]) -> list[Roster]:
    """Two regions meet, each coming `late_s` after the start."""

    def come(region: int) -> Roster:
        time.sleep(late_s[region])
        store: dist.Store = connect_store(address, 20.0)
        return rendezvous(store, region, 2, {"region": region}, 20.0)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(come, range(2)))


def test_a_run_that_met_leaves_nothing_to_wait_for() -> None:
    """The next run on the same store meets at once, whoever of it comes first, and is another run."""
    store = serve_store("127.0.0.1")
    address = f"127.0.0.1:{store.port}"
    runs = [meet(address, {0: 0.0, 1: 0.0})[0].run]
    for late_s in ({0: 0.0, 1: 0.5}, {0: 0.5, 1: 0.0}):
        start = time.monotonic()
        first, second = meet(address, late_s)
        assert time.monotonic() - start < ACK_S / 2
        assert first == second
        assert first.hellos == [{"region": 0}, {"region": 1}]
        runs.append(first.run)
    assert len(set(runs)) == 3
