"""What all regions tell each other at one moment arrives by region."""

from __future__ import annotations

from typing import NamedTuple

from hf_cocodc.links.base import Link
from hf_cocodc.links.lockstep import run_in_lockstep
from hf_cocodc.links.spreading import gather, spread, spread_all


class Told(NamedTuple):
    """A number."""

    number: int


def test_everybody_has_everybodys_record_and_bytes() -> None:
    """Texts of any length, also empty ones, and of lengths that are no multiple of four."""

    def tell(region: int, link: Link) -> tuple[dict, dict, bytes, bytes]:
        own = b"12345"[: 2 * region]
        found = spread(link, 2, own, "one text"), spread(link, None, own or b"of 0", "the first's")
        return gather(link, Told(10 + region), "numbers"), spread_all(link, own, "texts"), *found

    records = {region: Told(10 + region) for region in range(3)}
    texts = {0: b"", 1: b"12", 2: b"1234"}
    assert run_in_lockstep(3, tell) == [(records, texts, b"1234", b"of 0")] * 3
