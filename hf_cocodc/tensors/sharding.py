"""Access to the shards that FSDP2 leaves on this rank."""

from torch import Tensor, nn


def local_shard(tensor: Tensor) -> Tensor:
    """The part of `tensor` on this rank: the own shard of a DTensor (FSDP2), else the tensor itself."""
    from torch.distributed.tensor import DTensor

    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def reshard(model: nn.Module) -> None:
    """Drop the gathered parameters of FSDP2 modules, so that the next forward pass reads the values in the shards.

    A forward pass without a backward pass (an evaluation) leaves some parameters gathered.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
