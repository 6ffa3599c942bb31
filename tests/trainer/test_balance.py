"""Trainers of different speed share the global batch."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig
from hf_cocodc.errors import HandshakeError, InputError
from hf_cocodc.link.lockstep import Absence, LockstepLink, VirtualLink, loopback, run_in_lockstep
from tests.toys import Rows, Stream, llama, params_of, tokens_from

STEPS, INTERVAL, ACCUMULATE, MICRO_BATCH, ROWS = 12, 3, 4, 2, 44
LINK = VirtualLink(step_time_s=1.0, latency_s=0.01, bandwidth=1e9, speeds=(3.0, 1.0))


class Noting(Trainer):
    """Notes the first tokens of each micro-batch of each inner step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[int, list[list[int]]] = {}

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        step = self.seen.setdefault(self.state.global_step, [])
        step.append(inputs["input_ids"][:, 0].tolist())
        return super().training_step(model, inputs, *args, **kwargs)

    @property
    def micro_batches(self) -> list[int]:
        return [len(self.seen[step]) for step in sorted(self.seen)]

    @property
    def rows(self) -> list[int]:
        """In the order in which they were trained."""
        return [row for step in sorted(self.seen) for batch in self.seen[step] for row in batch]


def train(
    folder: Path,
    region: int,
    link: LockstepLink,
    balance: str = "auto",
    shards: str = "fixed",
    data: Any = None,
    stream: bool = False,
    steps: int = STEPS,
    resume: bool = False,
    weights: str = "equal",
    dropout: float = 0.0,
    least: int | None = None,
    evaluates: bool = False,
    **options: Any,
) -> Noting:
    args = TrainingArguments(
        output_dir=str(folder / f"region-{region}"),
        max_steps=steps,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        include_num_input_tokens_seen="all",
        **{"save_strategy": "no", **options},
    )
    rows = Rows(ROWS, made=tokens_from)
    data = data if data is not None else Stream(rows) if stream else rows
    model = llama(layers=2, dropout=dropout)
    callback = CoCoDCCallback(
        OuterConfig(sync_interval=INTERVAL, weights=weights),
        RegionConfig(balance=balance, shards=shards, min=least),
        link=link,
    )
    held_out = {"eval_dataset": rows} if evaluates else {}
    trainer = Noting(model, args, train_dataset=data, callbacks=[callback], **held_out)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def both(folder: Path, **options: Any) -> list[Noting]:
    return run_in_lockstep(2, lambda region, link: train(folder, region, link, **options), LINK)


@pytest.mark.parametrize("stream", [False, True])
def test_a_region_alone_trains_what_a_trainer_trains(stream: bool, tmp_path: Path) -> None:
    """But for the rounding of a mean whose weight is no power of two."""
    dealt = train(tmp_path / "a", 0, loopback(), stream=stream, steps=5)
    plain = train(tmp_path / "b", 0, loopback(), balance="equal", stream=stream, steps=5)
    assert dealt.rows == plain.rows
    torch.testing.assert_close(params_of(dealt.model), params_of(plain.model), rtol=1e-5, atol=1e-7)
    logs = [[log.get("loss") for log in each.state.log_history if "loss" in log] for each in (dealt, plain)]
    assert logs[0] == pytest.approx(logs[1], rel=1e-4)
    assert dealt.state.num_input_tokens_seen == plain.state.num_input_tokens_seen
    assert dealt.state.total_flos == plain.state.total_flos


@pytest.mark.parametrize("weights", ["equal", "tokens"])
def test_trainers_take_what_they_were_dealt(weights: str, tmp_path: Path) -> None:
    """And read on through their data: each pass has every row once."""
    fast, slow = both(tmp_path, weights=weights)
    assert fast.micro_batches == [ACCUMULATE] * INTERVAL + [6] * (STEPS - INTERVAL)
    assert slow.micro_batches == [ACCUMULATE] * INTERVAL + [2] * (STEPS - INTERVAL)
    for each in (fast, slow):
        passes = [each.rows[first : first + ROWS] for first in range(0, len(each.rows), ROWS)]
        assert all(sorted(rows) == list(range(ROWS)) for rows in passes[:-1])
        assert len(set(passes[-1])) == len(passes[-1])
    assert torch.equal(params_of(fast.model), params_of(slow.model))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("save_at", [4, 9, 10])
def test_a_resumed_run_keeps_the_deal_and_its_place_in_the_data(
    save_at: int, stream: bool, tmp_path: Path
) -> None:
    """To the bit. Step 9 is the end of a round."""
    saving = {"save_strategy": "steps", "save_steps": save_at, "stream": stream, "dropout": 0.1}
    whole = both(tmp_path / "whole", **saving)
    for region in range(2):
        for folder in (tmp_path / "whole" / f"region-{region}").glob("checkpoint-*"):
            if int(folder.name.rpartition("-")[2]) > save_at:
                shutil.rmtree(folder)
    rest = both(tmp_path / "whole", resume=True, **saving)
    for region in range(2):
        assert rest[region].seen == {s: rows for s, rows in whole[region].seen.items() if s >= save_at}
        assert torch.equal(params_of(rest[region].model), params_of(whole[region].model))


