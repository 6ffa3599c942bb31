import asyncio
import contextlib
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hf_cocodc.coordinator import caller
from hf_cocodc.coordinator import client as client_module
from hf_cocodc.coordinator.caller import CoordinatorConnection, LoopThread, connect
from hf_cocodc.coordinator.client import Client, status
from hf_cocodc.coordinator.messages import Bye, Note, Post, Posted, Refuse, Resumed, Waiting
from hf_cocodc.coordinator.server import Served, serve_in_thread
from hf_cocodc.errors import InputError, MeetingError, MeetingRefused
from hf_cocodc.net.addresses import own_address
from tests.listening import free_port
from tests.standing import standing

from ..net.swallowing import Swallowing
from .regions import OTHER, SECRET, Region, hello, meet, part, socket_of, try_to_meet, wait_until


def test_nobody_answers() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(MeetingError, match=f"no coordinator answers at {address} .Connection refused."):
        status(address, None, timeout_s=0.5)


def test_an_unknown_host() -> None:
    with pytest.raises(MeetingError, match=r"host 'nowhere\.invalid' has no address") as failure:
        status("nowhere.invalid:29650", None, timeout_s=0.3)
    assert failure.value.exit_code == 1, "a name server may know it later"


def test_an_address_that_drops_packets_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name often has an IPv6 address that nobody reaches; and a kernel may not know its family."""
    monkeypatch.setattr(caller, "_EACH_S", 0.2)
    there = serve_in_thread()
    with socket.socket() as silent, contextlib.ExitStack() as kept:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(3):  # its queue is full: it answers nobody else
            waiting = kept.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        known = [
            (family, socket.SOCK_STREAM, 0, "", where)
            for family, where in (
                (socket.AF_INET, silent.getsockname()),
                (99, ("::1", 1)),
                (socket.AF_INET, ("127.0.0.1", there.port)),
            )
        ]
        monkeypatch.setattr(caller, "resolve", lambda address, kind: known)
        assert status("many.example:29650", None, timeout_s=5.0) == []
    there.close()


def test_a_region_names_a_coordinator_that_has_no_address() -> None:
    """A plain loop asks for the way there before it calls it."""
    with pytest.raises(MeetingError, match=r"host 'nowhere\.invalid' has no address"):
        own_address("nowhere.invalid:29650", None)


def test_a_coordinator_that_is_started_a_moment_later_is_reached() -> None:
    port = free_port()
    served = []
    timer = threading.Timer(0.5, lambda: served.append(serve_in_thread(port=port)))
    timer.start()
    assert status(f"127.0.0.1:{port}", None) == []
    timer.join()
    served[0].close()


@pytest.mark.parametrize(
    ("answer", "why", "patience_s"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "is not a coordinator", 10.0),
        (b"", "does not answer as a coordinator", 0.4),
    ],
)
def test_something_else_listens_there(answer: bytes, why: str, patience_s: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def work() -> None:
            connection, _ = server.accept()
            connection.sendall(answer)
            time.sleep(0.8)
            connection.close()

        thread = threading.Thread(target=work)
        thread.start()
        with pytest.raises(MeetingError, match=why):
            status(f"127.0.0.1:{server.getsockname()[1]}", None, timeout_s=patience_s)
        thread.join()


def test_a_signal_ends_the_meeting() -> None:
    served = serve_in_thread()
    client = Client(served.address, "run")
    begun = time.monotonic()

    def look() -> None:
        if time.monotonic() > begun + 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.meet(hello(0), 60.0, look=look)
    assert time.monotonic() < begun + 30.0
    client.close()
    served.close()
    begun = time.monotonic()
    client = Client(served.address, "run")
    with pytest.raises(KeyboardInterrupt):
        client.meet(hello(0), 60.0, look=look)
    assert time.monotonic() < begun + 30.0
    client.close()


def test_a_coordinator_that_stays_away_before_regions_have_met() -> None:
    served = serve_in_thread()
    client = Client(served.address, "run")
    heard: list[Waiting] = []

    def waiting(news: Waiting) -> None:
        heard.append(news)
        served.close()

    with pytest.raises(MeetingError, match=r"tried for 2.5 s .*no coordinator answers.*Nothing was trained"):
        client.meet(hello(0), 2.5, waiting=waiting)
    assert heard[0] == Waiting(absent=(1,)) and "It tries again" in heard[1].why
    client.close()


def test_a_region_hears_that_large_packets_may_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator's signs of life come, and no answer: the region printed nothing for 10 minutes."""
    monkeypatch.setattr(client_module, "SILENT_S", 1.0)
    served = serve_in_thread()
    way = Swallowing(served.address)
    client = Client(way.address, "run")

    class Heard(Exception):
        pass

    def waiting(news: Waiting) -> None:
        raise Heard(news.why)

    with pytest.raises(
        Heard, match="does not answer what it has said of itself. Perhaps small packets pass, .*MTU"
    ):
        client.meet(hello(0, large="x" * 4096), 30.0, waiting=waiting)
    for each in (way, served):
        each.close()


