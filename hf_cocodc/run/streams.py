"""A region's part of a stream: equal in every pass, whatever the stream draws and whichever region reads it."""

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import datasets
import numpy as np
import torch
from datasets.iterable_dataset import (
    BufferShuffledExamplesIterable,
    SkipExamplesIterable,
    StepExamplesIterable,
    TakeExamplesIterable,
)
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ..errors import InputError
from .samples import Draws

_DRAWN = 1 << 64
"""A seed of a generator that is larger was drawn by NumPy (128 bits), not given."""
_PARTS = 1000
"""A longer list in a stream holds samples, not its parts."""
MANY_FILES = 16
"""So many files a region are dealt as they are: one file more or less is little, and else each region would read all of them."""


class RegionStride(IterableDataset[Any]):
    """Samples region, region + num_regions, ... of a torch iterable dataset, or of each DataLoader worker's part.

    Regions train with random numbers of their own. A stream that shuffles with torch's global generator, or NumPy's, or Python's,
    would have another order in each region: it draws apart from training, equally in all regions, anew in each pass.
    """

    # No __len__: torch would compare it with a count that depends on how the dataset splits over DataLoader workers.
    def __init__(self, dataset: IterableDataset[Any], region: int, num_regions: int) -> None:
        self._dataset, self._region, self._num_regions = dataset, region, num_regions
        self._epoch = 0
        self.generator = getattr(dataset, "generator", None)  # Accelerate makes it equal in all ranks
        self._seed = self.generator.initial_seed() if isinstance(self.generator, torch.Generator) else 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be that of an epoch, as Accelerate does."""
        self._epoch = epoch
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        elif isinstance(self.generator, torch.Generator):
            self.generator.manual_seed(self._seed + epoch)  # epoch 0, too: it may have been read

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        draws = Draws((self._epoch << 16) + (worker.id if worker else 0))
        self._epoch += 1
        with draws:
            samples = iter(self._dataset)
        while True:
            with draws:
                dealt = list(islice(samples, self._num_regions))
            if len(dealt) > self._region:
                yield dealt[self._region]
            if len(dealt) < self._num_regions:
                return


class FixedStride(StepExamplesIterable):
    """Every `step`-th sample of what a datasets.IterableDataset reads, from `offset` on, in an order that no epoch changes.

    datasets shuffles files, and buffers, anew in each epoch, and would then take every `step`-th sample of another order.
    """

    @property
    def ex_iterable(self) -> Any:
        return self._inner

    @ex_iterable.setter
    def ex_iterable(self, inner: Any) -> None:
        self.__dict__.setdefault("_inner", inner)  # datasets puts one with another order there in each epoch

    def shuffle_data_sources(self, generator: Any) -> "FixedStride":
        return self

    @property
    def num_shards(self) -> int:
        """One: what a region reads must not depend on its number of DataLoader workers, each with files of its own."""
        return 1

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> "FixedStride":
        return self


def part_of(dataset: Any, region: int, num_regions: int) -> Any:
    """A region's part of a datasets.IterableDataset: whole files if they can be dealt about evenly, else every num_regions-th
    sample. The files, or the order, are chosen here, before an epoch shuffles them.

    After `skip` or `take`, too: datasets would let each region skip its share of the count in files of its own, and so train on
    samples that a held-out set has.
    """
    is_even = dataset.num_shards % num_regions == 0 or dataset.num_shards >= MANY_FILES * num_regions
    counted = (SkipExamplesIterable, TakeExamplesIterable)
    if is_even and not any(isinstance(each, counted) for each in _parts_of(dataset)):
        return dataset.shard(num_regions, region, contiguous=False)
    part = dataset.shard(1, 0)
    part._ex_iterable = FixedStride(part._ex_iterable, step=num_regions, offset=region)
    part._prepare_ex_iterable_for_iteration()  # the place where it begins
    return part


def generators_of(stream: Any) -> list[Any]:
    """The states of all random generators that a stream holds. Raises InputError if NumPy drew the seed of one."""
    states: list[Any] = []
    for each in _parts_of(stream):
        if isinstance(each, np.random.Generator):
            seed = getattr(getattr(each.bit_generator, "seed_seq", None), "entropy", None)
            if isinstance(seed, int) and seed >= _DRAWN:
                raise InputError(
                    "this stream is shuffled without a seed: every region would divide another order, and samples would be "
                    "trained twice or never. Give it the same seed in all regions: dataset.shuffle(seed=42)."
                )
            states.append(each.bit_generator.state)
        elif isinstance(each, torch.Generator):
            states.append(each.get_state())
        elif isinstance(each, random.Random):
            states.append(each.getstate())
    return states


def is_exact(stream: Any) -> bool:
    """Whether reading goes on from a state of a stream as it would have: datasets keeps no samples of a shuffle buffer."""
    return isinstance(stream, datasets.IterableDataset) and not any(
        isinstance(each, BufferShuffledExamplesIterable) for each in _parts_of(stream)
    )


def _parts_of(stream: Any) -> Iterator[Any]:
    """A stream and everything that it is made of."""
    seen: set[int] = set()
    found = [stream]
    while found:
        each = found.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, (list, tuple)) and len(each) <= _PARTS:
            found += reversed(each)
        elif isinstance(each, Dataset) or type(each).__module__.startswith(("datasets.", __package__)):
            found += reversed(list(getattr(each, "__dict__", {}).values()))
