"""The micro-batches of a region, where its samples follow from the inner step and from what the regions have dealt."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from ..errors import InputError
from ..link.process_state import random_state_kept
from ..parts.deal import Portion
from ..parts.tensors.memory import HOST

Now = Callable[[], tuple[Portion, int]]
"""A region's portion, and the inner step that comes next."""

ORDER_SEED = 0
"""Of the orders in which a plain loop passes over shuffled data; equal in all regions."""


class DealtSamples(Sampler[int]):
    """The samples that this region trains on, step after step without an end, as indexes of the data.

    Args:
        size: of the data.
        num_parts: its length is that of one of so many parts of the data: loops count epochs by it.
        seed: of the order of each pass; None for the order of the data.
        is_own: whether the data are this region's alone (`regions.shards: fixed`); else samples are dealt to all regions.
    """

    def __init__(self, size: int, num_parts: int, seed: int | None, now: Now, is_own: bool = False) -> None:
        self._size, self._seed, self._now, self._is_own = size, seed, now, is_own
        self._length = max(size // num_parts, 1)
        self._order: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._length

    @property
    def shuffles(self) -> bool:
        """Whether each pass has an order of its own."""
        return self._seed is not None

    def __iter__(self) -> Iterator[int]:
        portion, step = self._now()
        while True:
            first = portion.begins_own(step) if self._is_own else portion.begins(step)
            if first < 0:  # it has come in since the last landing; the others read all that is dealt
                draws = torch.Generator(HOST).manual_seed(step)
                yield from torch.randint(
                    self._size, (portion.samples,), generator=draws, device=HOST
                ).tolist()
            else:
                yield from (self._index(number) for number in range(first, first + portion.samples))
            step += 1

    def _index(self, number: int) -> int:
        passes, place = divmod(number, self._size)
        if self._seed is None:
            return place
        if self._order[0] != passes:
            draws = torch.Generator(HOST).manual_seed(self._seed + passes)
            self._order = passes, torch.randperm(self._size, generator=draws, device=HOST)
        return int(self._order[1][place])


class DealtBatches(Iterator[Any]):
    """The batches of a dataloader whose sampler is `DealtSamples`.

    A loader reads ahead. What it has read is of no use once something else is dealt, or the loop is at another inner step: it
    then begins anew, and draws no random numbers of the training's for it.
    """

    def __init__(self, loader: Any, now: Now) -> None:
        self._loader, self._now = loader, now
        self._portion: Portion | None = None
        self._batches: Iterator[Any] | None = None
        self._step = 0
        self.given = 0
        """Batches of the present inner step."""

    def __next__(self) -> Any:
        portion, step = self._now()
        is_next = step in (self._step, self._step + 1)
        self.given = self.given + 1 if step == self._step else 1
        self._step = step
        if is_next and portion == self._portion and self._batches is not None:
            return next(self._batches)
        self.close()
        self._portion, self._batches = portion, iter(self._loader)
        with random_state_kept():
            return next(self._batches)

    def close(self) -> None:
        """Read no more. Accelerate takes a loader for the one in use until it ends, and this one does not."""
        if self._batches is not None and hasattr(self._loader, "end"):
            self._loader.end()
        self._batches = None


def is_shuffled(loader: Any) -> bool:
    """Whether a dataloader that Accelerate has prepared shuffles its data. Raises InputError if its samples have no numbers, or
    are chosen in another way.
    """
    inner: Any = getattr(loader, "batch_sampler", None)
    inner = getattr(inner, "batch_sampler", inner)  # behind what gives each rank its batches
    sampler: Any = getattr(inner, "sampler", None)
    dataset: Any = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        why = "its data are a stream, whose samples have no numbers. Use a map-style dataset"
    elif type(loader) is not DataLoaderShard or loader.use_stateful_dataloader:
        why = "it keeps a place of its own. Prepare it with Accelerate, without dispatch_batches and use_stateful_dataloader"
    elif type(inner) is not BatchSampler:
        why = f"its batches come from {type(inner).__name__}. Give it a batch_size instead"
    elif type(sampler) is SequentialSampler:
        return False
    elif isinstance(sampler, DealtSamples):
        return sampler.shuffles
    elif isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == len(dataset):
        return True
    else:
        why = f"its samples come from {type(sampler).__name__}. Use shuffle=True or False instead"
    raise InputError(
        f"outer.batches cannot deal samples to this dataloader: {why}, or iterate over it yourself."
    )
