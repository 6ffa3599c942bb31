"""The best model of a Trainer's run: chosen alike in all regions, and left in the model at the end.

Trainer compares a metric of each evaluation with the best one before. Here the metric is the mean over the regions. It takes
the place of the region's own before any callback sees it, so that every decision that follows from it (what is best, early
stopping, a learning rate that falls on a plateau) is the same in all regions.
"""

import contextlib
import copy
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from accelerate import Accelerator
from transformers import DefaultFlowCallback, Trainer, TrainerControl, TrainerState
from transformers.trainer_utils import IntervalStrategy, has_length

from ..errors import CheckpointError, InputError, LinkError
from ..link.base import Link
from ..link.spreading import gather
from ..run.outer_optimizer import OuterOptimizer
from ..run.resuming import restore_buffers
from ..snapshot.checkpoint import Facts, read_own
from ..snapshot.files import take_over
from ..snapshot.folders import PREFIX, run_of, step_of
from ..snapshot.resume import Start, damage_here
from .beginning import epoch_steps, metric_of
from .leaving import keeps_in_step
from .loop import waits_for_metrics

logger = logging.getLogger(__name__)


class Score(NamedTuple):
    """A region's metric at an evaluation (NaN: none). A region that only keeps in step has not evaluated."""

    inner_step: int
    has_evaluated: bool
    is_there: bool
    value: float


class HeldBest(NamedTuple):
    """The best checkpoint that a region knows of: its step (0: none), and whether the region has it, undamaged."""

    step: int
    is_good: bool


def mean_score(link: Link, own: Score, name: str) -> float:
    """The mean of a metric over the regions that have evaluated; NaN if one's is NaN, or none has. A collective call.

    Raises InputError if an evaluation has not given the metric, LinkError if regions evaluate at different inner steps.
    """
    scores = gather(link, own, f"{name} at an evaluation")
    for region, other in scores.items():
        if other.inner_step != own.inner_step:
            raise LinkError(
                f"regions are out of step: region {link.region} evaluates at step {own.inner_step}, region {region} at step "
                f"{other.inner_step}. Every region must evaluate at the same inner steps."
            )
        if other.has_evaluated and not other.is_there:
            raise InputError(
                f"the evaluation in region {region} has not given {name}, by which regions choose their best model. Let every "
                "region compute it, or change metric_for_best_model."
            )
        if other.is_there and math.isnan(other.value):
            logger.warning(
                "region %d: %s is NaN at step %d: this is not the best model.", region, name, own.inner_step
            )
    values = [other.value for other in scores.values() if other.has_evaluated]
    if len(set(values)) == 1:
        return values[0]  # the mean could differ from it by rounding
    return math.fsum(values) / len(values) if values else math.nan


def bring(link: Link, accelerator: Accelerator, best: Path | None, run: int, may_copy: bool) -> Path | None:
    """See to it that all regions have the checkpoint of the best global weights so far. A collective call.

    `best`: where this region must have it, if a best one is known. `may_copy`: another region's has the same global weights.
    Returns `best`, or None if no region has it any more. Raises CheckpointError if regions know of different ones, or a region
    lacks it and no other region's can take its place.
    """
    wrong = None if best is None else damage_here(link, accelerator, best)
    step = 0 if best is None else step_of(best)
    scores = gather(
        link, HeldBest(step, best is not None and wrong is None), "the checkpoint of the best model"
    )
    if len({other.step for other in scores.values()}) > 1:
        steps = ", ".join(str(other.step) for other in scores.values())
        raise CheckpointError(
            f"regions know of different best models so far (of steps {steps}; 0: of none). Set "
            "load_best_model_at_end=False in every region, or resume from an older checkpoint."
        )
    holders = [region for region, other in scores.items() if other.is_good]
    if best is None or not holders:
        if best is not None:
            logger.warning("no region has the best model so far any more (%s: %s).", best, wrong)
        return None
    if len(holders) < len(scores):
        lacking = next(region for region, other in scores.items() if not other.is_good)
        if not may_copy:
            raise CheckpointError(
                f"region {lacking} lacks {best.name}, the best model so far. With eager updates every region has its own global "
                "weights, and the best model is their mean. Restore it, or set load_best_model_at_end=False."
            )
        link.lead(lambda leader: take_over(leader, best, holders, run), "the checkpoint of the best model")
    return best


