"""What all regions tell each other at one moment: records and bytes, by region."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from ..errors import RegionLostError
from ..parts.tensors.memory import HOST
from .base import Link
from .records import Record

T = TypeVar("T")
Told = TypeVar("Told")

MOST = 1 << 26
"""Bytes that a region may spread if its caller sets no limit."""


class _Length(NamedTuple):
    """Number of bytes that a region is about to send."""

    num_bytes: int


def gather(link: Link, own: Record, what: str) -> dict[int, Record]:
    """The record of every region, by region, in ascending order. A collective call; messages call it `what`."""
    records = link.gather(own, what)
    return dict(zip(link.parties, records, strict=True))


def spread(link: Link, source: int | None, own: bytes, what: str, most: int = MOST) -> bytes:
    """The bytes of region `source`, or of the first member, in every region. A collective call; messages call it `what`.

    Raises RegionLostError, before memory is taken, if the region wants to send more than `most` bytes.
    """

    def told() -> int:
        length = torch.tensor([len(own)], dtype=torch.int64, device=HOST)
        link.broadcast(length.view(torch.float32), f"the length of {what}", source)
        return int(length)

    return _among_the_same(link, told, lambda length: _spread(link, source, own, length, what, most))


def spread_all(link: Link, own: bytes, what: str, most: int = MOST) -> dict[int, bytes]:
    """The bytes of every region, by region. A collective call; messages call it `what`. Raises as `spread`."""

    def told() -> dict[int, _Length]:
        return gather(link, _Length(len(own)), f"the length of {what}")

    def spread_each(lengths: dict[int, _Length]) -> dict[int, bytes]:
        return {
            region: _spread(link, region, own, length.num_bytes, f"{what} of region {region}", most)
            for region, length in lengths.items()
        }

    return _among_the_same(link, told, spread_each)


def _among_the_same(link: Link, first: Callable[[], Told], rest: Callable[[Told], T]) -> T:
    """What `rest` makes of what `first` has told; both again, while members are lost between their calls.

    All regions find the same, whatever link they have, and so make equally many calls.
    """
    while True:
        told = first()
        parties = link.parties
        value = rest(told)
        if link.parties == parties:
            return value


def _spread(link: Link, source: int | None, own: bytes, size: int, what: str, most: int) -> bytes:
    if not 0 <= size <= most:
        region = link.members[0] if source is None else source
        raise RegionLostError(
            region,
            f"region {region} wants to send {what} with {size} bytes; no region of this version has more than {most}.",
        )
    padded = bytearray(own if len(own) == size else size)
    padded += bytes(-size % 4)
    if not padded:
        return b""
    link.broadcast(torch.frombuffer(padded, dtype=torch.float32), what, source)
    return bytes(padded[:size])
