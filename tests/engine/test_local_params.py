"""Params of a device in flat tensors, and back: in slices, so that the device needs little memory beside them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_cocodc.engine.local_params import LocalParams
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.parts.fragments import Fragment
from hf_cocodc.parts.tensors import slices
from hf_cocodc.parts.tensors.memory import HOST, Home
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.far import FAR
from tests.toys import Blocks

SHAPES = ((37, 5), (3,), (0,), (129, 3), (1,), (64, 2))
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES)


def far_params(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    values = torch.arange(NUMEL, dtype=torch.float32).split([torch.Size(shape).numel() for shape in SHAPES])
    return [part.view(shape).to(dtype).to(FAR) for part, shape in zip(values, SHAPES, strict=True)]


def fragment() -> Fragment:
    return Fragment(0, tuple(f"p{index}" for index in range(len(SHAPES))), SHAPES, NUMEL)


@pytest.mark.parametrize("rests_on_host", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("length", [1, 7, 100, 1 << 26])
def test_params_move_in_slices(
    length: int, dtype: torch.dtype, rests_on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their length, the values arrive, on the device or at rest on the host, and never more of them at once."""
    monkeypatch.setattr(slices, "ON_DEVICE", length)
    home = Home(FAR, rests_on_host)
    params = LocalParams(far_params(dtype))
    assert max(cut.numel for cut in params.cuts) == min(length, NUMEL)
    flat = params.gather(home.take(NUMEL), home)
    assert flat.device == home.rest
    assert torch.equal(flat.cpu(), torch.arange(NUMEL, dtype=torch.float32).to(dtype).float())
    params.show(flat + 1, home)
    again = params.gather(home.take(NUMEL), home)
    assert torch.equal(again.cpu(), (flat.cpu() + 1).to(dtype).float())


def test_params_that_cannot_be_cut_move_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided ones have no stretches; the numbers are the same."""
    monkeypatch.setattr(slices, "ON_DEVICE", 7)
    strided = [torch.stack([param, param], dim=-1)[..., 0] for param in far_params()]
    assert not all(param.is_contiguous() for param in strided)
    params, home = LocalParams(strided), Home(FAR)
    assert len(params.cuts) == 1
    flat = params.gather(home.take(NUMEL), home)
    assert torch.equal(flat.cpu(), torch.arange(NUMEL, dtype=torch.float32))
    params.show(flat * 2, home)
    assert torch.equal(params.gather(home.take(NUMEL), home).cpu(), flat.cpu() * 2)


@pytest.mark.parametrize("device", [HOST, FAR])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_pieces_of_params_are_read_and_written_in_place(
    device: torch.device, dtype: torch.dtype, is_transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fragment that holds some rows of a parameter changes these rows and no others, on every device."""
    table = torch.arange(60.0).view(6, 10).T if is_transposed else torch.arange(60.0).view(10, 6)
    shards = {"table": table.to(dtype).to(device), "bias": torch.full((3,), 70.0, dtype=dtype).to(device)}
    before = shards["table"].clone()
    piece = Fragment(1, ("table", "bias"), ((4, 6), (3,)), 27, {0: (3, 7)})
    views = piece.views_of(shards)
    monkeypatch.setattr(slices, "ON_HOST", 5)
    monkeypatch.setattr(slices, "ON_DEVICE", 5)
    params, home = LocalParams(views), Home(device)
    flat = params.gather(home.take(27), home)
    assert flat.cpu().tolist() == [*before[3:7].cpu().float().reshape(-1).tolist(), 70, 70, 70]
    params.show(-flat, home)
    found = shards["table"].cpu().float()
    assert torch.equal(found[3:7].reshape(-1), -flat.cpu()[:24])
    assert torch.equal(found[:3], before[:3].cpu().float())
    assert torch.equal(found[7:], before[7:].cpu().float())
    assert (len(params.cuts) == 1) == is_transposed


def test_memory_on_the_device_is_told() -> None:
    """With the outer state at rest on the host, a device holds payloads, and slices while they are computed."""
    model = Blocks([torch.randn(50, 4) for _ in range(3)]).to(FAR)
    method = from_config(OuterConfig(method="streaming", num_fragments=3))
    told = Synchronizer(model, method, loopback(), home=Home(FAR, rests_on_host=True)).memory()
    assert told[FAR].kept == 0 and told[FAR].staged == 7 * 4 * 200
    assert told[HOST].kept == 3 * 2 * 4 * 200 and told[HOST].staged == 0


def test_evaluation_keeps_local_params_with_the_outer_state() -> None:
    """The copies that `global_weights` needs are on the host if the outer state is there: a device may have no room."""
    model = Blocks([torch.randn(50, 4)]).to(FAR)
    home = Home(FAR, rests_on_host=True)
    synchronizer = Synchronizer(model, from_config(OuterConfig()), loopback(), home=home)
    before = [param.detach().cpu().clone() for param in model.parameters()]
    copied: list[torch.device] = []
    original = Tensor.to

    def noted(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        if kwargs.get("copy"):
            copied.append(torch.device(args[0]))  # type: ignore[call-overload]
        return original(self, *args, **kwargs)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", noted)
        with synchronizer.global_weights():
            for param in model.parameters():
                param.detach().mul_(0)
    assert copied == [HOST]
    assert all(torch.equal(a, b.detach().cpu()) for a, b in zip(before, model.parameters(), strict=True))
