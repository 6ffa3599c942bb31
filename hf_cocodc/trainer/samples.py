"""A digest of the first samples of a dataset: two regions with equal digests train on the same data."""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

SAMPLES = 8
SPREAD = 256


def first_samples(dataset: Any) -> str:
    """Digest of the first samples of a map-style dataset; empty for a stream, and for a dataset without samples.

    A stream is not read: a sample may be gone afterwards, or cost the download of a whole shuffle buffer.
    """
    return _digest(dataset, lambda length: range(min(length, SAMPLES)))


def spread_samples(dataset: Any) -> str:
    """Digest of samples from all over a map-style dataset; empty where `first_samples` is."""
    return _digest(dataset, lambda length: range(0, length, max(1, length // SPREAD)))


def _digest(dataset: Any, choose: Callable[[int], Sequence[int]]) -> str:
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return ""
    sha = hashlib.sha256()
    try:
        with _same_randomness():
            samples = [dataset[index] for index in choose(len(dataset))]
        for sample in samples:
            _feed(sha, sample)
    except Exception:
        return ""  # the digest only serves a warning: training itself finds what is wrong with the dataset
    return sha.hexdigest()[:16] if samples else ""


def _feed(sha: Any, value: Any) -> None:
    """Add a value to a digest; equal values add equal bytes, in every process."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            sha.update(f"{{{key}:".encode())
            _feed(sha, value[key])
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


@contextlib.contextmanager
def _same_randomness() -> Iterator[None]:
    """Put the state of the random generators back after the block: a sample may be augmented at random."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
