"""What we support of a region, as `accelerate launch` has set it up, and of its model."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import InputError
from ..link.group import RegionGroup
from ..parts.codecs import has_radial, has_rank
from ..parts.tensors.flat import local_shard, offloaded
from ..parts.tensors.memory import HOST, Home
from ..resolve import from_config
from ..settings import OuterConfig
from ..settings.fields import at_least, converted
from ..settings.outer import AUTO


def refuse_unsupported(
    accelerator: Accelerator, config: OuterConfig, model: nn.Module, has_stages: bool = False
) -> None:
    """Check that we support a region as `accelerate launch` has set it up, and its model. Raises InputError if not, and says
    what to change. `has_stages`: every rank of the region holds its own pipeline stage.
    """
    if has_stages and config.on_nonfinite == "stop":
        raise InputError(
            "outer.on_nonfinite=stop with pipeline stages is not supported: a stage does not know the rounds of the others, and "
            "they would stop at different steps. Use outer.on_nonfinite=restart."
        )
    for name, param in model.named_parameters():
        if param.requires_grad and param.is_complex():
            raise InputError(
                f"the parameter {name} is complex ({param.dtype}), but regions exchange real numbers. Freeze it "
                "(requires_grad_(False)), or keep its real and imaginary parts as two real parameters (torch.view_as_real)."
            )
    devices = {str(each) for each in (getattr(model, "hf_device_map", None) or {}).values()} - {"cpu", "disk"}
    if len(devices) > 1:
        raise InputError(
            f"device_map puts the model on several devices ({', '.join(sorted(devices))}). This has not been tried: all outer "
            "state would rest on the first. Load the model without device_map, and shard it with FSDP2 over the region's "
            "GPUs, or give each region one GPU."
        )
    elsewhere = offloaded(model)
    for name, param in model.named_parameters():
        if param.requires_grad and name in elsewhere:
            raise InputError(
                f"the parameter {name} is trained, but Accelerate keeps its values on the host or on a disk (device_map), and "
                "each forward pass has a copy: training would change the copy. Freeze it (requires_grad_(False)), or place it "
                "on the device."
            )
    kind = accelerator.distributed_type
    supported = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if kind is DistributedType.FSDP and accelerator.is_fsdp2:
        codec = from_config(config).codec
        if has_rank(codec):
            raise InputError(
                "outer.codec=lowrank with FSDP2 is not supported: each process would choose the codec's rank for its own shards, "
                "and regions would disagree on the interval. Use another codec, or DDP."
            )
        if has_radial(codec):
            raise InputError(
                "radial averaging (outer.mean=radial) with FSDP2 is not supported: each process has shards, and norms are of "
                "whole parameters. Use outer.mean=average, or DDP."
            )
    elif kind not in supported:
        raise InputError(
            f"distributed type {kind.value} inside a region is not supported. Launch the region as one process, with DDP or "
            "with FSDP2 (fsdp_version 2; FSDP1 is not supported), and without DeepSpeed or Megatron."
        )


_SHARE = 0.1
"""`outer.device: auto` keeps global params and outer state with the model if they take at most this share of its memory."""


def home_of(model: nn.Module, config: OuterConfig) -> Home:
    """Where global params, outer state and transfers rest; they are computed with on the device of the model."""
    params = [local_shard(param) for param in model.parameters() if param.requires_grad]
    device = params[0].device if params else HOST
    room = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return Home(device, rests_on_host(config, sum(param.numel() for param in params), room))


def rests_on_host(config: OuterConfig, num_values: int, room: int | None) -> bool:
    """Whether the outer state of so many values rests on the host; `room`: bytes of the model's device, None if unknown."""
    # the momentum is as long as the global params, both in fp32
    is_large = room is not None and 8 * num_values > _SHARE * room
    return config.device == "host" or (config.device == AUTO and is_large)


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold shards of a model's parameters."""
    return any(isinstance(param, DTensor) for param in model.parameters())


