"""Doctors of several regions meet at a coordinator, compare what they would train, connect, and part again."""

from __future__ import annotations

import dataclasses
import platform
import socket
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from hf_cocodc.coordinator.client import Client, status
from hf_cocodc.coordinator.hello import packed
from hf_cocodc.coordinator.messages import Bye, Hello, Terms
from hf_cocodc.coordinator.server import Served, serve_in_thread
from hf_cocodc.net.keys import Keys
from hf_cocodc.net.members import Whereabouts
from hf_cocodc.settings import RegionConfig
from hf_cocodc.tools.doctor import coordinator as doctors_coordinator
from hf_cocodc.tools.doctor import others
from hf_cocodc.tools.doctor.facts import OK, WARN, WRONG, Finding
from tests.net.swallowing import Swallowing
from tests.secret import secret

KEYS = Keys.from_secret(secret("a secret for the tests of a doctor"))
MINE: dict[str, Any] = {
    "outer.sync_interval": 30,
    "regions.may_differ": ["path"],
    "facts": {"data.path": "/data", "torch": "2.13.0"},
    "frozen parameters and buffers": packed([]),
    "versions": {"transformers": "5.24.0"},
}


def regions(served: Served, region: int, **changes: Any) -> RegionConfig:
    given = {"count": 2, "region": region, "coordinator": served.address, "start_timeout_s": 60.0}
    return RegionConfig(**{**given, **changes}).resolved({})


