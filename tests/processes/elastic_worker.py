"""One region of an elastic run, without Trainer: real processes, sockets and a coordinator."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hf_cocodc.coordinator.messages import Terms
from hf_cocodc.errors import LeftBehind
from hf_cocodc.link.tcp import TcpLink
from tests.link.memory import linked
from tests.link.training import Trained, method_of

TIMEOUT_S = 30.0


def connect(region: int, count: int, address: str, **more: Any) -> TcpLink:
    """Meet the other regions at the coordinator, and connect to them."""
    terms = Terms(count=count, most=count, wait_s=3600.0, **{"timeout_s": TIMEOUT_S, **more})
    return linked(address, region, terms, patience_s=TIMEOUT_S)


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
