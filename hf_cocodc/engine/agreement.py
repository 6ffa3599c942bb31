"""What regions have in common: the same steps, start, global params and model at the end; and what is done if they have not."""

import json
import logging
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, HandshakeError, InputError, LinkError
from ..link.base import Arrival, Link, MeanRequest
from ..link.records import Ending, Trailer
from ..link.spreading import spread, spread_all
from ..parts.codecs import unrounded
from ..parts.codecs.base import Conversation
from ..parts.tensors.flat import (
    contents,
    digests,
    is_finite,
    local_shard,
    offloaded,
    raw,
    split_views,
    tensors_in,
)
from ..parts.tensors.memory import HOST, Departure, used_here
from .account import Measurements, Record, Totals
from .fragment import FragmentState
from .saved import HISTORIES

logger = logging.getLogger(__name__)


class StepChecksum(NamedTuple):
    """An inner step, and a checksum of weights there (-1 if regions need not agree on them)."""

    inner_step: int
    digest: int


def check_in_step(region: int, arrival: Arrival, fragment: int, sent_at: int) -> None:
    """Check that every region landed the same transfer; warn of regions that did not count. Raises LinkError if not."""
    for other, trailer in zip(arrival.members, arrival.trailers, strict=True):
        if (trailer.fragment, trailer.inner_step) != (fragment, sent_at):
            raise LinkError(
                f"regions are out of step: region {region} landed fragment {fragment} sent at step {sent_at}, region {other} "
                f"fragment {trailer.fragment} sent at step {trailer.inner_step}. Every region must make the same number of "
                "inner steps, and with eager updates the same evaluations: each of them is a transfer, too."
            )
        if not trailer.weight and trailer.ending is Ending.NO:
            logger.warning(
                "region %d sat out fragment %d sent at step %d: its outer gradient was not finite, or it had trained no step.",
                *(other, fragment, sent_at),
            )


_UNKNOWN = -1
_BYTE = torch.zeros(1, dtype=torch.uint8, device=HOST)


def differs(link: Link, digests: Collection[int]) -> bool:
    """Whether regions differ, by their `digests`: in any lane of the region, all of which then make the same calls."""
    return not set(digests) <= {_UNKNOWN} and _in_any_lane(link, len(set(digests)) > 1)


def _in_any_lane(link: Link, holds: bool) -> bool:
    return bool(link.total(torch.tensor([float(holds)], dtype=torch.float64, device=HOST)).item())


def reunite(link: Link, fragment: FragmentState, measured: Measurements) -> None:
    """Take the lowest region's global params and outer state of a fragment, and what schedule and guard know of it.

    Processors that round differently drift apart by bits. A collective call of all regions, after the landing that showed it.
    Transfers in flight keep their verdicts, which have gone into the means, and what these were judged by: for a resume.
    """
    what = f"the lowest region's global params of fragment {fragment.fragment.index}"
    sent = [transfer.global_params for transfer in fragment.in_flight]
    flats = {id(each): each for each in (fragment.global_params, *tensors_in(fragment.outer), *sent)}
    fragment.home.settle()
    for flat in flats.values():
        on_host = flat.to(HOST, copy=True).reshape(-1)
        link.broadcast(on_host.view(torch.float32), what)
        flat.copy_(on_host.view_as(flat))
    logger.warning(
        "the global params of fragment %d differ between regions: all regions take region %d's.",
        *(fragment.fragment.index, link.parties[0]),
    )
    index = fragment.fragment.index
    known = {
        "change": measured.change[index],
        "counts": [fragment.voids, fragment.far_losses],
        "histories": [list(getattr(fragment, name)) for name in HISTORIES],
    }
    theirs = json.loads(spread(link, None, json.dumps(known).encode(), f"what goes with {what}"))
    measured.correct(index, theirs["change"])
    fragment.voids, fragment.far_losses = theirs["counts"]
    for name, values in zip(HISTORIES, theirs["histories"], strict=True):
        setattr(fragment, name, values)


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
    what, departure = (
        f"the mean of global params (evaluation, or end): fragment {index}",
        Departure(home.device),
    )

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


def check_same_start(link: Link, own: StepChecksum) -> None:
    """Check that all regions resume from the same step of the same run. Raises CheckpointError if not."""
    standings = link.gather(own, "the checkpoint to resume from")
    first, lowest = standings[0], link.parties[0]
    for region, other in zip(link.parties, standings, strict=True):
        if other.inner_step != first.inner_step:
            raise CheckpointError(
                f"region {lowest} resumes from step {first.inner_step}, region {region} from step {other.inner_step}. Give every "
                "region the checkpoint of the same step."
            )
        if other.digest != first.digest:
            raise CheckpointError(
                f"the checkpoints of region {lowest} and region {region} are both of step {first.inner_step}, but their global "
                "params differ: they are from different runs. Give every region its own checkpoint of one run."
            )


