"""Trainer and plain loops: stopped, resumed, joined by regions and left by them; all in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
)
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from hf_cocodc import CoCoDCCallback, OuterConfig, OuterOptimizer, RegionConfig, simulate
from hf_cocodc.errors import CheckpointError, InputError, LinkError, RunFinished, RunStopped
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.run.journal import read
from hf_cocodc.snapshot import checkpoint as state
from hf_cocodc.snapshot import folders, manifest
from hf_cocodc.snapshot.local_weights import kept, restore
from tests.processes.worker import Tokens
from tests.snapshot.test_checkpoints import SETTINGS
from tests.toys import llama, params_of

H = 4
STEPS = 14


def config(name: str = "streaming") -> OuterConfig:
    settings = {"method": name, "sync_interval": H, **SETTINGS[name]}
    if "overlap_steps" in settings:
        settings["overlap_steps"] = min(3, settings["sync_interval"] - 1)
    return OuterConfig(**settings)


def make(
    folder: Path, link: Link, name: str = "streaming", callbacks: tuple = (), data: Any = None, **more: Any
) -> Trainer:
    """A Trainer of the region that `link` belongs to, with data of its own."""
    policy, model = more.pop("when_one_ends", "auto"), more.pop("model", None)
    weights = more.pop("evaluate_on", "global")
    common = {"max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 2, "learning_rate": 1e-3}
    common |= {"report_to": "none", "save_strategy": "steps", "save_steps": 1, "use_cpu": True}
    args = TrainingArguments(
        output_dir=str(folder), dataloader_pin_memory=False, disable_tqdm=True, **(common | more)
    )
    callback = CoCoDCCallback(
        config(name), RegionConfig(when_one_ends=policy), evaluate_on=weights, link=link
    )
    return Trainer(
        model=model if model is not None else llama(),
        args=args,
        train_dataset=data if data is not None else Tokens(16, seed=link.region),
        eval_dataset=Tokens(4, seed=9),
        callbacks=[callback, *callbacks],
    )


def callback_of(trainer: Trainer) -> CoCoDCCallback:
    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, CoCoDCCallback))


QUICK = ("streaming",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in SETTINGS]
)
def test_trainer_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Resumed after 3 and after 10 of 14 steps, mid-round and with transfers in flight: the weights of a run never stopped."""

    def whole(region: int, link: Link) -> Tensor:
        trainer = make(tmp_path / "whole", link, name)
        trainer.train()
        return params_of(trainer.model)

    def again(region: int, link: Link) -> tuple[Tensor, list[dict]]:
        trainer = make(tmp_path / "again", link, name, save_strategy="no")
        trainer.train(resume_from_checkpoint=True)
        return params_of(trainer.model), read(
            tmp_path / "again" / f"region-{region}" / "cocodc" / "journal.jsonl"
        )

    expected = simulate(whole, regions=2)
    for step in (3, 10):
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "again", symlinks=True)
        for later in range(step + 1, STEPS + 1):
            for region in range(2):
                shutil.rmtree(tmp_path / "again" / f"region-{region}" / f"checkpoint-{later}")
        for (end, journal), reference in zip(simulate(again, regions=2), expected, strict=True):
            assert torch.equal(end, reference), f"resumed from step {step}"
            sends = [event["step"] for event in journal if event["kind"] == "send"]
            assert sends == sorted(sends), "the journal goes on from the checkpoint"
            assert [event["step"] for event in journal if event["kind"] == "resume"] == [step]


class At(TrainerCallback):
    """Does something at the beginning of inner step `step`."""

    def __init__(self, step: int, action: Callable[[TrainerControl], None]) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            self.action(control)


def wish_to_stop(control: TrainerControl) -> None:
    control.should_training_stop = True


def fail(control: TrainerControl) -> None:
    raise ValueError("the data is broken")


def stopped(folder: Path, step: int, num_regions: int = 2, name: str = "streaming") -> int:
    """A run that region 0 was asked to end at `step`; the step of the checkpoints that it leaves."""

    def body(region: int, link: Link) -> int:
        trainer = make(folder, link, name, save_strategy="no")
        if region == 0:
            callback = callback_of(trainer)
            trainer.add_callback(At(step, lambda control: callback._note_signal("SIGTERM")))
        with pytest.raises(RunStopped, match=r"region 0 was interrupted \(SIGTERM\)"):
            trainer.train()
        return trainer.state.global_step

    steps = set(simulate(body, regions=num_regions))
    assert len(steps) == 1
    return steps.pop()


