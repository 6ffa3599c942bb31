"""The closed form of a transfer."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hf_cocodc.tools.plan.course import Cargo
from hf_cocodc.tools.plan.transfers import (
    FIRST_WINDOW,
    MSS,
    MTU,
    OVERHEAD_S,
    Codes,
    LinkFigures,
    TcpLine,
    wanted_connections,
)

MB = 10**6


def seconds(
    link: LinkFigures,
    num_bytes: int,
    connections: int = 4,
    limit: float | None = None,
    at: tuple[float, ...] = (0.0,),
    **codes: Any,
) -> list[float]:
    """Seconds of transfers that are sent at these times, from their beginning."""
    line = TcpLine(link, connections, 1, limit or 1e12, {num_bytes: Codes(**codes)})
    return [line.carry(Cargo(num_bytes), sent).link_s - OVERHEAD_S for sent in at]


def test_without_distance_a_transfer_takes_the_time_of_its_packets() -> None:
    """8 Mbit/s carry a megabyte in a second, and the headers."""
    [took] = seconds(LinkFigures(0.0, 8e6), MB, piece_bytes=MB // 4)
    assert took == pytest.approx(MTU / MSS, rel=0.01)


def test_a_long_link_costs_its_round_trip_and_slow_start() -> None:
    """The last byte travels half a round trip; windows that double carry little in the first ones."""
    link = LinkFigures(0.1, 1e9)
    [took] = seconds(link, 20 * MB)
    full = link.goodput * 0.1
    trips = math.log2(full / (4 * FIRST_WINDOW))
    rest_s = (20 * MB - (full - 4 * FIRST_WINDOW)) / link.goodput
    assert took == pytest.approx(trips * 0.1 + rest_s + 0.05)
    few, many = seconds(link, 20 * MB, connections=1)[0], seconds(link, 20 * MB, connections=16)[0]
    assert few > took > many
    [short] = seconds(link, 3 * 4 * FIRST_WINDOW)
    assert short == pytest.approx(2 * 0.1 + 0.05), "one window, then two"


def test_connections_that_rest_begin_again_but_bbr_does_not() -> None:
    """Back to back the second transfer has warm windows; after a minute cubic has small ones again."""
    for congestion, again in (("cubic", True), ("bbr", False)):
        link = LinkFigures(0.1, 1e9, congestion=congestion)
        first, warm, rested = seconds(link, 20 * MB, at=(0.0, 0.0, 60.0))
        assert warm < first
        assert (rested > 1.01 * warm) == again, congestion


@pytest.mark.parametrize(("congestion", "window"), [("reno", 122.47), ("cubic", 187.43)])
def test_losses_bound_what_a_connection_carries(congestion: str, window: float) -> None:
    """Mathis: MSS sqrt(3 / 2p) a round trip. More connections carry more."""
    link = LinkFigures(0.1, 1e9, loss=1e-4, congestion=congestion)
    assert link.window_of_loss == pytest.approx(MSS * window, rel=1e-3)
    size = 40_000 * MB
    [took] = seconds(link, size, connections=2)
    assert took == pytest.approx(size / (2 * link.window_of_loss / 0.1), rel=0.01)
    assert wanted_connections(link, 20e6) == math.ceil(20e6 * 0.1 / link.window_of_loss)
    assert LinkFigures(0.1, 1e9, 1e-4, "bbr").window_of_loss == math.inf


def test_a_traced_transfer() -> None:
    """Over an emulated link of 100 ms and 50 Mbit/s, three connections limited to 45 Mbit/s together, 3.6 MB after a rest of two
    seconds: 0.9 s from the first byte to the last, each time; 0.65 s without a rest."""
    link = LinkFigures(0.1, 50e6)
    _, *rested, warm = seconds(link, 3_640_000, 3, 45e6 / 8, at=(0.0, 3.0, 6.0, 7.0))
    assert rested == pytest.approx([0.95, 0.95], abs=0.06)
    assert warm == pytest.approx(0.05 + 3.64 / 45 * 8, abs=0.03)


def test_the_limit_the_codec_and_a_second_message_take_their_time() -> None:
    """A limit slows all; a slow codec decides; each message has half a round trip, and so has a scatter."""
    link = LinkFigures(0.1, 1e9, congestion="bbr")  # whose windows are no limit, once they have grown
    warm = (0.0,) * 4
    bare = seconds(link, 10 * MB, at=warm)[-1]
    assert seconds(link, 10 * MB, limit=5e6, at=warm)[-1] == pytest.approx(2.05, rel=0.02)
    assert seconds(link, 10 * MB, encode_s=3.0)[0] >= 3.0
    assert seconds(link, 10 * MB, decode_s=3.0)[0] >= 3.0
    assert bare + 0.04 < seconds(link, 10 * MB, at=warm, messages=2)[-1] < bare + 0.13
    assert seconds(link, 10 * MB, at=warm, scatters=True)[-1] == pytest.approx(bare + 0.05, abs=0.02)


def test_transfers_wait_for_each_other() -> None:
    """The line is serial: one is decoded before the next transfer begins."""
    line = TcpLine(LinkFigures(0.0, 8e6), 1, 1, 1e12, {1000: Codes(decode_s=5.0)})
    first, second = line.carry(Cargo(1000), 1.0), line.carry(Cargo(1000), 1.0)
    assert first.ready_s > 6.0
    assert second.ready_s == pytest.approx(2 * first.ready_s - 1.0)
