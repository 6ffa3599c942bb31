"""load_best_model_at_end: the best global weights, chosen alike in all regions by the mean of their metrics."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_cocodc import CoCoDCCallback, RegionConfig, simulate
from hf_cocodc.cli.main import main
from hf_cocodc.errors import CheckpointError, HandshakeError, InputError, RunFinished, RunStopped
from hf_cocodc.link.base import Link
from hf_cocodc.run.journal import read
from hf_cocodc.trainer.best import bring
from tests.processes.worker import Tokens
from tests.run.test_resuming import At, Dry, config, fail
from tests.toys import VOCAB, llama, params_of
from tests.trainer.test_peft import lora
from tests.trainer.test_training_variants import with_dropout
from tests.training.test_simulation import TINY

STEPS, EVERY = 10, 2
SCORES = {2: (1.0, 1.0), 4: (5.0, 1.0), 6: (2.0, 6.0), 8: (2.0, 3.0), 10: (1.0, 1.0)}
"""By inner step, the score of each region: region 0 alone would choose step 4; the mean is best at step 6."""
BEST = 6


class Run:
    """A region's Trainer whose evaluations give `scores`, and what the model held at each of them."""

    def __init__(
        self,
        folder: Path,
        link: Link,
        name: str = "streaming",
        scores: dict[int, tuple] = SCORES,
        build: Callable[[], Any] = llama,
        callbacks: tuple = (),
        evaluate_on: str = "global",
        regions: RegionConfig | None = None,
        data: Any = None,
        **more: Any,
    ) -> None:
        common: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 3e-3}
        common |= {
            "eval_strategy": "steps",
            "eval_steps": EVERY,
            "save_strategy": "steps",
            "save_steps": EVERY,
        }
        common |= {
            "load_best_model_at_end": True,
            "metric_for_best_model": "score",
            "greater_is_better": True,
        }
        common |= {"report_to": "none", "use_cpu": True, "dataloader_pin_memory": False, "disable_tqdm": True}
        self.shown: dict[int, Tensor] = {}
        self.callback = CoCoDCCallback(config(name), regions, link=link, evaluate_on=evaluate_on)
        self.trainer = Trainer(
            model=build(),
            args=TrainingArguments(output_dir=str(folder), **{**common, **more}),
            train_dataset=Tokens(32, seed=link.region) if data is None else data,
            eval_dataset=Tokens(4, seed=9),
            compute_metrics=lambda _: self._score(scores, link.region),
            callbacks=[*callbacks, self.callback],
        )
        run = self

        class Look(TrainerCallback):
            def on_evaluate(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
                run.shown[state.global_step] = params_of(model)

        self.trainer.add_callback(Look())

    def _score(self, scores: dict[int, tuple], region: int) -> dict[str, float]:
        score = scores[self.trainer.state.global_step][region]
        return {} if score is None else {"score": score}

    @property
    def params(self) -> Tensor:
        return params_of(self.trainer.model)


def train(folder: Path, resume: Any = False, num_regions: int = 2, **more: Any) -> list[Run]:
    def body(region: int, link: Link) -> Run:
        run = Run(folder, link, **more)
        run.trainer.train(resume_from_checkpoint=resume)
        return run

    return simulate(body, regions=num_regions)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("streaming", {}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("eager", {}),
                ("streaming", {"save_strategy": "best", "save_total_limit": 1}),
                ("streaming", {"save_steps": 4}),
                (
                    "streaming",
                    {"eval_strategy": "epoch", "save_strategy": "epoch", "gradient_accumulation_steps": 8},
                ),
            )
        ),
    ],
)
def test_the_best_global_weights_are_left_in_the_model(name: str, more: dict, tmp_path: Path) -> None:
    """All regions choose the step whose mean score is best, end with the global weights of that step, and save these."""
    runs = train(tmp_path, name=name, **more)
    for region, run in enumerate(runs):
        state = run.trainer.state
        assert (state.global_step, state.best_global_step, state.best_metric) == (STEPS, BEST, 4.0)
        assert state.best_model_checkpoint == str(tmp_path / f"region-{region}" / f"checkpoint-{BEST}")
        assert torch.equal(run.params, run.shown[BEST])
        assert not torch.equal(run.params, run.shown[STEPS])
    assert torch.equal(runs[0].params, runs[1].params)
    trainer = runs[0].trainer
    trainer.save_model()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "region-0")
    assert torch.equal(params_of(saved), runs[0].params)
    trainer.evaluate()
    last = read(tmp_path / "region-0" / "cocodc" / "journal.jsonl")[-1]
    assert (last["kind"], last["step"], last["weights"]) == ("evaluate", BEST, "global")


