"""One region of an elastic run, without Trainer: real processes, sockets, gloo and a store."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hf_cocodc.errors import LeftBehind
from hf_cocodc.links.elastic import ElasticLink
from hf_cocodc.links.terms import Reach, Terms
from hf_cocodc.links.wire import Wire
from hf_cocodc.meeting.changes import Changes
from hf_cocodc.meeting.presence import Member, Presence
from hf_cocodc.meeting.store import SteadyStore, connect_store
from tests.links.training import Trained, method_of

TIMEOUT_S = 30.0


def connect(region: int, count: int, address: str, **terms: Any) -> ElasticLink:
    """Meet the other regions at the store, and connect to them."""
    store = connect_store(address, TIMEOUT_S)
    me = Member(region, region + 1)
    presence = Presence("run", me, "127.0.0.1", TIMEOUT_S)
    store.set(f"at/{region}", presence.address)
    at = {Member(other, other + 1): store.get(f"at/{other}").decode() for other in range(count)}
    presence.connect(at, time.monotonic() + TIMEOUT_S)
    wire = Wire(region, connections=2, timeout_s=TIMEOUT_S)
    wire.connect_all(count, "run/wire", store)

    def agree(freeze: Any, decided: Any) -> Changes:
        return Changes(SteadyStore(address), "run", me, presence, freeze, decided)

    reach = Reach(me, wire, presence, agree, tuple(at))
    return ElasticLink(reach, Terms(lambda: store, "run", **terms), timeout_s=TIMEOUT_S)


def train(
    region: int,
    count: int,
    address: str,
    folder: Path,
    name: str,
    steps: int,
    pause_s: float,
    terms: dict[str, Any],
) -> None:
    """Train, and write down what was seen; every step as it is made, and whether the others went on without this region."""
    link = connect(region, count, address, **terms)
    trained = Trained(link, method_of(name))
    end = None
    try:
        with (folder / f"steps-{region}.txt").open("w") as made:
            for step in range(1, steps + 1):
                time.sleep(pause_s)
                trained.train(region)
                print(step, file=made, flush=True)
        end = trained.finish()
    except LeftBehind as error:
        (folder / f"left-behind-{region}.txt").write_text(str(error))
    found = {
        "end": end,
        "digests": list(trained.digests.values()),
        "members": [list(sent.arrival.members) for sent in trained.sent.values() if sent.arrival is not None],
        "events": list(link.events),
    }
    link.close()
    (folder / f"region-{region}.json").write_text(json.dumps(found))
