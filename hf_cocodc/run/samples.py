"""Digests of samples: whether two regions train on the same ones, and whether they divide the same order."""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

SAMPLES = 8
SPREAD, ORDERED = 256, 32


def first_samples(dataset: Any) -> str:
    """Digest of the first samples of a map-style dataset; empty for a stream, and for a dataset without samples.

    A stream is not read: a sample may be gone afterwards, or cost the download of a whole shuffle buffer.
    """
    return _digest(dataset, lambda length: range(min(length, SAMPLES)))


def spread_samples(dataset: Any) -> str:
    """Digest of samples from all over a map-style dataset; empty where `first_samples` is."""
    return _digest(dataset, lambda length: range(0, length, max(1, length // SPREAD)))


def order_of(dataset: Any) -> str:
    """The length of a map-style dataset, and a digest of samples from all over it, which tells other samples or another order
    apart; without a digest where samples have no bytes, or differ whenever they are read.
    """
    # all of them twice: a coin that changes half of them may leave one sample as it is
    held, again = (
        _digest(dataset, lambda length: range(0, length, max(1, length // ORDERED))) for _ in range(2)
    )
    return f"{len(dataset)} samples" + (f" {held}" if held and held == again else "")


def _digest(dataset: Any, choose: Callable[[int], Sequence[int]]) -> str:
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return ""
    try:
        with Draws(0):  # a sample may be augmented at random
            samples = _read(dataset, choose(len(dataset)))
        return digest(samples) if samples else ""
    except Exception:
        return ""  # training itself finds what is wrong with the dataset


def _read(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Samples; of a datasets.Dataset as they are stored: decoded images of two machines may differ in a last bit."""
    if hasattr(dataset, "with_format"):
        return dataset.with_format("arrow")[list(indices)].to_pylist()
    return [dataset[index] for index in indices]


def digest(value: Any) -> str:
    """A digest, equal in every process where the value is. Raises TypeError for values without bytes of their own."""
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()[:16]


def _feed(sha: Any, value: Any) -> None:
    """Add a value to a digest; equal values add equal bytes, in every process."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            sha.update(f"{{{key}:".encode())
            # where a machine keeps the file of an image is its own affair
            _feed(sha, Path(value[key]).name if key == "path" and value[key] else value[key])
    elif isinstance(value, (list, tuple)):
        sha.update(f"[{len(value)}".encode())
        for part in value:
            _feed(sha, part)
    elif isinstance(value, torch.Tensor):
        _feed(sha, value.detach().cpu().float().numpy() if value.is_floating_point() else value.cpu().numpy())
    elif value is None or isinstance(value, (str, bytes, bool, int, float)):
        sha.update(repr(value).encode())
    else:
        array = np.asarray(value)  # an image, for example
        if array.dtype == object:
            raise TypeError(f"{type(value).__name__} has no bytes of its own")
        sha.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())


class Draws:
    """The random numbers of torch, NumPy and Python inside `with`: a sequence of their own, which a seed decides."""

    def __init__(self, seed: int) -> None:
        self._seed, self._own, self._others = seed, None, ()  # type: tuple[int, Any, tuple]

    def __enter__(self) -> None:
        self._others = _states()
        if self._own is None:
            torch.default_generator.manual_seed(self._seed)
            random.seed(self._seed)
            np.random.seed(self._seed % (1 << 32))
        else:
            _go_to(self._own)

    def __exit__(self, *error: object) -> None:
        self._own = _states()
        _go_to(self._others)


def _states() -> tuple:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _go_to(states: tuple) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
