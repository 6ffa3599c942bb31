"""The cost of a link: the time of one mean over it, against the least that its rate and its round trip allow."""

import dataclasses
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple, TypeVar

import torch
from accelerate.utils import patch_environment

from ...coordinator.server import serve_in_thread
from ...errors import CocodcError, LinkError, error_named
from ...link.backends import refuse_backend
from ...link.base import MeanRequest
from ...link.records import Trailer
from ...link.tcp import TcpLink
from ...net.addresses import own_address
from ...net.keys import Keys, new_secret
from ...parts import codecs
from ...parts.codecs.base import Codec
from ...parts.fragments import Fragment
from ...parts.tensors.flat import digest
from ...parts.tensors.memory import HOST
from ...parts.tensors.slices import cores
from ...run.session import RegionContext
from ...settings import RegionConfig
from ...settings.outer import CODECS
from .report import BenchReport, Row

KNOWN: dict[str, Callable[[], Codec]] = {name: getattr(codecs, name) for name in CODECS}
"""Codecs by their names in recipes."""

T = TypeVar("T")
TIMEOUT_S = 120.0
ROUND_TRIPS = 5
RUN = "bench link"
"""Name of a measurement at a coordinator, if none is given."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The transfers of a measurement; equal in all regions.

    Attributes:
        megabytes: size of the flat fp32 tensor whose mean the regions compute, in 10^6 bytes.
        connections: TCP connections to each other region; None chooses by the round trip.
        rate_limit: the most Mbit/s that a region sends; None for no limit.
        encrypt: whether the regions share a secret, and so encrypt what they send (not over gloo).
        link: what carries payloads: tcp, or gloo.
    """

    megabytes: float = 64.0
    codec: str = "fp32"
    connections: int | None = None
    repeat: int = 5
    rate_limit: float | None = None
    encrypt: bool = False
    link: str = "tcp"

    def fragment(self) -> Fragment:
        """The tensor as a fragment: a matrix, because some codecs need one."""
        columns = 1000
        rows = max(round(self.megabytes * 1e6 / 4 / columns), 1)
        return Fragment(0, ("matrix",), ((rows, columns),), rows * columns)

    def make_codec(self) -> Codec:
        """The codec without error feedback, which does not affect the link."""
        return KNOWN[self.codec]()


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The results of a measurement.

    Attributes:
        connections: TCP connections for payloads between two regions.
        bytes_sent: payload bytes that region 0 sent for one mean, to all other regions together.
        seconds: the time of each mean, in order, in the slowest region.
        round_trip_s: seconds to send a small message to all other regions and receive theirs, in the slowest region.
        network_rtt_s: the same without what the processes take, as regions measure it to choose their link.
    """

    regions: int
    connections: int
    bytes_sent: int
    seconds: list[float]
    round_trip_s: float
    network_rtt_s: float | None = None


class Took(NamedTuple):
    """What one region measured: seconds, and the checksum of the mean that it received, if any."""

    seconds: float
    digest: int = -1


def measure_here(trial: Trial, regions: int) -> Figures:
    """Measure between `regions` processes on this machine, over the loopback interface. Raises LinkError if one fails."""
    secret = new_secret() if trial.encrypt else None
    num_threads = str(max(cores() // regions, 1))
    at_interrupt = signal.SIGINT, signal.SIG_DFL
    with ExitStack() as opened:
        served = serve_in_thread(secrets=[] if secret is None else [Keys.from_secret(secret)])
        opened.callback(served.close)
        # threads that spin would take the cores from the other regions
        opened.enter_context(patch_environment(OMP_NUM_THREADS=num_threads, GOMP_SPINCOUNT="0"))
        pool = ProcessPoolExecutor(regions, get_context("spawn"), signal.signal, at_interrupt)
        opened.enter_context(pool)
        of_all = (trial, served.address, regions, secret)
        ends = [pool.submit(_one_end, region, *of_all) for region in range(regions)]
        try:
            for each in as_completed(ends):
                each.result()
        except BrokenProcessPool as error:
            raise LinkError(
                "a process of the measurement was killed. Has this machine too little memory?"
            ) from error
        return ends[0].result()


def _one_end(region: int, trial: Trial, coordinator: str, regions: int, secret: str | None) -> Figures:
    """One region of `measure_here`."""
    keys = None if secret is None else Keys.from_secret(secret)
    try:
        return take_part(trial, coordinator, region, regions, keys=keys)
    except CocodcError as error:  # not all of ours can travel from a process to another
        raise error_named(type(error).__name__, str(error), LinkError) from None


def take_part(
    trial: Trial,
    coordinator: str,
    region: int,
    regions: int,
    interface: str | None = None,
    run: str | None = None,
    keys: Keys | None = None,
) -> Figures:
    """Measure as one end of the link; all regions call this at about the same time, and get the same figures.

    Args:
        coordinator: HOST:PORT of a coordinator that all regions reach.
        interface: network interface of the link; by default the one that reaches the coordinator.
        run: name of the measurement, if the coordinator has several at once.

    Raises:
        InputError: this machine lacks the process group that is to carry payloads.
        HandshakeError: another region has a different `trial`.
        LinkError: the coordinator or a region failed, or did not answer in time.
    """
    refuse_backend(trial.link)
    with ExitStack() as opened:
        settings = RegionConfig(
            region=region,
            count=regions,
            coordinator=coordinator,
            interface=interface,
            link=trial.link,
            connections=trial.connections or "auto",
            rate_limit=trial.rate_limit,
            start_timeout_s=TIMEOUT_S,
            timeout_s=TIMEOUT_S,
        )
        context = RegionContext(
            region=region,
            regions=settings,
            name=run or RUN,
            compared=dataclasses.asdict(trial),
            host=own_address(coordinator, interface),
            keys=keys,
        )
        wire = context.wire()
        return _measure(opened.enter_context(_closed(context.link(context.meet(False, wire), wire))), trial)


@contextmanager
def _closed(link: TcpLink) -> Iterator[TcpLink]:
    """Inside the block, the link; behind it, it is closed."""
    try:
        yield link
    except BaseException as error:
        link.close(f"{type(error).__name__}: {error}")
        raise
    link.close()


def _measure(link: TcpLink, trial: Trial) -> Figures:
    """Measure means over a link."""
    fragment, codec = trial.fragment(), trial.make_codec()
    state = codec.init(fragment)
    outer_grad = torch.randn(
        fragment.numel, generator=torch.Generator(HOST).manual_seed(link.region), device=HOST
    )
    round_trips = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        for _ in range(2):  # what a region says in the second one, it says once it has heard the first one
            link.gather(Took(0.0), "a round trip")
        round_trips.append(time.perf_counter() - start)
    records = link.gather(Took(statistics.median(round_trips)), "the round trips")
    round_trip_s = max(each.seconds for each in records)
    records = link.gather(Took(link.view.network_rtt_s), "the round trips of the network")
    network_rtt_s = max(each.seconds for each in records)

    seconds: list[float] = []
    bytes_sent = 0
    for number in range(1, trial.repeat + 1):
        what = f"transfer {number} of {trial.repeat}"
        link.gather(Took(0.0), what)  # no region starts its clock before all have finished the last transfer
        converse = partial(codec.converse, outer_grad, fragment, state)
        start = time.perf_counter()
        arrival = link.mean(MeanRequest(converse, fragment.numel, Trailer, what)).wait()
        took = Took(time.perf_counter() - start, digest(arrival.result.mean))
        records = link.gather(took, what)
        seconds.append(max(each.seconds for each in records))
        state, bytes_sent = arrival.result.state, arrival.bytes_sent
        if len({each.digest for each in records}) > 1:
            raise LinkError(
                f"{what} gave different means in different regions, so its time is meaningless. This is a bug in the codec "
                f"{trial.codec!r} or in the link; please report it."
            )
    return Figures(
        regions=link.num_regions,
        connections=link.wire.connections,
        bytes_sent=bytes_sent,
        seconds=seconds,
        round_trip_s=round_trip_s,
        network_rtt_s=network_rtt_s,
    )


def report(trial: Trial, results: Figures, setting: Row, rate: float | None = None) -> BenchReport:
    """The figures beside the floor: the time of the payload at the link's rate, plus one round trip.

    `rate` is bits per second of a region to all others together; None takes the best transfer as the floor.
    """
    bits = results.bytes_sent * 8
    fastest = min(results.seconds)
    floor = bits / rate + results.round_trip_s if rate is not None else fastest
    names = {"first": results.seconds[0]}
    if len(results.seconds) > 1:
        names[f"median of {len(results.seconds) - 1} more"] = statistics.median(results.seconds[1:])
    if len(results.seconds) > 2:
        names["best"] = fastest
    rows = [
        {
            "transfer": name,
            "seconds": seconds,
            "floor s": floor,
            "ratio": seconds / floor,
            "Mbit/s": bits / seconds / 1e6,
            "MB sent": results.bytes_sent / 1e6,
            "RTT ms": 1e3 * results.round_trip_s,
        }
        for name, seconds in names.items()
    ]
    notes = [
        "In the first transfer, the connections are in slow start; for later transfers they are warm.",
        "floor: the payload bytes of a region at the link's rate, plus one round trip."
        if rate is not None
        else "floor: the best transfer, because the link's rate is unknown. Give the rate with --rate-mbit.",
        "RTT: the time of a small message to all other regions and one back from each, over the link.",
    ]
    setting = {
        "regions": results.regions,
        "megabytes": trial.megabytes,
        "codec": trial.codec,
        "link": trial.link,
        "connections": results.connections if trial.link == "tcp" else 1,
        "rate_limit": trial.rate_limit,
        "network_rtt_ms": None if results.network_rtt_s is None else 1e3 * results.network_rtt_s,
        **setting,
    }
    return BenchReport("one mean over a link", setting, rows, notes, samples={"seconds": results.seconds})
