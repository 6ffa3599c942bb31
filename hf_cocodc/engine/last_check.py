"""The check at the end of a run: every tensor of the model is equal in all regions."""

import logging
import zlib
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..errors import HandshakeError
from ..links.base import Link
from ..links.spreading import spread, spread_all
from ..tensors.contents import contents, digests, raw
from ..tensors.sharding import local_shard
from .account import Record
from .agreement import StepChecksum, texts

logger = logging.getLogger(__name__)

_AVERAGED, _LOWEST, _ADOPTED, _FIXED = "averaged", "the lowest region's", "synchronised", "fixed"
_OWN = "each region's own"
Told = Mapping[int, Mapping[str, list[str]]]
"""For each region what it has said of its tensors, by name: fate, form and checksum."""
_EXTRA_STATE = "_extra_state"
"""Last part of the name of what a module saves beside its tensors (`torch.nn.Module.get_extra_state`)."""


@torch.no_grad()
def check_same_end(link: Link, model: nn.Module, adopted: Collection[str], step: int, record: Record) -> int:
    """Compare the model of all regions at the end of a run. A collective call.

    This includes frozen parameters, saved buffers and other saved tensors. Buffers may differ, because each region has seen
    other data (running statistics of batch normalisation): floating-point ones take the mean over the regions, others the
    lowest region's values. Synchronised parameters differ if processors round differently: they take the lowest region's
    values. Two things stay each region's own: buffers of different shapes (tables that grow with the longest sequence), and
    what modules save beside their tensors (`get_extra_state`, for example the scales of FP8).

    Args:
        link: reaches the other regions. Each lane compares its own shards.
        model: unwrapped.
        adopted: names of the synchronised parameters.
        step: inner step.
        record: keeps events.

    Returns:
        A checksum of the model.

    Raises:
        HandshakeError: something else differs; the message names it.
    """
    held = contents(model)
    buffers = dict(model.named_buffers())
    lines, digest = _lines(held, buffers, adopted)
    wrong = ""
    if len({other.digest for other in link.gather(StepChecksum(step, digest), "the end of the run")}) > 1:
        found = texts(link, "\n".join(lines), "the checksums of the model")
        told = {region: _by_name(text) for region, text in found.items()}
        differing = _differing(told)
        wrong = _in_words(differing, told)
        for fate, names in _fates(differing, told).items():
            for name in names if fate != _OWN else ():
                _make_equal(link, local_shard(held[name]), fate == _AVERAGED, f"{name} at the end")
            if names:
                _tell(fate, names, min(told), step, record)
        _, digest = _lines(held, buffers, adopted)
    elsewhere = link.total(torch.tensor([float(bool(wrong))], dtype=torch.float64)).item()
    if wrong or elsewhere:
        raise HandshakeError(
            (
                wrong
                or "the message of another rank of this region says what differs between regions at the end of the run"
            )
            + ". Only one region has changed it during the run, or it was trained without being synchronised. The model of no "
            "region is the result of this run: go back to a checkpoint, and change in all regions alike what is not trained."
        )
    return digest


def _lines(
    held: Mapping[str, Tensor], buffers: Mapping[str, Tensor], adopted: Collection[str]
) -> tuple[list[str], int]:
    """A line for each tensor, and the checksum of all lines."""
    lines = []
    for name, form in digests(held).items():
        fate = _ADOPTED if name in adopted else _FIXED
        if name in buffers:
            fate = _AVERAGED if held[name].is_floating_point() else _LOWEST
        elif name.rpartition(".")[2] == _EXTRA_STATE:
            fate = _OWN
        lines.append("\t".join((name, fate, *form.rsplit(" ", 1))))
    return lines, zlib.crc32("\n".join(lines).encode())


def _by_name(text: str) -> dict[str, list[str]]:
    """Fate, form and checksum of each tensor."""
    return {name: rest for name, *rest in (line.split("\t") for line in text.split("\n"))}


def _differing(told: Told) -> dict[str, list[int]]:
    """For each tensor that differs from the lowest region's, the regions where it does."""
    names, first = dict.fromkeys(name for each in told.values() for name in each), told[min(told)]
    found = {name: [r for r, each in told.items() if each.get(name) != first.get(name)] for name in names}
    return {name: regions for name, regions in found.items() if regions}


def _fates(differing: Collection[str], told: Told) -> dict[str, list[str]]:
    """What is done with the tensors that may differ."""
    found: dict[str, list[str]] = {_AVERAGED: [], _LOWEST: [], _ADOPTED: [], _OWN: []}
    for name in differing:
        kinds = {tuple(each[name][:2]) if name in each else ("", "") for each in told.values()}
        fates = {fate for fate, _ in kinds}
        if len(kinds) == 1 or fates <= {_AVERAGED, _LOWEST, _OWN}:
            fate = fates.pop() if len(kinds) == 1 else _OWN
            if fate in found:
                found[fate].append(name)
    return found


def _in_words(differing: Mapping[str, list[int]], told: Told) -> str:
    """What differs and must not."""
    mended = {name for names in _fates(differing, told).values() for name in names}
    wrong = [name for name in differing if name not in mended]
    if not wrong:
        return ""
    shown = [
        f"{name} (region {', '.join(map(str, differing[name]))} and region {min(told)})" for name in wrong[:3]
    ]
    more = f" and {len(wrong) - 3} more" if wrong[3:] else ""
    return f"regions differ at the end of the run in {', '.join(shown)}{more}"


def _make_equal(link: Link, tensor: Tensor, is_mean: bool, what: str) -> None:
    """Give a tensor the mean over the regions, or the lowest region's values; the same bits everywhere."""
    own = raw(tensor.cpu()).numpy().tobytes()
    told = list(spread_all(link, own, what).values()) if is_mean else [spread(link, None, own, what)]
    values = [torch.frombuffer(bytearray(each), dtype=tensor.dtype).view(tensor.shape) for each in told]
    if is_mean:
        tensor.copy_(torch.stack([each.double() for each in values]).mean(dim=0))
    else:
        tensor.copy_(values[0])


def _tell(fate: str, names: Sequence[str], lowest: int, step: int, record: Record) -> None:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
    said = {
        _AVERAGED: f"buffers differed between regions at the end and are averaged: {shown}.",
        _LOWEST: f"buffers differed between regions at the end and are region {lowest}'s now: {shown}.",
        _ADOPTED: f"the final global weights differed between regions and are region {lowest}'s now: {shown}. Do the regions' "
        "processors round differently? Lower digest_interval.",
        _OWN: "buffers of different shapes, or what modules save beside their tensors, differed between regions at the end and "
        f"stay each region's own: {shown}.",
    }[fate]
    logger.warning(said)
    record("note", step=step, message=said)
