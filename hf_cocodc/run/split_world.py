"""Split one `accelerate launch` into several regions."""

import logging
import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

from ..coordinator.secret import secret_of
from ..coordinator.server import Served, serve_in_thread
from ..errors import CocodcError, InputError, LinkError, reason, shown
from ..net.addresses import is_loopback, named, own_address, resolve
from ..settings import RegionConfig
from ..settings.environment import ENV_COORDINATOR, ENV_LAUNCH, ENV_REGION, ENV_REGIONS, ENV_SPLIT, MACHINES
from ..settings.fields import converted
from ..status import ENV_STATUS, say, speak_for, tell
from .gpus import VISIBLE, shares, sharing, visible

logger = logging.getLogger(__name__)

_KEY = "hf_cocodc/split"
_PACKAGE = str(Path(__file__).parents[1])
_RESTART = "TORCHELASTIC_RESTART_COUNT"
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def split_world(num_regions: int) -> int:
    """Turn one `accelerate launch` into `num_regions` regions of equal size; return the region of this process.

    Call it at the very start of the script, before an Accelerator or TrainingArguments exists. It rewrites the environment
    that torchrun set and makes every region a world of its own. Consecutive ranks form a region. Rank 0 serves their
    coordinator. Regions share the GPUs of a machine that has fewer GPUs than processes.

    With HF_COCODC_SPLIT=N in the environment, the import of hf_cocodc does the same, without a call; with
    HF_COCODC_SPLIT=machines, each machine of the launch is a region.

    Raises:
        InputError: no launcher started this process, the number of processes is not a multiple of `num_regions`, a region
            would begin or end in the middle of a machine, HF_COCODC_SPLIT asks for another number, or the call comes too
            late.
        LinkError: another process of the launch does not take part.
    """
    num_regions = converted(num_regions, int, "split_world: num_regions")
    said, env = f"split_world({num_regions})", os.environ
    if num_regions < 1:
        raise InputError(f"{said}: the number of regions must be at least 1.")
    if ENV_SPLIT in env and ENV_LAUNCH not in env:
        split_as_asked()
    if ENV_LAUNCH not in env:
        if num_regions == 1 and "RANK" not in env:
            return 0
        return _split(num_regions, said)
    if int(env[ENV_REGIONS]) != num_regions:
        asked = f" by {ENV_SPLIT}={env[ENV_SPLIT]}" if ENV_SPLIT in env else ""
        raise InputError(
            f"{said}: this launch is already split into {env[ENV_REGIONS]} region(s){asked}. Make the numbers equal, or "
            "remove one of the two."
        )
    return int(env[ENV_REGION])  # the import, or a parent of this process, has split the launch


def split_as_asked() -> None:
    """Split the launch as HF_COCODC_SPLIT says. Raises like `split_world`, and tells a command that listens."""
    wish = os.environ[ENV_SPLIT]
    said = f"{ENV_SPLIT}={shown(wish)}"
    try:
        _split(wished(wish, said), said)
    except CocodcError as error:
        tell(error=str(error), exit_code=error.exit_code)
        raise


def wished(wish: str, said: str) -> int | None:
    """The number of regions that HF_COCODC_SPLIT asks for; None makes each machine a region. Raises InputError if it is neither;
    `said` is what asks for it.
    """
    if wish != MACHINES and not re.fullmatch(r"[1-9]\d{0,8}", wish):
        raise InputError(
            f"{said} must be `{MACHINES}` (each machine of the launch is a region) or a whole number from 1 (so many regions of "
            "equal size). Correct it, or unset it."
        )
    return None if wish == MACHINES else int(wish)


class SplitRank(NamedTuple):
    """Where a process of a launch is, once the launch is split.

    Attributes:
        rank: within the region, which has `size` ranks.
        local_rank: within the part of the region on this machine, which has `local_size` ranks.
        slot: which of the `slots` regions of this machine.
    """

    num_regions: int
    region: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    slot: int = 0
    slots: int = 1


