"""Which parameters are synchronized, and how a run goes on when there are more of them."""

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, LinkError
from ..link.base import Link
from ..methods import Method
from ..parts.fragments import Fragment
from ..parts.merges import Merge
from ..parts.tensors.flat import flat_zeros, is_finite, local_shard
from ..parts.tensors.memory import HOST, Pool
from ..parts.tensors.pieces import HostThreads
from .account import Totals
from .compatibility import layout
from .fragment import FragmentState, hold
from .global_weights import not_finite, show_global
from .transfer import Trained, Transfer

logger = logging.getLogger(__name__)


def names_of(fragments: Sequence[Fragment]) -> frozenset[str]:
    """Names of the parameters in these fragments."""
    return frozenset(name for fragment in fragments for name in fragment.names)


def fragments_of(
    model: nn.Module, method: Method, names: Collection[str] | None = None
) -> tuple[Fragment, ...]:
    """The method's fragments of these parameters; by default of those that are trainable now."""
    if names is None:
        return method.fragments(model)
    with _trainable(model, names):
        return method.fragments(model)


@contextmanager
def _trainable(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Inside the block exactly these parameters are trainable."""
    changed = [param for name, param in model.named_parameters() if param.requires_grad != (name in names)]
    for param in changed:
        param.requires_grad_(not param.requires_grad)
    try:
        yield
    finally:
        for param in changed:
            param.requires_grad_(not param.requires_grad)


@torch.no_grad()
def make_equal(
    model: nn.Module, averaged: Sequence[str], created: Sequence[str], link: Link, step: int, totals: Totals
) -> None:
    """Give parameters that are adopted during a run the same values in all regions. A collective call.

    `averaged` ones were equal in all regions until they became trainable: their mean loses no inner step. `created` ones are
    new in the model, perhaps from different random numbers, and a mean of two adapters is none: they take region 0's values.
    Raises InputError if the values are not finite.
    """
    params = dict(model.named_parameters())
    for names, is_mean in ((averaged, True), (created, False)):
        if not names:
            continue
        shards = {name: local_shard(params[name]) for name in names}
        shapes = tuple(tuple(shard.shape) for shard in shards.values())
        numel = sum(shard.numel() for shard in shards.values())
        pool, threads = Pool(HOST, [numel]), HostThreads(trains_on_host=True)
        state = hold(Fragment(0, tuple(names), shapes, numel), shards, pool, pool, threads, flat_zeros(numel))
        if is_mean:
            show_global([state], link, step, totals, mean=True)
        else:
            link.broadcast(state.global_params, "new parameters from region 0")
            wrong = torch.tensor([float(not is_finite(state.global_params))], dtype=torch.float64)
            if link.total(wrong).item():
                raise InputError(not_finite(names, "region 0", step))
            state.local.show(state.global_params)


def carry_over(old: Sequence[FragmentState], new: Sequence[FragmentState], with_global: bool) -> None:
    """Copy outer momentum and, if asked, global params to new fragments; states of whole fragments begin anew."""
    held = [(each.fragment, _flats_of(each, with_global)) for each in old]
    for each in new:
        for key, target in _flats_of(each, with_global).items():
            for fragment, sources in held:
                if key in sources:
                    copy_rows(each.fragment, target, fragment, sources[key])


def _flats_of(state: FragmentState, with_global: bool) -> dict[str, Tensor]:
    flats = dict(_flats(state.outer, state.fragment.numel))
    return {**flats, "global_params": state.global_params} if with_global else flats


def _views(fragment: Fragment, flat: Tensor) -> Iterator[tuple[str, tuple[int, Tensor]]]:
    """Name, first row and view of each piece of a parameter in a flat tensor."""
    for i, (name, view) in enumerate(zip(fragment.names, fragment.views(flat), strict=True)):
        yield name, (fragment.rows.get(i, (0, 0))[0], view)


def _flats(state: Mapping[str, Any], numel: int, prefix: str = "outer") -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _flats(value, numel, f"{prefix}.{key}")
        elif isinstance(value, Tensor) and value.numel() == numel:
            yield f"{prefix}.{key}", value


def copy_rows(into: Fragment, target: Tensor, other: Fragment, source: Tensor) -> None:
    """Copy the rows that two flat tensors share, by the names of their fragments' parameters."""
    views = dict(_views(other, source))
    for name, (start, view) in _views(into, target):
        if name in views:
            _copy_overlap(start, view, *views[name])


def _copy_overlap(start: int, target: Tensor, other: int, source: Tensor) -> None:
    """Copy the rows that both pieces of a parameter have."""
    if target.shape == source.shape and start == other:
        target.copy_(source)
        return
    first, last = max(start, other), min(start + len(target), other + len(source))
    if first < last:
        target[first - start : last - start].copy_(source[first - other : last - other])


@dataclass(frozen=True)
class Unsent:
    """Inner steps of a fragment in no landed transfer: minus their sum, flat, and what was `trained` before them."""

    fragment: Fragment
    outer_grad: Tensor
    trained: Trained


@torch.no_grad()
def give_up(fragments: Sequence[FragmentState], link: Link, merge: Merge) -> list[Unsent]:
    """Drop all transfers in flight, because the others have gone on without this region; returns its unsent steps.

    A transfer that has its mean has brought this region's steps to the others, and lands there; any other was sent again
    without this region. Waiting for a handle cannot block: the link has failed.
    """
    kept = [_unsent(fragment, link, merge) for fragment in fragments]
    for fragment in fragments:
        while fragment.in_flight:
            fragment.drop(fragment.in_flight.pop())
    return kept


def _unsent(fragment: FragmentState, link: Link, merge: Merge) -> Unsent:
    base, trained = fragment.base(), fragment.trained
    snapshot, outer_grad, square = fragment.prepare(base)
    # after a landing since their send, local params have the steps of other transfers, or no longer
    has_them = base is fragment.global_params and merge.keeps_local_steps
    for transfer in reversed(fragment.in_flight):
        if _has_arrived(transfer, link):
            break
        trained = transfer.trained
        if transfer.is_own and not has_them and transfer.departure is not None:
            outer_grad.add_(transfer.departure.flat)
    fragment.pool.give(snapshot)
    return Unsent(fragment.fragment, outer_grad if math.isfinite(square) else outer_grad.zero_(), trained)


def _has_arrived(transfer: Transfer, link: Link) -> bool:
    try:
        link.give(transfer.handle.wait().result.mean)
    except LinkError:
        return False
    return True


@torch.no_grad()
def bring_back(fragments: Sequence[FragmentState], kept: Sequence[Unsent]) -> None:
    """Add the steps of `kept` to the local params, which are the global ones. The next sends carry them."""
    if layout([each.fragment for each in fragments]) == layout([each.fragment for each in kept]):
        for fragment, each in zip(fragments, kept, strict=True):
            _add(fragment, each.outer_grad)
            fragment.trained = each.trained
        return
    # parameters were adopted meanwhile: fragments have other layouts, and the steps are matched by name
    for fragment in fragments:
        outer_grad = torch.zeros_like(fragment.global_params)
        for each in kept:
            copy_rows(fragment.fragment, outer_grad, each.fragment, each.outer_grad)
        _add(fragment, outer_grad)
        fragment.trained = min(each.trained for each in kept)


def _add(fragment: FragmentState, outer_grad: Tensor) -> None:
    local = fragment.gather()
    fragment.local.show(local.sub_(outer_grad))
    fragment.pool.give(local)
