"""Which region this process belongs to, how regions find each other, and how ranks inside a region share a transfer."""

import fcntl
import json
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from .config import ENV_REGION, ENV_REGIONS, ENV_STORE
from .errors import InputError, LinkError, RegionLostError

SIOCGIFADDR = 0x8915  # Linux: get an interface's address
POLL_S = 0.05
ACK_S = 5.0
CONNECT_S = 10.0


def serve_store(host: str = "0.0.0.0", port: int = 0) -> dist.TCPStore:
    """Start a store in this process; it lives as long as the returned object. Port 0 takes a free one (`.port`).

    Raises:
        InputError: the address cannot be listened on.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise InputError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another --host or --port."
        ) from error
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def connect_store(address: str, timeout_s: float) -> dist.TCPStore:
    """Connect to the store at HOST:PORT.

    Raises:
        InputError: the host name is unknown.
        LinkError: nothing answers there within `timeout_s` (10 s at most).
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    deadline = time.monotonic() + min(timeout_s, CONNECT_S)
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=max(deadline - time.monotonic(), 1.0)).close()
            break
        except socket.gaierror as error:
            raise InputError(
                f"the store's host {host!r} has no address ({error.strerror}). Check regions.store={address!r}."
            ) from error
        except OSError as error:
            if time.monotonic() + 0.5 > deadline:
                raise LinkError(
                    f"no store answers at {address} ({error.strerror or error}). Start one there with `hf-cocodc store "
                    f"--port {port}`, and see that firewalls let every region reach it."
                ) from error
            time.sleep(0.5)
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))


def own_address(store_address: str, interface: str | None) -> str:
    """This machine's address on `interface`, or, without one, the address by which it reaches the store.

    Raises:
        InputError: no such interface, or it has no IPv4 address.
    """
    if interface is None:
        host, _, port = store_address.rpartition(":")
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: picks a route, sends nothing
            return str(probe.getsockname()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise InputError(
                f"regions.interface={interface!r} is no network interface with an IPv4 address here "
                f"({error.strerror}). This machine has {known}."
            ) from error
    return socket.inet_ntoa(packed[20:24])


def rendezvous(
    store: dist.Store, region: int, num_regions: int, hello: dict[str, Any], timeout_s: float
) -> "Roster":
    """Meet every other region and exchange hellos.

    A store may outlive runs, so a hello found in it may be a ghost's. Region 0 therefore writes a roster of the hellos
    it sees and waits for each region to acknowledge it; whoever does not has gone, and its next hello makes a new
    roster.

    Returns:
        The roster: a name unique to this run, and everybody's hello.

    Raises:
        RegionLostError: a region did not come within `timeout_s`.
    """
    store = dist.PrefixStore(f"hf_cocodc/{num_regions}", store)
    token = uuid.uuid4().hex
    store.set(f"hello/{region}", json.dumps({"token": token, "hello": hello}))
    deadline = time.monotonic() + timeout_s
    if region == 0:
        return _call_the_roll(store, num_regions, deadline, timeout_s)
    while time.monotonic() < deadline:
        if store.check(["roster"]):
            run, entries = _roster(store)
            if entries[region]["token"] == token:
                store.set(f"{run}/ack/{region}", "1")
                _wait(partial(store.check, [f"{run}/go"]), min(deadline, time.monotonic() + ACK_S))
                if store.check([f"{run}/go"]):
                    return Roster(run, [entry["hello"] for entry in entries])
        time.sleep(POLL_S)
    raise _missing(store, region, num_regions, timeout_s)


@dataclass(frozen=True)
class Roster:
    """Who takes part in this run: a name that no other run on the store has, and the hellos in the order of regions."""

    run: str
    hellos: list[dict[str, Any]]


def _call_the_roll(store: dist.Store, num_regions: int, deadline: float, timeout_s: float) -> Roster:
    others = range(1, num_regions)
    while time.monotonic() < deadline:
        if not _wait(lambda: store.check([f"hello/{r}" for r in range(num_regions)]), deadline):
            break
        entries = [store.get(f"hello/{r}").decode() for r in range(num_regions)]
        run = f"run-{uuid.uuid4().hex[:12]}"
        store.set("roster", json.dumps({"run": run, "entries": [json.loads(entry) for entry in entries]}))
        acks = [f"{run}/ack/{r}" for r in others]
        if not acks or _wait(partial(store.check, acks), min(deadline, time.monotonic() + ACK_S)):
            for r in range(num_regions):  # the next run on this store is not to meet these
                store.delete_key(f"hello/{r}")
            store.set(f"{run}/go", "1")
            return Roster(run, [json.loads(entry)["hello"] for entry in entries])
        for r in others:  # a ghost's hello must not be met again
            if not store.check([f"{run}/ack/{r}"]) and store.get(f"hello/{r}").decode() == entries[r]:
                store.delete_key(f"hello/{r}")
    raise _missing(store, 0, num_regions, timeout_s)


def _roster(store: dist.Store) -> tuple[str, list[dict[str, Any]]]:
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
        f"{names} did not come within {timeout_s:g} s (regions.timeout_s). Region {region} of {num_regions} is "
        "waiting at the store. Start what is missing with the same recipe and store, or raise regions.timeout_s.",
    )


