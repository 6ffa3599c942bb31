"""How wires reach each other where one of them cannot be called, or not where it listens."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cocodc.errors import LinkError
from hf_cocodc.net import reaching, view
from hf_cocodc.net.connection import Connection, Operation
from hf_cocodc.net.keys import Keys
from hf_cocodc.net.mailbox import mailbox
from hf_cocodc.net.wire import Wire
from tests.link.memory import at_once, connect
from tests.net.storages import folder_url
from tests.secret import secret

HOST = "127.0.0.1"
Announced = Sequence[tuple[str, int]]


@contextlib.contextmanager
def nowhere() -> Iterator[tuple[str, int]]:
    """An address that answers nobody: what a region behind a router announces."""
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        yield bound.getsockname()


@contextlib.contextmanager
def mapped(wire: Wire, delay_s: float = 0.0) -> Iterator[tuple[str, int]]:
    """Another port, from which a router passes all on to the wire's own, each way so much later."""
    with contextlib.ExitStack() as kept:
        server = kept.enter_context(socket.create_server((HOST, 0)))
        threads: list[threading.Thread] = []

        def start(work: Callable[..., None], *args: Any) -> None:
            threads.append(threading.Thread(target=work, args=args))
            threads[-1].start()

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller = kept.enter_context(server.accept()[0])
                    there = kept.enter_context(socket.create_connection((HOST, wire.port)))
                    start(_pass_on, caller, there, delay_s)
                    start(_pass_on, there, caller, delay_s)

        start(accept)
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def _pass_on(source: socket.socket, to: socket.socket, delay_s: float) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(1 << 16):
            time.sleep(delay_s)
            to.sendall(chunk)
    with contextlib.suppress(OSError):
        to.shutdown(socket.SHUT_WR)


def speak(one: Wire, other: Wire, order: int = 1) -> None:
    """Both ways, on every connection: 3 MB on one of them."""
    views = [wire.view((one.region, other.region), order) for wire in (one, other)]
    sizes = 100, 3 << 20
    got = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    pending = [views[1 - i].receive(i, got[i], 9, i, "something") for i in range(2)]
    sent = [torch.full((size,), 7, dtype=torch.uint8) for size in sizes]
    pending += [views[i].send(1 - i, sent[i], 9, i, "something") for i in range(2)]
    for i, each in enumerate((1, 0, 0, 1)):
        views[each].wait([pending[i]], "something")
    assert all(map(torch.equal, got, sent))


def wires(first: Announced | None = None, second: Announced | None = None, **settings: object) -> list[Wire]:
    return [
        Wire(
            region,
            2,
            timeout_s=20.0,
            announce=None if told is None else lambda port, told=told: told,  # type: ignore[misc]
            **settings,  # type: ignore[arg-type]
        )
        for region, told in enumerate((first, second))
    ]


def test_a_region_that_nobody_can_call_calls_the_other_one() -> None:
    """Whichever of the two it is; its payloads take the same way."""
    with nowhere() as hidden:
        for told, way in (((None, [hidden]), "reversed"), (([hidden], None), "direct")):
            both = wires(*told)
            connect(*both)
            assert [wire.ways for wire in both] == [{1: way}, {0: way}]
            speak(*both)
            streams = [wire.stream(1 - wire.region, 99, 20.0) for wire in _callers(both)]
            say(*streams)
            for each in (*both, *streams):
                each.close()


def say(one: Connection, other: Connection) -> None:
    """A message whose length the other end does not know before."""
    got = Operation(0, 0, torch.empty(0, dtype=torch.uint8), most=9)
    other.receive(got)
    one.send(Operation(0, 0, torch.full((5,), 7, dtype=torch.uint8)))
    got.wait(20.0)
    assert got.memory.tolist() == [7] * 5


def _callers(both: list[Wire]) -> list[Wire]:
    """The one that calls first: the other one waits for it."""
    is_first = both[0]._pairs[1]._called is not None
    return both if is_first else both[::-1]


def test_ports_that_a_router_maps_to_others() -> None:
    """Both regions are reached only through routers; the first announces an old address, too."""
    with contextlib.ExitStack() as kept:
        found: list[list[tuple[str, int]]] = [[], []]
        both = wires(*found)
        old = kept.enter_context(nowhere())
        found[0] += [old, kept.enter_context(mapped(both[0]))]
        found[1] += [kept.enter_context(mapped(both[1]))]
        for wire, told in zip(both, found, strict=True):
            wire.addresses = tuple(told)
        connect(*both)
        assert both[0]._pairs[1]._called == found[1][0]
        speak(*both)
        for wire in both:  # the routers go on until both ends have gone
            wire.close()


