"""What this rank holds of a tensor that FSDP2 has sharded."""

from torch import Tensor, nn


def local_shard(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this rank holds: its own shard of a DTensor (FSDP2), else the tensor itself."""
    from torch.distributed.tensor import DTensor

    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def reshard(model: nn.Module) -> None:
    """Let FSDP2 modules forget gathered parameters, so that the next forward pass sees what is written to the shards.

    A forward pass without a backward one (an evaluation) leaves some of them gathered.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
