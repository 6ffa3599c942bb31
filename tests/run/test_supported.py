"""Regions whose launch we do not support are refused by the part that cannot work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