class Best:
    """Chooses the best model of a Trainer's run with the other regions, and loads it.

    Attributes:
        averages: whether an evaluation while training shows the mean of the regions' own global weights (eager updates).
        ignore_keys: what `trainer.train` leaves out of predictions.
        loaded: the inner step and the metric of the best model, once the model holds it.
    """

    def __init__(self, trainer: Trainer, averages: bool) -> None:
        self._trainer, self.averages = trainer, averages
        self._known: Path | None = None
        self._is_resumed = self._is_due = False
        self._stopped_at: int | None = None
        self._limit: int | None = None
        self.ignore_keys: list[str] | None = None
        self.loaded: tuple[int, float] | None = None

    @property
    def metric(self) -> str | None:
        """See `metric_of`."""
        return metric_of(self._trainer.args)

    def forget(self) -> None:
        """Training starts anew."""
        self._known, self.loaded, self._is_resumed, self._stopped_at = None, None, False, None

    def keep_the_last(self) -> None:
        """With save_total_limit=1 Trainer would now delete all checkpoints but the best, also those of earlier runs."""
        if self._trainer.is_in_train:  # else a script logs the results of a training once more
            self._limit, self._trainer.args.save_total_limit = self._trainer.args.save_total_limit, None

    def end(self) -> None:
        """Training is over, and what `keep_the_last` has prevented."""
        self._trainer.args.save_total_limit = self._limit

    def begin(self, link: Link, start: Start, wrote: Facts, is_newcomer: bool = False) -> None:
        """Find the best checkpoint of a run that goes on from `start`, in all regions. Collective, except for a newcomer.

        A newcomer gets it at the end, when it needs it. Raises CheckpointError if a region lacks it, and cannot get it.
        """
        self._is_resumed, self._stopped_at = True, wrote.step if wrote.stopping else None
        assert start.checkpoint is not None
        best = None
        if self._trainer.args.load_best_model_at_end:
            state = TrainerState.load_from_json(str(start.checkpoint / "trainer_state.json"))
            # its path may be another region's, or of another machine
            step = state.best_global_step
            best = start.checkpoint.parent / f"{PREFIX}{step}" if step else None
        if is_newcomer:
            self._known = best
            return
        # in every region, for it is not known yet whether all of them are to load the best model
        self._known = bring(link, self._trainer.accelerator, best, start.run, may_copy=not self.averages)

    def settle(self) -> None:
        """Once all is loaded: tell Trainer of the best checkpoint so far."""
        state = self._trainer.state
        if not self._is_resumed or not self._trainer.args.load_best_model_at_end:
            return
        state.best_model_checkpoint = None if self._known is None else str(self._known)
        if self._known is None:
            state.best_metric = state.best_global_step = None

    def make_up(self, start: Start) -> None:
        """Make up for a due evaluation that a stopped run has not made. A collective call then."""
        trainer = self._trainer
        state = trainer.state
        stopped_at, self._stopped_at = self._stopped_at, None
        if state.global_step != stopped_at or self.metric is None:
            return
        made = (entry["step"] for entry in state.log_history if self.metric in entry)
        if state.global_step in made or not self._is_due_at(state.global_step):
            return
        metrics = trainer._evaluate(None, self.ignore_keys)
        if trainer._determine_best_metric(metrics, None):
            state.best_model_checkpoint = str(start.checkpoint)  # it may lie in another folder

    def stand_in(self, outer: OuterOptimizer) -> None:
        """While other regions evaluate, and this one only keeps in step: do what they need, and learn what they decide."""
        step = outer.inner_step
        if outer.verdict == "stop" or not self._is_due_at(step):
            return
        if self.averages and not outer.finished:
            with outer.spare("the mean of the global weights"), self.mean_shown(outer):
                pass  # they evaluate the mean of all regions
        if self.metric is None:
            return
        mean = _mean(outer, Score(step, False, False, math.nan), self.metric)
        trainer = self._trainer
        state, control = trainer.state, trainer.control
        if waits_for_metrics(trainer.lr_scheduler) and not outer.finished:
            trainer.lr_scheduler.step(mean)
        own_step, should_save = state.global_step, control.should_save
        state.global_step = step
        trainer._determine_best_metric({self.metric: mean}, None)
        state.global_step, control.should_save = own_step, should_save

    def save(self) -> None:
        """Let the best model so far be saved; there may be no other reason to save at this step."""
        trainer = self._trainer
        state, args = trainer.state, trainer.args
        if args.load_best_model_at_end:
            state.best_global_step = state.global_step
            state.best_model_checkpoint = str(Path(args.output_dir or ".") / f"{PREFIX}{state.global_step}")
            trainer.control.should_save = True

    def _is_due_at(self, step: int) -> bool:
        """Whether Trainer evaluates at an inner step."""
        args, state = self._trainer.args, copy.copy(self._trainer.state)
        if args.eval_strategy == IntervalStrategy.EPOCH:
            loader = self._trainer.callback_handler.train_dataloader
            often = min(epoch_steps(args, len(loader) if has_length(loader) else None), state.max_steps)
            is_end = often > 0 and (step % often == 0 or step >= state.max_steps)
            return is_end and args.eval_delay <= step / often
        state.global_step = step
        return DefaultFlowCallback().on_step_end(args, state, TrainerControl()).should_evaluate

    @contextlib.contextmanager
    def mean_shown(self, outer: OuterOptimizer) -> Iterator[None]:
        """Inside the block the model holds the global weights: the regions' mean, if they have their own (eager updates).

        A collective call then. Raises LinkError if the other regions do not evaluate at this step.
        """
        with contextlib.ExitStack() as block:
            try:
                block.enter_context(outer.global_weights())
            except LinkError as error:
                if type(error) is not LinkError or not self.averages:
                    raise
                raise LinkError(
                    f"region {outer.link.region} evaluates at step {outer.inner_step} with eager updates: this shows the mean of "
                    "all regions' weights, so every region must evaluate at this step. Let all do so, or set evaluate_on=local "
                    f"(evaluation.on). {error}"
                ) from error
            yield

    @contextlib.contextmanager
    def deciding(self, outer: OuterOptimizer | None) -> Iterator[None]:
        """Around an evaluation by which Trainer decides."""
        self._is_due = outer is not None and self.metric is not None
        try:
            yield
            if self._is_due and outer is not None:
                self.share(outer, {}, is_last=True)
        except Exception as error:
            if self._is_due and outer is not None and keeps_in_step(self._trainer, error):
                # the others wait for this region's metric, and hear of the error only after that
                with contextlib.suppress(LinkError):
                    own = Score(self._trainer.state.global_step, False, False, math.nan)
                    mean_score(outer.link, own, f"{self.metric}")
            raise
        finally:
            self._is_due = False

    def share(self, outer: OuterOptimizer, metrics: dict[str, float], is_last: bool = False) -> None:
        """Replace this region's metric with the mean over the regions. A collective call, once for an evaluation.

        `metrics` may be from one of several data sets (`is_last`: no more will come), and is changed in place. Raises
        InputError if an evaluation has not given the metric, LinkError if regions evaluate at different inner steps.
        """
        name = self.metric
        if not self._is_due or name is None or (name not in metrics and not is_last):
            return
        self._is_due = False
        own = Score(
            self._trainer.state.global_step, True, name in metrics, float(metrics.get(name, math.nan))
        )
        mean = _mean(outer, own, name)
        if name in metrics:
            metrics[name] = mean

    def load(self, outer: OuterOptimizer) -> None:
        """At the end, load the best checkpoint's global weights. A collective call. Raises CheckpointError if it is lost."""
        best = Path(self._trainer.state.best_model_checkpoint or "")
        run = run_of(best.parent)
        checkpoint = bring(outer.link, self._trainer.accelerator, best, run, may_copy=not self.averages)
        if checkpoint is None:
            raise CheckpointError(
                f"the best model is gone: no region has {best} any more. The model holds the last one."
            )
        model = self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)
        lane = self._trainer.accelerator.process_index if self._trainer.is_fsdp_enabled else 0
        restore_buffers(model, best, lane)  # and all else that is not trained
        outer.synchronizer.show_saved(read_own(outer.link, best).state)
        state, step = self._trainer.state, step_of(best)
        self.loaded = step, float(state.best_metric)
        logger.info(
            "the model holds the best global weights: of step %d, with %s=%.6g (the mean over the regions).",
            *(step, self.metric, state.best_metric),
        )
        outer.training.journal.write("best", step=step, metric=self.metric, value=self.loaded[1])


def _mean(outer: OuterOptimizer, own: Score, name: str) -> float:
    """The mean of a metric over the regions; this region's own if the others have gone on without it."""
    mean = own.value
    with outer.spare(f"the mean of {name}"):
        mean = mean_score(outer.link, own, name)
    return mean
