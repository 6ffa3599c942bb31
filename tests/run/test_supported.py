"""Regions whose launch we do not support are refused by the part that cannot work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.utils import DistributedType

from hf_cocodc import OuterConfig
from hf_cocodc.errors import InputError
from hf_cocodc.methods import Method, diloco, dilocox
from hf_cocodc.run.supported import refuse_unsupported

SHARDED: Any = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=True)


def low() -> Method:
    return dilocox()


def radial() -> Method:
    return diloco(mean="radial")


@pytest.mark.parametrize(
    ("method", "words"), [(low, "codec=lowrank with FSDP2"), (radial, "mean=radial.* with FSDP2")]
)
def test_parts_that_need_whole_parameters_are_refused_with_shards(method: Any, words: str) -> None:
    """Also in a method of a user's own, which has no setting of that name."""
    model = torch.nn.Linear(2, 2)
    refuse_unsupported(SHARDED, OuterConfig(), model)
    with pytest.raises(InputError, match=words):
        refuse_unsupported(SHARDED, OuterConfig(method=method), model)


def test_stages_do_not_stop_by_themselves() -> None:
    """Each stage counts its own rounds: they would stop at different steps."""
    one: Any = SimpleNamespace(distributed_type=DistributedType.NO)
    model, config = torch.nn.Linear(2, 2), OuterConfig(on_nonfinite="stop")
    refuse_unsupported(one, config, model)
    refuse_unsupported(one, OuterConfig(), model, has_stages=True)
    with pytest.raises(InputError, match="on_nonfinite=stop with pipeline stages"):
        refuse_unsupported(one, config, model, has_stages=True)


ALONE: Any = SimpleNamespace(distributed_type=DistributedType.NO)


def test_a_model_over_several_devices_is_refused() -> None:
    """Nobody has run it; on one device, with the rest offloaded, it is as any other."""
    model = torch.nn.Linear(2, 2)
    for device_map in ({"": 0}, {"a": "cuda:0", "b": "cpu", "c": "disk"}):
        model.hf_device_map = device_map  # type: ignore[assignment]
        refuse_unsupported(ALONE, OuterConfig(), model)
    model.hf_device_map = {"a": 0, "b": 1, "c": "cpu"}  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"several devices \(0, 1\).*Load the model without device_map"):
        refuse_unsupported(ALONE, OuterConfig(), model)


def test_what_is_offloaded_cannot_be_trained() -> None:
    """Training would change a copy, and throw it away."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    cpu_offload(model[0], "cpu")
    with pytest.raises(InputError, match=r"the parameter 0.weight is trained, but Accelerate keeps"):
        refuse_unsupported(ALONE, OuterConfig(), model)
    refuse_unsupported(ALONE, OuterConfig(), model.requires_grad_(False))
