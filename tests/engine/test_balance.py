"""What a region notes of the deals of the global batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hf_cocodc.engine.balance import Balance, Batch
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.parts.deal import FIXED, ROUNDS


def test_a_later_deal_that_is_too_coarse_is_noted_too() -> None:
    """Two regions of four micro-batches are equally fast, until one becomes so slow that even one micro-batch is too much."""
    noted: list[tuple[str, dict[str, Any]]] = []
    balance = Balance(FIXED, Batch(4, 1), loopback(), lambda kind, **facts: noted.append((kind, facts)))

    def land(step: int, *speeds: float) -> None:
        """Both regions have heard how long an inner step takes each of them."""
        dealt = [facts["samples"] for kind, facts in noted if kind == "deal"]
        samples = dealt[-1].values() if dealt else (4, 4)
        trailers = [
            SimpleNamespace(step_time_s=count / speed, samples=count, unit=1)
            for count, speed in zip(samples, speeds, strict=True)
        ]
        arrival: Any = SimpleNamespace(members=(0, 1), trailers=trailers)
        balance.hear(arrival, step, num_fragments=1)

    land(10, 4.0, 4.0)
    assert not noted
    for number in range(ROUNDS):
        land(20 + number, 4.0, 0.1)
    (deal, facts), (note, told) = noted
    assert (deal, facts["samples"]) == ("deal", {"0": 7, "1": 1})
    assert (note, told["step"]) == ("note", 20 + ROUNDS - 1) and "ask for a finer deal" in told["message"]
    land(30, 4.0, 0.1)
    assert len(noted) == 2
