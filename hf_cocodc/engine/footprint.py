"""An estimate of the memory that outer state and transfers take."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..methods import Method
from ..parts.codecs.base import copies
from ..parts.fragments import Fragment
from ..parts.tensors.flat import tensors_in
from ..parts.tensors.memory import HOST, Pool, shared_lengths
from ..parts.tensors.pieces import HostThreads
from .fragment import FragmentState, hold
from .local_params import staged_bytes
from .stepping import steps_ahead


class Memory(NamedTuple):
    """Bytes on a device: `kept` all the time, at most `per_transfer` in flight, `staged` while params are copied."""

    kept: int
    per_transfer: int = 0
    staged: int = 0


def memory(
    fragments: Sequence[FragmentState], method: Method, num_regions: int, steps_ahead: bool
) -> dict[torch.device, Memory]:
    """The memory of outer state and transfers by device. `num_regions`: the most, if they may change."""
    pool, params = fragments[0].pool, fragments[0].local
    by_device = {pool.device: Memory(0), HOST: Memory(0)}
    for each in fragments:
        length = pool.length(each.fragment.numel) if steps_ahead else each.fragment.numel
        num_flats = 1 + len(tensors_in(each.outer))
        by_device[pool.device] = _add(by_device[pool.device], kept=4 * length * num_flats)
        by_device[HOST] = _add(by_device[HOST], kept=_bytes(each.codec))
    for length in pool.lengths:
        served = [each for each in fragments if pool.length(each.fragment.numel) == length]
        flats = max(_flats(each, method, steps_ahead) for each in served)
        by_device[pool.device] = _add(by_device[pool.device], per_transfer=4 * length * flats)
        on_host = max(_for_the_link(each, method, num_regions, pool.device) for each in served)
        by_device[HOST] = _add(by_device[HOST], per_transfer=on_host)
    staged = max(staged_bytes(each.local, pool.device) for each in fragments)
    if staged:
        by_device[params.device] = _add(by_device.get(params.device, Memory(0)), staged=staged)
    return by_device


def forecast(
    model: nn.Module, fragments: Sequence[Fragment], method: Method, num_regions: int, device: torch.device
) -> dict[torch.device, Memory]:
    """The memory that a run of one rank per region will take, for a model on meta. `device`: the host, or meta."""
    ahead = steps_ahead(method, device, num_lanes=1)
    with torch.device("meta"), torch.no_grad():
        shards = dict(model.named_parameters())
        lengths = shared_lengths(each.numel for each in fragments)
        host = Pool(HOST, lengths)
        pool = host if device == HOST else Pool(device, lengths)
        threads = HostThreads(trains_on_host=False)
        states = [
            hold(each, shards, pool, host, threads, torch.empty(each.numel, dtype=torch.float32))
            for each in fragments
        ]
        for state in states:
            state.codec = method.codec.init(state.fragment)
            state.outer = method.outer.init(state.global_params)
    return memory(states, method, num_regions, ahead)


def in_words(memory: Mapping[torch.device, Memory]) -> list[str]:
    """One sentence per device."""
    return [
        f"outer state: {each.kept / 1e6:.4g} MB on {'the host' if device == HOST else device}, at most "
        f"{each.per_transfer / 1e6:.4g} MB more for each transfer in flight, {each.staged / 1e6:.4g} MB while params are copied."
        for device, each in memory.items()
    ]


def _flats(fragment: FragmentState, method: Method, steps_ahead: bool) -> int:
    """Flat tensors of the fragment's length that a transfer takes at most."""
    flats = 3  # snapshot, outer gradient, mean
    if steps_ahead:  # new global params, and new outer state, some of it in the memory of the outer gradient
        flats += 1 + max(len(tensors_in(fragment.outer)) - 1, 0)
    if method.schedule.back_to_back:
        flats += 1  # the global params at the send, which move before the transfer lands
    return flats


def _for_the_link(fragment: FragmentState, method: Method, num_regions: int, device: torch.device) -> int:
    """Bytes on the host that one transfer of the fragment takes for the link and its codec."""
    layout, values = fragment.fragment, fragment.global_params.nbytes
    received = max(method.codec.wire_bytes(layout, region, num_regions) for region in range(num_regions))
    sent = received if received < values else 0  # fp32 is sent from the outer gradient's own memory
    remembered = 2 * _bytes(fragment.codec)  # the values that a codec with memory sends, and its next state
    on_host = 2 if device != HOST else 0  # outer gradient and mean, once more
    again = copies(method.codec) + on_host
    return again * values + received + sent + remembered


def _add(memory: Memory, **more: int) -> Memory:
    return memory._replace(**{name: getattr(memory, name) + count for name, count in more.items()})


def _bytes(state: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(state))