def split_world(num_regions: int) -> int:
    """Turn one `accelerate launch` into `num_regions` regions of equal size; returns this process's region.

    Call it at the very start of the script, before Accelerate or TrainingArguments exist: it rewrites the environment
    that torchrun set, so that every region is a world of its own. Consecutive ranks form a region. The launcher's own
    store is where the regions meet.

    Raises:
        InputError: not under a launcher, or the processes do not divide into `num_regions`.
    """
    env = os.environ
    if num_regions < 1:
        raise InputError(f"split_world({num_regions}): the number of regions must be at least 1.")
    if "HF_COCODC_SPLIT" in env:  # torchrun's workers may fork workers that run the script again
        return int(env[ENV_REGION])
    if "WORLD_SIZE" not in env or "MASTER_PORT" not in env:
        if num_regions == 1:
            return 0
        raise InputError(
            f"split_world({num_regions}) needs a launcher that starts several processes. Use `accelerate launch "
            "--multi_gpu --num_processes N script.py` (on CPUs with ACCELERATE_USE_CPU=true), or torchrun."
        )
    world, rank = int(env["WORLD_SIZE"]), int(env["RANK"])
    if world % num_regions:
        raise InputError(
            f"split_world({num_regions}): {world} processes do not divide into {num_regions} regions of equal size. "
            f"Launch a multiple of {num_regions}."
        )
    size = world // num_regions
    region, rank_in_region = divmod(rank, size)
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    store = _launcher_store(host, port, rank)
    key = f"hf_cocodc/split/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}/{region}"
    if rank_in_region == 0:
        store.set(
            key, f"{socket.gethostname() if world > int(env['LOCAL_WORLD_SIZE']) else host}:{_free_port()}"
        )
    region_host, _, region_port = store.get(key).decode().rpartition(":")
    local_rank, local_size = int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
    if local_size > size:  # several regions on this machine: each sees its own devices, counted from 0
        first = local_rank // size * size
        devices = env.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(local_size)))).split(",")
        if len(devices) >= local_size:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + size])
        env.update(LOCAL_RANK=str(local_rank % size), LOCAL_WORLD_SIZE=str(size))
    env.update(
        RANK=str(rank_in_region),
        WORLD_SIZE=str(size),
        MASTER_ADDR=region_host,
        MASTER_PORT=region_port,
        TORCHELASTIC_USE_AGENT_STORE="False",
        HF_COCODC_SPLIT=str(num_regions),
    )
    env.update({ENV_REGION: str(region), ENV_REGIONS: str(num_regions), ENV_STORE: f"{host}:{port}"})
    return region


_kept_stores: list[dist.TCPStore] = []


def _launcher_store(host: str, port: int, rank: int) -> dist.TCPStore:
    """torchrun's store; where the launcher keeps none for its workers, rank 0 serves it, as env:// would."""
    ours = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(host, port, is_master=ours and rank == 0, wait_for_workers=False)
    _kept_stores.append(store)
    return store


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
