"""Process groups that carry what a CUDA device holds: run with `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import pytest
import torch

from hf_cocodc.link.process_group import Circumstances, choose, gpu_of
from hf_cocodc.parts.codecs.base import Coder
from hf_cocodc.parts.codecs.block import Float4, Integers
from hf_cocodc.parts.codecs.cast import Cast
from tests.link.test_process_group import Runs, kinds

CODERS = [Cast(torch.float32), Integers(8, 256), Float4(32)]
GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="no CUDA device here")]
two_gpus = pytest.mark.skipif(
    GPUS < 2, reason=f"NCCL needs a GPU for each of two regions, and there are {GPUS}"
)


@pytest.mark.parametrize("coder", CODERS)
def test_two_regions_on_one_gpu_send_over_gloo(coder: Coder) -> None:
    """The payload goes through pinned memory of the host: the bits of TCP."""
    assert_as_over_tcp("gloo", [0, 0], coder)


@two_gpus
@pytest.mark.parametrize("coder", CODERS)
def test_regions_with_a_gpu_each_send_over_nccl(coder: Coder) -> None:
    """The payload never leaves the GPUs: the bits of TCP."""
    assert_as_over_tcp("nccl", [0, 1], coder)


@two_gpus
def test_three_transfers_after_a_lost_region() -> None:
    """An NCCL group of which one region is lost is aborted, and payloads go on among the others."""
    devices = [torch.device("cuda", index % GPUS) for index in range(3)]
    asked = "nccl" if GPUS >= 3 else "gloo"
    with Runs(3, asked, devices) as run:
        run.mean()
        run.regions.links[2].part_with()
        for step in (1, 2, 3):
            first, second = run.mean(0, 1, step=step)
            assert torch.equal(first.result.mean.cpu(), second.result.mean.cpu())


def test_one_gpu_has_one_number() -> None:
    cuda = torch.device("cuda", 0)
    assert gpu_of(cuda) == gpu_of(cuda) > 0
    shared = Circumstances(0, 0.0001, 7, gpu_of(cuda))
    assert choose("auto", (0, 1), [shared, shared]).kind == "gloo"


def assert_as_over_tcp(link: str, gpus: list[int], coder: Coder) -> None:
    devices = [torch.device("cuda", index) for index in gpus]
    found = []
    for asked in (link, "tcp"):
        with Runs(2, asked, devices) as run:
            found.append([run.mean(coder=coder, step=step) for step in range(3)])
            assert kinds(run) == {asked}
    for over_group, over_tcp in zip(*found, strict=True):
        for one, other in zip(over_group, over_tcp, strict=True):
            assert one.result.mean.is_cuda
            assert torch.equal(one.result.mean, other.result.mean)
            assert one.bytes_sent == other.bytes_sent
