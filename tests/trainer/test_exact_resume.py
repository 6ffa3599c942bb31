"""Trainer resumes with the weights that were saved, however Transformers names them in its files; or it does not train at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Trainer

from hf_cocodc import simulate
from hf_cocodc.link.base import Link
from hf_cocodc.snapshot import folders
from tests.run.test_resuming import STEPS, checkpoint_of, make, params_of
from tests.trainer.test_architectures import causal_lm

BACK = 7
"""Step to resume from: in the middle of a round."""
FAMILIES = ["qwen3_moe", pytest.param("gpt_neox", marks=pytest.mark.slow)]
"""Saved with a name for each expert; and with other names."""


def trained(folder: Path, family: str, num_regions: int = 2) -> list[Trainer]:
    """Regions, resumed from their newest checkpoint, if there is one."""

    def body(region: int, link: Link) -> Trainer:
        trainer = make(folder, link, "diloco", model=causal_lm(family), save_steps=BACK)
        trainer.train(resume_from_checkpoint=True)
        return trainer

    return simulate(body, regions=num_regions)


def weights_of(trainers: list[Trainer]) -> Tensor:
    return torch.stack([params_of(trainer.model) for trainer in trainers])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_run_ends_with_the_bits_of_one_never_stopped(family: str, tmp_path: Path) -> None:
    whole = weights_of(trained(tmp_path, family))
    for region in range(2):
        shutil.rmtree(checkpoint_of(tmp_path, region, STEPS))
        assert list(folders.checkpoints(tmp_path / f"region-{region}")) == [BACK]
    assert torch.equal(weights_of(trained(tmp_path, family)), whole)


@pytest.mark.slow
def test_a_region_that_takes_over_has_the_weights_of_the_others(tmp_path: Path) -> None:
    """Global weights and buffers: at the end all three are equal."""
    trained(tmp_path, "qwen3_moe")
    for region in range(2):
        shutil.rmtree(checkpoint_of(tmp_path, region, STEPS))
    three = weights_of(trained(tmp_path, "qwen3_moe", 3))
    assert torch.equal(three[0], three[1])
    assert torch.equal(three[0], three[2])