def checkpoint_of(folder: Path, region: int, step: int) -> Path:
    return folder / f"region-{region}" / f"checkpoint-{step}"


def resumed(folder: Path, num_regions: int = 2, name: str = "streaming", **more: Any) -> list[Trainer]:
    def body(region: int, link: Link) -> Trainer:
        trainer = make(folder, link, name, **more)
        trainer.train(resume_from_checkpoint=True)
        return trainer

    return simulate(body, regions=num_regions)


def weights_of(trainers: list[Trainer]) -> list[Tensor]:
    return [params_of(trainer.model) for trainer in trainers]


def test_checkpoints_at_the_ends_of_epochs(tmp_path: Path) -> None:
    """save_strategy=epoch: resumed from the first epoch's end, in the middle of a round."""

    def body(region: int, link: Link) -> Tensor:
        epochs = {"save_strategy": "epoch", "num_train_epochs": 3, "max_steps": -1}
        trainer = make(tmp_path, link, data=Tokens(10, seed=region), **epochs)
        trainer.train(resume_from_checkpoint=True)
        return params_of(trainer.model)

    whole = simulate(body, regions=2)
    for region in range(2):
        assert list(folders.checkpoints(tmp_path / f"region-{region}")) == [5, 10, 15]
        for step in (10, 15):
            shutil.rmtree(checkpoint_of(tmp_path, region, step))
    assert torch.equal(torch.stack(simulate(body, regions=2)), torch.stack(whole))


def test_trainers_own_checkpoint_after_sigterm(tmp_path: Path) -> None:
    """enable_jit_checkpoint: Trainer's checkpoint holds our part too and is complete, its mark of haste notwithstanding."""

    def trainer_of(**more: Any) -> Trainer:
        return make(tmp_path, loopback(), save_strategy="no", **more)

    def ask(control: TrainerControl) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    whole = trainer_of()
    whole.train()
    trainer = trainer_of(enable_jit_checkpoint=True)
    [jit] = [each for each in trainer.callback_handler.callbacks if isinstance(each, JITCheckpointCallback)]
    jit.jit_manager.kill_wait = 0
    trainer.add_callback(At(5, ask))
    with pytest.raises(RunStopped, match="region 0 was interrupted"):
        trainer.train()
    signal.signal(signal.SIGTERM, before)
    assert trainer.state.global_step < STEPS
    assert all(manifest.damage(path) is None for path in folders.checkpoints(tmp_path / "region-0").values())
    again = trainer_of()
    again.train(resume_from_checkpoint=True)
    assert torch.equal(params_of(again.model), params_of(whole.model))