def lanes_of(accelerator: Accelerator, model: nn.Module, stage: tuple[int, int] | None) -> tuple[int, int]:
    """The lane of this rank, and the number of lanes of its region. Raises InputError if the ranks hold what cannot be
    exchanged.

    `model` is unwrapped. `stage`: (index, number of stages) if every rank of the region holds its own pipeline stage.
    """
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    sharded = accelerator.distributed_type is DistributedType.FSDP
    lane, num_lanes = stage or ((rank, num_ranks) if sharded else (0, 1))
    if stage is not None and (sharded or (lane, num_lanes) != (rank, num_ranks)):
        raise InputError(
            f"stage={stage} in rank {rank} of {num_ranks} must be {(rank, num_ranks)}: every rank holds one stage, in the order "
            "of the ranks. A stage cannot be sharded (FSDP2). Launch each region with one process per stage."
        )
    parts = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    if parts and num_ranks > 1 and not sharded:
        raise InputError(
            f"{parts[0]} is sharded over ranks that Accelerate treats as replicas ({accelerator.distributed_type.value}): tensor "
            "parallelism is not supported. Shard with FSDP2 through Accelerate, or split the model into pipeline stages."
        )
    replicated = next((name for name in parts if _is_replicated(model.get_parameter(name))), None)
    if sharded and replicated is not None:
        raise InputError(
            f"{replicated} is sharded over some ranks and replicated over others (dp_replicate_size): each replica would send "
            "the same shards over the link, and norms would count them several times. Shard over all ranks of the region "
            "(dp_replicate_size=1), or make each replica a region."
        )
    return lane, num_lanes


OF_STAGES = "a region with pipeline stages cannot be lost, come back or join. Use regions of one process, with DDP or with FSDP2."
"""Why a run of such regions cannot go on without one."""


def _is_replicated(param: nn.Parameter) -> bool:
    """Whether several ranks of a sharded parameter's mesh hold the same shard."""
    assert isinstance(param.data, DTensor)
    sizes = zip(param.data.placements, param.data.device_mesh.shape, strict=True)
    return any(placement.is_replicate() and size > 1 for placement, size in sizes)


def refuse_uneven(group: RegionGroup, max_steps: int | None, num_batches: int | None = None) -> None:
    """Raise InputError, in all ranks of a region, unless all make equally many inner steps, of equally many batches in an epoch.
    A collective call; None is unknown.
    """
    of_ranks = group.of_all([max_steps, num_batches], "how long each rank trains")
    if all(each == of_ranks[0] for each in of_ranks):
        return
    differ = [rank for rank, each in enumerate(of_ranks) if each != of_ranks[0]]
    numbers = ", ".join(
        f"rank {rank} {_length_in_words(*of_ranks[rank])}" for rank in (0, *differ[:_MOST_NAMED])
    ) + (f" and {len(differ) - _MOST_NAMED} ranks more" if differ[_MOST_NAMED:] else "")
    raise InputError(
        f"the ranks of this region would not train equally long: {numbers}. Ranks wait for each other in every step, so all need "
        "as many batches: set even_batches=True (accelerator_config), or dataloader_drop_last=True, or give every rank the same "
        "max_steps and as much data."
    )


_MOST_NAMED = 4


def _length_in_words(max_steps: int | None, num_batches: int | None) -> str:
    steps = "an unknown number of inner steps" if max_steps is None else f"{max_steps} inner steps"
    return (
        f"makes {steps}" if num_batches is None else f"has {num_batches} batches an epoch and makes {steps}"
    )


def length_of(max_steps: Any) -> int | None:
    """`max_steps` as a number, or None. Raises InputError if it is no whole number from 1."""
    most: int | None = converted(max_steps, int | None, "max_steps")
    if most is not None:
        at_least(1).check("max_steps", most)
    return most


_TRAINED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models that an outer optimizer trains now."""


def refuse_second(model: nn.Module) -> None:
    """Raise InputError if an outer optimizer trains `model` already."""
    if model in _TRAINED:
        raise InputError(
            f"another OuterOptimizer, or another CoCoDCCallback, trains this {type(model).__name__}: both would write its "
            "parameters. End the first one (finish() or close()), or train a model of its own."
        )


def claim(model: nn.Module) -> Callable[[], None]:
    """Note that an outer optimizer trains `model`, until the returned function is called."""
    _TRAINED.add(model)
    return lambda: _TRAINED.discard(model)
