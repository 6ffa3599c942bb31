"""What tests of several studies look at."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.studies.inner import Inner


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Tensor]]:
    """All that is trained on in this test, by inner step."""
    noted: dict[int, list[Tensor]] = {}
    train = Inner.train

    def train_noted(inner: Inner, batch: Tensor) -> float:
        noted.setdefault(inner.step, []).append(batch)
        return train(inner, batch)

    monkeypatch.setattr(Inner, "train", train_noted)
    return noted
