"""Runs whose fragments hold pieces of parameters: stopped and resumed, and resumed from what older versions wrote."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.errors import CheckpointError, InputError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.resolve import from_config
from hf_cocodc.training.simulation import simulate
from tests.toys import llama, params_of, train_loop

STEPS, SAVED_AT = 11, 6
COCODC: dict[str, Any] = {"sync_interval": 4, "num_fragments": 4, "overlap_steps": 2, "sends_per_interval": 4}


class Run:
    """A region of a plain loop, with a model whose embedding and head are split by default."""

    def __init__(self, link: Link, folder: Path | None = None, **settings: Any) -> None:
        self.accelerator = Accelerator(cpu=True)
        model = llama(link.region)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        config = OuterConfig(method="cocodc", **{**COCODC, **settings})
        self.outer = OuterOptimizer(
            self.accelerator, self.model, self.optimizer, config, max_steps=STEPS, link=link
        )
        if folder is not None:
            self.accelerator.load_state(str(checkpoint_of(folder, link)))

    def train(self, until: int) -> None:
        train_loop(self.accelerator, self.model, self.optimizer, self.outer, until)

    def end(self) -> Tensor:
        self.train(STEPS)
        self.outer.finish()
        return params_of(self.model)

    @property
    def num_pieces(self) -> int:
        return sum(len(state.fragment.rows) for state in self.outer.synchronizer.fragments)


def checkpoint_of(folder: Path, link: Link) -> Path:
    return folder / f"region-{link.region}" / f"checkpoint-{SAVED_AT}"


def saved(folder: Path, **settings: Any) -> list[Tensor]:
    """Runs that were saved in mid-round and then trained on to their end."""

    def body(region: int, link: Link) -> Tensor:
        run = Run(link, **settings)
        run.train(SAVED_AT)
        assert any(state.in_flight for state in run.outer.synchronizer.fragments)
        run.accelerator.save_state(str(checkpoint_of(folder, link)))
        return run.end()

    return simulate(body, regions=2)


def test_a_run_with_pieces_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Pieces in flight included; and the pieces change numbers, so that the test means something."""
    expected = saved(tmp_path / "split")

    def again(region: int, link: Link) -> Tensor:
        run = Run(link, tmp_path / "split")
        assert run.num_pieces == 8
        return run.end()

    for end, whole in zip(simulate(again, regions=2), expected, strict=True):
        assert torch.equal(end, whole)
    assert torch.equal(expected[0], expected[1])
    assert not torch.equal(expected[0], saved(tmp_path / "undivided", split_rows=False)[0])


@pytest.mark.parametrize("given", [True, False])
def test_the_setting_cannot_change_at_a_resume(given: bool, tmp_path: Path) -> None:
    """The error names it."""
    saved(tmp_path, split_rows=not given)
    with pytest.raises(CheckpointError, match=r"rows 0 to 15.*outer\.split_rows that wrote it"):
        simulate(lambda region, link: Run(link, tmp_path, split_rows=given), regions=2)


def test_the_setting_needs_several_fragments() -> None:
    """Where it would have no effect it is refused, with what to set."""
    with pytest.raises(
        InputError, match=r"split_rows=True has an effect only with outer\.fragment_pattern=strided or sequen"
    ):
        from_config(OuterConfig(split_rows=True))


@pytest.mark.parametrize(("given", "said"), [({}, True), ({"split_rows": True}, False)])
def test_the_log_names_uneven_fragments(given: dict, said: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Where Streaming keeps a large embedding whole, a user hears how to even the fragments."""
    caplog.set_level(logging.INFO)
    model = llama(layers=2, tie=True)
    model.resize_token_embeddings(512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = OuterConfig(method="streaming", num_fragments=2, **given)
    OuterOptimizer(Accelerator(cpu=True), model, optimizer, config, link=loopback())
    told = "the largest of 2 fragments is 1.61 times as large as the mean"
    assert (told in caplog.text) is said


@pytest.mark.parametrize(
    ("regions", "codec", "said"), [(3, "topk", True), (2, "topk", False), (5, "int4", False)]
)
def test_the_log_names_a_codec_whose_payloads_go_to_all_others(
    regions: int, codec: str, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With the others, each region averages a part: it sends less than two payloads, however many regions there are."""
    caplog.set_level(logging.INFO)

    def begin(region: int, link: Link) -> None:
        model = llama(layers=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        OuterOptimizer(
            Accelerator(cpu=True), model, optimizer, OuterConfig(codec=codec, error_feedback=True), link=link
        )

    simulate(begin, regions=regions)
    told = f"each region sends its whole payload to each of the {regions - 1} others: a mean of the codec {codec}"
    assert (told in caplog.text) is said
