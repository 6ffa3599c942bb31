"""The link of a fixed run: three regions as threads over loopback sockets, against lockstep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch

from hf_cocodc.coordinator.messages import Terms
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.errors import LinkError
from hf_cocodc.link import exchange
from hf_cocodc.link.base import Arrival, Handle, Link, MeanRequest
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.link.records import Trailer
from hf_cocodc.link.tcp import TcpLink
from hf_cocodc.net import connection, pacing, wire
from hf_cocodc.net.keys import Keys
from hf_cocodc.net.reaching import Search
from hf_cocodc.net.wire import connections_for
from hf_cocodc.parts import codecs
from hf_cocodc.parts.codecs import base
from hf_cocodc.parts.codecs.base import Codec, Coder, Plain
from hf_cocodc.parts.codecs.block import Float4, Integers
from hf_cocodc.parts.codecs.cast import Cast
from hf_cocodc.parts.codecs.topk import TopK
from hf_cocodc.parts.fragments import Fragment
from hf_cocodc.parts.tensors.flat import moved
from hf_cocodc.parts.tensors.memory import Home
from tests.far import FAR
from tests.link.memory import linked
from tests.secret import secret

GBIT = 125e6
SHAPES = ((300, 70), (33,))
FRAGMENT = Fragment(0, ("matrix", "vector"), SHAPES, 300 * 70 + 33)

LARGE = Fragment(0, ("matrix",), ((1000, 500),), 500_000)


def run_over_tcp(
    num_regions: int,
    body: Callable[[int, TcpLink], Any],
    timeout_s: float = 30.0,
    stuck_timeout_s: float = 300.0,
    connections: int | None = 2,
    rate_limit: float | Sequence[float | None] | None = None,
    num_lanes: int = 1,
    keys: Keys | None = None,
) -> list[Any]:
    """body(region, link) for every region at once, each on a thread of its own; they may have different rate limits."""
    terms = Terms(count=num_regions, timeout_s=timeout_s, stuck_timeout_s=stuck_timeout_s)
    period_s = min(timeout_s / 4, 1.0)
    served = serve_in_thread(secrets=[] if keys is None else [keys])

    def live(region: int) -> Any:
        rate = rate_limit[region] if isinstance(rate_limit, Sequence) else rate_limit
        how = {"connections": connections, "num_lanes": num_lanes}
        how["rate_limit"] = None if rate is None else rate / num_lanes
        link = linked(
            served.address, region, terms, period_s=period_s, patience_s=timeout_s, keys=keys, **how
        )
        try:
            return body(region, link)
        finally:
            link.close()

    with closing(served), ThreadPoolExecutor(num_regions) as pool:
        return list(pool.map(live, range(num_regions)))


@pytest.mark.parametrize("num_regions", [2, 3])
@pytest.mark.parametrize("piece_bytes", [exchange.SMALLEST, 512])
@pytest.mark.parametrize(
    "codec",
    [
        codecs.fp32(),
        codecs.bf16(),
        codecs.int8(),
        codecs.fp4(),
        codecs.feedback(codecs.topk(7, 128)),
        codecs.feedback(codecs.lowrank(4)),
    ],
    ids=["fp32", "bf16", "int8", "fp4", "topk", "lowrank"],
)
def test_tcp_is_lockstep(
    codec: Codec, piece_bytes: int, num_regions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means, own parts, bytes and trailers of two rounds are the same bits over sockets, encrypted or not, and in one process."""
    monkeypatch.setattr(exchange, "SMALLEST", piece_bytes)

    def body(region: int, link: Link) -> list[Any]:
        state, found = codec.init(FRAGMENT), []
        for step in (1, 2):
            outer_grad = torch.randn(
                FRAGMENT.numel, generator=torch.Generator().manual_seed(10 * region + step)
            )
            trailer = partial(Trailer, weight=float(region != 1 or step == 1), inner_step=step, loss=region)
            converse = partial(codec.converse, outer_grad, FRAGMENT, state)
            arrival = link.mean(MeanRequest(converse, FRAGMENT.numel, trailer, f"step {step}")).wait()
            state = arrival.result.state
            found += [arrival.result.mean, arrival.result.own(), arrival.bytes_sent, arrival.trailers]
        return found

    over_tcp = run_over_tcp(num_regions, body)
    if num_regions == 2:
        assert same(
            over_tcp, run_over_tcp(num_regions, body, keys=Keys.from_secret(secret("a long secret of ours")))
        )
    assert same(over_tcp, run_in_lockstep(num_regions, body))


