"""What a model consists of: every tensor that is saved with it, and the bytes of each."""

import ctypes
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from .sharding import local_shard, plain_parts

_MOST_THREADS = 4


def contents(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, every saved buffer and every other saved tensor (the scales of quantised weights), by name.

    A tied parameter has one name. Buffers that are not saved follow from the model's config.
    """
    saved = model.state_dict(keep_vars=True)
    named = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return {
        **dict(model.named_parameters()),
        **{name: buffer for name, buffer in model.named_buffers() if name in saved},
        **{name: each for name, each in saved.items() if isinstance(each, Tensor) and id(each) not in named},
    }


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Shape, type and checksum (CRC-32 of the bytes) of each tensor, as a text. Takes about a second per GB and thread."""
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="hf_cocodc-digest") as pool:
        return dict(zip(tensors, pool.map(_digest, tensors.values()), strict=True))


def _digest(tensor: Tensor) -> str:
    checksum = 0
    for part in bytes_of(tensor):
        checksum = zlib.crc32(part, checksum)
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {checksum:08x}"


def bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, part by part, of a sharded one those of this rank; none of a tensor without values (meta).

    A part may be used until the next one is asked for.
    """
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
