"""Makes global params that have drifted apart equal again in all regions."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..links.base import Link
from ..parts.guard import Ordinary
from ..tensors.flat import tensors_in
from .compatibility import HISTORIES
from .fragment import FragmentState
from .measurements import Measurements
from .transfer import Transfer

logger = logging.getLogger(__name__)


def reunite(link: Link, fragment: FragmentState, landed: Transfer, measured: Measurements) -> None:
    """Take the lowest region's global params and outer state of a fragment, and what schedule and guard know of it.

    Processors that round differently drift apart by bits. A collective call of all regions, after the landing of a transfer that
    told of it.
    """
    what = f"the lowest region's global params of fragment {fragment.fragment.index}"
    sent = [transfer.global_params for transfer in fragment.in_flight]
    flats = {id(each): each for each in (fragment.global_params, *tensors_in(fragment.outer), *sent)}
    for flat in flats.values():
        on_host = flat.cpu()
        link.broadcast(on_host, what)
        flat.copy_(on_host)
    logger.warning(
        "the global params of fragment %d differ between regions: all regions take region %d's.",
        *(fragment.fragment.index, link.parties[0]),
    )
    index, histories = fragment.fragment.index, [list(getattr(fragment, name)) for name in HISTORIES]
    at_sends = [number for transfer in fragment.in_flight for number in transfer.ordinary]
    counts = fragment.voids, fragment.far_losses, *map(len, histories)
    numbers = [*_numbers_in(fragment.outer), measured.change[index], *at_sends, *counts]
    told = iter(_told(link, numbers, what))
    fragment.outer = _with_numbers(fragment.outer, told)
    measured.correct(index, next(told))
    for transfer in fragment.in_flight:
        transfer.ordinary = Ordinary(next(told), next(told))
    fragment.voids, fragment.far_losses, *lengths = map(int, told)
    for name, values, length in zip(HISTORIES, histories, lengths, strict=True):
        setattr(fragment, name, _told(link, [*values, *[0.0] * length][:length], what))
    # Steps that were taken ahead, or would start from the landed one, have the old values: they are left to their landings.
    # A link's thread is no longer at these tensors, because the broadcasts came after all its earlier work.
    for transfer in (landed, *fragment.in_flight):
        transfer.outcome.step = None


def _told(link: Link, numbers: Sequence[float], what: str) -> list[float]:
    """The lowest region's numbers, as many as there are here."""
    if not numbers:
        return []
    told = torch.tensor(numbers, dtype=torch.float64)
    link.broadcast(told.view(torch.float32), what)  # the bits of each number, as two halves
    return told.tolist()


def _numbers_in(state: dict[str, Any]) -> Iterator[float]:
    """Every number of a nested state, in the order of its keys."""
    for value in state.values():
        if isinstance(value, dict):
            yield from _numbers_in(value)
        elif not isinstance(value, Tensor):
            yield float(value)


def _with_numbers(state: dict[str, Any], numbers: Iterator[float]) -> dict[str, Any]:
    """The state with other numbers, each of the type that it had."""
    changed: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            changed[name] = _with_numbers(value, numbers)
        else:
            changed[name] = value if isinstance(value, Tensor) else type(value)(next(numbers))
    return changed