def placed(num_regions: int | None, env: Mapping[str, str], said: str) -> SplitRank:
    """The place of the process that a launcher has given this environment; None makes each machine a region. Raises InputError
    if the launch cannot be divided so; `said` is what asks for it.
    """
    missing = [name for name in _NEEDED if name not in env]
    if missing:
        raise InputError(
            f"{said} needs a launcher that starts several processes, and {missing[0]} is not set. Use `accelerate launch "
            "--multi_gpu --num_processes N script.py` (on CPUs with ACCELERATE_USE_CPU=true), or torchrun; with Slurm, `srun "
            "accelerate launch` with one task a machine."
        )
    rank, world, local_rank, local_size = (int(env[name]) for name in _NEEDED[:4])
    first = rank - local_rank  # rank of this machine's first process
    if num_regions is None:
        if "GROUP_RANK" in env and "GROUP_WORLD_SIZE" in env:
            count, region = int(env["GROUP_WORLD_SIZE"]), int(env["GROUP_RANK"])
        elif world % local_size or first % local_size:
            raise InputError(
                f"{said}: the launcher does not say which machine rank {rank} of {world} is on. It must set GROUP_RANK and "
                "GROUP_WORLD_SIZE, as torchrun does, or start equally many consecutive ranks on each machine."
            )
        else:
            count, region = world // local_size, first // local_size
        return SplitRank(count, region, local_rank, local_size, local_rank, local_size)
    if world % num_regions:
        raise InputError(
            f"{said}: {world} processes cannot be divided into {num_regions} regions of equal size. Launch a multiple of "
            f"{num_regions} processes."
        )
    size = world // num_regions
    region, rank_in_region = divmod(rank, size)
    if first % size == 0 and local_size % size == 0:
        slot, local_rank = divmod(local_rank, size)
        return SplitRank(
            num_regions, region, rank_in_region, size, local_rank, size, slot, local_size // size
        )
    if first // size != (first + local_size - 1) // size:
        raise InputError(
            f"{said}: a region of {size} processes would begin or end in the middle of a machine, which has {local_size}. A "
            "region must be one or more whole machines, or a machine one or more whole regions: change the number of regions "
            f"or of processes. {ENV_SPLIT}={MACHINES} makes each machine a region, whatever its size."
        )
    return SplitRank(num_regions, region, rank_in_region, size, local_rank, local_size)