@pytest.mark.parametrize("event", ["on_step_end", "on_optimizer_step"])
def test_a_checkpoint_is_of_one_moment(event: str, tmp_path: Path) -> None:
    """A callback before ours saves when Trainer has counted a step, as the just-in-time one does: the outer step is made first.
    In the middle of a step no checkpoint can be made.
    """

    def body(region: int, link: Link) -> Tensor:
        trainer = make(tmp_path, link, save_strategy="no")

        def save(args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
            if state.global_step == 5:
                trainer._save_checkpoint(trainer.model, trial=None)

        early = TrainerCallback()
        setattr(early, event, save)
        trainer.callback_handler.callbacks.insert(0, early)
        trainer.train()
        return params_of(trainer.model)

    if event == "on_optimizer_step":
        with pytest.raises(InputError, match="a checkpoint in the middle of inner step 6"):
            simulate(body, regions=2)
        return
    whole = simulate(body, regions=2)
    for region in range(2):
        assert list(folders.checkpoints(tmp_path / f"region-{region}")) == [5]
        assert state.read(checkpoint_of(tmp_path, region, 5)).facts.step == 5
    again = weights_of(resumed(tmp_path, save_strategy="no"))
    assert torch.equal(torch.stack(again), torch.stack(whole))


def test_an_interruption_stops_all_regions_with_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    """One region is asked to end: all save the same step, and go on from it to the bits of a run never stopped."""

    def whole(region: int, link: Link) -> Trainer:
        trainer = make(tmp_path / "whole", link, save_strategy="no")
        trainer.train()
        return trainer

    step = stopped(tmp_path / "run", 6)
    assert 6 <= step <= 6 + 2 * H
    assert all(manifest.damage(checkpoint_of(tmp_path / "run", region, step)) is None for region in range(2))
    ours = weights_of(resumed(tmp_path / "run", save_strategy="no"))
    theirs = weights_of(simulate(whole, regions=2))
    assert torch.equal(torch.stack(ours), torch.stack(theirs))


@pytest.mark.parametrize(
    ("policy", "ends"),
    [("auto", "finish"), ("finish", "finish"), ("stop", "stop"), ("continue", "max_steps")],
)
def test_early_stopping_in_one_region(policy: str, ends: str, tmp_path: Path) -> None:
    """What regions.when_one_ends says: all finish with equal weights, all stop with a checkpoint, or the rest goes on."""

    why = "region 1 has completed its training"

    def body(region: int, link: Link) -> tuple[int, str, Tensor]:
        callbacks = (At(5, wish_to_stop),) if region else ()
        trainer = make(tmp_path, link, callbacks=callbacks, when_one_ends=policy, save_strategy="no")
        with contextlib.nullcontext() if ends != "stop" else pytest.raises(RunStopped, match=why):
            trainer.train()
        how = "finish" if callback_of(trainer).outer.finished else "stop"
        return trainer.state.global_step, how, params_of(trainer.model)

    (step, how, weights), (other_step, other_how, other_weights) = simulate(body, regions=2)
    assert (step, how) == (other_step, other_how)
    assert how == ("stop" if ends == "stop" else "finish")
    assert (step == STEPS) == (ends == "max_steps")
    assert torch.equal(weights, other_weights) == (ends != "stop")
    if ends == "stop":
        assert all(manifest.damage(checkpoint_of(tmp_path, region, step)) is None for region in range(2))


def test_a_stop_decided_by_an_evaluation(tmp_path: Path) -> None:
    """Trainer's own EarlyStoppingCallback: all regions see the same held-out loss and finish together."""

    def body(region: int, link: Link) -> tuple[int, Tensor]:
        patience = EarlyStoppingCallback(1, early_stopping_threshold=10.0)
        more = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}
        trainer = make(tmp_path, link, callbacks=(patience,), save_strategy="no", **more)
        trainer.train()
        return trainer.state.global_step, params_of(trainer.model)

    (step, weights), (other_step, other_weights) = simulate(body, regions=2)
    assert 4 < step == other_step < STEPS
    assert torch.equal(weights, other_weights)


def test_early_stopping_waits_no_longer_after_a_resume(tmp_path: Path) -> None:
    """The patience of a checkpoint goes on: a resumed run ends where it would have ended."""

    def body(region: int, link: Link) -> int:
        patience = EarlyStoppingCallback(3, early_stopping_threshold=10.0)
        more = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss"}
        trainer = make(tmp_path, link, callbacks=(patience,), **more)
        trainer.train(resume_from_checkpoint=True)
        return trainer.state.global_step

    [whole, _] = simulate(body, regions=2)
    for region in range(2):
        for step in range(3, whole + 1):
            shutil.rmtree(checkpoint_of(tmp_path, region, step))
    assert simulate(body, regions=2) == [whole] * 2


@pytest.mark.parametrize("name", ["streaming", "eager"])
def test_after_a_stop_the_global_weights_are_used(name: str, tmp_path: Path) -> None:
    """A script that goes on after RunStopped evaluates, predicts with and saves what the journal says: no local weights."""

    def body(region: int, link: Link) -> tuple[float, float, float]:
        trainer = make(tmp_path, link, name, callbacks=(At(6, wish_to_stop),), when_one_ends="stop")
        with pytest.raises(RunStopped):
            trainer.train()
        folder = tmp_path / f"region-{region}"
        losses = trainer.evaluate()["eval_loss"], trainer.predict(Tokens(4, seed=9)).metrics["test_loss"]
        trainer.save_model()
        saved = AutoModelForCausalLM.from_pretrained(folder)
        stored = AutoModelForCausalLM.from_pretrained(folder / f"checkpoint-{trainer.state.global_step}")
        assert torch.equal(params_of(saved), params_of(stored))
        rows = Tokens(4, seed=9).rows
        with torch.no_grad():
            loss = float(saved(input_ids=rows, labels=rows).loss)
        assert losses == pytest.approx((loss, loss), rel=1e-5)
        assert read(folder / "cocodc" / "journal.jsonl")[-1]["weights"] == "global"
        return loss

    one, other = simulate(body, regions=2)
    assert (one == other) == (name == "streaming")


