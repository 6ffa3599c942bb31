"""The cost of a link: the time of one mean over it, against the least that its rate and its round trip allow."""

import dataclasses
import math
import platform
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ...coordinator.client import Client
from ...coordinator.messages import Hello, Terms
from ...coordinator.server import serve_in_thread
from ...errors import InputError, LinkError, nearest, shown
from ...link.base import MeanRequest
from ...link.records import Trailer
from ...link.tcp import TcpLink
from ...net.addresses import own_address
from ...net.keys import Keys, new_secret
from ...net.wire import Wire
from ...parts.codecs.base import Codec
from ...parts.fragments import Fragment
from ...parts.tensors.flat import digest
from ...parts.tensors.memory import HOST
from ...parts.tensors.slices import cores
from .codec import KNOWN
from .report import BenchReport, Row
from .workers import run, serve, start_here

TIMEOUT_S = 120.0
ROUND_TRIPS = 5
RUN = "bench link"
"""Name of a measurement at a coordinator, if none is given."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The transfers of a measurement; equal in all regions. Raises InputError if a value is out of range or unknown.

    Attributes:
        megabytes: size of the flat fp32 tensor whose mean the regions compute, in 10^6 bytes.
        connections: TCP connections to each other region; None chooses by the round trip.
        rate_limit: the most Mbit/s that a region sends; None for no limit.
        encrypt: whether the regions share a secret, and so encrypt what they send.
    """

    megabytes: float = 64.0
    codec: str = "fp32"
    connections: int | None = None
    repeat: int = 5
    rate_limit: float | None = None
    encrypt: bool = False

    def __post_init__(self) -> None:
        if not 0.001 <= self.megabytes < math.inf:
            raise InputError(f"--megabytes {self.megabytes:g} must be at least 0.001 and finite.")
        if self.codec not in KNOWN:
            raise InputError(f"--codec {shown(self.codec)} is not known.{nearest(self.codec, list(KNOWN))}")
        if self.repeat < 1:
            raise InputError(f"--repeat {self.repeat} must be at least 1.")

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
    """

    regions: int
    connections: int
    bytes_sent: int
    seconds: list[float]
    round_trip_s: float


class Took(NamedTuple):
    """What one region measured: seconds, and the checksum of the mean that it received, if any."""

    seconds: float
    digest: int = -1


def measure_here(trial: Trial, regions: int) -> Figures:
    """Measure between `regions` processes on this machine, over the loopback interface. Raises LinkError if one fails."""
    secret = new_secret() if trial.encrypt else None
    common = {"secret": secret, "trial": dataclasses.asdict(trial), "regions": regions}
    num_threads = max(cores() // regions, 1)
    with closing(serve_in_thread(secrets=[] if secret is None else [Keys.from_secret(secret)])) as served:
        specs = [{**common, "coordinator": served.address, "region": region} for region in range(regions)]
        [figures] = run(__name__, specs, start_here, num_threads)
    return Figures(**figures)


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
        HandshakeError: another region has a different `trial`.
        LinkError: the coordinator or a region failed, or did not answer in time.
    """
    host = own_address(coordinator, interface)
    link = _link(trial, Client(coordinator, run or RUN, keys), region, regions, host, keys)
    try:
        figures = _measure(link, trial)
    except BaseException as error:
        link.close(f"{type(error).__name__}: {error}")
        raise
    link.close()
    return figures


def _link(trial: Trial, client: Client, region: int, regions: int, host: str, keys: Keys | None) -> TcpLink:
    """Meet the other regions, and connect to them."""
    rate = None if trial.rate_limit is None else trial.rate_limit * 1e6 / 8
    wire = Wire(
        region,
        trial.connections,
        host,
        TIMEOUT_S,
        rate,
        keys=keys,
    )
    compared = dataclasses.asdict(trial)
    hello = Hello(
        region=region,
        join=False,
        lanes=(wire.whereabouts,),
        machine=platform.node(),
        token=uuid.uuid4().hex,
        terms=Terms(count=regions, timeout_s=TIMEOUT_S),
        compared=compared,
    )
    try:
        client.meet(hello, TIMEOUT_S)
    except BaseException:
        client.close()
        wire.close()
        raise
    return TcpLink(client, hello.terms, wire, timeout_s=TIMEOUT_S)


def _measure(link: TcpLink, trial: Trial) -> Figures:
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
    seconds, bytes_sent = [], 0
    for number in range(1, trial.repeat + 1):
        what = f"transfer {number} of {trial.repeat}"
        link.gather(Took(0.0), what)  # no region starts its clock before all have finished the last transfer
        start = time.perf_counter()
        converse = partial(codec.converse, outer_grad, fragment, state)
        arrival = link.mean(MeanRequest(converse, fragment.numel, Trailer, what)).wait()
        took = time.perf_counter() - start
        state, bytes_sent = arrival.result.state, arrival.bytes_sent
        records = link.gather(Took(took, digest(arrival.result.mean)), what)
        if len({each.digest for each in records}) > 1:
            raise LinkError(
                f"{what} gave different means in different regions, so its time is meaningless. This is a bug in the codec "
                f"{trial.codec!r} or in the link; please report it."
            )
        seconds.append(max(each.seconds for each in records))
    return Figures(
        regions=link.num_regions,
        connections=link.view.connections,
        bytes_sent=bytes_sent,
        seconds=seconds,
        round_trip_s=round_trip_s,
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
        "connections": results.connections,
        "rate_limit": trial.rate_limit,
        **setting,
    }
    return BenchReport("one mean over a link", setting, rows, notes, samples={"seconds": results.seconds})


def _one_end(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One region of `measure_here`."""
    keys = None if spec["secret"] is None else Keys.from_secret(spec["secret"])
    trial = Trial(**spec["trial"])
    yield dataclasses.asdict(
        take_part(trial, spec["coordinator"], spec["region"], spec["regions"], keys=keys)
    )


if __name__ == "__main__":
    serve(_one_end)