def met(
    served: Served, keys: Keys | None = None, theirs: Mapping[str, Any] | None = None, **changes: Any
) -> list[list[Finding]]:
    """What the doctors of two regions find, of which the second one tells `theirs`."""
    found: dict[int, list[Finding]] = {}

    def doctor(region: int) -> None:
        told = {**MINE, **(theirs or {})} if region else MINE
        config = regions(served, region, **changes)
        found[region] = list(others.meet(config, "a run", told, "127.0.0.1", keys, lambda words: None))

    threads = [threading.Thread(target=doctor, args=(region,), name=f"doctor-{region}") for region in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    return [found[0], found[1]]


def test_doctors_meet_and_connect_with_a_secret() -> None:
    """Each finds the other one, and how far it is; they can do so again."""
    served = serve_in_thread(secrets=[KEYS])
    for _ in range(2):
        for region, (other, all_regions) in enumerate(met(served, KEYS)):
            assert (other.level, other.topic) == (OK, f"region {1 - region}")
            same = (
                f"{platform.node()} at 127.0.0.1: same versions, settings, model and data; reached directly"
            )
            assert other.words == same
            assert (all_regions.level, all_regions.topic) == (OK, "regions")
            assert "connection" in all_regions.words and "round trip" in all_regions.words
            assert "tcp would carry payloads: region 0: a secret is set" in all_regions.words
    served.close()


@pytest.mark.parametrize("elastic", [{}, {"min": 1, "wait_s": 30.0}])
def test_a_run_that_trains_is_not_disturbed(elastic: dict[str, Any]) -> None:
    """Its doctors meet beside it: it has the members that it had, and no newcomer."""
    served = serve_in_thread()
    terms = Terms(count=1, most=2, wait_s=30.0) if elastic else Terms(count=1)
    lanes = (Whereabouts((("127.0.0.1", 9),), bytes(32)),)
    hello = Hello(region=0, join=False, lanes=lanes, machine="m", token="t", terms=terms, compared={})
    client = Client(served.address, "a run")
    client.meet(hello, 60.0)
    [before] = status(served.address, None, "a run")
    assert all(each.level == OK for lines in met(served, **elastic) for each in lines)
    [after] = status(served.address, None, "a run")
    assert (after["run"], after["epoch"]) == (before["run"], before["epoch"])
    assert [each["region"] for each in after["members"]] == [0] and not after.get("newcomers")
    client.close(Bye(how="finished"))
    served.close()


@pytest.mark.parametrize(
    ("theirs", "level", "words"),
    [
        ({"outer.sync_interval": 60}, WRONG, "disagree on outer.sync_interval: region 0 has 30, region 1 has 60"),
        ({"facts": {"data.path": "/data", "torch": "2.12.0"}}, WRONG, "disagree on torch"),
        ({"facts": {"data.path": "/x", "torch": "2.13.0"}}, WARN, "data.path, which may differ: '/data' in region 0"),
        ({"versions": {"transformers": "5.23.0"}}, WARN, "other versions of transformers: 5.24.0 in region 0"),
    ],
)  # fmt: skip
def test_what_regions_compare(theirs: dict[str, Any], level: str, words: str) -> None:
    """By the run's own rules; both doctors say it, and what is wrong has a command."""
    served = serve_in_thread()
    for found in met(served, theirs=theirs):
        [line] = [each for each in found if each.level != OK]
        assert (line.level, line.topic) == (level, "regions") and words in line.words
        assert level != WRONG or str(line.command).startswith("scp RECIPE HOST:")
    served.close()


def test_a_doctor_whom_nobody_joins() -> None:
    """It says for whom it has waited; that is no fault."""
    served = serve_in_thread()
    told: list[str] = []
    config = regions(served, 0, start_timeout_s=1.0, count=3)
    found = list(others.meet(config, "a run", MINE, "127.0.0.1", None, told.append))
    assert [(each.topic, each.level) for each in found] == [("regions", WARN)]
    late = "region 1 and region 2 did not arrive within 1 s (--wait): nothing was compared."
    assert found[0].words == late and "in all regions at once" in str(found[0].command)
    assert told == ["waits for the doctors of the other regions, for 1 s at most (--wait)"]
    served.close()


def test_regions_of_which_neither_reaches_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet at the coordinator, and what they announce answers nobody: a firewall, or NAT."""
    monkeypatch.setattr(others, "_REACH_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    served = serve_in_thread()
    for found in met(served, announce=f"127.0.0.1:{port}"):
        [line] = found
        assert (line.level, line.topic) == (WRONG, "regions") and "do not reach each other" in line.words
        assert "regions.announce=HOST:29700" in str(line.command)
    served.close()


def test_what_another_region_says_is_one_line() -> None:
    """It is never believed, and stands in no command."""
    served = serve_in_thread()
    for found in met(served, theirs={"facts": {"torch": "2.13.0", "data.path": "\x1b[2J\nx; touch /tmp/y"}}):
        assert all(each.words.isprintable() for each in found)
        assert not any("touch" in str(each.command) for each in found)
    served.close()


def test_a_coordinator_that_goes_away_while_a_doctor_waits() -> None:
    served = serve_in_thread()
    config = regions(served, 0, start_timeout_s=3.0)
    found = list(others.meet(config, "a run", MINE, "127.0.0.1", None, lambda words: served.close()))
    assert [(each.topic, each.level) for each in found] == [("coordinator", WRONG)]
    assert str(found[0].command).startswith("hf-cocodc coordinator --host 127.0.0.1")


def test_an_address_and_a_port_on_which_nobody_can_listen() -> None:
    """A region of this machine that waits or trains may have the port."""
    served = serve_in_thread()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = regions(served, 0)
        mine = dataclasses.replace(config, port=taken.getsockname()[1])
        for regions_, address in ((config, "203.0.113.7"), (mine, "127.0.0.1")):
            [line] = others.meet(regions_, "a run", MINE, address, None, lambda words: None)
            assert (line.topic, line.level) == ("regions", WRONG)
            assert "cannot listen on" in line.words and "regions.interface=NAME" in str(line.command)
    served.close()


def test_a_slow_coordinator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctors_coordinator, "SLOW_S", 0.0)
    served = serve_in_thread(secrets=[KEYS])
    lines = doctors_coordinator.reach(served.address, KEYS)
    assert lines[1].level == WARN and "but only after" in lines[1].words
    served.close()


def test_a_coordinator_behind_a_way_on_which_large_packets_vanish() -> None:
    served = serve_in_thread()
    way = Swallowing(served.address)
    assert doctors_coordinator.reach(served.address, None)[1].level == OK
    lines = doctors_coordinator.reach(way.address, None, timeout_s=0.5)
    assert lines[1].level == WRONG
    assert lines[1].words.startswith(
        f"answers at {way.address}, but small packets pass, and large ones vanish"
    )
    for each in (way, served):
        each.close()


def test_the_coordinator_and_the_secret() -> None:
    """No coordinator, another secret, no secret far away, and a good one."""
    served = serve_in_thread(secrets=[KEYS])
    address, reach = served.address, doctors_coordinator.reach
    assert [each.level for each in reach(address, KEYS)] == [OK, OK]
    lines = reach(address, None)
    assert [each.level for each in lines] == [OK, WRONG]
    assert "the coordinator has a secret, and the caller has none" in lines[1].words
    assert str(lines[1].command).startswith("scp 127.0.0.1:secret secret")
    lines = reach(address, Keys.from_secret(secret("another secret of a doctor")))
    assert [each.level for each in lines] == [OK, WRONG] and "another secret" in lines[1].words
    assert str(lines[1].command).startswith(f"hf-cocodc coordinator --host 127.0.0.1 --port {served.port}")
    served.close()
    lines = reach(address, KEYS, timeout_s=0.1)
    assert lines[1].level == WRONG and "no coordinator answers" in lines[1].words
    assert f"nc -vz 127.0.0.1 {served.port}" in str(lines[1].command)
    lines = reach("no-such-machine.invalid:1", KEYS, timeout_s=0.5)
    assert (lines[1].level, lines[1].command) == (WRONG, "getent hosts no-such-machine.invalid")
    none = doctors_coordinator.secret("10.0.0.1:29650", None)
    assert none.level == WARN and none.command == doctors_coordinator.NEW_SECRET