def test_the_round_trip_is_that_of_both_ways() -> None:
    """Both ends measure it at the same time: neither is misled by what the other one has sent before. The number of connections
    follows from it."""
    with contextlib.ExitStack() as kept:
        told: list[tuple[str, int]] = []
        both = wires([("127.0.0.1", 9)], told)
        told.append(kept.enter_context(mapped(both[1], 0.05)))
        both[1].addresses = tuple(told)
        connect(*both)
        assert all(wire._pairs[1 - wire.region].rtt_s >= 0.1 for wire in both)
        for wire in both:
            wire.close()


@pytest.mark.parametrize(("is_storage", "swaps"), [(False, 9), (True, 0)])
def test_through_a_storage_nothing_is_measured_before_the_first_step(
    is_storage: bool, swaps: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There each swap takes a second. Elsewhere a round trip is measured, and the number of connections is agreed on."""
    made: Counter[int] = Counter()
    swap = view.View.swap

    def counted(self: view.View, own: Tensor, what: str) -> list[Tensor]:
        made[self.region] += 1
        return swap(self, own, what)

    monkeypatch.setattr(view.View, "swap", counted)
    both = wires([], [])
    for wire in both:
        if is_storage:
            wire.storage = folder_url(tmp_path)
        else:
            wire.addresses = ((HOST, wire.port),)
    connect(*both)
    assert made == Counter({0: swaps, 1: swaps})
    for wire in both:
        assert 0.0 < wire._pairs[1 - wire.region].rtt_s < 5.0
        wire.close()


def test_names_of_machines_and_version_six() -> None:
    with contextlib.ExitStack() as kept:
        hidden = kept.enter_context(nowhere())
        for host in ("localhost", "::1"):
            both = wires([hidden], [hidden])
            both[1].addresses = ((host, both[1].port),)
            try:
                connect(*both)
            except LinkError as error:
                if host == "::1" and "Cannot assign" in str(error):
                    pytest.skip("this machine has no IPv6")
                raise
            speak(*both)
            for wire in both:
                wire.close()


def test_regions_that_do_not_reach_each_other_say_where_they_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon, whatever regions.timeout_s is; the message names both addresses, and the way out."""
    assert reaching.REACH_S <= 30.0
    monkeypatch.setattr(reaching, "REACH_S", 1.0)
    with nowhere() as first, nowhere() as second:
        both = wires([first], [second])
        began = time.monotonic()
        with pytest.raises(LinkError) as caught:
            connect(*both)
        assert time.monotonic() - began < 10.0
        words = str(caught.value)
        assert all(f"{HOST}:{port}" in words for _, port in (first, second)), words
        assert all(
            each in words for each in ("regions.port", "regions.announce", "ssh -R", "--coordinator URL")
        )
        for wire in both:
            assert not wire.regions
            wire.close()


@pytest.mark.parametrize("keys", [None, Keys.from_secret(secret())], ids=["open", "secret"])
def test_two_regions_that_nobody_can_call_meet_in_the_storage(
    keys: Keys | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections go through it; a socket that breaks there costs no bit."""
    monkeypatch.setattr(reaching, "_STORAGE_S", 0.2)
    with nowhere() as first, nowhere() as second:
        both = wires([first], [second], keys=keys)
        for wire in both:
            wire.storage = folder_url(tmp_path)
        connect(*both)
        assert [wire.ways for wire in both] == [{1: "storage"}, {0: "storage"}]
        speak(*both)
        streams = at_once(*(partial(wire.stream, 1 - wire.region, 99, 20.0) for wire in both))
        say(*streams)
        for way in mailbox(folder_url(tmp_path))._open_ways:
            way.end(ConnectionResetError("the test breaks it"))
        speak(*both, order=2)
        say(*streams)
        for each in (*both, *streams):
            each.close()


def test_who_waits_alone_in_the_storage_waits_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other region has no way to it."""
    monkeypatch.setattr(reaching, "_STORAGE_S", 0.1)
    monkeypatch.setattr(reaching, "REACH_S", 2.0)
    url = folder_url(tmp_path)
    with nowhere() as first, nowhere() as second:
        both = wires([first], [second])
        both[0].storage = url
        with pytest.raises(LinkError, match=f"and {url} .the other end has not come"):
            connect(*both)
        for wire in both:
            wire.close()


def test_a_port_of_the_users_choice() -> None:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    wire = Wire(0, 1, port=port)
    assert (wire.port, wire.addresses) == (port, ((HOST, port),))
    wire.close()
