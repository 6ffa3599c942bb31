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


def test_payloads_of_any_length_use_the_same_memory() -> None:
    """A codec's payload may get shorter and longer for ever (a rank that follows the spectrum): no more is kept than was lent at
    once."""
    buffers, most = Buffers(lengths_vary=True), 5000
    for length in [*range(most, 4000, -7), *range(1, most, 13)]:
        lent = [buffers.take(each, torch.uint8) for each in (length, length, max(length // 2, 1))]
        assert [len(each) for each in lent] == [length, length, max(length // 2, 1)]
        for value, each in enumerate(lent):
            each.fill_(value)
        assert [int(each.unique()) for each in lent] == [0, 1, 2]
        buffers.give(*lent)
        assert buffers.spare_bytes <= 3 * most
    again = buffers.take(17, torch.uint8)
    buffers.give(again)
    kept = buffers.take(most - 1, torch.uint8)
    assert buffers.spare_bytes + len(kept) <= 3 * most


def test_flat_tensors_have_memory_of_their_length() -> None:
    """A small fragment never holds the memory of a large one."""
    buffers = Buffers()
    large = buffers.take(1000)
    buffers.give(large)
    small = buffers.take(10)
    assert small.untyped_storage().nbytes() == 40 and buffers.spare_bytes == 4000
