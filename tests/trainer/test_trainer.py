"""The callback in a Trainer: found by itself, evaluation on global weights, logs, refusals."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig, simulate
from hf_cocodc.errors import HandshakeError, InputError, RunStopped
from hf_cocodc.link.base import Link
from hf_cocodc.run.journal import read
from hf_cocodc.trainer.patches import OF_DEALS, WRAPPED
from hf_cocodc.training.data import byte_tokenizer
from tests.processes.worker import Tokens
from tests.toys import llama, params_of

CONFIG = OuterConfig(method="diloco", sync_interval=4, outer_lr=0.7)


class SubTrainer(Trainer):
    """Any subclass will do."""


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    common = {"max_steps": 6, "per_device_train_batch_size": 2, "logging_steps": 2, "learning_rate": 1e-3}
    common |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(output_dir=str(folder), dataloader_pin_memory=False, **(common | more))


def make(folder: Path, callbacks: list, kind: type[Trainer] = Trainer, **more: Any) -> Trainer:
    data = Tokens(16)
    return kind(
        model=llama(),
        args=arguments(folder, **more),
        train_dataset=data,
        eval_dataset=data,
        callbacks=callbacks,
    )


@pytest.mark.parametrize(
    "how", ["constructor", "subclass", "added later", "imported later", "attached by hand"]
)
def test_the_callback_finds_its_trainer(how: str, tmp_path: Path) -> None:
    """Passed to the constructor, added later or attached by hand: the run and its output folder are the same."""
    callback = CoCoDCCallback(CONFIG)
    given = [callback] if how in ("constructor", "subclass") else []
    trainer = make(tmp_path, given, SubTrainer if how == "subclass" else Trainer)
    if how == "added later":
        trainer.add_callback(callback)
    if how == "imported later":  # trainer.add_callback(hf_cocodc.CoCoDCCallback(...)) takes the method first
        inspect.unwrap(Trainer.add_callback)(trainer, callback)
    if how == "attached by hand":
        callback.attach(trainer)
    assert set(WRAPPED) - vars(trainer).keys() == {"get_batch_samples", *OF_DEALS}
    trainer.train()
    assert callback.outer is not None
    assert callback.outer.synchronizer.totals.landings == 2
    assert Path(trainer.args.output_dir) == tmp_path / "region-0"
    assert trainer.callback_handler.callbacks.count(callback) == 1
    kinds = [event["kind"] for event in read(tmp_path / "region-0" / "cocodc" / "journal.jsonl")]
    assert kinds[0] == "start"
    assert kinds.count("land") == 2


def test_a_trainer_that_the_callback_cannot_serve_in_full_is_refused(tmp_path: Path) -> None:
    """It came past `add_callback`, or during training: a signal would kill the region, and no lock would guard its folder."""
    trainer = make(tmp_path, [])
    trainer.callback_handler.add_callback(CoCoDCCallback(CONFIG))
    with pytest.raises(InputError, match=r"Call callback\.attach\(trainer\) before trainer\.train\(\)"):
        trainer.train()

    class Late(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            other.add_callback(CoCoDCCallback(CONFIG))

    other = make(tmp_path, [Late()])
    with pytest.raises(InputError, match="trains already, without CoCoDCCallback"):
        other.train()


def test_a_callback_that_was_removed_trains_nothing(tmp_path: Path) -> None:
    """The methods that it has wrapped would wait for its events until the end."""
    callback = CoCoDCCallback(CONFIG)
    trainer = make(tmp_path, [callback])
    trainer.remove_callback(CoCoDCCallback)
    with pytest.raises(InputError, match=r"was removed from this Trainer.*trainer\.add_callback\(callback\)"):
        trainer.train()
    assert trainer.state.global_step == 0
    trainer.add_callback(callback)
    assert trainer.train().global_step == 6


def test_a_run_whose_callback_was_added_later_is_stopped_and_resumed(tmp_path: Path) -> None:
    """As with one that was given to the constructor: SIGTERM stops it with a checkpoint, from which the next one goes on."""

    class Signals(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    for signals in (True, False):
        trainer = make(tmp_path, [Signals()] if signals else [])
        trainer.add_callback(CoCoDCCallback(CONFIG))
        with pytest.raises(RunStopped, match="SIGTERM") if signals else contextlib.nullcontext():
            trainer.train(resume_from_checkpoint=not signals)
    kinds = [event["kind"] for event in read(tmp_path / "region-0" / "cocodc" / "journal.jsonl")]
    assert kinds.count("start") == kinds.count("resume") == 1
    assert trainer.state.global_step == 6


def test_evaluation_sees_the_global_weights(tmp_path: Path) -> None:
    """Both regions report the same held-out loss at every evaluation, between landings too, and train on undisturbed."""

    def train(evaluate: bool, on: str = "global") -> Any:
        def body(region: int, link: Link) -> tuple[list[float], torch.Tensor]:
            may_differ = RegionConfig(may_differ="seed")
            callback = CoCoDCCallback(CONFIG, may_differ, link=link, evaluate_on=on)
            how = {"eval_strategy": "steps", "eval_steps": 3} if evaluate else {}
            trainer = make(tmp_path, [callback], seed=region, **how)
            trainer.train()
            losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
            return losses, params_of(trainer.model)

        return simulate(body, regions=2)

    (first, model), (second, _) = train(evaluate=True)
    assert len(first) == 2
    assert first == second
    assert torch.equal(train(evaluate=False)[0][1], model), "evaluating changes nothing"
    local = train(evaluate=True, on="local")
    assert local[0][0][0] != local[1][0][0], "between landings local weights differ"
    assert local[0][0][1] == local[1][0][1], "at the end they are the global ones"


def test_outer_figures_stand_beside_trainers_own(tmp_path: Path) -> None:
    """Logs carry outer/...; the loss among them is the mean over regions that rode on the last transfer."""

    def body(region: int, link: Link) -> list[dict]:
        trainer = make(tmp_path, [CoCoDCCallback(CONFIG, link=link)])
        trainer.train()
        return [entry for entry in trainer.state.log_history if "loss" in entry]

    logs = simulate(body, regions=2)
    last = logs[0][-1]
    assert {"outer/rounds", "outer/blocked_s", "outer/bytes_sent", "outer/compute_utilization"} <= set(last)
    assert last["outer/loss"] == pytest.approx(sum(log[-2]["loss"] for log in logs) / 2)


def test_what_cannot_work_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """auto_find_batch_size, save_only_model, a search, one callback for two Trainers."""
    for more, message in (
        ({"auto_find_batch_size": True}, "Set it to False"),
        ({"save_only_model": True}, "Set it to False.*checkpoint-N\\."),
    ):
        with pytest.raises(InputError, match=message):
            make(tmp_path, [CoCoDCCallback(CONFIG)], **more)
    callback = CoCoDCCallback(CONFIG)
    trainer = make(tmp_path, [callback])
    with pytest.raises(InputError, match="other values in each region.*without CoCoDCCallback"):
        trainer.hyperparameter_search(n_trials=1, backend="optuna")
    with pytest.raises(InputError, match="cocodc/COMPLETE is missing"):
        trainer.train(resume_from_checkpoint=str(tmp_path))
    with pytest.raises(InputError, match="this Trainer has two CoCoDCCallbacks.*Give it one"):
        make(tmp_path, [CoCoDCCallback(CONFIG), CoCoDCCallback(CONFIG)])
    with pytest.raises(InputError, match="already serves another Trainer"):
        make(tmp_path, [callback])
    with pytest.raises(InputError, match="outer.method='x' is not known"):
        CoCoDCCallback(OuterConfig(method="x"))


def test_two_trainers_may_train_a_model_one_after_the_other(tmp_path: Path) -> None:
    """Not at the same time: a second one is refused as long as the first trains."""
    refused = []

    class Meanwhile(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                second = Trainer(
                    model,
                    arguments(tmp_path / "2"),
                    train_dataset=Tokens(8),
                    callbacks=[CoCoDCCallback(CONFIG)],
                )
                with pytest.raises(InputError, match="another CoCoDCCallback, trains this LlamaForCausalLM"):
                    second.train()
                refused.append(second)

    first = make(tmp_path / "1", [CoCoDCCallback(CONFIG), Meanwhile()])
    first.train()
    refused[0].train()


def test_regions_of_a_simulation_compare_their_training(tmp_path: Path) -> None:
    """As those of a real run do, before anything is trained; what may differ may."""

    def body(region: int, link: Link, may_differ: str = "") -> None:
        callback = CoCoDCCallback(
            CONFIG, RegionConfig(may_differ=may_differ), link=link, facts={"data.path": "x"}
        )
        make(tmp_path, [callback], learning_rate=1e-3 * (1 + region)).train()

    with pytest.raises(
        HandshakeError, match="disagree on training.learning_rate: region 0 has 0.001, region 1"
    ):
        simulate(body, regions=2)
    simulate(lambda region, link: body(region, link, "learning_rate"), regions=2)


class Sentences(Dataset):
    """Token rows, each of one of two classes."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [1 + index, 2, 3], "label": index % 2}