@pytest.mark.parametrize("own", [0, 1])
def test_an_evaluation_in_one_region_only_is_named(own: int, tmp_path: Path) -> None:
    """With eager updates it shows the mean of all regions' weights, and the others do not come. The first error says so."""
    said = []

    def body(region: int, link: Link) -> None:
        trainer = make(tmp_path, link, "eager", save_strategy="no")
        evaluate = At(6, lambda control: trainer.evaluate())
        if region == own:
            trainer.add_callback(evaluate)
        try:
            trainer.train()
        except LinkError as error:
            said.append(str(error))
            raise

    with pytest.raises(LinkError):
        simulate(body, regions=2)
    named = f"region {own} evaluates at step 5 with eager updates"
    assert any(sentence.startswith(named) for sentence in said) and "evaluation" in said[0]


@pytest.mark.parametrize("policy", ["auto", "finish"])
def test_an_error_in_one_region_costs_the_others_nothing(policy: str, tmp_path: Path) -> None:
    """The others hear of it with the next transfer, why included, and stop with a checkpoint, or finish."""

    def body(region: int, link: Link) -> str:
        callbacks = (At(6, fail),) if region else ()
        trainer = make(tmp_path, link, callbacks=callbacks, when_one_ends=policy, save_strategy="no")
        try:
            trainer.train()
        except (RunStopped, ValueError) as error:
            return str(error)
        assert callback_of(trainer).outer.finished
        return "finished"

    survivor, failed = simulate(body, regions=2)
    assert failed == "the data is broken"
    if policy == "finish":
        assert survivor == "finished"
    else:
        assert "region 1 was interrupted (ValueError at step 5: the data is broken)" in survivor
        [step] = folders.checkpoints(tmp_path / "region-0")
        assert f"This region has saved checkpoint-{step}" in survivor  # the other has not
        assert not folders.checkpoints(tmp_path / "region-1")


def test_a_region_that_cannot_keep_in_step_tells_the_others_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a CUDA error every call on the device fails, the steps without training too."""
    told = []

    def body(region: int, link: Link) -> None:
        trainer = make(tmp_path, link, save_strategy="no")
        callback = callback_of(trainer)

        def break_down(control: TrainerControl) -> None:
            def out_of_order(*args: Any, **kwargs: Any) -> None:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

            callback.outer.synchronizer.step = out_of_order
            close = link.close
            link.close = lambda reason=None: (told.append(reason), close(reason))
            raise ValueError("the data is broken")

        trainer.add_callback(At(6, break_down))
        with pytest.raises(ValueError, match="the data is broken"):
            trainer.train()

    simulate(body, regions=1)
    assert told == ["ValueError at step 5: the data is broken"]


class Dry(IterableDataset):
    """Rows that are there only once."""

    def __init__(self, rows: int) -> None:
        self.rows = iter(Tokens(rows))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from self.rows


@pytest.mark.parametrize(("policy", "together"), [("auto", True), ("continue", False)])
def test_an_iterable_that_runs_dry_in_one_region(policy: str, together: bool, tmp_path: Path) -> None:
    """After 5 of 14 steps there is no more data in region 1: all finish early, or region 0 goes on to the end."""

    def body(region: int, link: Link) -> tuple[int, Tensor]:
        data = Dry(10) if region else None
        own = {
            "accelerator_config": {"dispatch_batches": False}
        }  # Accelerate's dispatcher fails on empty data
        trainer = make(tmp_path, link, data=data, when_one_ends=policy, save_strategy="no", **own)
        trainer.train()
        outer = callback_of(trainer).outer
        assert outer is not None
        return outer.inner_step, params_of(trainer.model)

    (step, weights), (other_step, other_weights) = simulate(body, regions=2)
    assert step == other_step
    assert (step < STEPS) == together
    assert torch.equal(weights, other_weights)


def test_epochs_of_unequal_shards_end_together(tmp_path: Path) -> None:
    """Two epochs of 12 and of 16 rows: both regions make the fewer steps."""

    def body(region: int, link: Link) -> tuple[int, Tensor]:
        trainer = make(
            tmp_path, link, data=Tokens(12 + 4 * region), max_steps=-1, num_train_epochs=2, save_strategy="no"
        )
        trainer.train()
        return trainer.state.global_step, params_of(trainer.model)

    (step, weights), (other_step, other_weights) = simulate(body, regions=2)
    assert step == other_step == 12
    assert torch.equal(weights, other_weights)


@pytest.mark.parametrize("name", ["streaming", "eager", pytest.param("dilocox", marks=pytest.mark.slow)])
def test_regions_join_and_leave(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two regions go on as three, then as one; who joins takes the global params, outer state and data share of its own."""
    step = stopped(tmp_path, 6, name=name)
    with caplog.at_level(logging.WARNING):
        three = weights_of(resumed(tmp_path, 3, name, save_steps=STEPS))
    assert "region 2 has no complete checkpoint of step" in caplog.text
    assert "resuming 2 regions as 3" in caplog.text
    assert torch.equal(three[0], three[1])
    assert torch.equal(three[0], three[2])
    assert state.read(checkpoint_of(tmp_path, 2, STEPS)).facts.region == 2
    for region in range(3):
        for path in (tmp_path / f"region-{region}").glob("checkpoint-*"):
            if int(path.name.rpartition("-")[2]) > step:
                shutil.rmtree(path)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        [alone] = resumed(tmp_path, 1, name, save_strategy="no")
    assert "resuming 2 regions as 1" in caplog.text
    assert alone.state.global_step == STEPS