def stop(folder: Path, step: int, **more: Any) -> None:
    """A run that is asked to end at `step`: it stops there, and evaluates no more."""

    def body(region: int, link: Link) -> int:
        run = Run(folder, link, **more)
        run.trainer.add_callback(StopAt(step, run.callback))
        with pytest.raises(RunStopped):
            run.trainer.train()
        assert run.trainer.state.global_step not in run.shown
        return run.trainer.state.global_step

    assert simulate(body, regions=2) == [step] * 2


class StopAt(TrainerCallback):
    """All regions agree to stop at `step`, as they do over a coordinator."""

    def __init__(self, step: int, callback: CoCoDCCallback) -> None:
        self.step, self.callback = step, callback

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.callback.outer is not None
        endings = self.callback.outer.training.endings
        hear = endings.after_step

        def after_step(inner_step: int, words: Any) -> None:
            hear(inner_step, words)
            if inner_step == self.step:
                endings.verdict = "stop"

        endings.after_step = after_step  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("save_strategy", "step"),
    [
        ("steps", BEST),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("steps", BEST - 1), ("steps", BEST + 1), ("best", BEST), ("best", BEST + 1))
        ),
    ],
)
def test_the_best_of_a_run_that_was_stopped(save_strategy: str, step: int, tmp_path: Path) -> None:
    """Stopped before, at and after the best step, with dropout: the bits of a run that never stopped."""
    more = {"build": with_dropout, "save_strategy": save_strategy}
    whole = train(tmp_path / "whole", **more)
    stop(tmp_path / "stopped", step, **more)
    again = train(tmp_path / "stopped", resume=True, **more)
    for one, other in zip(whole, again, strict=True):
        assert torch.equal(one.params, one.shown[BEST])
        assert torch.equal(other.params, one.params)
        assert torch.equal(other.shown[STEPS], one.shown[STEPS])
        assert other.trainer.state.best_metric == 4.0
        assert [
            entry["eval_score"] for entry in other.trainer.state.log_history if "eval_score" in entry
        ] == [entry["eval_score"] for entry in one.trainer.state.log_history if "eval_score" in entry]


@pytest.mark.slow
def test_a_region_without_the_best_checkpoint(tmp_path: Path) -> None:
    """Region 1 has lost its disk, and region 2 is new: they take over the best checkpoint, too."""
    whole = train(tmp_path / "whole")
    stop(tmp_path / "stopped", BEST + 1)
    shutil.rmtree(tmp_path / "stopped" / "region-1")
    scores = {step: (*both, sum(both) / 2) for step, both in SCORES.items()}
    for run in train(tmp_path / "stopped", resume=True, num_regions=3, scores=scores):
        assert run.trainer.state.best_global_step == BEST
        assert torch.equal(run.params, whole[0].params)


@pytest.mark.slow
def test_with_eager_updates_no_other_regions_weights_will_do(tmp_path: Path) -> None:
    """The best model is the mean of all regions' own: refused before step 1 if one is lost."""
    stop(tmp_path, BEST + 1, name="eager")
    shutil.rmtree(tmp_path / "region-1" / f"checkpoint-{BEST}")
    with pytest.raises(
        CheckpointError, match=r"region 1 lacks checkpoint-6, the best model.*load_best_model_at_end=False"
    ):
        train(tmp_path, resume=True, name="eager")
    train(tmp_path, resume=True, name="eager", load_best_model_at_end=False)


