"""Flat fp32 tensors: how parameters lie in them, what a model consists of, and the bytes of each tensor."""

import ctypes
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

_MOST_THREADS = 4


def flat_zeros(numel: int) -> Tensor:
    """A flat fp32 tensor of `numel` zeros on the host, where the link reads it."""
    return torch.zeros(numel, dtype=torch.float32, device=torch.device("cpu"))


def split_views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of the 1-D `flat`, one for each shape, in order. Writing to a view writes to `flat`.

    >>> [view.tolist() for view in split_views(torch.arange(5), [(2,), (1, 3)])]
    [[0, 1], [[2, 3, 4]]]
    """
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target in place, across dtypes and devices."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    else:
        torch._foreach_copy_(list(targets), list(sources))


def digest(*flats: Tensor, start: int = 0) -> int:
    """A checksum (CRC-32, exact in a float64) of the bytes of flat tensors; `start`: of earlier ones, to continue from."""
    for flat in flats:
        start = zlib.crc32(flat.cpu().numpy(), start)
    return start


def is_finite(flat: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    return math.isfinite(flat.sum())


def tensors_in(state: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor of a nested state, in the order of its keys."""
    tensors = []
    for value in state.values():
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, dict):
            tensors += tensors_in(value)
    return tensors


def mapped(state: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """A nested state with every tensor changed."""
    return {
        name: mapped(value, change)
        if isinstance(value, Mapping)
        else change(value)
        if isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }


def moved(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A nested state with its tensors on a device."""
    return mapped(state, lambda tensor: tensor.to(device))


def alone(tensor: Tensor) -> Tensor:
    """A plain tensor on the host, contiguous, in memory of its own: safetensors refuses strides, and views of one memory."""
    on_host = tensor.detach().cpu().contiguous()
    return on_host if on_host.untyped_storage().nbytes() == on_host.nbytes else on_host.clone()


def local_shard(tensor: Tensor) -> Tensor:
    """The part of `tensor` on this rank: the own shard of a DTensor (FSDP2), else the tensor itself."""
    from torch.distributed.tensor import DTensor

    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def plain_parts(tensor: Any) -> list[Tensor]:
    """Plain tensors inside `tensor`: a quantized weight may be a subclass of values and scales, without bytes of its own."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(tensor, name))]


def reshard(model: nn.Module) -> None:
    """Let the next forward pass of FSDP2 modules read the shards: one without a backward pass leaves parameters gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def contents(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter (a tied one once) and saved buffer of a model, by name."""
    saved = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def offloaded(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """How to read each tensor of which a model has only the shape (meta), by name: with a `device_map`, hooks of Accelerate's
    keep its values on the host or on a disk.
    """
    readers: dict[str, Callable[[], Tensor]] = {}
    for path, module in model.named_modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            if getattr(each, "offload", False):
                deep = each.place_submodules
                for name, tensor in (*module.named_parameters("", deep), *module.named_buffers("", deep)):
                    if tensor.is_meta:
                        full = f"{path}.{name}" if path else name
                        readers[full] = partial(each.weights_map.__getitem__, name)
    return readers


def digests(
    tensors: Mapping[str, Tensor], elsewhere: Mapping[str, Callable[[], Tensor]] = MappingProxyType({})
) -> dict[str, str]:
    """Shape, type and CRC-32 of each tensor, as a text. Takes about a second per GB and thread. `elsewhere`: see `offloaded`."""

    def digest_of(name: str) -> str:
        return _digest(elsewhere[name]() if name in elsewhere else tensors[name])

    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="hf_cocodc-digest") as pool:
        return dict(zip(tensors, pool.map(digest_of, tensors), strict=True))


def _digest(tensor: Tensor) -> str:
    checksum = 0
    for part in bytes_of(tensor):
        checksum = zlib.crc32(part, checksum)
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {checksum:08x}"


def bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, or of this rank's shard, in parts that are valid until the next; none without values (meta)."""
    for part in plain_parts(local_shard(tensor)):
        if not part.is_meta and part.numel():
            held = raw(part.cpu())
            # not numpy(): torch never resizes a storage that NumPy has seen, and FSDP2 resizes those of gathered parameters
            yield memoryview((ctypes.c_char * len(held)).from_address(held.data_ptr())).cast("B")


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a plain tensor in the order of its values, 1-D uint8; a view of it where that is possible."""
    flat = tensor.contiguous().as_strided(
        (tensor.numel(),), (1,)
    )  # a tensor of one value may have any stride
    return flat.view(torch.uint8)
