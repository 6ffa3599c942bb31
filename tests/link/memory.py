"""Regions in one process: real wires and links, which meet directly, or over a coordinator in a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

from hf_cocodc.coordinator.client import Client
from hf_cocodc.coordinator.messages import Hello, Terms
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.link.process_group import Payloads
from hf_cocodc.link.tcp import TcpLink
from hf_cocodc.net.addresses import is_url
from hf_cocodc.net.keys import Keys
from hf_cocodc.net.wire import Wire

T = TypeVar("T")
PATIENCE_S = 20.0
"""No test needs so long; a wait that reaches it is an error."""

SILENT_S = 4.0
"""A region that has gone without a word is lost after so long."""


def wait_until(condition: Callable[[], Any]) -> None:
    """Until the condition holds; it must, before long."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.001)


def at_once(*calls: Callable[[], T]) -> list[T]:
    """The results of calls that wait for each other."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def connect(one: Wire, other: Wire, about: str = "pair") -> None:
    """Connect two wires."""

    def call(here: Wire, there: Wire) -> None:
        here.add(here.meet(there.region, there.whereabouts, about))

    at_once(partial(call, one, other), partial(call, other, one))


def connected(regions: Sequence[int], **settings: Any) -> dict[int, Wire]:
    """A wire for each region, connected pair by pair."""
    settings = {"connections": 1, "timeout_s": PATIENCE_S, **settings}
    wires = {region: Wire(region, **settings) for region in regions}
    for one, other in combinations(regions, 2):
        connect(wires[one], wires[other], f"{one}-{other}")
    return wires


def met(
    address: str,
    region: int,
    terms: Terms,
    join: bool = False,
    period_s: float = 0.1,
    patience_s: float = PATIENCE_S,
    keys: Keys | None = None,
    **settings: Any,
) -> tuple[Client, Wire]:
    """What a link needs of a process that has met the others at a coordinator, or of a newcomer. `settings`: of its wire."""
    client = Client(address, "run", keys, period_s)
    settings = {"connections": 2, "timeout_s": patience_s, **settings}
    if is_url(address):
        settings |= {"connections": None, "announce": lambda port: ()}
    wire = Wire(region, keys=keys, **settings)
    hello = Hello(
        region=region,
        join=join,
        lanes=(wire.whereabouts,),
        machine="here",
        token=f"{region} {time.monotonic_ns()}",
        terms=terms,
        compared={},
    )
    try:
        client.meet(hello, patience_s)
    except BaseException:
        wire.close()
        raise
    return client, wire


def linked(
    address: str, region: int, terms: Terms, join: bool = False, payloads: Payloads | None = None, **how: Any
) -> TcpLink:
    """The link of such a process; for `how` see `met`."""
    client, wire = met(address, region, terms, join, **how)
    return TcpLink(client, terms, wire, timeout_s=wire.timeout_s, payloads=payloads)


class Regions:
    """Regions of a run with a coordinator, each with a link of its own.

    Args:
        count: number of regions at the start.
        elastic: whether the run goes on without a lost region.
        payloads: makes, for a region, how its payloads travel; by default over its connections.
    """

    def __init__(
        self,
        count: int,
        elastic: bool = True,
        payloads: Callable[[int], Payloads] = lambda region: Payloads(),
    ) -> None:
        self._payloads = payloads
        self.served = serve_in_thread()
        self._terms = Terms(count=count, most=count + 2, wait_s=3600.0 * elastic, timeout_s=SILENT_S)
        self.links = at_once(*(partial(self.link, region) for region in range(count)))

    def link(self, region: int, join: bool = False) -> TcpLink:
        """A process that has met the others; or a newcomer."""
        return linked(self.served.address, region, self._terms, join, self._payloads(region))

    def begin_again(self, link: TcpLink) -> None:
        """Be a newcomer, after `part_with`."""
        link.begin_again(*met(self.served.address, link.region, self._terms, join=True))

    def run(self, body: Callable[[int, TcpLink], T]) -> dict[int, T | BaseException]:
        """body(region, link) for every region at once, and the end of its link: results, or the errors that ended regions."""

        def live(link: TcpLink) -> T | BaseException:
            try:
                result = body(link.region, link)
                link.close()
            except BaseException as error:
                link.close(str(error))
                return error
            return result

        found = at_once(*(partial(live, link) for link in self.links))
        self.served.close()
        return {link.region: each for link, each in zip(self.links, found, strict=True)}

    def end_coordinator(self) -> None:
        self.served.close()

    def end(self) -> None:
        """Let every thread end."""
        at_once(*(partial(link.close, "the test is over") for link in self.links))
        self.served.close()
