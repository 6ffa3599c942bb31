"""What all regions tell each other at one moment arrives by region."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from hf_cocodc.errors import RegionLostError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.link.records import Record
from hf_cocodc.link.spreading import gather, spread, spread_all
from hf_cocodc.link.tcp import TcpLink
from tests.link.memory import Regions
from tests.link.training import Died


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


def test_a_length_beyond_what_is_expected_takes_no_memory() -> None:
    """It names the region, in all regions. Lengths that are none do, too."""

    def tell(region: int, link: Link) -> list[str]:
        own = bytes(9 if region == 1 else 4)
        said = []
        for call in (lambda: spread(link, 1, own, "a text", 8), lambda: spread_all(link, own, "texts", 8)):
            with pytest.raises(RegionLostError, match="region 1 wants to send .* with 9 bytes") as found:
                call()
            said.append(found.value.region)
        lies = torch.tensor([-1 if region else 0]).view(torch.float32)
        with (
            mock.patch.object(link, "broadcast", lambda flat, what, source: flat.copy_(lies)),
            pytest.raises(RegionLostError, match="with -?[0-9]+ bytes")
            if region
            else contextlib.nullcontext(),
        ):
            spread(link, 1, b"", "a text")
        return said

    assert run_in_lockstep(2, tell) == [[1, 1]] * 2


def test_a_loss_between_calls_that_belong_together_lets_them_be_made_once_more() -> None:
    """Not twice: a region whose ranks share a link (`test_ranks`) would make fewer calls than the others."""

    def body(region: int, link: TcpLink) -> tuple[dict[int, bytes], Counter[str]]:
        gathers: Counter[str] = Counter()
        make = link.gather

        def counted(record: Record, what: str) -> tuple[Record, ...]:
            gathers[what] += 1
            return make(record, what)

        def die(*args: object) -> None:
            raise Died("its process has died")

        with (
            mock.patch.object(link, "gather", counted),
            mock.patch.object(link, "broadcast", die if region == 2 else link.broadcast),
        ):
            return spread_all(link, f"of {region}".encode(), "texts"), gathers

    found = Regions(3).run(body)
    assert isinstance(found.pop(2), Died)
    assert list(found.values()) == [({0: b"of 0", 1: b"of 1"}, {"the length of texts": 2})] * 2