@pytest.mark.parametrize("joins", [False, True])
def test_a_region_that_waits_survives_the_death_of_the_coordinator(joins: bool) -> None:
    """It waits at the next one."""
    served = serve_in_thread()
    client, heard = Client(served.address, "run"), []
    restarted: list[Served] = []

    def waiting(news: Waiting) -> None:
        heard.append(news)
        if len(heard) == 1:
            served.close()
        elif not restarted:
            restarted.append(serve_in_thread(port=served.port))
            thread.start()

    def others() -> None:
        regions = (0, 1) if joins else (1,)
        found.extend(meet(served.address, *(hello(each, elastic=True) for each in regions)))

    found: list[Region] = []
    thread = threading.Thread(target=others)
    welcome = client.meet(hello(2 if joins else 0, elastic=True, join=joins), 20.0, waiting=waiting)
    assert welcome.joins == joins
    thread.join()
    client.close()
    part(*found)
    restarted[0].close()


def test_a_name_that_is_not_known_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    served, asked = serve_in_thread(), []
    known = caller.resolve

    def resolve(address: str, kind: socket.SocketKind) -> list[Any]:
        asked.append(address)
        return known("nowhere.invalid:1" if len(asked) < 3 else address, kind)

    monkeypatch.setattr(caller, "resolve", resolve)
    client = Client(served.address, "run")
    client.meet(hello(0, count=1), 10.0)
    assert len(asked) == 3
    client.close()
    served.close()


def test_a_refusal_is_not_waited_out() -> None:
    served = serve_in_thread(secrets=[SECRET])
    client = Client(served.address, "run", OTHER)
    began = time.monotonic()
    with pytest.raises(MeetingRefused, match="another secret"):
        client.meet(hello(0), 60.0)
    assert time.monotonic() - began < 30.0
    served.close()


def test_a_joiner_waits_for_a_run_and_says_that_there_is_none() -> None:
    served = serve_in_thread()
    client = Client(served.address, "run")
    with pytest.raises(MeetingError, match="within 0.5 s .*no run 'run' trains here"):
        client.meet(hello(0, elastic=True, join=True), 0.5)
    client.close()
    served.close()


def test_nothing_is_lost_between_the_meeting_and_the_thread() -> None:
    served = serve_in_thread()
    a, b = try_to_meet(served.address, hello(0), hello(1))
    assert isinstance(a, Region) and isinstance(b, Region)
    b.start()
    for number in range(100):
        b.client.send(Post(to=a.client.me, topic="t", content={"number": number}))
    time.sleep(0.2)
    a.start()
    wait_until(lambda: len(a.heard) >= 100)
    assert [each.content["number"] for each in a.heard if isinstance(each, Posted)] == list(range(100))
    part(a, b)
    served.close()


def test_a_handler_that_fails_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    served = serve_in_thread()
    a, b = meet(served.address, hello(0), hello(1))
    usual, a._on = a._on, lambda message: 1 / 0  # type: ignore[method-assign,assignment]
    a.client._on = a._on
    b.client.send(Post(to=a.client.me, topic="t", content={}))
    wait_until(lambda: "division by zero" in caplog.text)
    a.client._on = usual
    b.client.send(Post(to=a.client.me, topic="again", content={}))
    assert a.wait_for(Posted).topic == "again"
    part(a, b)
    served.close()


def test_an_outage_is_one_warning_and_one_line_when_it_is_over(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "hf_cocodc.coordinator.client")
    served = serve_in_thread(state=tmp_path / "state")
    a, b = meet(served.address, hello(0), hello(1))
    served.close()
    time.sleep(0.4)
    again = serve_in_thread(port=served.port, state=tmp_path / "state")
    for region in (a, b):
        region.wait_for(Resumed, 8.0)
    wait_until(lambda: sum(record.levelname == "INFO" for record in caplog.records) == 2)
    time.sleep(0.3)
    assert caplog.text.count("training goes on; what only it decides waits until it is back") == 2
    part(a, b)
    again.close()


