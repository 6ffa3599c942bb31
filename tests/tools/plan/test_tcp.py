"""The physical model of a transfer."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from hf_cocodc.tools.plan import flights
from hf_cocodc.tools.plan.course import Cargo
from hf_cocodc.tools.plan.flights import (
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
    wire = 20 * MB / link.goodput
    # 4 connections: 58 kB, 116 kB, ... until 12 MB are under way, after 8 round trips
    trips = math.ceil(math.log2(link.goodput * 0.1 / (4 * FIRST_WINDOW)))
    assert wire + 0.05 < took < wire + 0.05 + 0.1 * (trips + 1)
    few, many = seconds(link, 20 * MB, connections=1)[0], seconds(link, 20 * MB, connections=16)[0]
    assert few > took > many


def test_connections_that_rest_begin_again_but_bbr_does_not() -> None:
    """Back to back the second transfer has warm windows; after a minute cubic has small ones again."""
    for congestion, again in (("cubic", True), ("bbr", False)):
        link = LinkFigures(0.1, 1e9, congestion=congestion)
        first, warm, rested = seconds(link, 20 * MB, at=(0.0, 0.0, 60.0))
        assert warm < first
        assert (rested > 1.01 * warm) == again, congestion


@pytest.mark.parametrize(("congestion", "window"), [("reno", 122.47), ("cubic", 187.43)])
def test_losses_bound_what_a_connection_carries(congestion: str, window: float) -> None:
    """Mathis: MSS sqrt(3 / 2p) a round trip. A long transfer goes on at that rate; more connections carry more."""
    link = LinkFigures(0.1, 1e9, loss=1e-4, congestion=congestion)
    assert link.window_of_loss == pytest.approx(MSS * window, rel=1e-3)
    size = 40_000 * MB
    [took] = seconds(link, size, connections=2)
    assert took == pytest.approx(size / (2 * link.window_of_loss / 0.1), rel=0.04)
    assert wanted_connections(link, 20e6) == math.ceil(20e6 * 0.1 / link.window_of_loss)
    assert LinkFigures(0.1, 1e9, 1e-4, "bbr").window_of_loss == math.inf


def test_a_new_connection_rests_longer_before_it_begins_again() -> None:
    """Traced over an emulated link of 300 ms and 100 Mbit/s: time-outs of Linux 0.904 s before the first transfer of 600 kB, and
    these after it and each further one; a window is halved once the connection was idle for longer."""
    link = LinkFigures(0.3, 100e6)
    direction = flights.Direction(link, 1, 1.4e6, random.Random(0).random)
    [connection] = direction._connections
    assert 0.3 + connection._variance_s == pytest.approx(0.904, abs=0.005)
    begin = 0.0
    for time_out_s in (0.608, 0.564, 0.536, 0.520, 0.512, 0.508, 0.508, 0.504):
        begin = direction.send(0.6 * MB, 1, begin, 0.0) + 0.3
        assert 0.3 + connection._variance_s == pytest.approx(time_out_s, abs=0.04)
    before = connection._window
    connection._rest(0.49)
    assert connection._window == before
    connection._rest(0.53)
    assert connection._window == before / 2


def test_what_is_acknowledged_keeps_a_connection_from_rest() -> None:
    """A region says on a connection how much has come on it, once 256 KiB have: half a round trip after its own last byte."""
    link = LinkFigures(0.3, 100e6)
    direction = flights.Direction(link, 1, 1e7, random.Random(0).random)
    [connection] = direction._connections
    for size, later_s in ((2e5, 0.0), (2e5, 0.15), (3e5, 0.15)):
        ends = direction.send(size, 1, connection.ended, 0.0)
        assert connection.ended - ends == pytest.approx(later_s)


def test_windows_grow_to_twice_what_is_under_way() -> None:
    """Linux takes a window for too small as long as half of it was in use; what is under way follows the limit.

    Traced over an emulated link of 100 ms and 50 Mbit/s, three connections limited to 45 Mbit/s together, 3.6 MB after a rest
    of two seconds: windows of 272 segments each time, 132 under way, 1.0 s with half a round trip before and one after.
    """
    link = LinkFigures(0.1, 50e6)
    direction = flights.Direction(link, 3, 45e6 / 8, random.Random(0).random)
    for begin in (0.0, 3.0, 6.0):
        ends = direction.send(3.64 * MB / 3, 3, begin, 0.0)
        assert ends - begin == pytest.approx(0.9, abs=0.06)
        assert all(230 < each._window / MSS < 360 for each in direction._connections)
    assert direction.send(3.64 * MB / 3, 3, ends, 0.0) - ends == pytest.approx(3.64 / 45 * 8, abs=0.03)


def test_a_loss_costs_nothing_while_the_window_is_larger_than_what_is_under_way() -> None:
    """The first and the second; only then does a connection fall behind its share of the limit."""
    link = LinkFigures(0.1, 50e6, loss=1e-9)
    took = []
    for losses in range(5):
        direction = flights.Direction(link, 3, 45e6 / 8, random.Random(0).random)
        direction.send(MB, 3, 0.0, 0.0)
        connection = direction._connections[0]
        for _ in range(losses):
            connection._window *= 0.7
            connection._threshold = connection._window
        took.append(direction.send(MB, 3, 1.0, 0.0) - 1.0)
    assert took[2] == pytest.approx(took[0], abs=0.01)
    assert took[4] > took[0] + 0.1


def test_a_short_transfer_hardly_meets_a_loss() -> None:
    """Of 700 packets one in ten thousand is lost: the bound of long transfers does not hold."""
    clean, lossy = (
        sum(TcpLine(link, 4, 1, 1e12, {MB: Codes()}, seed).carry(Cargo(MB), 0.0).link_s for seed in range(40))
        for link in (LinkFigures(0.1, 50e6), LinkFigures(0.1, 50e6, loss=1e-4))
    )
    assert clean < lossy < 1.2 * clean


def test_the_limit_the_codec_and_a_second_message_take_their_time() -> None:
    """A limit slows all pieces; a slow codec decides; each message has half a round trip, and so has a scatter."""
    link = LinkFigures(0.1, 1e9, congestion="bbr")  # whose windows are no limit, once they have grown
    warm = (0.0,) * 4
    bare = seconds(link, 10 * MB, at=warm)[-1]
    assert seconds(link, 10 * MB, limit=5e6, at=warm, piece_bytes=10 * MB // 16)[-1] == pytest.approx(
        2.05, rel=0.02
    )
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