def dealt(regions: list[Noting]) -> list[int]:
    """The rows of all regions, in the order in which they were dealt."""
    steps = sorted(regions[0].seen)
    return [row for step in steps for each in regions for batch in each.seen[step] for row in batch]


@pytest.mark.parametrize("balance", ["equal", "auto"])
@pytest.mark.parametrize("order", ["random", "sequential"])
def test_every_sample_is_dealt_once_in_a_pass(balance: str, order: str, tmp_path: Path) -> None:
    """Both regions have all of the data. In the order of the data, neighbors go to different regions in turn."""
    regions = both(tmp_path, balance=balance, shards="dealt", train_sampling_strategy=order)
    rows = dealt(regions)
    assert len(rows) == STEPS * 2 * ACCUMULATE * MICRO_BATCH
    passes = [rows[first : first + ROWS] for first in range(0, len(rows), ROWS)]
    assert all(sorted(each) == list(range(ROWS)) for each in passes[:-1])
    assert len(set(passes[-1])) == len(passes[-1])
    if order == "sequential":
        assert all(each == sorted(each) for each in passes)
    else:
        assert passes[0] != passes[1] and passes[0] != sorted(passes[0])
    assert regions[0].micro_batches[-1] == (6 if balance == "auto" else ACCUMULATE)


@pytest.mark.parametrize("save_at", [4, 9])
def test_a_resumed_run_deals_on(save_at: int, tmp_path: Path) -> None:
    """To the bit."""
    options = {"save_strategy": "steps", "save_steps": save_at, "shards": "dealt", "dropout": 0.1}
    whole = both(tmp_path, **options)
    for region in range(2):
        for folder in (tmp_path / f"region-{region}").glob("checkpoint-*"):
            if int(folder.name.rpartition("-")[2]) > save_at:
                shutil.rmtree(folder)
    rest = both(tmp_path, resume=True, **options)
    for region in range(2):
        assert rest[region].seen == {s: rows for s, rows in whole[region].seen.items() if s >= save_at}
        assert torch.equal(params_of(rest[region].model), params_of(whole[region].model))


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_others_read_on_in_the_place_of_a_lost_region(evaluates: bool, tmp_path: Path) -> None:
    """Region 1 is lost after step 4, and trains again from the landing at 9 on. Rows are read once in a pass, but for its part of
    the round in which it was lost; with evaluations whose mean decides which model is best.
    """
    link = dataclasses.replace(LINK, speeds=(1.0, 1.0, 1.0), away=(Absence(1, 4, 8),))
    options: dict[str, Any] = {"shards": "dealt", "least": 1, "steps": 15}
    if evaluates:
        best = {"metric_for_best_model": "loss", "load_best_model_at_end": True}
        saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        options |= {"evaluates": True, **best, **saving}
    regions = run_in_lockstep(3, lambda region, own: train(tmp_path, region, own, **options), link)
    assert [sorted(each.seen) for each in regions] == [
        list(range(15)),
        [*range(4), *range(9, 15)],
        list(range(15)),
    ]
    assert [each.state.global_step for each in regions] == [15] * 3
    assert [len(regions[0].seen[step]) for step in (0, 5, 6, 11, 12, 14)] == [4, 4, 6, 6, 4, 4]
    assert torch.equal(params_of(regions[0].model), params_of(regions[1].model))
    rows: list[int | None] = []
    for step in range(15):
        for region, each in enumerate(regions):
            if region == 1 and step in (4, 5):  # dealt to it, and read by nobody
                rows += [None] * 8
            elif region != 1 or step not in range(
                6, 12
            ):  # before its first landing it reads what others read, too
                rows += [row for batch in each.seen[step] for row in batch]
    assert len(rows) == 15 * 24
    for first in range(0, len(rows) - ROWS, ROWS):
        read = [row for row in rows[first : first + ROWS] if row is not None]
        assert len(set(read)) == len(read)
    assert len({each.state.best_model_checkpoint is None for each in regions}) == 1


def test_data_that_cannot_be_dealt_is_refused(tmp_path: Path) -> None:
    """A stream has no numbers; a sampler of the user's own would be ignored; regions must have the same data."""
    with pytest.raises(InputError, match=r"regions\.shards=dealt deals samples by their numbers.*stream"):
        both(tmp_path, shards="dealt", stream=True)
    with pytest.raises(InputError, match=r"train_sampling_strategy=group_by_length"):
        both(tmp_path, shards="dealt", train_sampling_strategy="group_by_length")

    def body(region: int, link: LockstepLink) -> Noting:
        return train(tmp_path, region, link, shards="dealt", data=Rows(ROWS, region, tokens_from))

    with pytest.raises(HandshakeError, match=r"data\.order"):
        run_in_lockstep(2, body, LINK)