def test_a_region_that_joins_starts_from_the_global_weights(tmp_path: Path) -> None:
    """Before its first step its model is the global model, and its residuals are zero."""
    step = stopped(tmp_path, 6, name="dilocox")
    exported = AutoModelForCausalLM.from_pretrained(checkpoint_of(tmp_path, 0, step))
    seen = {}

    def body(region: int, link: Link) -> None:
        trainer = make(tmp_path, link, "dilocox", save_strategy="no")

        def look(control: TrainerControl) -> None:
            fragments = callback_of(trainer).outer.synchronizer.fragments
            seen[region] = (params_of(trainer.model), [float(f.codec["residual"].norm()) for f in fragments])

        trainer.add_callback(At(step + 1, look))
        trainer.train(resume_from_checkpoint=True)

    simulate(body, regions=3)
    assert torch.equal(seen[2][0], params_of(exported))
    assert seen[2][1] == [0.0]
    assert seen[0][1] != [0.0]


def test_a_checkpoint_that_one_region_has_only_partly_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Region 1 names the file that is missing, and all go back to the newest that is whole everywhere."""
    whole = weights_of(resumed(tmp_path))
    for region in range(2):
        shutil.rmtree(checkpoint_of(tmp_path, region, STEPS))
    (checkpoint_of(tmp_path, 1, STEPS - 1) / "optimizer.pt").unlink()
    with caplog.at_level(logging.INFO):
        again = weights_of(resumed(tmp_path, save_strategy="no"))
    assert "region 1: " in caplog.text
    assert "optimizer.pt is missing" in caplog.text
    assert f"region 0 resumes from {checkpoint_of(tmp_path, 0, STEPS - 2)}" in caplog.text
    assert torch.equal(torch.stack(again), torch.stack(whole))


def test_a_run_that_has_finished_is_left_as_it_is(tmp_path: Path) -> None:
    """Also in a region that has lost its folder: no other model than the one that was trained may look like its result."""
    resumed(tmp_path, save_steps=STEPS)
    shutil.rmtree(tmp_path / "region-0")
    with pytest.raises(RunFinished, match="has finished at step") as over:
        resumed(tmp_path, save_steps=STEPS)
    assert f"Its model is in {checkpoint_of(tmp_path, 0, STEPS)}." in str(over.value)


def test_a_run_that_has_finished_goes_on_where_more_is_asked_for(tmp_path: Path) -> None:
    """More epochs, as more steps, are trained on top."""
    epoch = {"max_steps": -1, "save_strategy": "epoch"}
    assert resumed(tmp_path, num_train_epochs=1, **epoch)[0].state.global_step == 8
    with pytest.raises(RunFinished, match="raise num_train_epochs"):
        resumed(tmp_path, num_train_epochs=1, **epoch)
    assert resumed(tmp_path, num_train_epochs=2, **epoch)[0].state.global_step == 16
    assert resumed(tmp_path, max_steps=18, save_strategy="no")[0].state.global_step == 18


def test_the_time_of_the_process_before_is_not_counted(tmp_path: Path) -> None:
    """Seconds blocked before the checkpoint do not lower the compute utilization after it."""
    step = stopped(tmp_path, 6)
    for region in range(2):
        checkpoint = checkpoint_of(tmp_path, region, step)
        saved = state.read(checkpoint)
        saved.state["totals"]["blocked_s"] = 1000.0
        state.begin(checkpoint)
        state.write(checkpoint, saved)
        state.seal(checkpoint)
    for trainer in resumed(tmp_path, save_strategy="no"):
        shares = [
            entry["outer/compute_utilization"] for entry in trainer.state.log_history if "loss" in entry
        ]
        assert all(0 <= share <= 1 for share in shares[-3:])


def test_a_checkpoint_of_another_method_or_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another method is refused; another value is taken, with a word."""
    stopped(tmp_path, 6)
    with pytest.raises(CheckpointError, match=r"written with outer.method=streaming, this run has diloco"):
        resumed(tmp_path, name="diloco")

    def body(region: int, link: Link) -> None:
        trainer = make(tmp_path, link)
        changed = dataclasses.replace(callback_of(trainer).config, outer_lr=0.123)
        callback_of(trainer).config = changed
        trainer.train(resume_from_checkpoint=True)

    simulate(body, regions=2)
    assert "outer.outer_lr was 0.6 when the checkpoint was written and is 0.123 now" in caplog.text
    for region in range(2):
        newest = max(folders.checkpoints(tmp_path / f"region-{region}").items())[1]
        path = newest / state.state_file()
        path.write_text(json.dumps(json.loads(path.read_text()) | {"settings": {}}))
        state.seal(newest)
    with pytest.raises(CheckpointError, match=r"written with outer.method=None, this run has streaming"):
        resumed(tmp_path, max_steps=STEPS + 2)


