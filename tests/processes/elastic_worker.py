"""One region of an elastic run, without Trainer: real processes, sockets, gloo and a store."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

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
    region: int, count: int, address: str, folder: Path, name: str, steps: int, pause_s: float, **terms: Any
) -> None:
    """Train, and write down what was seen; `steps` of it as they are made."""
    link = connect(region, count, address, **terms)
    trained = Trained(link, method_of(name))
    blocked_s = 0.0
    with (folder / f"steps-{region}.txt").open("w") as made:
        for step in range(1, steps + 1):
            time.sleep(pause_s)
            began = time.monotonic()
            trained.train(region)
            blocked_s = max(blocked_s, time.monotonic() - began)
            print(step, file=made, flush=True)
    end = trained.finish()
    found = {
        "end": end,
        "digests": list(trained.digests.values()),
        "members": [list(each.arrival.members) for each in trained.sent.values() if each.arrival is not None],
        "events": list(link.events),
        "blocked_s": blocked_s,
    }
    link.close()
    (folder / f"region-{region}.json").write_text(json.dumps(found))
