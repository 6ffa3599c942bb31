"""An estimate of the memory that outer state and transfers take."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..methods import Method
from ..parts.codecs.base import SLICE, Plain, copies
from ..parts.fragments import Fragment
from ..parts.tensors.flat import tensors_in
from ..parts.tensors.memory import HOST, Home
from ..parts.tensors.slices import longest

_FLATS = 3
"""Flat tensors of a transfer: snapshot, outer gradient, mean."""
_TEMPORARIES = 4
"""Slices that a send or a landing computes with at once."""
_ENCODING = 3
"""Slices of a message that encoding and decoding take for a while, with what they make of them."""


class Memory(NamedTuple):
    """Bytes on a device: `kept` all the time, at most `per_transfer` in flight, `staged` while slices are computed with."""

    kept: int
    per_transfer: int = 0
    staged: int = 0


def memory(
    fragments: Sequence[Fragment], method: Method, num_regions: int, home: Home
) -> dict[torch.device, Memory]:
    """The memory of outer state and transfers by device. `num_regions`: the most, if they may change."""
    by_device = {home.rest: Memory(0), HOST: Memory(0), home.device: Memory(0)}
    with FakeTensorMode():  # no byte is taken
        kept = sum(
            4 * each.numel + _bytes(method.outer.init(torch.empty(each.numel, device=HOST)))
            for each in fragments
        )
        codec = [_bytes(method.codec.init(each)) for each in fragments]
    largest = max(fragments, key=lambda each: each.numel)
    values, remembered = 4 * largest.numel, max(codec)
    flats = (
        _FLATS + method.schedule.back_to_back
    )  # the global params at the send, which move before the transfer lands
    payload = max(method.codec.wire_bytes(largest, region, num_regions) for region in range(num_regions))
    by_device[home.rest] = _add(
        by_device[home.rest], kept=kept + sum(codec), per_transfer=flats * values + remembered
    )
    # what comes, and what leaves a device; on the host fp32 leaves from the outer gradient's own memory
    is_on_host = home.device == HOST
    ways = 1 if is_on_host and payload >= values else 2
    by_device[HOST] = _add(by_device[HOST], per_transfer=ways * payload)
    # a codec that is not plain computes with the whole fragment
    whole = 0 if isinstance(method.codec, Plain) else values * copies(method.codec) + remembered
    if home.is_apart and not isinstance(method.codec, Plain):
        whole += 2 * values + remembered
    slices = _TEMPORARIES * min(values, 4 * longest(home.device)) + _ENCODING * min(values, 4 * SLICE)
    by_device[home.device] = _add(
        by_device[home.device], per_transfer=whole + (0 if is_on_host else payload), staged=slices
    )
    return by_device


def in_words(memory: Mapping[torch.device, Memory]) -> list[str]:
    """One sentence per device."""
    return [
        f"outer state: {each.kept / 1e6:.4g} MB on {'the host' if device == HOST else device}, at most "
        f"{each.per_transfer / 1e6:.4g} MB more for each transfer in flight, {each.staged / 1e6:.4g} MB while they are computed."
        for device, each in memory.items()
    ]


def _add(memory: Memory, **more: int) -> Memory:
    return memory._replace(**{name: getattr(memory, name) + count for name, count in more.items()})


def _bytes(state: Mapping[str, object]) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(state))
