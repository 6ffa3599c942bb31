"""Access to the shards that FSDP2 leaves on this rank, and to the plain tensors inside others."""

from typing import Any

from torch import Tensor, nn


def local_shard(tensor: Tensor) -> Tensor:
    """The part of `tensor` on this rank: the own shard of a DTensor (FSDP2), else the tensor itself."""
    from torch.distributed.tensor import DTensor

    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def plain_parts(tensor: Any) -> list[Tensor]:
    """Plain tensors inside `tensor`.

    A quantised weight may be a tensor subclass that holds values and scales, but no bytes of its own.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(tensor, name))]


def reshard(model: nn.Module) -> None:
    """Drop the gathered parameters of FSDP2 modules, so that the next forward pass reads the values in the shards.

    A forward pass without a backward pass (an evaluation) leaves some parameters gathered.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