@torch.no_grad()
def check_same_end(
    link: Link, model: nn.Module, synchronized: Collection[str], step: int, record: Record
) -> tuple[int, list[str]]:
    """Compare the model of all regions at the end of a run; returns its checksum, and the names of tensors that were changed. A
    collective call, for each lane's shards.

    This includes frozen parameters and saved buffers. Buffers may differ, because each region has seen other data (running
    statistics of batch normalization): floating-point ones take their mean over the regions, others the lowest region's values.
    So do `synchronized` parameters, which differ if processors round differently. Buffers of different shapes (tables that grow
    with the longest sequence) stay each region's own. Raises HandshakeError, which names the first tensor that differs otherwise.
    """
    own, wrong = digests(contents(model), offloaded(model)), ""
    changed: list[str] = []
    answers = link.gather(_checksum(step, own), "the end of the run")
    if differs(link, [other.digest for other in answers]):
        listings = spread_all(link, json.dumps(own).encode(), "the checksums of the model")
        told = {region: json.loads(text) for region, text in listings.items()}
        changed, notes, wrong = _make_equal(link, model, synchronized, told)
        for note in notes:
            logger.warning(note)
            record("note", step=step, message=note)
        own = digests(contents(model), offloaded(model))
    if _in_any_lane(link, bool(wrong)):
        raise HandshakeError(
            (wrong or "another rank of this region says what differs between regions at the end of the run")
            + ". Only one region has changed it during the run, or it was trained without being synchronized. The model of no "
            "region is the result of this run: go back to a checkpoint, and change in all regions alike what is not trained."
        )
    return _checksum(step, own).digest, changed


def _checksum(step: int, own: Mapping[str, str]) -> StepChecksum:
    return StepChecksum(step, zlib.crc32(json.dumps(own).encode()))


def _make_equal(
    link: Link, model: nn.Module, synchronized: Collection[str], answers: Mapping[int, Mapping[str, str]]
) -> tuple[list[str], list[str], str]:
    """Make equal what differs by `answers`, every region's digests. Returns the names of what was changed, and in words what was
    done, and what must not differ.
    """
    held, buffers = contents(model), dict(model.named_buffers())
    lowest, lines = min(answers), answers.values()
    differing = [name for name in dict.fromkeys(chain(*lines)) if len({each.get(name) for each in lines}) > 1]
    forms = {name: {each.get(name, "").rpartition(" ")[0] for each in lines} for name in differing}
    alike = [name for name in differing if len(forms[name]) == 1]
    shared = [name for name in alike if name in buffers]
    weights = [name for name in alike if name in synchronized]
    apart = [name for name in differing if name in buffers and name not in alike and "" not in forms[name]]
    for names, values_of in ((shared, _mean_or_lowest), (weights, _lowest)):
        tensors = [local_shard(held[name]) for name in names]
        is_needed = _in_any_lane(link, bool(tensors))
        for tensor, values in zip(tensors, values_of(link, tensors) if is_needed else (), strict=True):
            tensor.copy_(values)
    done = {
        "buffers differed between regions at the end: floating-point ones are averaged, others are region "
        f"{lowest}'s now": shared,
        "the final global weights differed between regions, perhaps because their processors round differently (then lower "
        f"digest_interval), and are region {lowest}'s now": weights,
        "buffers of different shapes differed between regions at the end and stay each region's own": apart,
    }
    notes = [f"{what}: {_first_of(names)}." for what, names in done.items() if names]
    for name in differing:
        if name not in {*shared, *weights, *apart}:
            first = answers[lowest].get(name)
            other = next(region for region, each in answers.items() if each.get(name) != first)
            wrong = f"regions differ at the end of the run in {name} (region {other} and region {lowest})"
            return [*shared, *weights], notes, wrong
    return [*shared, *weights], notes, ""


def _first_of(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def _mean_or_lowest(link: Link, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The mean over the regions of each floating-point tensor, else the lowest region's values; the same bits everywhere."""
    # a byte more: a lane that has nothing makes as many calls as the others
    own = torch.cat([*(raw(tensor.cpu()) for tensor in tensors), _BYTE]).numpy().tobytes()
    answers = spread_all(link, own, "buffers at the end", len(own)).values()
    flats = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in answers]
    parts = (flat.split([*(tensor.nbytes for tensor in tensors), 1])[:-1] for flat in flats)
    for tensor, *each in zip(tensors, *parts, strict=True):
        values = torch.stack([part.clone().view(tensor.dtype).view(tensor.shape) for part in each])
        yield values.double().mean(dim=0) if tensor.is_floating_point() else values[0]


def _lowest(link: Link, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The lowest region's values of parameters, which show global params: fp32 holds them exactly."""
    flat = torch.cat([torch.empty(0, device=HOST), *(tensor.cpu().float().flatten() for tensor in tensors)])
    link.broadcast(flat, "the final global weights of the lowest region")
    return split_views(flat, [tuple(tensor.shape) for tensor in tensors])
