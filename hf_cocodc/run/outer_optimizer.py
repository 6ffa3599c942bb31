"""The outer optimizer: trains one model across regions from an ordinary Accelerate loop."""

import contextlib
import dataclasses
import math
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from ..coordinator.messages import Bye
from ..engine.replicas import Engine
from ..errors import (
    InputError,
    LeftBehind,
    LinkError,
    RegionLostError,
    RunFinished,
    RunLeft,
    RunStopped,
    spare_traceback,
)
from ..link.base import Link
from ..link.lockstep import LockstepLink
from ..link.records import Ending
from ..parts.tensors.memory import is_capturing
from ..resolve import from_config
from ..settings import OuterConfig, RegionConfig
from ..settings.fields import converted
from ..settings.given import settings_of
from ..snapshot.checkpoint import Saved
from .about import About, of_loop
from .absences import Absences
from .connect import meet
from .elastic import Elastic
from .endings import loss_in_words
from .giving import Giving
from .inner_optimizer import InnerOptimizer, Tokens
from .loop import Loop, PlainLoop
from .resuming import Loaded, start_point
from .saving import hook_into_saving, seal, write
from .supported import claim, length_of, refuse_second, refuse_unsupported
from .training import Training, ruined_at_the_end


class OuterOptimizer:
    """Trains one model across regions from an ordinary Accelerate loop.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with OuterOptimizer(accelerator, model, optimizer, OuterConfig(sync_interval=100)) as outer:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    outer.step()
                if outer.should_stop:       # another region has reached its end, or was interrupted
                    break
        # without an exception, finish() has been called here: the model holds the global weights

    `accelerator.save_state(folder)` saves the outer optimizer too, and `accelerator.load_state(folder)` loads it, transfers in
    flight included (`loaded`: before it is made); `outer.inner_step` says where the loop must continue. Regions
    save and load at the same inner step, each in its own folder: a second region of the run that saves into a folder is
    refused.

    Args:
        accelerator: of this region; its processes are the region's ranks.
        model: as `accelerator.prepare` returned it.
        optimizer: the inner optimizer, as `accelerator.prepare` returned it, or a list of several; its learning rate is read.
            It need not be PyTorch's, but it has `param_groups`. It keeps one set of weights: schedule-free ones are refused.
        config: the method and its settings, or the name of a method.
        regions: which region this is; by default the environment says so.
        max_steps: inner steps of the run, if known; regions must agree on it. `should_stop` is True after so many, and another
            `step` is refused.
        journal: file for one JSON line per event; none by default.
        link: reaches the other regions, which compare over it what they are; by default it is made from `regions`.
        saved: our part of a checkpoint, to start from; the model must hold the weights that were saved with it.
        loaded: the folder that `accelerator.load_state` has loaded before; the run goes on from there. False if model and
            optimizer were trained before, and a new run begins with them: without this, they are refused.
        about: the rest of the training, compared between regions and at a resume; by default what model and optimizer show,
            which is nothing of the data.
        stage: (index, number of stages) if every rank of the region holds its own pipeline stage. `model` is then that stage,
            not prepared by Accelerate, and exchanges only with the same stage of the other regions (DiLoCoX's dual optimizer,
            2506.21263). See below.
        loop: what makes the inner steps; by default a loop of your own, whose regions agree here on what they begin from:
            `saved`, or what is `loaded`. Trainer's says what they have agreed on before, and begins from `saved` or step 0.

    The learning rate is read when `step` is called: call `optimizer.step()`, `outer.step()`, `scheduler.step()` in this order,
    or `outer.note_lr()` before a schedule that steps earlier.

    The constructor is a collective call: it waits for all regions, compares their settings, and starts them from region 0's
    parameters.

    With `stage`, each stage has its own measured times, low rank and rounds: stages of a region may send and land at different
    inner steps. They would also hear of another region's early end at different steps, and the first to leave would keep the
    others waiting for activations. Therefore give `max_steps`, and make all these steps in every region. An error in one stage
    ends every region. A stage that does not count for several rounds begins anew alone (`outer.on_nonfinite`); what came to it
    from broken stages breaks it too, and each of them begins anew in its turn.

    Raises:
        InputError: settings, an optimizer or a model that cannot work; or another outer optimizer trains the model.
        HandshakeError: regions disagree.
        CheckpointError: `saved`, or what is `loaded`, is damaged, of another run, or of another step than the
            other regions' checkpoints; or the model holds other weights.
        LinkError: the coordinator or a region cannot be reached in time.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        config: OuterConfig | str,
        regions: RegionConfig | None = None,
        *,
        max_steps: int | None = None,
        journal: str | Path | None = None,
        link: Link | None = None,
        saved: Saved | None = None,
        loaded: Loaded = None,
        about: About | None = None,
        stage: tuple[int, int] | None = None,
        loop: Loop | None = None,
    ) -> None:
        self._plain: PlainLoop | None = None
        config, regions = settings_of("OuterOptimizer", config, regions)
        for name, value, kind in (
            ("accelerator", accelerator, Accelerator),
            ("model", model, nn.Module),
            ("link", link, Link | None),
        ):
            converted(value, kind, f"OuterOptimizer: {name}")
        stage = converted(stage, tuple[int, int] | None, "OuterOptimizer: stage")
        max_steps = length_of(max_steps)
        method = from_config(config)  # a mistake in the settings comes before everything else
        bare = accelerator.unwrap_model(model, keep_torch_compile=False)
        refuse_unsupported(accelerator, config, bare, has_stages=stage is not None)
        if stage is not None and regions.rule_of_batch is not None:
            raise InputError(
                "regions.balance=auto and regions.shards=dealt are not supported with pipeline stages: stages of a region land "
                "at different steps, and must have the same micro-batches. Remove both."
            )
        refuse_second(bare)
        inner = InnerOptimizer(
            optimizer, bare, reads_lr=method.reads_lr, begins_anew=config.on_nonfinite == "restart"
        )
        if loop is None:
            loop = self._plain = PlainLoop(accelerator, regions.shards == "dealt")
        about = about or of_loop(accelerator, bare, optimizer)
        if self._plain is not None:
            about = dataclasses.replace(about, facts={**self._plain.facts, **about.facts})
        is_own_link = link is None
        if link is None or self._plain is not None:  # Trainer's regions have met
            link = meet(link, accelerator, bare, config, regions, max_steps, stage=stage, about=about)
        self.training = Training(
            link=link,
            accelerator=accelerator,
            model=bare,
            inner=inner,
            tokens=Tokens(accelerator, config.weights == "tokens", alike=stage is not None),
            about=about,
            loop=loop,
            config=config,
            allowed=regions.allowed,
            max_steps=max_steps,
            rule_of_batch=regions.rule_of_batch,
            is_dealt=regions.shards == "dealt",
            has_stages=stage is not None,
        )
        self.elastic: Elastic | Absences | None = None
        self._undo: list[Callable[[], object]] = []
        self._has_read_verdict = self._shows_own = False
        path = Path(journal) if journal is not None and accelerator.is_main_process else None
        self._place = "" if path is None else f"{platform.node()}:{path.absolute().parent.parent}"
        try:
            start = start_point(link, accelerator, bare, inner, saved, loaded, journal, loop.started)
            self.training.begin(start, path, regions.when_one_ends)
            self._hook()
            if isinstance(link, LockstepLink) and link.is_elastic:
                self.elastic = Absences(self.training, link, regions)
            elif link.is_elastic:
                self.elastic = Elastic(
                    self.training, regions.resolved(), start.bases, self.coast_one, self.end
                )
            if self.elastic is not None:
                self._undo.append(self.elastic.close)
            home = None if journal is None else Path(journal).absolute().parent
            self._giving = Giving(self.training, self.own_global_weights, home, self._place)
            self._undo += [self._giving.close, self.training.progress.close]
            if loop.started is None or not start.is_new:
                self.begin(start.is_new)
        except BaseException as error:
            self._undo_all()
            if isinstance(error, RunFinished):
                spare_traceback()
            if is_own_link:
                link.close(f"{type(error).__name__}: {error}")
            raise

    def begin(self, is_new: bool) -> None:
        """Take part in the run; the constructor does it, but for a newcomer of Trainer, whose loop is not ready before."""
        if self.elastic is not None:
            self.elastic.begin(is_new)
        self.training.progress.begin()

    def _hook(self) -> None:
        """Hear of what else happens to the model, the inner optimizer and the accelerator."""
        training = self.training
        self._undo += [claim(training.model), training.inner.note_clipping(training.accelerator)]
        self._undo += hook_into_saving(training, self.spare)
        if training.link.agreement is not None:
            training.link.agreement.start(training.inner_step)
            self._undo.append(training.link.agreement.close)
        if training.loop.started is None:  # Trainer's callback forgets no call of `step`
            self._undo.append(training.inner.watch_steps())

    @property
    def synchronizer(self) -> Engine:
        """The engine: global params, outer state, and what is in flight."""
        return self.training.engine

    @property
    def link(self) -> Link:
        return self.training.link

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting of the method, defaults filled in."""
        return self.training.settings

    @property
    def finished(self) -> bool:
        """Whether the run has ended, and the model holds the global weights."""
        return self.training.finished

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the regions that take part now, as far as this one knows."""
        return self.training.link.members

    @property
    def inner_step(self) -> int:
        """Inner steps made so far."""
        return self.training.inner_step

    @property
    def micro_batches(self) -> int:
        """Micro-batches of this region's next inner step (each rank makes so many); they change only in `step`, with
        `regions.balance=auto`. A loop with `accelerator.accumulate` follows by itself.
        """
        return self.training.micro_batches

    def batches(self, loader: Any) -> Iterator[Any]:
        """This region's micro-batches from the next inner step on, until `should_stop`: iterate over them instead of `loader`.

        They go on from pass to pass over the data. Which samples an inner step has follows from its number and from the deals of
        the regions alone, so a resumed loop goes on exactly where it was, also with `regions.balance=auto`. With
        `regions.shards=dealt` the loader has all of the data, and each sample goes to one region in each pass; else it has this
        region's part (`region_shard`). If it shuffles, each pass has an order of its own, equal in all regions.

        Args:
            loader: the first dataloader that `accelerator.prepare` has returned, over map-style data; its sampler is replaced.

        Raises:
            InputError: it is another one, its data are a stream, or a sampler of your own chooses the samples.
        """
        if self._plain is None:
            raise InputError("outer.batches is for a loop of your own: this Trainer reads what it is dealt.")
        batches = self._plain.batches(loader, lambda: (self.synchronizer.portion, self.inner_step + 1))

        def read() -> Iterator[Any]:
            try:
                while not self.should_stop:
                    yield next(batches)
            finally:
                batches.close()

        return read()

    @property
    def verdict(self) -> str | None:
        """What the regions have agreed to do before max_steps: "finish" or "stop"; None to train on.

        "leave": this region alone has left, and the others train on. A script that has read "stop" or "leave" ends as it
        chooses; in any other, `finish` raises RunStopped.
        """
        verdict = self.training.endings.verdict
        self._has_read_verdict = self._has_read_verdict or verdict is not None
        return verdict

    @property
    def why(self) -> str:
        """The reason for the verdict, in words."""
        return self.training.endings.why

    @property
    def should_stop(self) -> bool:
        """Whether the run has ended here, or all `max_steps` are made: leave the loop.

        With `verdict` "finish" the model holds the global weights; with "stop" call `accelerator.save_state` before you
        leave, and resume later. So does a region that ends because another one is lost: `finish` then raises RegionLostError.
        """
        return self.training.is_over

    def note_loss(self, loss: float) -> None:
        """Tell the others this region's training loss with the next transfers."""
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        self.training.endings.tell(
            loss=math.inf if math.isnan(value) else value
        )  # NaN says that it is unknown

    def say(self, ending: Ending) -> None:
        """Tell the others with the next transfer that this region is about to end; train on until `should_stop`."""
        self.training.endings.tell(ending=ending)

    def ask_to_stop(self, reason: str) -> None:
        """Ask all regions to stop with a checkpoint; train on until `should_stop`, which takes about a second.

        Regions agree on the step through the coordinator. One rank of one region is enough, and a signal's handler may call this.
        """
        self.training.endings.ask_to_stop(reason)

    def leave(self, reason: str) -> None:
        """After an error: tell the others why, and `coast`. Steps since the last sends are lost: they may be incomplete.

        The others save the transfers that are in flight then; this region takes part in them to their end.
        """
        self.training.engine.give_up_unsent()
        self.ask_to_stop(reason)
        engine = self.training.engine
        try:
            self.coast()
        except Exception:  # an interrupt leaves at once
            with contextlib.suppress(LinkError):
                engine.wait_for_transfers()
            raise
        engine.wait_for_transfers()

    def coast(self, end: Callable[[], None] = lambda: None) -> None:
        """Keep step with the others without training, until they have heard of it and all `end` together."""
        while not self.should_stop and not self.training.is_at_the_end:
            self._advance(trained=False)
            if self.training.is_at_the_end:
                end()
            self.training.loop.stand_in()

    def finish(self) -> None:
        """End the run: the model holds the global weights afterwards. A collective call; calling it again does nothing.

        Regions may come here after different numbers of inner steps: an early one coasts until the others have heard of
        it. After a `verdict` to stop or leave nothing is exchanged and the model keeps its local weights.

        Raises:
            RegionLostError: a region is lost, and that has ended the run (`regions.on_loss`).
            RunStopped: the regions have stopped, or this one has left (RunLeft), and the script knows nothing of it: it has
                saved no checkpoint of this step, and has not read `verdict`. It would go on as if the run were complete.
        """
        self.end()
        self.raise_loss()
        self._refuse_unnoticed()

    def raise_loss(self) -> None:
        """Leave in good order, and raise RegionLostError, if the loss of a region has ended the run."""
        endings, step = self.training.endings, self.inner_step
        if endings.lost is None:
            return
        self.close()
        error = RegionLostError(endings.lost, loss_in_words(step, endings.why, endings.word.saved_at == step))
        self.training.journal.write_error(step, error)
        raise error

    def end(self) -> None:
        """`finish` for a caller that looks at `finished` and `verdict` afterwards: raises no RunStopped."""
        if not self.finished:
            self.training.inner.refuse_uncounted(self.inner_step)
            self.training.inner.copies.refuse()
        if not self.finished and not self.training.is_at_the_end:
            self.say(Ending.DONE)
            self.coast(self._finish)
        self._finish()

    def _refuse_unnoticed(self) -> None:
        step, region = self.inner_step, self.link.region
        if self.finished or self._has_read_verdict or 0 < self.training.endings.word.saved_at == step:
            return
        if self.training.endings.verdict == "leave":
            raise RunLeft(
                f"region {region} has left the run at step {step}: {self.why}. The others train on with what it has trained; its "
                "model is not the run's. A script that reads outer.verdict may end in another way."
            )
        raise RunStopped(
            f"all regions stopped at step {step}: {self.why}. Region {region} has saved no checkpoint of this step, so what it "
            "has trained since its last one is lost. When outer.should_stop is True, look at outer.verdict: if it is stop, call "
            "accelerator.save_state(folder) inside the with block, and resume from there later."
        )

    def _finish(self) -> None:
        training = self.training
        while not training.finished and training.endings.verdict not in ("stop", "leave"):
            try:
                words = training.engine.finish(training.endings.word)
            except LeftBehind as error:
                if self.elastic is None:
                    raise
                self._go_on_to_the_end(error)
                continue
            training.endings.note_saved_everywhere(words)
            if training.stop_if_lost(words):
                continue
            if ruined := ruined_at_the_end(training.engine, training.config):
                training.endings.stop(ruined)
                continue
            training.finished = True
            if not training.loop.keeps_link:
                self.close()

    def _go_on_to_the_end(self, error: LeftBehind) -> None:
        """Come back after the others have gone on without this region, which had come to its end, and keep step with them to
        theirs. Raises LinkError if they have ended, too.
        """
        assert self.elastic is not None
        step = self.inner_step
        try:
            self.elastic.come_back(error)
        except LinkError as gone:
            raise LinkError(
                f"region {self.link.region} came to its end at step {step}, but the other regions had gone on without it, and it "
                f"cannot come back ({gone}). Its model lacks what they exchanged last: take the model from the folder of another "
                "region, which has the global weights. If they have not ended either, start this region again with the same "
                "command: it joins them."
            ) from gone
        self.coast()

    def spare(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around what a region can do without, if the others have gone on without it; see `Elastic.spare`."""
        return contextlib.nullcontext() if self.elastic is None else self.elastic.spare(what)

    def coast_one(self) -> None:
        """Make an inner step without training."""
        self._advance(trained=False)
        self.training.loop.stand_in()

    def _advance(self, inner_lr: float = 0.0, trained: bool = True) -> None:
        """Count an inner step, and end if the regions have agreed to."""
        if self.elastic is None:
            self.training.step(inner_lr, trained)
        else:
            self.elastic.guard(lambda: self.training.step(inner_lr, trained))
        if self.training.endings.verdict == "finish":
            self._finish()

    @property
    def report(self) -> dict[str, float]:
        """Figures at the last landing: rounds, staleness, seconds blocked, bytes sent (`Totals`), mean loss of the regions."""
        return self.training.engine.report

    def step(self, loss: float | None = None, tokens: int | Tensor | None = None) -> None:
        """Call after every `optimizer.step()`; does nothing on micro-batches that only accumulate. A second step of PyTorch's
        optimizers without this call raises InputError.

        The learning rate is read here: step a schedule after this call, or call `note_lr` before. Of groups with different
        rates counts the mean, weighted by the number of values that they train, without groups whose rate is 0. Only CO2 and
        `compensation=lr_normalized` compute with it.

        A step that a gradient scaler skipped counts, as in Trainer's `global_step`: scalers of different regions skip
        at different times, and regions that count differently would wait for each other for ever.

        Where a CUDA graph holds the optimizer's step, call it after every `graph.replay()`: nobody counts the steps of replays.

        Args:
            loss: this region's training loss, for the mean over regions in `report`.
            tokens: of this rank's micro-batch; needed at every call with `weights=tokens`, otherwise not used.
        """
        if self.should_stop:
            self.raise_loss()
            length = f" (max_steps={self.training.max_steps})" if self.training.is_all_made else ""
            raise InputError(
                f"step() after the run has ended at step {self.inner_step}{length}. Leave the loop when outer.should_stop is "
                "True; make a new OuterOptimizer to train on."
            )
        if is_capturing():
            raise InputError(
                "step() while a CUDA graph is captured: it would run now, and in no replay. Call outer.step() after each "
                "graph.replay(), outside `with torch.cuda.graph(...)`."
            )
        if tokens is not None:
            self.training.tokens.note(tokens)
        self.training.inner.count()
        self.training.loop.refuse_undealt(self.training.rule_of_batch, self.micro_batches)
        if not self.training.accelerator.sync_gradients:
            return
        if loss is not None:
            self.note_loss(loss)
        self._advance(self.training.inner.take_lr())
        if not self.should_stop:
            self._giving.after_step()
        self.training.journal.check()

    def note_lr(self) -> None:
        """Read the learning rate now, for the inner step that has just been made; without this call `step` reads it.

        Only needed if the learning rate schedule is stepped before `step`.
        """
        self.training.inner.note_lr()

    def _undo_all(self) -> None:
        while self._undo:
            self._undo.pop(0)()

    def close(self, reason: str | None = None) -> None:
        """Leave the other regions without finishing, and tell them the `reason`. Calling it again does nothing."""
        if not self._undo:
            return
        self._undo_all()
        if self.training.endings.verdict in ("stop", "leave"):
            spare_traceback()
        if self.training.lane is not None:
            verdict = str(self.training.endings.verdict)
            how = "finished" if self.finished else {"stop": "stopped", "leave": "left"}.get(verdict, "failed")
            self.training.lane.end(Bye(how=how, step=self.inner_step, place=self._place))
        self.link.close(reason)
        if self.training.loop.started is None:  # Trainer saves its last checkpoint after this
            self.training.progress.summarize()

    def save(self, checkpoint: str | Path, *, weights: bool = False) -> None:
        """Write the outer optimizer's state into a checkpoint's folder; `seal` it when everything else is there.

        A collective call of this region's ranks; saving changes no number and asks nothing of other regions.

        Args:
            checkpoint: its folder.
            weights: whether to write the local weights, too. Else save the model's parameters yourself, as
                `accelerator.save_state` does; a digest of them is written in both cases.

        Raises:
            CheckpointError: the disk refuses.
            LeftBehind: the others have gone on without this region; nothing is written, and the next `step` comes back.
        """
        write(self.training, Path(checkpoint), weights)

    def seal(self, checkpoint: str | Path) -> None:
        """Declare a checkpoint complete, once every rank of the region has written its part."""
        seal(self.training, Path(checkpoint))

    def global_weights(self) -> contextlib.AbstractContextManager[None]:
        """The model holds the global weights inside the block; see `Synchronizer.global_weights`. A collective call.

        At the end of a run it holds them already: the block changes nothing then.
        """
        return contextlib.nullcontext() if self.finished else self.training.engine.global_weights()

    def own_global_weights(self, everywhere: bool = True) -> contextlib.AbstractContextManager[None]:
        """The same without asking the other regions: with eager updates each region has its own global weights.

        A collective call of the region's ranks. If not `everywhere`, DDP ranks do not ask each other either: only rank 0 shows
        the global weights, which is enough to save them. Inside itself, the block changes nothing.
        """
        if self.finished or self._shows_own:
            return contextlib.nullcontext()
        return self._own_shown(everywhere)

    @contextlib.contextmanager
    def _own_shown(self, everywhere: bool) -> Iterator[None]:
        self._shows_own = True
        try:
            with self.training.engine.global_weights(averaged=False, everywhere=everywhere):
                yield
        finally:
            self._shows_own = False

    def __enter__(self) -> "OuterOptimizer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self.finish()
            except BaseException as failure:
                self.close(f"{type(failure).__name__} at step {self.inner_step}: {failure}")
                raise
            self.close()  # after a verdict to stop, the link is still open
            # a script must not save a ruined model, and end as if it were well
            if self.training.endings.is_hopeless:
                raise RunStopped(self.why)
        else:  # never communicate after an exception: the others may not come
            if issubclass(kind, RunStopped | RunFinished):
                spare_traceback()
            self.close(f"{kind.__name__} at step {self.inner_step}: {error}")