@pytest.mark.slow
def test_a_best_checkpoint_that_is_gone_everywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The best model is chosen anew from the step of the resume on, with a warning."""
    stop(tmp_path, BEST + 1)
    for region in range(2):
        shutil.rmtree(tmp_path / f"region-{region}" / f"checkpoint-{BEST}")
    with caplog.at_level(logging.WARNING):
        runs = train(tmp_path, resume=True)
    assert "no region has the best model so far any more" in caplog.text
    for run in runs:
        assert run.trainer.state.best_global_step == 8
        assert torch.equal(run.params, run.shown[8])


@pytest.mark.slow
def test_a_finished_run_keeps_its_best_model(tmp_path: Path) -> None:
    """Resumed without more steps to make, a run names its best model; with more, it goes on from its last step."""
    first = train(tmp_path, save_total_limit=1)
    left = sorted(path.name for path in (tmp_path / "region-0").glob("checkpoint-*"))
    assert {f"checkpoint-{STEPS}", f"checkpoint-{BEST}"} <= set(left), "the best, and the last to go on from"
    assert not {"checkpoint-2", "checkpoint-4"} & set(left)
    first[0].trainer.log({"train_runtime": 1.0})  # as scripts do after a training
    assert first[0].trainer.args.save_total_limit == 1
    best = tmp_path / "region-0" / f"checkpoint-{BEST}"
    with pytest.raises(RunFinished, match=f"Its model is in {best}"):
        train(tmp_path, resume=True)
    longer = train(tmp_path, resume=True, max_steps=12, scores={12: (9.0, 9.0)})
    assert longer[0].trainer.state.best_global_step == 12
    assert torch.equal(longer[1].params, longer[0].shown[12])


@pytest.mark.parametrize("threshold", [pytest.param(0.0, marks=pytest.mark.slow), 2.5])
def test_early_stopping_sees_the_mean(threshold: float, tmp_path: Path) -> None:
    """Region 1's own score falls behind region 0's: its patience is not counted by it. All regions end alike."""
    scores = {step: (step + 4.0, step / 2 - 4) for step in SCORES} | {9: (0.0, 0.0)}
    patience = EarlyStoppingCallback(2, early_stopping_threshold=threshold)
    runs = train(tmp_path, scores=scores, callbacks=(patience,))
    steps = {run.trainer.state.global_step for run in runs}
    assert steps == {STEPS} if threshold == 0 else max(steps) < STEPS
    assert len(steps) == 1
    assert torch.equal(runs[0].params, runs[1].params)


@pytest.mark.slow
def test_a_score_that_is_nan_is_not_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In no region, although it is NaN in region 1 alone."""
    with caplog.at_level(logging.WARNING):
        runs = train(tmp_path, scores={**SCORES, BEST: (9.0, float("nan"))})
    assert [run.trainer.state.best_global_step for run in runs] == [4, 4]
    assert f"region 1: eval_score is NaN at step {BEST}" in caplog.text


@pytest.mark.slow
def test_a_rate_that_falls_on_a_plateau_falls_in_all_regions(tmp_path: Path) -> None:
    """The scores of region 0 rise, those of region 1 fall faster: the mean decides."""
    scores = {step: (float(step), -2.0 * step) for step in SCORES}
    more = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "mode": "max"},
    }
    runs = train(tmp_path, scores=scores, load_best_model_at_end=False, save_strategy="no", **more)
    rates = [run.trainer.optimizer.param_groups[0]["lr"] for run in runs]
    assert rates[0] == rates[1] < 3e-4


