"""Regions that train over real links and a coordinator, in one process, while one of them dies or comes in."""

from __future__ import annotations

import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from msgspec import structs
from torch.__config__ import parallel_info

from hf_cocodc.coordinator.messages import Ask, Beat, Bye, Refuse
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.errors import LinkError
from hf_cocodc.link import rules, tcp
from hf_cocodc.link.base import MeanRequest
from hf_cocodc.link.records import NOTHING_TO_SAY, Trailer
from hf_cocodc.link.tcp import TcpLink, use_one_thread
from hf_cocodc.parts import codecs
from hf_cocodc.parts.codecs.base import Conversation
from tests.link.memory import PATIENCE_S, SILENT_S, Regions, at_once, met, wait_until
from tests.link.training import STEPS, Died, Trained, check, method_of, train_all
from tests.parts.test_codecs import fragment_of
from tests.standing import standing


class Told(NamedTuple):
    """A number."""

    number: int


@pytest.mark.parametrize("name", ["diloco", "streaming", "co2", "dilocox"])
def test_the_others_train_on_without_a_region_that_dies(name: str) -> None:
    """All that land anything land the same, and end with the same model; what the region leaves is void for all or for none."""
    dies = {1: random.Random(name).randrange(2, STEPS)}
    found, errors = train_all(name, dies)
    assert found.keys() == {0, 2} and isinstance(errors[1], Died)
    check(name, found)
    for trained, _ in found.values():
        assert trained.link.epoch.members == (0, 2)
        epochs = [facts for kind, facts in trained.link.events if kind == "epoch"]
        assert [facts["members"] for facts in epochs] == [[0, 2]]
        assert re.fullmatch(r"region 1 is lost: .*its process has died", epochs[0]["why"])


def test_a_loss_is_decided_in_a_fixed_run_too() -> None:
    """Who is left holds the same, and quotes the note of the lost region."""
    method = method_of("diloco")

    def body(region: int, link: TcpLink) -> Trained:
        trained = Trained(link, method)
        for step in range(1, STEPS + 1):
            if (region, step) == (1, 4):
                raise Died("its disk is full")
            trained.train(region)
        trained.finish()
        return trained

    found = Regions(3, elastic=False).run(body)
    assert isinstance(found.pop(1), Died)
    assert found[0].digests == found[2].digests
    for trained in found.values():
        [(_, facts)] = [each for each in trained.link.events if each[0] == "epoch"]
        assert facts["members"] == [0, 2] and facts["why"] == "region 1 is lost: its disk is full"


def test_a_newcomer_makes_no_call_before_it_has_a_base() -> None:
    """It is connected to all, and known to them; until it is in, they are who they were."""
    regions = Regions(2)
    newcomer = regions.link(2, join=True)
    regions.links.append(newcomer)
    assert newcomer.members == (2,) and not newcomer.takes_part()
    assert {member.region for member in newcomer.donors} == {0, 1}
    with pytest.raises(LinkError, match="before it has a base"):
        newcomer.mean(None)  # type: ignore[arg-type]
    assert [link.members for link in regions.links[:2]] == [(0, 1)] * 2
    regions.end()


def test_nobody_searches_for_a_newcomer_that_has_gone() -> None:
    """It was started again: what listens at its address answers, and each search would call it until the time-out."""
    regions = Regions(2)
    ports = [link.wire._port for link in regions.links]
    for link in regions.links:
        link.wire.timeout_s = 10 * PATIENCE_S
    before = [set(port._expected) for port in ports]
    client, wire = met(regions.served.address, 2, regions.links[0].terms, join=True)
    wait_until(lambda: all(set(port._expected) > known for port, known in zip(ports, before, strict=True)))
    client.close(Bye(how="left"))
    wait_until(lambda: all(set(port._expected) == known for port, known in zip(ports, before, strict=True)))
    wire.close()
    regions.end()


def test_a_thread_that_hangs_in_an_earlier_life_ends_with_it() -> None:
    """It is in a call while its process parts with the run and comes back: another one makes the new calls."""
    before = set(threading.enumerate())
    regions = Regions(2)
    stays, link = regions.links
    held, released = threading.Event(), threading.Event()
    hung: list[threading.Thread] = []

    def hang() -> Conversation:
        result = yield from codecs.fp32().converse(torch.ones(4), fragment_of((4,)), {})
        hung.append(threading.current_thread())
        held.set()
        released.wait(PATIENCE_S)
        return result

    converse = partial(codecs.fp32().converse, torch.ones(4), fragment_of((4,)), {})
    link.mean(MeanRequest(hang, 4, Trailer, "a mean"))
    stays.mean(MeanRequest(converse, 4, Trailer, "a mean"))
    assert held.wait(PATIENCE_S)
    link.part_with()
    regions.begin_again(link)
    released.set()
    hung[0].join(PATIENCE_S)
    assert not hung[0].is_alive()
    log: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link.follow(iter(log.get, None))
    stays.log_to(lambda item: log.put(item) is None)
    assert not link.apply(link.next_marker())
    link.say_ready()
    wait_until(lambda: stays.knows)
    stays.gather(Told(0), "before it comes in")
    stays.regroup(stays.knows)
    while not link.apply(link.next_marker()):
        pass
    gathered = at_once(*(partial(each.gather, Told(each.region), "after") for each in regions.links))
    assert gathered == [(Told(0), Told(1))] * 2
    workers = {each for each in threading.enumerate() if each.name == "hf_cocodc-link"} - before
    assert len(workers) == len(regions.links)
    regions.end()


