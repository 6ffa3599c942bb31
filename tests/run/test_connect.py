"""How the ranks of a region find the store that the region has for itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hf_cocodc.run import connect

ELSEWHERE = "203.0.113.1"  # reserved for examples: no machine has it


@pytest.mark.parametrize(
    ("master", "on_this_machine"), [(ELSEWHERE, 2), ("127.0.0.2", 1), ("127.0.0.1", 1)], ids=str
)
def test_ranks_reach_the_store_of_their_region(
    master: str, on_this_machine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one machine through the loopback, whatever the launcher calls the machine; on several at the leader's address."""
    said: list[Any] = []
    monkeypatch.setattr(connect, "broadcast_object_list", lambda own: said or said.extend(own) or own)
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_this_machine))
    leader, other = (
        connect._region_store(SimpleNamespace(num_processes=2, process_index=rank, is_main_process=not rank))
        for rank in range(2)
    )
    assert leader is not None and other is not None
    assert leader.lead(lambda: "met", "the meeting") == "met"
    assert other.lead(lambda: "met", "the meeting") is None