def same(ours: Any, theirs: Any) -> bool:
    """Whether two nested results are the same bits."""
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def test_a_region_that_leaves_says_why() -> None:
    """The others name the region that left, and the reason it gave."""

    def body(region: int, link: TcpLink) -> str:
        if region == 1:
            link.close("KeyboardInterrupt at step 7")
            return ""
        link.gather(Trailer(), "the end of the run")
        assert link.parties == (0,)
        return link.losses_in_words

    assert run_over_tcp(2, body, timeout_s=3.0)[0] == "region 1 is lost: KeyboardInterrupt at step 7"


def test_a_region_that_leaves_frees_the_threads_of_others() -> None:
    """Its process may live on for long. A thread that waited there would outlast the patience of the other's interpreter."""

    def body(region: int, link: TcpLink) -> None:
        if region:
            link.close("it cannot load its checkpoint")
            return
        handle = begin(link)
        thread = link._thread
        assert thread is not None
        assert handle.wait().members == (0,)
        link.close("the other region left")
        thread.join(15)
        assert not thread.is_alive()

    run_over_tcp(2, body)


def test_a_closed_link_refuses_at_once() -> None:
    """Nobody waits on a link that was closed."""

    def body(region: int, link: Link) -> None:
        link.close()
        with pytest.raises(LinkError, match="the link is closed"):
            link.gather(Trailer(), "too late")

    run_over_tcp(2, body)


def begin(link: Link, fragment: Fragment = FRAGMENT) -> Handle:
    """Begin a mean, by default a small one."""
    codec = codecs.fp32()
    converse = partial(codec.converse, torch.zeros(fragment.numel), fragment, codec.init(fragment))
    return link.mean(MeanRequest(converse, fragment.numel, Trailer, "step 1"))


def meet(link: Link, fragment: Fragment = FRAGMENT) -> Arrival:
    return begin(link, fragment).wait()