def test_a_fixed_run_needs_no_coordinator_that_refuses_it(caplog: pytest.LogCaptureFixture) -> None:
    """Others have begun a run of its name while it was cut off from the coordinator: it trains on."""
    method = method_of("diloco")

    def body(region: int, link: TcpLink) -> Trained:
        trained = Trained(link, method)
        link._hear(Refuse(error="RunOver", why="run 'run' has been begun anew."))
        for _ in range(STEPS):
            trained.train(region)
        trained.finish()
        return trained

    found = Regions(2, elastic=False).run(body)
    assert all(isinstance(each, Trained) for each in found.values()), found
    assert "trains on without the coordinator" in caplog.text


def test_a_process_that_listens_nowhere_costs_its_region(caplog: pytest.LogCaptureFixture) -> None:
    """The thread that connects to it ends with a reason, and tries again."""
    regions = Regions(2)
    link, other = regions.links[0], regions.links[1].me
    part = replace(link._part, lanes={**link._part.lanes, other: ()}, paired={}, meeting=frozenset({other}))
    link._part = part
    link._connect(link.me, other, 0.0)
    assert "region 1 listens with 0 of its ranks" in caplog.text
    assert "listens with 0 of its ranks" in link._part.unpaired[other]
    regions.end()


@pytest.mark.parametrize("elastic", [False, True])
def test_a_region_that_waits_says_for_whom(
    elastic: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before its time-out, and again later: training stands still meanwhile."""
    monkeypatch.setattr(tcp, "_SAY_S", 0.2)
    said = re.compile(r"region 0 has waited \d s for region 1 \(anything\)\.")

    def body(region: int, link: TcpLink) -> None:
        if region == 1:
            wait_until(lambda: len(said.findall(caplog.text)) > 1)
        link.gather(NOTHING_TO_SAY, "anything")

    found = Regions(2, elastic=elastic).run(body)
    assert found == {0: None, 1: None}


def test_a_region_says_it_has_waited_for_no_second_for_which_it_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stood = standing(monkeypatch)
    said: list[Beat] = []

    def body(region: int, link: TcpLink) -> None:
        if region == 0:
            link.gather(NOTHING_TO_SAY, "anything")
            return
        waits = regions.links[0]
        wait_until(lambda: waits._sign().awaits == 1)
        stood.s, waits.coasts = 9.0, True
        said.append(waits._sign())
        link.gather(NOTHING_TO_SAY, "anything")

    regions = Regions(2)
    assert regions.run(body) == {0: None, 1: None}
    assert said[0].awaits == 1 and said[0].blocked_s is not None and said[0].coasts
    assert max(said[0].waited_s, said[0].idle_s, said[0].blocked_s) < SILENT_S


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_loss_does_not_wait_for_ever_for_a_coordinator_that_is_away(comes_back: bool) -> None:
    """After `regions.wait_s` the region ends with an error that says so. One without its memory waits for a member in vain."""
    regions = Regions(2)
    link = regions.links[0]
    link._part = replace(link._part, terms=structs.replace(link.terms, timeout_s=0.0, wait_s=0.1))
    regions.links[1]._client.close()
    regions.end_coordinator()
    until = time.monotonic() + 20
    while link.has_coordinator and time.monotonic() < until:
        time.sleep(0.05)
    served = serve_in_thread(port=regions.served.port) if comes_back else None
    while comes_back and not link._client.is_connected and time.monotonic() < until:
        time.sleep(0.05)
    assert link._client.is_connected is comes_back
    link._feed(rules.HeardFrom(Ask(number=0)))
    while link.failure is None and time.monotonic() < until:
        link._sign()
        time.sleep(0.05)
    with pytest.raises(LinkError, match=r"the coordinator has not (answered|decided) for .*regions.wait_s"):
        link.gather(NOTHING_TO_SAY, "anything")
    regions.end()
    if served is not None:
        served.close()


@pytest.fixture
def four_threads() -> Iterator[None]:
    """torch computes with four threads here, however many cores there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def numbers() -> set[int]:
    """With how many threads torch, OpenMP and MKL compute in this thread."""
    return {torch.get_num_threads(), *map(int, re.findall(r"max_threads\(\) : (\d+)", parallel_info()))}


def in_a_thread(live: Callable[[], object] = lambda: None) -> set[int]:
    """The `numbers` in a new thread, once it has done `live`."""
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: [live(), found.append(numbers())])
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.usefixtures("four_threads")
def test_the_threads_of_a_user_compute_as_without_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own setting is the process's, too: it is that of each thread that begins later, one by one."""
    found, setting = [], torch.set_num_threads

    def told(count: int) -> None:
        setting(count)
        found.append(in_a_thread())

    monkeypatch.setattr(torch, "set_num_threads", told)
    assert in_a_thread(use_one_thread) == {1}
    assert all(each == {4} for each in (*found, in_a_thread(), numbers()))


@pytest.mark.usefixtures("four_threads")
def test_a_link_beside_the_thread_that_pins_batches() -> None:
    """DataLoader's sets one for all threads that begin later, also if they are of the user; a link changes nothing of it."""
    for first, then in ((use_one_thread, pins_batches), (pins_batches, use_one_thread)):
        torch.set_num_threads(4)
        assert [in_a_thread(first), in_a_thread(then)] == [{1}, {1}]
        assert [in_a_thread(), numbers()] == [{1}, {4}]


def pins_batches() -> None:
    """As `torch.utils.data._utils.pin_memory` begins."""
    torch.set_num_threads(1)
