"""What a run says of itself at the store."""

from __future__ import annotations

from collections.abc import Callable

from hf_cocodc.meeting import live

RECORD = live.Record(
    run="run 7",
    name="mine",
    epoch=2,
    losses=1,
    members=(
        live.Standing(region=0, ticket=3, address="10.0.0.1:5", step=412, moved_s=0.5, awaits=2),
        live.Standing(region=1, ticket=4, address="10.0.0.1:6", step=398, doing="sends a base to region 3"),
        live.Standing(region=2, ticket=9, address="10.0.0.2:5", step=380, behind=32, moved_s=31),
    ),
    count=4,
    least=2,
    most=5,
    max_steps=800,
    landed_at=400,
    landed_s=1.2,
    hello={"model": {"x": [1]}},
)


def process(region: int) -> Callable[[], tuple[str, int]]:
    """A member as its publisher knows it."""
    return lambda: (RECORD.run, RECORD.members[region].ticket)