def test_a_region_that_is_refused_hears_so_and_calls_no_more() -> None:
    """It looks after its own waits all the same: a loss that nobody decides must end."""
    served = serve_in_thread()
    a, b = meet(served.address, hello(0), hello(1))
    a.welcome = structs.replace(a.welcome, token="another")
    socket_of(a).shutdown(socket.SHUT_RDWR)
    assert a.wait_for(Refuse).error == "LeftBehind"
    before = a.beats
    wait_until(lambda: a.beats > before + 2, 5.0)
    assert (
        a.aways == 1
    )  # of the broken connection: the refusal tells why nobody decides any more, and no outage does
    assert sum(isinstance(each, Refuse) for each in a.heard) == 1
    part(a, b)
    served.close()


def test_a_client_may_close_while_the_coordinator_is_away() -> None:
    served = serve_in_thread()
    a, b = meet(served.address, hello(0), hello(1))
    served.close()
    wait_until(lambda: not a.client.is_connected)
    begun = time.monotonic()
    a.client.close(Bye(how="finished", step=1))
    part(b)
    assert time.monotonic() < begun + 2.0


def test_a_coordinator_that_is_silent_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SILENT_S", 0.5)
    monkeypatch.setattr(client_module, "_SILENT_PERIODS", 1)
    served = serve_in_thread()
    served._coordinator._alive_s = 60.0
    a, b = meet(served.address, hello(0), hello(1))
    assert a.wait_for(Resumed).generation.number == 1
    part(a, b)
    served.close()


def test_a_message_that_is_too_long_is_refused_before_it_is_sent() -> None:
    served = serve_in_thread()
    connection = CoordinatorConnection(served.address, "run", "region", None)
    with pytest.raises(InputError, match="longer than a line"):
        connection.send(hello(0, model={"x": "y" * (9 << 20)}))
    connection.close()
    served.close()


def test_a_region_that_stood_still_calls_nobody_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came meanwhile is heard: whoever called again would not hear that the run has begun."""
    stood = standing(monkeypatch)
    monkeypatch.setattr("hf_cocodc.coordinator.service.ALIVE_S", 60.0)
    served, heard = serve_in_thread(), []
    client = Client(served.address, "run")

    def waiting(news: Waiting) -> None:
        heard.append(news)
        if len(heard) == 1:
            timer.start()

    def others() -> None:
        stood.s = 100.0
        time.sleep(0.5)
        found.extend(meet(served.address, hello(1)))

    found: list[Region] = []
    timer = threading.Timer(0.5, others)
    client.meet(hello(0), 600.0, waiting=waiting)
    assert heard == [Waiting(absent=(1,))]
    timer.join()
    client.close()
    part(*found)
    served.close()


def test_a_call_that_nobody_has_any_more_is_closed_with_its_loop() -> None:
    """Whoever asked for it was interrupted a moment after it had come about."""
    served, thread = serve_in_thread(), LoopThread()
    call = thread.wait_for(connect(served.address, "run", "region", None, 5.0))
    thread.end()
    assert not thread.calls and call.writer.transport.is_closing()
    with pytest.raises(OSError, match="Bad file descriptor"):
        call.writer.get_extra_info("socket").getpeername()
    served.close()


def test_a_loop_is_ended_once_also_by_two_threads() -> None:
    """What it does last takes a moment; a second end must not cut that short."""
    thread = LoopThread()
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)
            ended.set()

    thread.soon(lambda: asyncio.ensure_future(work()))
    thread.wait_for(asyncio.sleep(0.05))
    ends = [threading.Thread(target=thread.end) for _ in range(2)]
    for each in ends:
        each.start()
        time.sleep(0.1)
    for each in ends:
        each.join()
    assert ended.is_set() and thread.loop.is_closed() and not thread.is_alive()


def test_what_is_said_while_a_client_closes_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """Other threads know of it a moment later."""
    served = serve_in_thread()
    a, b = meet(served.address, hello(0), hello(1))
    thread = a.client._thread
    assert thread is not None
    parting = asyncio.run_coroutine_threadsafe(a.client._part(), thread.loop)
    for _ in range(50):
        thread.soon(a.client._say, Note(text="late"))
    parting.result(5.0)
    part(a, b)
    served.close()
    assert "write_eof" not in caplog.text