@pytest.mark.parametrize("num_regions", [1, 2])
def test_a_limit_of_one_leaves_what_every_region_can_go_on_from(num_regions: int, tmp_path: Path) -> None:
    """One region keeps its newest; several keep the newest that all are known to have, too."""

    def body(region: int, link: Link) -> None:
        make(tmp_path, link, save_total_limit=1, save_steps=2).train()

    simulate(body, regions=num_regions)
    for region in range(num_regions):
        kept = list(folders.checkpoints(tmp_path / f"region-{region}"))
        assert kept == ([14] if num_regions == 1 else [12, 14])


def test_the_global_model_is_in_every_checkpoint(tmp_path: Path) -> None:
    """checkpoint-N is the global model of that moment; what a user saves, evaluates and predicts with, too."""
    seen: dict[int, dict[str, Any]] = {}

    def body(region: int, link: Link) -> None:
        trainer = make(tmp_path, link, save_steps=7)

        def look(control: TrainerControl) -> None:
            local = params_of(trainer.model)
            trainer.save_model(str(tmp_path / f"saved-{region}"))
            trainer.create_model_card()
            predicted = trainer.predict(Tokens(4, seed=9)).predictions
            seen[region] = {"local": local, "after": params_of(trainer.model), "logits": predicted}
            with callback_of(trainer).outer.global_weights():
                seen[region]["global"] = params_of(trainer.model)
                trainer.model.eval()
                rows = torch.stack([row["input_ids"] for row in Tokens(4, seed=9)])
                with torch.no_grad():
                    seen[region]["expected"] = trainer.model(input_ids=rows).logits.numpy()
                trainer.model.train()

        trainer.add_callback(At(8, look))
        trainer.train()

    simulate(body, regions=2)
    for region in range(2):
        found = seen[region]
        assert torch.equal(found["local"], found["after"])
        assert not torch.equal(found["local"], found["global"])
        checkpoint = checkpoint_of(tmp_path, region, 7)
        for folder in (checkpoint, tmp_path / f"saved-{region}"):
            model = AutoModelForCausalLM.from_pretrained(folder)
            assert torch.equal(params_of(model), found["global"]), folder
        restore(model, checkpoint, kept(model))
        assert torch.equal(params_of(model), found["local"])
        numpy.testing.assert_array_equal(found["logits"], found["expected"])
    for readme in (checkpoint_of(tmp_path, 0, 7), tmp_path / "region-0"):
        card = (readme / "README.md").read_text()
        for word in ("hf-cocodc", "| method | streaming |", "| regions | 2 |", "2501.18512", "bytes", "fp4"):
            assert word in card, f"{word} in {readme}"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")  # of older releases of PEFT