def test_what_transformers_writes_into_a_config_is_no_other_model(tmp_path: Path) -> None:
    """The first labels set the problem type, and Trainer the tokenizer's ids: a resume in the same process goes on."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForSequenceClassification(config)

    def trainer(max_steps: int) -> Trainer:
        args = arguments(tmp_path, max_steps=max_steps, save_strategy="steps", save_steps=2)
        given = {"train_dataset": Sentences(), "processing_class": byte_tokenizer()}
        return Trainer(model=model, args=args, callbacks=[CoCoDCCallback(CONFIG)], **given)

    first = trainer(2)
    first.train()
    assert (model.config.problem_type, model.config.pad_token_id) == ("single_label_classification", 256)
    first.args.max_steps = 4
    first.train(resume_from_checkpoint=True)
    second = trainer(6)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 6


def test_an_exception_leaves_the_link(tmp_path: Path) -> None:
    """A failing callback ends training with its own exception; the hook on the optimizer is gone."""

    class Fails(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("on purpose")

    callback = CoCoDCCallback(CONFIG)
    trainer = make(tmp_path, [callback, Fails()])
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.train()
    assert not trainer.optimizer.optimizer._optimizer_step_post_hooks


def test_a_run_that_finishes_before_the_first_step_has_the_global_weights(tmp_path: Path) -> None:
    """A newcomer may come in while the others wait for more regions, and all may agree there to finish."""
    callback = CoCoDCCallback(CONFIG)

    class Ends(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert callback.outer is not None
            callback.outer.training.endings.end("finish", "region 1 was interrupted")

    make(tmp_path, [callback, Ends()]).train()
    assert callback.outer is not None and callback.outer.finished


def test_the_recipes_callback(tmp_path: Path) -> None:
    """from_recipe takes the outer, regions and evaluation sections."""
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart" / "diloco.yaml"
    callback = CoCoDCCallback.from_recipe(
        recipe, ("regions.count=1", "evaluation.on=local", "outer.sync_interval=7")
    )
    assert (callback.config.sync_interval, callback.evaluate_on, callback.num_regions) == (7, "local", 1)


def test_a_script_that_trains_twice_resumes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--resume is for what was interrupted: the second training of the same Trainer begins anew, as without it."""
    monkeypatch.setenv("HF_COCODC_RESUME", "1")

    def body(region: int, link: Link) -> int:
        saving = {"save_strategy": "steps", "save_steps": 3}
        trainer = make(
            tmp_path / "run", [CoCoDCCallback("diloco", sync_interval=3, link=link)], max_steps=6, **saving
        )
        trainer.train()
        trainer.train()
        return trainer.state.global_step

    assert simulate(body, regions=2) == [6, 6]
