"""The text of a study: blocks of tokens, drawn so that every arm of a study trains on the same ones."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_cocodc.errors import InputError, shown
from hf_cocodc.settings.recipe import Recipe

END = 256
"""The token between two documents; the tokens below it are bytes."""
VOCABULARY = 257


@functools.cache
def english() -> Tensor:
    """Other text than Python's source: its manual, as every Python brings it for `help()`; 0.46 MB of tokens, like `tokens`."""
    from pydoc_data.topics import topics

    return torch.from_numpy(_tokens(topics[name] for name in sorted(topics)))


@functools.cache
def tokens(builtin: str | None, path: str | None, name: str | None, split: str, column: str) -> Tensor:
    """The tokens (int16, one-dimensional) of all documents of a data set in a row, an `END` after each."""
    from hf_cocodc.training.data import load_text

    return torch.from_numpy(_tokens(load_text(builtin, path, name, split, column, streaming=False)[column]))


def _tokens(documents: Iterable[str]) -> np.ndarray:
    parts: list[np.ndarray] = []
    for each in documents:
        parts += [np.frombuffer(each.encode(), np.uint8).astype(np.int16), np.array([END], np.int16)]
    return np.concatenate(parts)


def digest_of(recipe: Recipe) -> str:
    """A checksum of the text that a recipe trains on and is evaluated on."""
    crc = 0
    for split in (recipe.data.split, recipe.data.eval_split):
        crc = zlib.crc32(_of(recipe, split).numpy().tobytes(), crc)
    return f"{crc:08x}"


class Tokens(NamedTuple):
    """A text in tokens.

    Attributes:
        train, held_out: int16, one-dimensional.
        vocabulary: number of different tokens that there can be.
    """

    train: Tensor
    held_out: Tensor
    vocabulary: int


def tokens_of(recipe: Recipe) -> Tokens:
    """The text that a recipe names, byte by byte."""
    return Tokens(_of(recipe, recipe.data.split), _of(recipe, recipe.data.eval_split), VOCABULARY)


def _of(recipe: Recipe, split: str) -> Tensor:
    data = recipe.data
    if recipe.tokenizer.builtin != "bytes":
        raise InputError(
            f"tokenizer.builtin={shown(recipe.tokenizer.builtin)}: a study reads text byte by byte. Use tokenizer.builtin: bytes."
        )
    return tokens(data.builtin, data.path, data.name, split, data.text_column)


class Text:
    """Batches and held-out blocks.

    The training text has as many parts as there are streams, and each of M regions draws from its own of them, by default from
    one. A batch depends on the seed, the stream and the inner step, and on nothing else: data-parallel training, whose batch is
    those of all regions together, sees the same tokens, and so do other numbers of regions with as many streams.

    Args:
        recipe: says how long a block is, and how many are held out.
        tokens: the text.
        regions: M.
        seed: of the run.
        batch_size: blocks in the batch of a region.
        streams: a multiple of M; by default M.

    Raises:
        InputError: the regions cannot share the streams evenly, or the streams of a region its batch.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokens: Tokens,
        regions: int,
        seed: int,
        batch_size: int,
        streams: int | None = None,
    ) -> None:
        self._train, self._held_out, _ = tokens
        self._block, self._eval_blocks = recipe.data.block_size, recipe.data.eval_blocks or 64
        self._streams, self._seed = streams or regions, seed
        self._of_region, uneven = divmod(self._streams, regions)
        if uneven or batch_size % self._of_region:
            raise InputError(
                f"study.streams={self._streams}: it must be a multiple of the {regions} regions, and the {batch_size} blocks of "
                "a region's batch must be a multiple of its streams."
            )
        self._batch_size = batch_size // self._of_region

    def batch(self, region: int, step: int) -> Tensor:
        """The batch (batch_size, block_size) of a region in an inner step, counted from 1."""
        first = region * self._of_region
        return torch.cat([self._drawn(stream, step) for stream in range(first, first + self._of_region)])

    def _drawn(self, stream: int, step: int) -> Tensor:
        length = len(self._train) // self._streams
        first = stream * length
        generator = torch.Generator().manual_seed((self._seed * 1009 + stream) * 1_000_003 + step)
        starts = torch.randint(first, first + length - self._block, (self._batch_size,), generator=generator)
        return torch.stack([self._train[start : start + self._block] for start in starts.tolist()]).long()

    def held_out(self) -> Tensor:
        """The held-out blocks (eval_blocks, block_size): the same ones for all seeds."""
        starts = torch.linspace(0, len(self._held_out) - self._block, self._eval_blocks).long().tolist()
        return torch.stack([self._held_out[start : start + self._block] for start in starts]).long()

    def digest(self, region: int, steps: Sequence[int]) -> str:
        """A checksum of a region's batches in some inner steps."""
        crc = 0
        for step in steps:
            crc = zlib.crc32(self.batch(region, step).numpy().tobytes(), crc)
        return f"{crc:08x}"
