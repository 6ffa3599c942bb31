"""How a newcomer reaches the members of a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.errors import LinkError, MeetingError, RegionLostError
from hf_cocodc.meeting import live
from hf_cocodc.meeting.store import StoreAwayError
from hf_cocodc.run import place as its_module
from hf_cocodc.run.place import Place, connected, find_again
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
    ("looks", "ended", "said"),
    [
        ([None, StoreAwayError("away"), RECORD], [], None),
        ([dataclasses.replace(RECORD, run="s")], [], "another one of that name trains"),
        ([None], ["mine"], "'mine' that this region was in has ended: it cannot come back"),
        ([None] * 9, [], r"has not answered at the store for 0.3 s \(regions.start_timeout_s\)"),
    ],
)
def test_a_region_looks_for_the_run_that_it_was_in(
    looks: list[Any], ended: list[str], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members may be frozen for a while, and the store away."""

    def read_alive(store: Any, name: str) -> Any:
        found = looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(live, "read_alive", read_alive)
    monkeypatch.setattr(live, "ended", lambda store: ended)
    monkeypatch.setattr(Place, "steady_store", lambda place: None)
    monkeypatch.setattr(its_module, "_AGAIN_S", 0.05)
    regions = RegionConfig(region=1, count=2, min=1, start_timeout_s=0.3)
    place = Place(region=1, regions=regions, name="mine", hello={}, host="h", pin_memory=False)
    if said is None:
        assert find_again(place, "r") is RECORD
        return
    with pytest.raises(LinkError, match=said):
        find_again(place, "r")


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
    monkeypatch.setattr(its_module, "alive", lambda place: RECORD)
    monkeypatch.setattr(Place, "store", lambda place: None)
    monkeypatch.setattr(Place, "presence", lambda place, run, me: Refusing(error))
    regions = RegionConfig(region=1, count=2, min=1, timeout_s=0.2)
    place = Place(region=1, regions=regions, name="mine", hello={}, host="h", pin_memory=False)
    with pytest.raises(kind) as found:
        connected(place, RECORD)
    assert str(found.value).startswith(said)
    [news] = json.loads(status.read_text())["news"]
    assert news.startswith(f"cannot join yet, and tries again for 0 s: {said}")
