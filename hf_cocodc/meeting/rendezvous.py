"""Regions meet at the start of a run: they exchange hellos through a store that may outlive the run."""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from ..errors import RegionLostError

POLL_S = 0.05
ACK_S = 5.0


def rendezvous(
    store: dist.Store, region: int, num_regions: int, hello: dict[str, Any], timeout_s: float
) -> "Roster":
    """Meet every other region and exchange hellos.

    A store may outlive a run: a hello in the store may come from a process that no longer exists. Region 0 therefore
    writes a roster of the hellos that it sees, and waits until every other region acknowledges the roster. A hello without
    acknowledgement is deleted; the next hello of that region makes a new roster.

    Returns:
        The roster: a name unique to this run, and the hellos of all regions.

    Raises:
        RegionLostError: a region did not arrive within `timeout_s`.
    """
    store = dist.PrefixStore(f"hf_cocodc/{num_regions}", store)
    token = uuid.uuid4().hex
    store.set(f"hello/{region}", json.dumps({"token": token, "hello": hello}))
    deadline = time.monotonic() + timeout_s
    if region == 0:
        return _make_roster(store, num_regions, deadline, timeout_s)
    while time.monotonic() < deadline:
        if store.check(["roster"]):
            run, entries = _read_roster(store)
            if entries[region]["token"] == token:
                store.set(f"{run}/ack/{region}", "1")
                _wait(partial(store.check, [f"{run}/go"]), min(deadline, time.monotonic() + ACK_S))
                if store.check([f"{run}/go"]):
                    return Roster(run, [entry["hello"] for entry in entries])
        time.sleep(POLL_S)
    raise _missing(store, region, num_regions, timeout_s)


@dataclass(frozen=True)
class Roster:
    """The regions of this run: a name that no other run on the store has, and the hellos in the order of regions."""

    run: str
    hellos: list[dict[str, Any]]


def _make_roster(store: dist.Store, num_regions: int, deadline: float, timeout_s: float) -> Roster:
    others = range(1, num_regions)
    while time.monotonic() < deadline:
        if not _wait(lambda: store.check([f"hello/{r}" for r in range(num_regions)]), deadline):
            break
        entries = [store.get(f"hello/{r}").decode() for r in range(num_regions)]
        run = f"run-{uuid.uuid4().hex[:12]}"
        store.set("roster", json.dumps({"run": run, "entries": [json.loads(entry) for entry in entries]}))
        acks = [f"{run}/ack/{r}" for r in others]
        if not acks or _wait(partial(store.check, acks), min(deadline, time.monotonic() + ACK_S)):
            for r in range(num_regions):  # the next run on this store must not use these
                store.delete_key(f"hello/{r}")
            store.set(f"{run}/go", "1")
            return Roster(run, [json.loads(entry)["hello"] for entry in entries])
        for r in others:  # the hello of a process that no longer exists must not be used again
            if not store.check([f"{run}/ack/{r}"]) and store.get(f"hello/{r}").decode() == entries[r]:
                store.delete_key(f"hello/{r}")
    raise _missing(store, 0, num_regions, timeout_s)


def _read_roster(store: dist.Store) -> tuple[str, list[dict[str, Any]]]:
    roster = json.loads(store.get("roster"))
    return roster["run"], roster["entries"]


def _wait(ready: Callable[[], bool], deadline: float) -> bool:
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _missing(store: dist.Store, region: int, num_regions: int, timeout_s: float) -> RegionLostError:
    absent = [r for r in range(num_regions) if r != region and not store.check([f"hello/{r}"])]
    if not absent:
        absent = [0] if region else list(range(1, num_regions))
    names = " and ".join(f"region {r}" for r in absent)
    return RegionLostError(
        absent[0],
        f"{names} did not arrive within {timeout_s:g} s (regions.timeout_s). Region {region} of {num_regions} is "
        "waiting at the store. Start every missing region with the same recipe and store, or raise regions.timeout_s.",
    )
