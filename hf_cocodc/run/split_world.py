"""Split one `accelerate launch` into several regions."""

import logging
import os
import socket

import torch.distributed as dist
from accelerate.utils import parse_flag_from_env

from ..coordinator.secret import secret_of
from ..coordinator.server import Served, serve_in_thread
from ..errors import InputError
from ..net.addresses import free_port
from ..settings import ENV_COORDINATOR, ENV_REGION, ENV_REGIONS, RegionConfig
from .gpus import VISIBLE, shares, sharing, visible

logger = logging.getLogger(__name__)

_KEY = "hf_cocodc/split"


def split_world(num_regions: int) -> int:
    """Turn one `accelerate launch` into `num_regions` regions of equal size; return the region of this process.

    Call it at the very start of the script, before an Accelerator or TrainingArguments exists. It rewrites the environment
    that torchrun set and makes every region a world of its own. Consecutive ranks form a region. Rank 0 serves their
    coordinator. Regions share the GPUs of a machine that has fewer GPUs than processes.

    Raises:
        InputError: no launcher started this process, or the number of processes is not a multiple of `num_regions`.
    """
    env = os.environ
    if num_regions < 1:
        raise InputError(f"split_world({num_regions}): the number of regions must be at least 1.")
    if "HF_COCODC_SPLIT" in env:  # a child process, such as a DataLoader worker, may run the script again
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
            f"split_world({num_regions}): {world} processes cannot be divided into {num_regions} regions of equal size. "
            f"Launch a multiple of {num_regions} processes."
        )
    size = world // num_regions
    region, rank_in_region = divmod(rank, size)
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    store = _launcher_store(host, port, rank)
    restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"{_KEY}/{restart}/{region}"
    if rank_in_region == 0:
        store.set(
            key, f"{socket.gethostname() if world > int(env['LOCAL_WORLD_SIZE']) else host}:{free_port()}"
        )
    if rank == 0:
        store.set(
            f"{_KEY}/{restart}/coordinator", _serve(host, one_machine=world == int(env["LOCAL_WORLD_SIZE"]))
        )
    coordinator = store.get(f"{_KEY}/{restart}/coordinator").decode()
    region_host, _, region_port = store.get(key).decode().rpartition(":")
    local_rank, local_size = int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
    if (
        local_size > size
    ):  # several regions are on this machine: each sees only its own devices, counted from 0
        here = local_size // size
        gpus = [] if parse_flag_from_env("ACCELERATE_USE_CPU") else visible()
        if len(gpus) >= size:  # otherwise torch says which rank of a region has none
            env[VISIBLE] = ",".join(shares(gpus, here, size)[local_rank // size])
            shared = sharing(len(gpus), here, size)
            if shared is not None and local_rank == 0:
                logger.warning(shared)
        env.update(LOCAL_RANK=str(local_rank % size), LOCAL_WORLD_SIZE=str(size))
    env.update(
        RANK=str(rank_in_region),
        WORLD_SIZE=str(size),
        MASTER_ADDR=region_host,
        MASTER_PORT=region_port,
        TORCHELASTIC_USE_AGENT_STORE="False",
        HF_COCODC_SPLIT=str(num_regions),
    )
    env.update({ENV_REGION: str(region), ENV_REGIONS: str(num_regions), ENV_COORDINATOR: coordinator})
    return region


_served: list[Served] = []  # a coordinator that is not kept would close


def _serve(host: str, one_machine: bool) -> str:
    """Serve the coordinator of the regions; returns its address. All ranks reach `host`, where rank 0 runs."""
    keys = secret_of(RegionConfig())
    served = serve_in_thread("127.0.0.1" if one_machine else "0.0.0.0", 0, [] if keys is None else [keys])
    _served.append(served)
    return f"{'127.0.0.1' if one_machine else host}:{served.port}"


_kept_stores: list[dist.TCPStore] = []  # a store that is not kept would close


def _launcher_store(host: str, port: int, rank: int) -> dist.TCPStore:
    """Connect to torchrun's store; if the launcher has none for its processes, rank 0 serves it, as env:// does."""
    ours = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(host, port, is_master=ours and rank == 0, wait_for_workers=False)
    _kept_stores.append(store)
    return store
