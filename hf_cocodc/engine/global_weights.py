"""The global weights in the model: for evaluation, for export and at the end of a run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..link.base import Link, MeanRequest
from ..link.records import Trailer
from ..parts.codecs import unrounded
from ..parts.codecs.base import Conversation
from ..parts.tensors.flat import is_finite, reshard
from ..parts.tensors.memory import Departure, used_here
from .account import Totals
from .agreement import check_in_step
from .fragment import FragmentState


@torch.no_grad()
def show_global(
    fragments: Sequence[FragmentState], link: Link, step: int, totals: Totals, mean: bool
) -> None:
    """Copy this region's global params into the local params, or their `mean` over the regions, in a collective call.

    `totals` counts bytes. Raises InputError if there is no mean, because no region's values are finite.
    """
    for fragment in fragments:
        if mean:
            _show_mean(fragment, link, step, totals)
        else:
            fragment.show(fragment.global_params)


def _show_mean(fragment: FragmentState, link: Link, step: int, totals: Totals) -> None:
    index, flat, home = fragment.fragment.index, fragment.global_params, fragment.home
    home.settle()
    trailer = Trailer(float(is_finite(flat)), fragment=index, inner_step=step)
    what, departure = f"the mean of the global params of fragment {index}", Departure(home.device)

    def converse() -> Conversation:
        departure.wait(flat)
        return (yield from unrounded(flat))

    arrival = link.mean(
        MeanRequest(converse, fragment.fragment.numel, lambda: trailer, what, home=home)
    ).wait()
    check_in_step(link.region, arrival, index, step)
    totals.bytes_sent += arrival.bytes_sent
    if not (arrival.is_finite and any(trailer.weight for trailer in arrival.trailers)):
        first, *rest = fragment.fragment.names
        more = f" and {len(rest)} more" if rest else ""
        raise InputError(
            f"{first}{more} cannot be synchronized after step {step}: not all values are finite in any region. Go back to an "
            "earlier checkpoint, with a lower learning rate or gradient clipping."
        )
    used_here(arrival.result.mean)
    fragment.show(arrival.result.mean)
    home.give(arrival.result.mean)


@contextmanager
def local_kept(model: nn.Module, params: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Restore these local params after the block, bit for bit, from `device`: that of the outer state costs a GPU no memory."""
    with torch.no_grad():
        reshard(model)
        kept = [param.to(device, copy=True) for param in params]
    try:
        yield
    finally:
        reshard(model)
        with torch.no_grad():
            for param, local in zip(params, kept, strict=True):
                param.copy_(local)
