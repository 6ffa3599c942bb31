"""How a newcomer reaches the members of a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_cocodc.errors import LinkError, MeetingError, RegionLostError
from hf_cocodc.meeting import live
from hf_cocodc.meeting.store import StoreAwayError
from hf_cocodc.run import place as its_module
from hf_cocodc.run.place import Place, RunTrains, connected, find_again, watch
from hf_cocodc.run.status import ENV_STATUS
from hf_cocodc.settings import RegionConfig

MEMBERS = tuple(live.Standing(region=region, ticket=region + 1, address=f"a:{region}") for region in (0, 1))
RECORD = live.Record(
    run="r", name="mine", epoch=0, losses=0, members=MEMBERS, count=2, least=1, most=2, hello={}
)


class Refusing:
    """Presence where a member refuses this process."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def connect(self, *given: Any) -> None:
        raise self.error

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("looks", "has_ended", "said"),
    [
        ([None, StoreAwayError("away"), RECORD], False, None),
        ([dataclasses.replace(RECORD, run="s")], False, "another run of that name trains"),
        ([None], True, "the run 'mine' has ended\\."),
        ([None] * 9, False, r"has not answered at the store for 0.3 s \(regions.start_timeout_s\)"),
    ],
)
def test_a_region_looks_for_the_run_that_it_was_in(
    looks: list[Any], has_ended: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members may be frozen for a while, and the store away."""

    def read_alive(store: Any, name: str) -> Any:
        found = looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(live, "read_alive", read_alive)
    monkeypatch.setattr(live, "has_ended", lambda store, run: has_ended)
    monkeypatch.setattr(Place, "steady_store", lambda place: None)
    monkeypatch.setattr(its_module, "_AGAIN_S", 0.05)
    regions = RegionConfig(region=1, count=2, min=1, start_timeout_s=0.3)
    place = Place(region=1, regions=regions, name="mine", hello={}, host="h", pin_memory=False)
    if said is None:
        assert find_again(place, "r") is RECORD
        return
    with pytest.raises(LinkError, match=said):
        find_again(place, "r")


def test_a_region_that_waits_for_others_sees_that_the_run_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its members may have been frozen. One new record is not enough, and an old one is none."""
    now, record = [0.0], [RECORD]
    monkeypatch.setattr(its_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(live, "read", lambda store, name: record[0])
    monkeypatch.setattr(Place, "steady_store", lambda place: None)
    regions = RegionConfig(region=1, count=2, min=1)
    look = watch(Place(region=1, regions=regions, name="mine", hello={}, host="h", pin_memory=False))

    def after(seconds: float, beat: int) -> None:
        now[0] += seconds
        record[0] = dataclasses.replace(RECORD, beat=beat)
        look()

    after(20.0, 0)
    after(20.0, 1)
    after(0.1, 2)
    after(20.0, 2)
    after(2.0, 2)
    with pytest.raises(RunTrains) as found:
        after(2.0, 3)
    assert found.value.record.beat == 3


@pytest.mark.parametrize(
    ("error", "said", "kind"),
    [
        (
            MeetingError("region 0 refuses region 1: region 1 takes part already."),
            "region 1 is in run 'mine' already, as the process at a:1.",
            MeetingError,
        ),
        (RegionLostError(0, "region 0 was not reached"), "region 0 was not reached", RegionLostError),
    ],
)
def test_a_newcomer_says_at_once_why_it_waits(
    error: Exception, said: str, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has its number, and for how long it tries again; after that it ends with the same words."""
    status = tmp_path / "status.json"
    monkeypatch.setenv(ENV_STATUS, str(status))
    monkeypatch.setattr("hf_cocodc.run.status._news", [])
    monkeypatch.setattr(its_module, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(its_module, "_AGAIN_S", 0.05)
    monkeypatch.setattr(its_module, "take_ticket", lambda store: 7)
    monkeypatch.setattr(its_module, "find_again", lambda place, run: RECORD)
    monkeypatch.setattr(Place, "store", lambda place: None)
    monkeypatch.setattr(Place, "presence", lambda place, run, me: Refusing(error))
    regions = RegionConfig(region=1, count=2, min=1, timeout_s=0.2)
    place = Place(region=1, regions=regions, name="mine", hello={}, host="h", pin_memory=False)
    with pytest.raises(kind) as found:
        connected(place, RECORD)
    assert str(found.value).startswith(said)
    [news] = json.loads(status.read_text())["news"]
    assert news.startswith(f"cannot join yet, and tries again for 0 s: {said}")


def test_a_newcomer_does_not_wait_long_for_a_member_that_has_just_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record that it has read names that member; the next one does not."""
    now, given = [0.0], []

    class Dead:
        def connect(self, addresses: Any, deadline: float, hello: Any) -> None:
            given.append(deadline - now[0])
            now[0] = deadline
            if len(given) < 4:
                raise RegionLostError(0, "region 0 was not reached")

        def close(self) -> None: ...

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(its_module, "time", clock)
    monkeypatch.setattr(its_module, "take_ticket", lambda store: 7)
    monkeypatch.setattr(its_module, "find_again", lambda place, run: RECORD)
    monkeypatch.setattr(its_module, "show_differences", lambda hellos: None)
    monkeypatch.setattr(its_module, "compare_two", lambda *given: None)
    monkeypatch.setattr(Place, "store", lambda place: None)
    monkeypatch.setattr(Place, "presence", lambda place, run, me: Dead())
    regions = RegionConfig(region=1, count=2, min=1, timeout_s=120.0)
    connected(Place(region=1, regions=regions, name="mine", hello={}, host="h", pin_memory=False), RECORD)
    assert given == [30.0] * 4