@pytest.mark.parametrize(
    ("common", "own", "error", "message"),
    [
        ({"evaluate_on": "local"}, {}, InputError, "evaluate_on=local"),
        (
            {},
            {"load_best_model_at_end": False},
            HandshakeError,
            "disagree on training.load_best_model_at_end: region 0 has True, region 1 has False",
        ),
        (
            {},
            {"metric_for_best_model": "loss"},
            HandshakeError,
            "disagree on training.metric_for_best_model",
        ),
        (
            {},
            {"save_steps": 4, "eval_steps": 4},
            HandshakeError,
            "disagree on training.save_steps: region 0 has 2, region 1 has 4",
        ),
        ({"scores": {2: (1.0, None)}}, {}, InputError, "the evaluation in region 1 has not given eval_score"),
        (
            {"scores": {2: (None, None)}},
            {},
            InputError,
            "the evaluation in region 0 has not given eval_score",
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    common: dict, own: dict, error: type[Exception], message: str, tmp_path: Path
) -> None:
    """By name, with the way out; before step 1 where that is known."""

    def body(region: int, link: Link) -> None:
        Run(tmp_path, link, **(common | own if region else common)).trainer.train()

    with pytest.raises(error, match=message):
        simulate(body, regions=2)


@pytest.mark.slow
def test_training_twice_and_evaluating_before(tmp_path: Path) -> None:
    """Each training chooses its own best model."""

    def body(region: int, link: Link) -> tuple[Run, int]:
        run = Run(tmp_path, link, scores={0: (0.0, 0.0), **SCORES})
        run.trainer.evaluate()
        run.trainer.train()
        first = run.trainer.state.best_global_step
        run.trainer.train()
        return run, first

    for run, first in simulate(body, regions=2):
        assert first == BEST
        assert torch.equal(run.params, run.shown[BEST])


def test_a_region_whose_data_has_run_out(tmp_path: Path) -> None:
    """It evaluates no more, but hears what the other one decides, and ends with the same best model."""

    def body(region: int, link: Link) -> Run:
        # Accelerate's dispatcher fails on empty data
        own = {"data": Dry(6), "accelerator_config": {"dispatch_batches": False}} if region else {}
        run = Run(tmp_path, link, regions=RegionConfig(when_one_ends="continue"), **own)
        run.trainer.train()
        return run

    first, second = simulate(body, regions=2)
    assert sorted(second.shown) == [2]
    assert first.trainer.state.best_global_step == second.trainer.state.best_global_step == 4
    assert torch.equal(first.params, first.shown[4])
    assert torch.equal(second.params, first.params)


def test_the_link_is_closed_after_the_best_model_is_loaded(tmp_path: Path) -> None:
    """Also where a Trainer was told of the callback late."""

    def body(region: int, link: Link) -> list[str]:
        done = []
        run = Run(tmp_path, link)
        [callback] = [run.trainer.pop_callback(CoCoDCCallback)]
        late = Trainer(
            run.trainer.model,
            run.trainer.args,
            train_dataset=run.trainer.train_dataset,
            eval_dataset=run.trainer.eval_dataset,
            compute_metrics=lambda _: {"score": float(late.state.global_step == BEST)},
        )
        close = link.close
        link.close = lambda reason=None: done.append("closed") or close(reason)  # type: ignore
        late.add_callback(CoCoDCCallback(callback.config, link=link))
        late.train()
        assert late.state.best_global_step == BEST
        return done

    assert simulate(body, regions=2) == [["closed"]] * 2


def check_that_the_others_stop(run_of: Callable[[int, Link], Run], own: str, told: str) -> None:
    """Region 1 fails with the message `own`; region 0 is `told` of it, and stops with a checkpoint."""

    def body(region: int, link: Link) -> str:
        run = run_of(region, link)
        with pytest.raises((RunStopped, ValueError, KeyError)) as error:
            run.trainer.train()
        return str(error.value)

    survivor, failed = simulate(body, regions=2)
    assert failed == own
    assert told in survivor
    assert "This region has saved checkpoint-" in survivor


def test_an_error_between_two_evaluations(tmp_path: Path) -> None:
    """Region 1 fails, and keeps in step past the evaluation of region 0, which stops with a checkpoint."""

    def run_of(region: int, link: Link) -> Run:
        return Run(tmp_path, link, callbacks=(At(4, fail),) if region else ())

    check_that_the_others_stop(run_of, "the data is broken", "the data is broken")


NO_METRIC = {
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "greater_is_better": None,
    "save_strategy": "no",
}


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("more", [{}, NO_METRIC], ids=["metric", "no metric"])
def test_an_error_between_two_evaluations_of_a_mean(more: dict, several: bool, tmp_path: Path) -> None:
    """With eager updates an evaluation needs the global weights of all regions, also of one that only keeps in step."""

    def run_of(region: int, link: Link) -> Run:
        run = Run(tmp_path, link, name="eager", callbacks=(At(4, fail),) if region else (), **more)
        if several:
            run.trainer.eval_dataset = {"first": Tokens(4, seed=9), "second": Tokens(4, seed=8)}
            if more is not NO_METRIC:
                run.trainer.args.metric_for_best_model = "first_score"
        return run

    check_that_the_others_stop(run_of, "the data is broken", "the data is broken")


@pytest.mark.parametrize("name", ["streaming", pytest.param("eager", marks=pytest.mark.slow)])
def test_an_error_in_an_evaluation(name: str, tmp_path: Path) -> None:
    """The other region waits for the metric there; it goes on without it, hears of the error, and stops with a checkpoint."""

    def run_of(region: int, link: Link) -> Run:
        return Run(tmp_path, link, name=name, scores={2: (1.0, 1.0)} if region else SCORES)

    check_that_the_others_stop(run_of, "4", "region 1 was interrupted (KeyError at step 4: 4)")


class AddsAScore(Trainer):
    """Its own metric joins the others after callbacks were told of them."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {**super().evaluate(*args, **kwargs), "eval_late": SCORES[self.state.global_step][self.own]}


def test_a_metric_that_a_subclass_adds(tmp_path: Path) -> None:
    """Regions decide by its mean."""

    def body(region: int, link: Link) -> Trainer:
        first = Run(tmp_path, link, metric_for_best_model="late").trainer
        [callback] = [first.pop_callback(CoCoDCCallback)]
        trainer = AddsAScore(
            first.model,
            first.args,
            train_dataset=first.train_dataset,
            eval_dataset=first.eval_dataset,
            callbacks=[CoCoDCCallback(callback.config, link=link)],
        )
        trainer.own = region
        trainer.train()
        return trainer

    for trainer in simulate(body, regions=2):
        assert (trainer.state.best_global_step, trainer.state.best_metric) == (BEST, 4.0)


def test_regions_that_know_of_different_best_models_are_refused(tmp_path: Path) -> None:
    def body(region: int, link: Link) -> None:
        bring(link, Accelerator(cpu=True), None if region else tmp_path / "checkpoint-4", 1, may_copy=True)

    with pytest.raises(CheckpointError, match=r"of steps 4, 0; 0: of none"):
        simulate(body, regions=2)


class Counting(nn.Module):
    """Counts the steps that it has trained, in a buffer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        self.steps += self.training
        return self.model(input_ids=input_ids, labels=labels, use_cache=False)


def qwen_moe() -> PreTrainedModel:
    """A model whose weights have other names in files than in memory."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 4}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "build", [lambda: lora(0), qwen_moe, lambda: Counting(llama())], ids=["LoRA", "experts", "buffers"]
)
def test_all_of_the_best_model_is_loaded(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Adapters, experts and buffers."""
    runs = train(tmp_path, build=build)
    whole = [run.trainer.model.state_dict() for run in runs]
    for run in runs:
        assert torch.equal(run.params, run.shown[BEST])
    for name, tensor in whole[0].items():
        assert torch.equal(whole[1][name], tensor), name
    if "steps" in whole[0]:
        assert whole[0]["steps"] == BEST


@pytest.mark.slow
def test_the_best_model_is_of_before_a_layer_was_frozen(tmp_path: Path) -> None:
    """Its layer is as it was then, not as it was frozen."""
    scores = {step: (float(step == 4), float(step == 4)) for step in SCORES}

    def body(region: int, link: Link) -> Run:
        def freeze() -> None:
            run.trainer.model.model.layers[0].requires_grad_(False)

        run = Run(tmp_path, link, scores=scores, callbacks=(At(5, lambda control: freeze()),))
        run.trainer.train()
        return run

    for run in simulate(body, regions=2):
        assert run.callback.outer is not None
        assert torch.equal(run.params, run.shown[4])
        assert not torch.equal(run.shown[STEPS], run.shown[4])


@pytest.mark.slow
def test_a_recipe_may_ask_for_the_best_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The summary and the card say of which step the model is."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "train.txt").write_text(Path(__file__).read_text())
    sets = [*TINY, f"data.path={text}", f"training.output_dir={tmp_path / 'run'}", "data.eval_split=train"]
    sets += ["training.eval_strategy=steps", "training.eval_steps=2", "training.save_strategy=best"]
    sets += ["training.load_best_model_at_end=true", "training.learning_rate=10"]
    sets += ["outer.guard=none"]  # it would stop a run that ends with such losses
    recipe = str(Path(__file__).parents[2] / "recipes" / "quickstart" / "diloco.yaml")
    assert main(["simulate", recipe, *(part for each in sets for part in ("--set", each))]) == 0
    folder = tmp_path / "run" / "simulated" / "region-0"
    [best] = [event for event in read(folder / "cocodc" / "journal.jsonl") if event["kind"] == "best"]
    assert f"(global weights, the best: of step {best['step']})" in capsys.readouterr().out
    assert (
        f"| weights | the best of the run: of step {best['step']}, where"
        in (folder / "README.md").read_text()
    )