def _split(num_regions: int | None, said: str) -> int:
    """Split the launch, and return this process's region. Raises like `split_world`."""
    env = os.environ
    # a command that listens serves the coordinator, where rank 0 is, so that it outlives rank 0
    ours = [] if ENV_STATUS in env else [ENV_COORDINATOR]
    given = [name for name in (ENV_REGION, ENV_REGIONS, *ours) if name in env]
    if given:
        raise InputError(
            f"{said} numbers the regions and starts their coordinator, but {given[0]}={env[given[0]]} is set, too. Unset one of "
            "the two."
        )
    place = placed(num_regions, env, said)
    _refuse_late(said, place.slots > 1)
    host, port, rank = env["MASTER_ADDR"], int(env["MASTER_PORT"]), int(env["RANK"])
    is_one_machine = int(env["WORLD_SIZE"]) == int(env["LOCAL_WORLD_SIZE"])
    store = _launcher_store(host, port, rank)
    key = f"{_KEY}/{env.setdefault(_RESTART, '0')}"
    if not is_one_machine:
        # many a machine knows its own name as a loopback address; the last one says how the others know the first
        if rank == int(env["WORLD_SIZE"]) - 1:
            store.set(f"{key}/host", resolve(named(host, port), socket.SOCK_STREAM)[0][4][0])
        if rank == int(env["LOCAL_RANK"]) and is_loopback(host):
            host = _told(store, f"{key}/host")
    if rank == 0:
        if num_regions is None and place.num_regions == 1:
            _warn(
                f"{said}: this launch has one machine, so a single region trains. For more, launch on more machines, or set "
                f"{ENV_SPLIT} to a number of regions."
            )
        served = env.get(ENV_COORDINATOR, "").rpartition(":")[2] or _serve(is_one_machine)
        store.set(f"{key}/launch", f"{secrets.token_hex(8)} {served} {place.num_regions}")
    launch, coordinator_port, count = _told(store, f"{key}/launch").split(" ")
    if int(count) != place.num_regions:
        raise InputError(
            f"{said} makes {place.num_regions} region(s) of this launch, and where rank 0 is they are {count}. Say the same on "
            "every machine."
        )
    if place.rank == 0:
        # all processes of the launch reach rank 0 at MASTER_ADDR, by whatever name each has for it
        is_here = place.size == place.local_size
        own = "127.0.0.1" if is_here else "" if rank == 0 else own_address(named(host, port), None)
        store.set(f"{key}/{place.region}", f"{own} {_serve_store()}")
    region_host, region_port = _told(store, f"{key}/{place.region}").split(" ")
    shared = None
    if place.slots > 1:  # each region sees only its own devices, counted from 0
        gpus = [] if parse_flag_from_env("ACCELERATE_USE_CPU") else visible()
        if len(gpus) >= place.size:  # otherwise torch says which rank of a region has none
            env[VISIBLE] = ",".join(shares(gpus, place.slots, place.size)[place.slot])
            shared = sharing(len(gpus), place.slots, place.size)
    env.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_size),
        MASTER_ADDR=region_host or host,
        MASTER_PORT=region_port,
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    env[ENV_LAUNCH] = launch
    env[ENV_REGION], env[ENV_REGIONS] = str(place.region), str(place.num_regions)
    env[ENV_COORDINATOR] = named("127.0.0.1" if is_one_machine else host, int(coordinator_port))
    speak_for(place.region)
    if shared is not None and place.slot == place.local_rank == 0:
        _warn(shared)
    return place.region


def _warn(line: str) -> None:
    logger.warning("%s", line)
    say(line)


def _told(store: dist.TCPStore, key: str) -> str:
    """What another process of the launch tells under this key. Raises LinkError if it does not."""
    try:
        return store.get(key).decode()
    except dist.DistError as error:
        raise LinkError(
            f"a process of the launch does not take part in its split ({reason(error)}). All of them must import hf_cocodc, or "
            "call split_world, at the beginning of the script; if they do, look at the output of the first that has failed."
        ) from error


def _refuse_late(said: str, hides_gpus: bool) -> None:
    """Raise InputError, which names the line to move, if something in this process was made for the launch as one world."""
    made = {
        "an Accelerator or TrainingArguments": PartialState._shared_state,
        "a process group": dist.is_initialized(),
        "a CUDA context": hides_gpus and torch.cuda.is_initialized(),
    }
    late = next((name for name, is_there in made.items() if is_there), None)
    if late is None:
        return
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, "<frozen importlib")):
        frame = frame.f_back
    line = f"line {frame.f_lineno} of {frame.f_code.co_filename}"
    raise InputError(
        f"{said} comes too late: {late} exists already, made for one world of {os.environ['WORLD_SIZE']} processes. Move {line} "
        "to the beginning of the script."
    )


_served: list[Served] = []  # a coordinator that is not kept would close
_kept_stores: list[dist.TCPStore] = []  # and so would a store


def _serve(is_one_machine: bool) -> int:
    """Serve the coordinator of the regions; returns its port."""
    keys = secret_of(RegionConfig())
    _served.append(serve_in_thread("127.0.0.1" if is_one_machine else "", 0, [] if keys is None else [keys]))
    return _served[-1].port


def _serve_store() -> int:
    """Serve the store at which the ranks of this process's region meet; returns its port."""
    _kept_stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return _kept_stores[-1].port


def _launcher_store(host: str, port: int, rank: int) -> dist.TCPStore:
    """Connect to torchrun's store; if the launcher has none for its processes, rank 0 serves it, as env:// does."""
    ours = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(host, port, is_master=ours and rank == 0, wait_for_workers=False)
    _kept_stores.append(store)
    return store