@pytest.mark.parametrize("connections", [1, 3, 16])
def test_frames_cover_a_payload_and_load_all_connections_alike(connections: int) -> None:
    """In order, without gaps, none too large, and enough of them for every connection."""
    for size in (1, 100, 300_007, 9_000_001):
        payload = torch.arange(size) % 251
        cut = exchange.frames(payload.to(torch.uint8), connections)
        assert [place for place, _ in cut] == list(range(len(cut)))
        assert torch.equal(torch.cat([frame for _, frame in cut]), payload.to(torch.uint8))
        sizes = [frame.numel() for _, frame in cut]
        assert max(sizes) <= exchange.LARGEST
        assert len(cut) >= min(connections, size // exchange.SMALLEST)
        loads = [sum(sizes[index::connections]) for index in range(connections)]
        if (
            size >= connections * exchange.SMALLEST
        ):  # the kernel gives each connection an equal share of the limit
            assert max(loads) - min(loads) <= len(cut)


@pytest.mark.parametrize("num_regions", [2, 3])
@pytest.mark.parametrize(
    "coder",
    [Cast(torch.float32), Integers(8, 256), Integers(4, 64), Float4(32), TopK(7, 128, Integers(4, 7 * 2))],
    ids=["fp32", "int8", "int4", "fp4", "topk"],
)
def test_slices_cover_a_message_and_cost_no_byte_more(
    coder: Coder, num_regions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, without gaps, and cut where blocks end; one region averages each if they are scattered."""
    monkeypatch.setattr(base, "SLICE", 10_000)
    for numel in (0, 1, 256, 300_007):
        of_regions = base.slices(coder, numel, num_regions)
        cut = (
            of_regions[0]
            if base.swaps_whole(coder, num_regions)
            else [part for each in of_regions for part in each]
        )
        assert [part.stop for part in cut[:-1]] == [part.start for part in cut[1:]]
        assert [cut[0].start, cut[-1].stop] == [0, numel] if cut else numel == 0
        assert all(part.start % coder.block == 0 for part in cut)
        assert all(part.stop - part.start <= max(10_000, 2 * coder.block) for part in cut)
        sizes = [coder.num_bytes(part.stop - part.start) for part in cut]
        assert sum(sizes) == coder.num_bytes(numel)


@pytest.mark.parametrize(
    ("rtt_s", "rate", "window", "expected"),
    [
        *((0.0, GBIT, 4 << 20, 1), (0.0001, GBIT, 4 << 20, 1), (0.1, GBIT, 4 << 20, 12)),
        *((0.3, GBIT, 4 << 20, 16), (0.1, GBIT / 20, 4 << 20, 1), (0.1, GBIT, 16 << 20, 3)),
    ],
)
def test_connections_follow_the_round_trip(rtt_s: float, rate: float, window: int, expected: int) -> None:
    """What is in flight, a quarter of a window each; a slow link or a large window needs fewer."""
    assert connections_for(rtt_s, rate, window) == expected


def test_all_pairs_search_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes seconds if nobody answers. Behind others, a pair would be late for the other end, which gives up after ten."""
    all_search, run = threading.Barrier(12, timeout=60.0), Search.run

    def together(search: Search, *about: Any) -> Any:
        all_search.wait()
        return run(search, *about)

    monkeypatch.setattr(Search, "run", together)
    run_over_tcp(4, lambda region, link: meet(link))


def test_lanes_share_what_the_network_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks for connections that carry its share."""
    rates = []
    monkeypatch.setattr(wire, "connections_for", lambda rtt_s, rate: rates.append(rate) or 2)
    run_over_tcp(2, lambda region, link: None, connections=None, num_lanes=8)
    run_over_tcp(2, lambda region, link: None, connections=None, num_lanes=4, rate_limit=8e6)
    assert rates == [GBIT / 8] * 2 + [2e6] * 2


@pytest.fixture(params=["kernel", "throttle"])
def kept_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What keeps a rate limit: the kernel, or this package where the kernel does not."""
    paced = []

    def pace(*args: Any) -> bool:
        paced.append(request.param == "kernel" and pacing.pace(*args))
        return paced[-1]

    monkeypatch.setattr(connection, "pace", pace)
    monkeypatch.setattr(wire, "can_pace", lambda: request.param == "kernel")
    pacing.say_who_keeps_the_limit.cache_clear()
    yield request.param
    assert paced
    assert all(paced) == (request.param == "kernel")


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_a_rate_limit_is_kept(kept_by: str, num_lanes: int, caplog: pytest.LogCaptureFixture) -> None:
    """However fast the link: a payload takes at least as long as a lane's share of the limit says, but for its beginning.
    So do the seconds that a transfer says it took, which schedules go by: in the region that came to it last."""
    rate = 4e6

    def body(region: int, link: TcpLink) -> list[tuple[float, Arrival]]:
        found = []
        for _ in range(3):
            start = time.monotonic()
            arrival = meet(link, LARGE)
            found.append((time.monotonic() - start, arrival))
        return found

    found = sum(run_over_tcp(2, body, rate_limit=rate * num_lanes, num_lanes=num_lanes), [])
    least = found[0][1].bytes_sent / 2 / rate
    assert least > 0.2
    for passed, arrival in found:
        assert passed >= max(arrival.seconds, least)
    assert max(arrival.seconds for _, arrival in found) >= least
    told = caplog.text.count("kernel does not keep a rate limit")
    assert told == (0 if kept_by == "kernel" else 2), "each region says it once"


@pytest.mark.parametrize(("rate", "is_slow"), [(1e6, False), (1e3, True)])
def test_a_limit_that_delays_the_first_piece_is_kept_by_the_throttle(rate: float, is_slow: bool) -> None:
    """Side by side all pieces would come at the end, and a healthy region would count as silent."""
    found = run_over_tcp(
        2, lambda region, link: link.wire._throttle.rate is not None, rate_limit=rate, connections=3
    )
    assert found == [is_slow] * 2


def test_a_late_region_does_not_count_for_the_link() -> None:
    """The seconds of a transfer begin when the last region has come to it."""

    def body(region: int, link: TcpLink) -> tuple[float, float, float]:
        meet(link)
        time.sleep(1.0 * region)
        came = time.monotonic()
        return came, meet(link).seconds, time.monotonic()

    found = run_over_tcp(2, body)
    last_came, last_ended = max(came for came, *_ in found), max(ended for *_, ended in found)
    for _, seconds, _ in found:
        assert seconds <= last_ended - last_came


@pytest.mark.parametrize(
    "codec", [codecs.fp32(), codecs.feedback(codecs.lowrank(4))], ids=["fp32", "lowrank"]
)
def test_means_are_made_where_the_values_are(codec: Codec) -> None:
    """On a device, or at rest on the host and computed with on a device: the bits of the host in each case."""

    def body(home: Home, link: TcpLink) -> list[torch.Tensor]:
        place = home.rest if isinstance(codec, Plain) else home.device
        state, means = moved(codec.init(FRAGMENT), place), []
        for step in range(4):
            seed = torch.Generator().manual_seed(10 * link.region + step)
            values = torch.randn(FRAGMENT.numel, generator=seed).to(place)
            converse = partial(codec.converse, values, FRAGMENT, state)
            request = MeanRequest(converse, FRAGMENT.numel, Trailer, f"step {step}", home=home)
            result = link.mean(request).wait().result
            state = result.state
            assert result.mean.device == place
            means.append(result.mean.cpu().clone())
            home.give(result.mean)
        return means

    on_host = run_over_tcp(2, lambda _, link: body(Home(), link))
    for home in (Home(FAR), Home(FAR, rests_on_host=True)):
        found = run_over_tcp(2, lambda _, link, home=home: body(home, link))
        torch.testing.assert_close(found, on_host, atol=0, rtol=0)


def test_payloads_of_many_lengths_do_not_let_the_memory_grow() -> None:
    """As those of a codec whose rank follows the spectrum: what is kept is one transfer's."""

    def body(region: int, link: TcpLink) -> int:
        home = Home()
        for numel in range(2000, 1000, -25):
            fragment = Fragment(0, ("vector",), ((numel,),), numel)
            converse = partial(codecs.bf16().converse, torch.ones(numel), fragment, {})
            link.mean(MeanRequest(converse, numel, Trailer, f"{numel} values", home=home)).wait()
        return link._buffers[home.device].spare_bytes

    assert max(run_over_tcp(2, body)) == 4000


def test_memory_that_is_handed_back_is_used_again() -> None:
    """By means of the same length; what a codec has made itself does not let the memory grow."""
    codec = codecs.feedback(codecs.lowrank(4))

    def body(region: int, link: TcpLink) -> int:
        home, state = Home(), codec.init(FRAGMENT)
        for step in range(40):
            values = torch.randn(FRAGMENT.numel, generator=torch.Generator().manual_seed(step))
            converse = partial(codec.converse, values, FRAGMENT, state)
            request = MeanRequest(converse, FRAGMENT.numel, Trailer, f"step {step}", home=home)
            result = link.mean(request).wait().result
            state = result.state
            home.give(result.mean)
        return home.spare_bytes

    def plain(region: int, link: TcpLink) -> list[int]:
        home, places = Home(), []
        for step in range(3):
            values = torch.ones(FRAGMENT.numel)
            converse = partial(codecs.fp32().converse, values, FRAGMENT, {})
            request = MeanRequest(converse, FRAGMENT.numel, Trailer, f"step {step}", home=home)
            mean = link.mean(request).wait().result.mean
            places.append(mean.data_ptr())
            home.give(mean)
        return places

    assert max(run_over_tcp(2, body)) <= 8 * FRAGMENT.numel
    for places in run_over_tcp(2, plain):
        assert len(set(places)) == 1


@pytest.mark.slow
def test_a_region_that_is_late_but_lives_is_waited_for() -> None:
    """Three time-outs of lateness cost nothing: the region shows heartbeats, and gets on."""

    def body(region: int, link: Link) -> str:
        for step in range(30 * region):
            time.sleep(0.1)
            link.tick(step + 1)
        meet(link)
        return "met"

    assert run_over_tcp(2, body, timeout_s=1.0) == ["met", "met"]


def test_a_region_that_lives_but_is_stuck_is_given_up() -> None:
    """Signs of life without inner steps do not keep the others for ever."""
    given_up = threading.Event()

    def body(region: int, link: TcpLink) -> str:
        if region:
            given_up.wait(20)
            return ""
        try:
            meet(link)
        finally:
            given_up.set()
        return link.losses_in_words

    assert (
        "it is alive, but has been stuck at step 0"
        in run_over_tcp(2, body, timeout_s=1.0, stuck_timeout_s=2.0)[0]
    )
