"""Checks that regions are in step, start from one state and end with one model."""

import logging
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, HandshakeError, LinkError
from ..link.base import Arrival, Link
from ..link.records import Ending
from ..link.spreading import spread, spread_all
from ..parts.tensors.flat import contents, digests, local_shard, raw
from .account import Record

logger = logging.getLogger(__name__)

_AVERAGED, _LOWEST, _ADOPTED, _FIXED = "averaged", "the lowest region's", "synchronized", "fixed"
_OWN = "each region's own"
_EXTRA_STATE = "_extra_state"
"""Ends the names of what modules save beside their tensors (`torch.nn.Module.get_extra_state`)."""


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
                "inner steps."
            )
        if not trailer.weight and trailer.ending is Ending.NO:
            logger.warning(
                "region %d sat out fragment %d sent at step %d: its outer gradient was not finite, or it had trained no step.",
                *(other, fragment, sent_at),
            )


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


def texts(link: Link, own: str, what: str) -> dict[int, str]:
    """Every region's text, by region. A collective call."""
    answers = spread_all(link, own.encode(), what)
    return {region: text.decode() for region, text in answers.items()}


Told = Mapping[int, Mapping[str, list[str]]]
"""For each region its tensors by name: fate, form and checksum."""


@torch.no_grad()
def check_same_end(
    link: Link, model: nn.Module, adopted: Collection[str], step: int, record: Record
) -> tuple[int, list[str]]:
    """Compare the model of all regions at the end of a run; returns its checksum, and the names of tensors that were changed. A
    collective call, for each lane's shards.

    This includes frozen parameters, saved buffers and other saved tensors. Buffers may differ, because each region has seen
    other data (running statistics of batch normalization): floating-point ones are averaged over the regions, others take the
    lowest region's values. So do synchronized parameters, which differ if processors round differently. Two things stay each
    region's own: buffers of different shapes (tables that grow with the longest sequence), and what modules save beside their
    tensors (`get_extra_state`, for example the scales of FP8). Raises HandshakeError, which names what else differs.
    """
    held = contents(model)
    buffers = dict(model.named_buffers())
    lines, digest = _lines(held, buffers, adopted)
    changed: list[str] = []
    wrong = ""
    if len({other.digest for other in link.gather(StepChecksum(step, digest), "the end of the run")}) > 1:
        listings = texts(link, "\n".join(lines), "the checksums of the model")
        answers = {region: _by_name(text) for region, text in listings.items()}
        differing = _differing(answers)
        wrong = _in_words(differing, answers)
        for fate, names in _fates(differing, answers).items():
            for name in names if fate != _OWN else ():
                _make_equal(link, local_shard(held[name]), fate == _AVERAGED, f"{name} at the end")
                changed.append(name)
            if names:
                _tell(fate, names, min(answers), step, record)
        _, digest = _lines(held, buffers, adopted)
    elsewhere = link.total(torch.tensor([float(bool(wrong))], dtype=torch.float64)).item()
    if wrong or elsewhere:
        raise HandshakeError(
            (
                wrong
                or "the message of another rank of this region says what differs between regions at the end of the run"
            )
            + ". Only one region has changed it during the run, or it was trained without being synchronized. The model of no "
            "region is the result of this run: go back to a checkpoint, and change in all regions alike what is not trained."
        )
    return digest, changed


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


def _differing(answers: Told) -> dict[str, list[int]]:
    """For each tensor that differs from the lowest region's, the regions where it does."""
    names, first = dict.fromkeys(name for each in answers.values() for name in each), answers[min(answers)]
    differing = {
        name: [r for r, each in answers.items() if each.get(name) != first.get(name)] for name in names
    }
    return {name: regions for name, regions in differing.items() if regions}


def _fates(differing: Collection[str], answers: Told) -> dict[str, list[str]]:
    """The tensors that may differ, by what is done with them."""
    by_fate: dict[str, list[str]] = {_AVERAGED: [], _LOWEST: [], _ADOPTED: [], _OWN: []}
    for name in differing:
        kinds = {tuple(each[name][:2]) if name in each else ("", "") for each in answers.values()}
        fates = {fate for fate, _ in kinds}
        if len(kinds) == 1 or fates <= {_AVERAGED, _LOWEST, _OWN}:
            fate = fates.pop() if len(kinds) == 1 else _OWN
            if fate in by_fate:
                by_fate[fate].append(name)
    return by_fate


def _in_words(differing: Mapping[str, list[int]], answers: Told) -> str:
    """A message about what differs and must not; empty if there is nothing."""
    mended = {name for names in _fates(differing, answers).values() for name in names}
    wrong = [name for name in differing if name not in mended]
    if not wrong:
        return ""
    shown = [
        f"{name} (region {', '.join(map(str, differing[name]))} and region {min(answers)})"
        for name in wrong[:3]
    ]
    more = f" and {len(wrong) - 3} more" if wrong[3:] else ""
    return f"regions differ at the end of the run in {', '.join(shown)}{more}"


def _make_equal(link: Link, tensor: Tensor, is_mean: bool, what: str) -> None:
    """Give a tensor the mean over the regions, or the lowest region's values; the same bits everywhere."""
    own = raw(tensor.cpu()).numpy().tobytes()
    most = len(own)  # only tensors of one form in all regions are made equal, and they may be large
    answers = spread_all(link, own, what, most).values() if is_mean else [spread(link, None, own, what, most)]
    values = [torch.frombuffer(bytearray(each), dtype=tensor.dtype).view(tensor.shape) for each in answers]
    if is_mean:
        tensor.copy_(torch.stack([each.double() for each in values]).mean(dim=0))
    else:
        tensor.copy_(values[0])


def _tell(fate: str, names: Sequence[str], lowest: int, step: int, record: Record) -> None:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
    sentence = {
        _AVERAGED: f"buffers differed between regions at the end and are averaged: {shown}.",
        _LOWEST: f"buffers differed between regions at the end and are region {lowest}'s now: {shown}.",
        _ADOPTED: f"the final global weights differed between regions and are region {lowest}'s now: {shown}. Do the regions' "
        "processors round differently? Lower digest_interval.",
        _OWN: "buffers of different shapes, or what modules save beside their tensors, differed between regions at the end and "
        f"stay each region's own: {shown}.",
    }[fate]
    logger.warning(sentence)
    record("note", step=step, message=sentence)
