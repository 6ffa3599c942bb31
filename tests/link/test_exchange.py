"""Payloads that no codec has made: the region that sent them is lost, and nobody else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cocodc.errors import RegionLostError
from hf_cocodc.link.exchange import Exchange
from hf_cocodc.parts.codecs.base import Coder, Message
from hf_cocodc.parts.codecs.cast import Cast
from hf_cocodc.parts.codecs.topk import TopK
from hf_cocodc.parts.tensors.memory import Buffers, Home
from tests.link.memory import connected

TOPK = TopK(2, 64, Cast(torch.float32))


class Picky:
    """Bytes of small whole numbers; it decodes no other byte."""

    block = 1

    def num_bytes(self, numel: int) -> int:
        return numel

    def encode(self, values: Tensor) -> Tensor:
        return values.to(torch.uint8)

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        if (payload == 255).any():
            raise IndexError("a byte of 255")
        return payload.float()


def exchanged(
    coder: Coder, count: int, message: int, weights: list[float], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """What each region comes to, if all bytes that region 1 sends in its first (0) or second (1) message become 255."""
    wires = connected(range(count), connections=2)

    def mean(region: int) -> Tensor:
        view = wires[region].view(range(count), 1)
        send = view.send

        def damaging(other: int, payload: Tensor, tag: int, *rest: Any) -> Any:
            is_damaged = region == 1 and tag == message
            return send(other, torch.full_like(payload, 255) if is_damaged else payload, tag, *rest)

        monkeypatch.setattr(view, "send", damaging)
        values = torch.arange(128.0) % 7
        exchange = Exchange(view, Message(values, coder), Home(), Buffers(), "fragment 0 sent at step 4")
        exchange.begin()
        return exchange.end(weights).mean

    with ThreadPoolExecutor(count) as pool:
        found = [pool.submit(mean, region) for region in range(count)]
        others = [found[region].exception() for region in range(count) if region != 1]
        for region, wire in wires.items():
            if any(others) and region != 1:
                wire.close()  # region 1 may wait for them
        return [each.exception() or each.result() for each in found]


@pytest.mark.parametrize(
    ("coder", "count", "message"), [(TOPK, 2, 0), (TOPK, 3, 0), (Picky(), 3, 0), (Picky(), 3, 1)]
)
def test_a_payload_that_cannot_be_decoded_is_its_regions_fault(
    coder: Coder, count: int, message: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both messages of an exchange: of the shards, and of their means."""
    ends = exchanged(coder, count, message, [1 / count] * count, monkeypatch)
    for region in set(range(count)) - {1}:
        assert isinstance(ends[region], RegionLostError), ends[region]
        assert ends[region].region == 1
        assert str(ends[region]).startswith(
            "what region 1 sent for fragment 0 sent at step 4 is no payload of the codec ("
        )


def test_a_payload_that_does_not_count_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a region with the weight 0."""
    first, second = exchanged(TOPK, 2, 0, [1.0, 0.0], monkeypatch)
    assert torch.equal(first, second)


def test_a_fault_of_the_codec_here_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other region is named for it."""

    class Broken(Picky):
        def __init__(self) -> None:
            self.calls = 0

        def decode(self, payload: Tensor, numel: int) -> Tensor:
            self.calls += 1
            if self.calls == 1:
                raise IndexError("it decodes nothing at first")
            return payload.float()

    ends = exchanged(Broken(), 2, 5, [0.5, 0.5], monkeypatch)  # they share it: one of them meets the fault
    assert any(isinstance(each, IndexError) for each in ends)
