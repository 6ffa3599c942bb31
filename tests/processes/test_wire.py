"""The pairs of regions themselves: real processes, one of which is killed, and another of which comes later."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch
from torch.distributed import TCPStore

from hf_cocodc.errors import LinkError, RegionLostError
from hf_cocodc.link.exchange import Exchange
from hf_cocodc.net.connection import Operation
from hf_cocodc.net.members import Whereabouts
from hf_cocodc.net.view import Revoked, UnderWay, View
from hf_cocodc.net.wire import Wire
from hf_cocodc.parts.codecs.base import Coder, Message, mean_of
from hf_cocodc.parts.codecs.block import Integers
from hf_cocodc.parts.codecs.cast import Cast
from hf_cocodc.parts.tensors.memory import Buffers, Home
from tests.processes.forks import fork, torch_master
from tests.processes.launching import TIMEOUT_S

NUMEL = 1_000_003
CODERS = {"fp32": Cast(torch.float32), "int8": Integers(8, 256)}


def values(region: int, op: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * region + op))


def exchange_of(view: View, me: int, op: int, coder: Coder) -> Exchange:
    return Exchange(view, Message(values(me, op), coder), Home(), Buffers(), f"op {op}")


def mean(view: View, me: int, op: int, coder: Coder) -> torch.Tensor:
    exchange = exchange_of(view, me, op, coder)
    exchange.begin()
    return exchange.end([1.0] * view.num_regions).mean


class Endless:
    """The patience of one who waits for ever."""

    def wait_for(self, region: int, what: str) -> None: ...

    def arrived(self) -> None:
        raise AssertionError("nothing arrives")


def begin_and_end(exchange: Exchange) -> None:
    exchange.begin()
    exchange.end([1.0] * 4)


def expected(regions: list[int], op: int, coder: Coder) -> torch.Tensor:
    messages = [Message(values(region, op), coder) for region in regions]
    return mean_of(messages, [1.0] * len(regions))[0].mean


def a_region(ticket: int, region: int, port: int, folder: str) -> None:
    """Region 3 dies in a mean of four; the others go on without it, and with the process that comes instead of it."""
    store, waiting = (TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60)) for _ in range(2))
    found: dict[str, torch.Tensor] = {}
    wire = Wire(region, 2, timeout_s=60.0)
    wire.why_lost = lambda region, broken_at, is_refused, is_closed: "died" if is_refused else None
    store.set(f"wire/{ticket}", msgspec.json.encode(wire.whereabouts).decode())
    tickets = [1, 2, 3, ticket] if ticket == 5 else [1, 2, 3, 4]

    def connect(other: int) -> None:
        there = tickets[other]
        first, second = sorted((ticket, there))
        whereabouts = msgspec.json.decode(waiting.get(f"wire/{there}"), type=Whereabouts)
        wire.add(wire.meet(other, whereabouts, f"{first}-{second}"))

    def together(name: str) -> None:
        """Until all four processes that are alive now have come here."""
        store.set(f"{name}/{ticket}", "")
        store.wait([f"{name}/{each}" for each in tickets])

    for other in range(4):
        if other != region:
            if ticket == 5:
                store.set(f"comes to {other}", "")
            connect(other)
    coder = CODERS["int8"]
    if ticket != 5:
        first = wire.view(range(4), 1)
        torch.testing.assert_close(
            mean(first, region, 1, coder), expected([0, 1, 2, 3], 1, coder), atol=0, rtol=0
        )
        together("began")
        broken = wire.view(range(4), 2)
        exchange = exchange_of(broken, region, 2, coder)
        if region == 3:
            exchange.begin()
            # all have sent something, and nobody has all of it: this region sends no mean
            os.kill(os.getpid(), signal.SIGKILL)
        # a wait for a region that lives, for what it never sends: only the end of the view ends it
        stuck, late = threading.Event(), []

        def wait_for_ever() -> None:
            pending = broken.receive((region + 1) % 3, torch.empty(8, dtype=torch.uint8), 63, 0, "op 2")
            stuck.set()
            try:
                broken.wait([pending], "op 2", Endless())
            except BaseException as error:
                late.append(error)

        threading.Thread(target=wait_for_ever, daemon=True).start()
        stuck.wait()

        def attempt() -> None:
            """Who waits for a region that has noticed the loss, and sends no more, does not notice it."""
            with pytest.raises(LinkError) as caught:
                begin_and_end(exchange)
            if isinstance(caught.value, RegionLostError):
                store.set("lost", str(caught.value))

        threading.Thread(target=attempt, daemon=True).start()
        while not store.check(["lost"]):  # a call that blocks would block the other thread's
            time.sleep(0.01)
        assert store.get("lost").decode().startswith("region 3 closed its connection")
        broken.revoke()
        wire.drop(3)
        for call in (
            broken.tag,
            lambda: broken.swap(torch.zeros(1), ""),
            lambda: broken.wait([UnderWay(0, Operation(2, 0, torch.empty(0)))], ""),
        ):
            with pytest.raises(Revoked):
                call()
        with pytest.raises(LinkError, match="region 3"):
            wire.view(range(4), 1)
        for op, name in ((3, "fp32"), (4, "int8")):
            view = wire.view(range(3), op)
            assert (view.region, view.others) == (region, [r for r in range(3) if r != region])
            torch.testing.assert_close(
                mean(view, region, op, CODERS[name]), expected([0, 1, 2], op, CODERS[name]), atol=0, rtol=0
            )
        # a mean that cannot end before region 3 is there again: region 2 begins when it has connected
        under_way = threading.Thread(
            target=lambda: found.update(mean=mean(wire.view(range(3), 5), region, 5, coder))
        )
        if region != 2:
            under_way.start()
        tickets[3] = 5
        store.wait([f"comes to {region}"])
        connect(3)
        together("connected")
        assert not found
        if region == 2:
            under_way.start()
        under_way.join()
        torch.testing.assert_close(found["mean"], expected([0, 1, 2], 5, coder), atol=0, rtol=0)
        assert all(isinstance(each, Revoked) for each in late)
    else:
        together("connected")
    torch.testing.assert_close(
        mean(wire.view(range(4), 6), region, 6, coder),
        expected([0, 1, 2, 3], 6, coder),
        atol=0,
        rtol=0,
    )
    Path(folder, str(ticket)).write_text("done")
    together("over")
    wire.close()


@pytest.mark.slow
def test_a_pair_is_dropped_and_added_while_the_others_stay(tmp_path: Path) -> None:
    """One of four processes dies in the middle of a mean; the connections of the others carry the right bits afterwards,
    beside operations that never end, and while a new process connects."""
    store, log = torch_master(), tmp_path / "log"
    processes = [
        fork(a_region, ticket, region, store.port, str(tmp_path), log=log)
        for ticket, region in ((1, 0), (2, 1), (3, 2), (4, 3), (5, 3))
    ]
    for process in processes:
        process.join(TIMEOUT_S)
    assert [process.exitcode for process in processes] == [0, 0, 0, -signal.SIGKILL, 0], log.read_text()[
        -4000:
    ]
    assert all((tmp_path / str(ticket)).exists() for ticket in (1, 2, 3, 5))
