"""Work that is divided among threads: every piece once, in order, and with torch's own threads left as they were."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_cocodc.parts.tensors import pieces as threads
from hf_cocodc.parts.tensors.pieces import HostThreads, divide


@pytest.mark.parametrize("count", [0, 1, 7, 64])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_piece_is_worked_on_once(count: int, num_threads: int) -> None:
    """Parts are in order, and a few pieces are not worth a thread."""
    seen: list[tuple[str, int]] = []
    before = torch.get_num_threads()

    def work(part: range) -> list[int]:
        seen.append((threading.current_thread().name, torch.get_num_threads()))
        return list(part)

    assert [index for part in divide(work, count, num_threads) for index in part] == list(range(count))
    assert len(seen) == max(min(num_threads, count // threads._WORTH_A_THREAD), 1)
    assert {own for _, own in seen} == {1}, "torch divides no operation a second time"
    assert torch.get_num_threads() == before


def test_an_error_in_any_thread_reaches_the_caller() -> None:
    """Nothing is lost because another thread met it."""

    def work(part: range) -> None:
        if 31 in part:
            raise ValueError("piece 31")

    with pytest.raises(ValueError, match="piece 31"):
        divide(work, 32, 4)


def test_training_on_the_host_keeps_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link's thread takes one while training goes on, and training's while training waits for it. Beside a GPU both take
    half of the rank's share of the cores."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "cores", lambda: 48)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("HF_COCODC_REGIONS_HERE", "2")
    try:
        torch.set_num_threads(3)
        host, beside_a_gpu = HostThreads(trains_on_host=True), HostThreads(trains_on_host=False)
    finally:
        torch.set_num_threads(before)
    assert (host.in_training(), host.in_background(awaited=True), host.in_background(awaited=False)) == (
        3,
        3,
        1,
    )
    assert beside_a_gpu.in_training() == beside_a_gpu.in_background(awaited=False) == 6
