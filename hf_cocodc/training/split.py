"""What one accelerate launch that is split into regions has on this machine, known before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InputError
from .launch import told_accelerate


@dataclass(frozen=True)
class Split:
    """The part of a split launch that this machine has.

    Attributes:
        wish: what HF_COCODC_SPLIT tells the processes.
        said: what asks for it.
        count: regions of the launch.
        regions: those that have ranks on this machine.
        machine: which machine of its region this is; 0 if a region has no other.
        has_rank_0: of the launch.
        host: of rank 0, by which the other machines know it; None if there are no others.
    """

    wish: str
    said: str
    count: int
    regions: Sequence[int]
    machine: int
    has_rank_0: bool
    host: str | None


def split_of(wish: str, said: str, launcher: Sequence[str]) -> Split:
    """What accelerate launch will have on this machine with the arguments `launcher`, or by the user's configuration. `said` is
    what asks for it.

    Raises InputError if the launch cannot be divided as it is asked to, or would divide itself otherwise than can be known here.
    """
    from ..run.split_world import placed, wished

    num_regions = wished(wish, said)
    told = told_accelerate(launcher)
    machines, rank = told.num_machines or 1, told.machine_rank or 0
    count = told.num_processes
    if count is None:  # accelerate starts one process for each GPU here
        import torch

        count = torch.cuda.device_count()
    local = count // machines
    if local < 1 or machines * local == 1:
        raise InputError(
            f"{said} divides one launch of several processes, and accelerate launch would start {max(local, 1)} on {machines} "
            "machine(s). Pass --multi_gpu and --num_processes N behind --, or run accelerate config."
        )
    if machines > 1 and (told.main_process_ip is None or not 0 <= rank < machines):
        raise InputError(
            f"{said}: each of {machines} machines must say which it is, --machine_rank 0 to {machines - 1} (here {rank}), and "
            f"where the first is, --main_process_ip (here {told.main_process_ip}). Pass both behind --, or run accelerate config."
        )
    if machines > 1 and told.rdzv_backend != "static":
        raise InputError(
            f"{said} numbers regions by --machine_rank, and with --rdzv_backend {told.rdzv_backend} machines are numbered as "
            "they come. Remove --rdzv_backend."
        )
    if told.max_restarts:
        raise InputError(
            f"{said}: regions of one launch begin and end together, and --max_restarts {told.max_restarts} would restart one "
            "machine of it. Remove it, and start the same command with --resume on every machine after a failure."
        )
    env = {"WORLD_SIZE": machines * local, "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": 0, "MASTER_PORT": 0}
    env |= {"GROUP_RANK": rank, "GROUP_WORLD_SIZE": machines}
    ranks = [env | {"RANK": rank * local + each, "LOCAL_RANK": each} for each in range(local)]
    places = [placed(num_regions, {key: str(value) for key, value in each.items()}, said) for each in ranks]
    first = places[0]
    return Split(
        wish,
        said,
        first.num_regions,
        sorted({each.region for each in places}),
        first.rank // first.local_size,
        rank == 0,
        told.main_process_ip if machines > 1 else None,
    )
