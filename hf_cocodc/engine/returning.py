"""What a region that was left behind keeps of its own when it takes over the others' state."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import LinkError
from ..links.base import Link
from ..parts.fragments import Fragment
from ..parts.merges import Merge
from .adoption import copy_rows
from .compatibility import layout
from .fragment import FragmentState
from .shares import Trained
from .transfer import Transfer


@dataclass(frozen=True)
class Unsent:
    """Inner steps of one fragment that no landed transfer carries.

    Attributes:
        fragment: its layout.
        outer_grad: minus the sum of these steps, flat.
        trained: what the region had trained before them.
    """

    fragment: Fragment
    outer_grad: Tensor
    trained: Trained


@torch.no_grad()
def give_up(fragments: Sequence[FragmentState], link: Link, merge: Merge) -> list[Unsent]:
    """Give up all transfers in flight, because the others have gone on without this region.

    No handle is waited for: those of such a link have ended. A transfer that has its mean has brought this region's steps to the
    others, and lands there. Any other one was sent again without this region.

    Args:
        fragments: all fragments of the model.
        link: which the others have left.
        merge: the method's.

    Returns:
        What this region keeps: what its next sends would carry, and what has not arrived.
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
    """Add the steps of `kept` to the local params, which are the global ones. The next sends carry them.

    Parameters may have been adopted meanwhile: fragments then have other layouts, and steps are found by name.
    """
    if layout([each.fragment for each in fragments]) == layout([each.fragment for each in kept]):
        for fragment, each in zip(fragments, kept, strict=True):
            _add(fragment, each.outer_grad)
            fragment.trained = each.trained
        return
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
