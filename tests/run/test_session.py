"""A newcomer that waits for a base: it hears what becomes of its run."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_cocodc import RegionConfig
from hf_cocodc.coordinator.messages import Over, Posted
from hf_cocodc.errors import DonorLost, LeftBehind, LinkError, RunOver
from hf_cocodc.link.log import Marker
from hf_cocodc.net.members import Member
from hf_cocodc.run import session as session_module
from hf_cocodc.run.session import RegionContext, RegionSession

ZERO = Member(0, 1)


def session(start_timeout_s: float = 60.0) -> RegionSession:
    """Of region 1, whose only donor, region 0, never answers."""
    regions = RegionConfig(
        region=1,
        count=2,
        coordinator="127.0.0.1:1",
        min=1,
        timeout_s=60.0,
        start_timeout_s=start_timeout_s,
    )
    context = RegionContext(region=1, regions=regions, name="run", compared={}, host="127.0.0.1")
    link: Any = SimpleNamespace(
        post=lambda *args, **content: None,
        is_there=lambda member: True,
        stream=None,
        donors=(ZERO,),
        failure=None,
    )
    return RegionSession(context, link)


def test_a_newcomer_hears_that_the_run_has_ended_while_it_waits_for_a_base(tmp_path: Path) -> None:
    """A member that finishes gives no base any more: the newcomer would wait for `stuck_timeout_s`."""
    waits = session()

    def post(*args: Any, **content: Any) -> None:
        waits.link.on(Over(how="finished", step=100, place="host:/model"))

    waits._donors._post = post
    with pytest.raises(
        RunOver, match="has finished at step 100: there is nothing to join. Its model is at host:/model"
    ):
        waits.get_base(tmp_path)


def test_a_newcomer_that_the_coordinator_refuses_waits_for_no_base(tmp_path: Path) -> None:
    """Its run was begun anew meanwhile."""
    waits = session()

    def post(*args: Any, **content: Any) -> None:
        waits.link.failure = RunOver("run 'run' has been begun anew.")  # type: ignore[misc]

    waits._donors._post = post
    with pytest.raises(RunOver, match="begun anew"):
        waits.get_base(tmp_path)


def test_a_newcomer_whose_members_have_all_died_ends_in_time(tmp_path: Path) -> None:
    """Nobody is left to miss them."""
    began = time.monotonic()
    with pytest.raises(
        LinkError, match=r"no region gave a base to region 1 within 1 s .*has offered no base"
    ):
        session(start_timeout_s=1.0).get_base(tmp_path)
    assert time.monotonic() - began < 20.0


def test_a_newcomer_that_reaches_no_donor_looks_for_the_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections were to be made while the network was away. One that gets no base for another reason asks again."""
    waits, unreached = session(), DonorLost("region 0 has offered a base, and is not reached")
    unreached.is_unreached = True
    answers: list[Exception] = [DonorLost("region 0 gives no base"), unreached, RunOver("the run has ended")]
    came_back: list[int] = []

    def base_of(*args: Any, **how: Any) -> Any:
        raise answers.pop(0)

    monkeypatch.setattr(waits._donors, "base_of", base_of)
    monkeypatch.setattr(waits, "come_back", lambda: came_back.append(len(answers)))
    with pytest.raises(RunOver):
        waits.get_base(tmp_path)
    assert came_back == [1]


def test_a_newcomer_that_nobody_lets_in_begins_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member has heard from a coordinator that went that it has gone, say. It waits while nobody can let it in, or is to."""
    clock = itertools.count(0.0, 50.0)
    monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    waits = session()
    link: Any = waits.link
    link.say_ready = lambda: None
    marker: Any = SimpleNamespace(step=5, newest=5)
    for link.is_announced, link.has_coordinator in (
        *((False, True), (False, True), (True, True), (False, True), (False, False), (False, True)),
    ):
        waits.ask_in(marker, 10)
    with pytest.raises(LeftBehind, match="it has been ready for 100 s, and nobody lets it in"):
        waits.ask_in(marker, 10)


def test_a_newcomer_far_behind_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members would wait for it: over a slow link, a newcomer that was 100 steps behind cost the others 33 s."""
    waits = session()
    now = iter([0.0, 10.0, 20.0, 30.0, 70.0])
    monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    link: Any = waits.link
    said: list[int] = []
    link.is_announced, link.has_coordinator = False, True
    for step, newest in ((10, 110), (60, 120), (100, 119), (110, 130), (120, 150)):
        link.say_ready = lambda step=step: said.append(step)
        waits.ask_in(Marker(step, 0, 0, 0, (), newest=newest), 20)
    assert said == [100, 120]  # less than a round; and as near as it comes


def test_a_newcomer_that_has_given_up_gets_no_base() -> None:
    """It has gone to another member while this one was busy: nobody would take what this one writes."""
    gives = session()
    for _ in range(2):  # it asks again every 10 s
        gives.link.on(Posted(sender=ZERO, topic="base", content={}))
    assert list(gives.wants) == [ZERO]
    for _ in range(2):
        gives.link.on(Posted(sender=ZERO, topic="enough", content={}))
        assert not gives.wants