def test_an_adapter_is_exported_and_resumed(tmp_path: Path) -> None:
    """PEFT: checkpoint-N loads with PeftModel.from_pretrained, and a stopped run goes on bit for bit.

    A callback may export the adapter into the checkpoint once more, as PEFT's examples do.
    """

    def adapted() -> PeftModel:
        torch.manual_seed(1)
        return get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))

    def body(region: int, link: Link) -> tuple[Tensor, Tensor]:
        trainer = make(tmp_path, link, save_steps=7, model=adapted())
        seen = []

        def look(control: TrainerControl) -> None:
            with callback_of(trainer).outer.global_weights():
                seen.append(params_of(trainer.model))

        trainer.add_callback(At(8, look))
        trainer.train(resume_from_checkpoint=True)
        assert set(trainer.model.peft_config) == {"default"}
        return params_of(trainer.model), seen[0]

    whole = simulate(body, regions=2)
    loaded = PeftModel.from_pretrained(llama(), str(checkpoint_of(tmp_path, 1, 7)))
    assert torch.equal(params_of(loaded), whole[1][1])
    for region in range(2):
        shutil.rmtree(checkpoint_of(tmp_path, region, STEPS))
        loaded.save_pretrained(checkpoint_of(tmp_path, region, 7) / "adapter_model")
    assert torch.equal(simulate(body, regions=2)[0][0], whole[0][0])


def test_a_plain_loop_saves_and_loads(tmp_path: Path) -> None:
    """accelerator.save_state mid-round and load_state in a new process-to-be: the bits of a loop never stopped."""

    def loop(link: Link, start: Path | None, save_at: int | None) -> Tensor:
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
        )
        model = llama(link.region)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(Tokens(2 * STEPS, seed=link.region), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with OuterOptimizer(accelerator, model, optimizer, config(), max_steps=STEPS, link=link) as outer:
            if start is not None:
                accelerator.load_state(str(start / str(link.region)))
            for batch in accelerator.skip_first_batches(loader, outer.inner_step):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                outer.step()
                if outer.inner_step == save_at:
                    accelerator.save_state(str(tmp_path / str(link.region)))
        return params_of(accelerator.unwrap_model(model))

    whole = simulate(lambda region, link: loop(link, None, None), regions=2)
    saving = simulate(lambda region, link: loop(link, None, 6), regions=2)
    again = simulate(lambda region, link: loop(link, tmp_path, None), regions=2)
    assert torch.equal(torch.stack(saving), torch.stack(whole)), "saving changes nothing"
    assert torch.equal(torch.stack(again), torch.stack(whole))
    (tmp_path / "0" / state.COMPLETE).unlink()
    with pytest.raises(CheckpointError, match="COMPLETE is missing"):
        simulate(lambda region, link: loop(link, tmp_path, None), regions=1)


def test_plain_loops_of_unequal_length_end_together() -> None:
    """The loop that ends first coasts until the other has heard of it; should_stop tells the other to leave."""

    def loop(region: int, link: Link) -> tuple[int, Tensor]:
        accelerator = Accelerator(cpu=True)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(Tokens(20 + 20 * region), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with OuterOptimizer(accelerator, model, optimizer, config(), link=link) as outer:
            for batch in loader:
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                outer.step()
                if outer.should_stop:
                    break
            steps = outer.inner_step
        if region:
            with pytest.raises(InputError, match="after the run has ended"):
                outer.step()
        return steps, params_of(accelerator.unwrap_model(model))

    (first, weights), (second, other) = simulate(loop, regions=2)
    assert first == 10
    assert 10 < second < 20
    assert torch.equal(weights, other)
