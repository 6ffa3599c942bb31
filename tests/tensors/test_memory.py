"""Memory of the host that a GPU copies from and to."""

from __future__ import annotations

import mmap

import pytest
import torch

from hf_cocodc.parts.tensors.memory import Buffers, Home, own_pages


@pytest.mark.parametrize(("numel", "dtype"), [(1, torch.uint8), (70_001, torch.float32)])
def test_pages_of_its_own(numel: int, dtype: torch.dtype) -> None:
    """It begins at a page, and the next one at another; it lives as long as a view of it."""
    first, second = own_pages(numel, dtype), own_pages(numel, dtype)
    assert first.shape == (numel,) and first.dtype == dtype
    assert first.data_ptr() % mmap.PAGESIZE == 0 == second.data_ptr() % mmap.PAGESIZE
    view = first.fill_(3)[:1]
    del first
    assert view.item() == 3 and not second.any()


def test_what_is_kept_away_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat tensors of a loaded state come into buffers, so that landings copy them beside training."""
    taken: list[int] = []
    take = Buffers.take

    def counted(self: Buffers, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        taken.append(numel)
        return take(self, numel, dtype)

    monkeypatch.setattr(Buffers, "take", counted)
    momentum, matrix = torch.arange(5.0), torch.ones(2, 2)
    kept = Home(torch.device("meta"), rests_on_host=True).kept(
        {"momentum": momentum, "steps": 3, "more": {"q": matrix}}
    )
    assert taken == [5]
    assert torch.equal(kept["momentum"], momentum) and kept["momentum"] is not momentum
    assert torch.equal(kept["more"]["q"], matrix) and kept["steps"] == 3
