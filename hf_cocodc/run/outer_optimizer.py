"""The outer optimizer: trains one model across regions from an ordinary Accelerate loop."""

import contextlib
import logging
import math
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from ..coordinator.messages import Bye
from ..engine.replicas import Engine
from ..errors import InputError, LeftBehind, LinkError, RunLeft, RunStopped, spare_traceback
from ..link.base import Link
from ..link.records import Ending, Words
from ..methods import Method
from ..resolve import as_config, continuing, from_config, settings
from ..settings import OuterConfig, RegionConfig
from ..snapshot.checkpoint import Saved
from ..snapshot.donor import Inner
from .about import About, of_loop
from .connect import begin_over, meet
from .elastic import Elastic
from .endings import Endings
from .fresh_start import recover, ruined_at_the_end
from .inner_optimizer import InnerOptimizer, Tokens
from .journal import Journal
from .newcomer import advance, inner_of
from .resuming import Loaded, StartPoint, check, config_of, in_all, start_point
from .saving import facts_of, hook_into_saving, seal, write
from .session import session_of
from .starting import engine_for, note_start, record_of, run_of
from .supported import claim, length_of, refuse_second, refuse_unsupported

logger = logging.getLogger(__name__)


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
        config: the method and its settings; or a `Method` with a name, for a method of your own.
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
        has_agreed: whether the regions have agreed on what they begin from, `saved` or step 0, as Trainer's callback does. Else
            they do so here; without `saved` it is what is `loaded`.

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
        config: OuterConfig | Method,
        regions: RegionConfig | None = None,
        *,
        max_steps: int | None = None,
        journal: str | Path | None = None,
        link: Link | None = None,
        saved: Saved | None = None,
        loaded: Loaded = None,
        about: About | None = None,
        stage: tuple[int, int] | None = None,
        has_agreed: bool = False,
    ) -> None:
        asked, regions = as_config(config), regions or RegionConfig()
        max_steps = length_of(max_steps)
        method = from_config(asked)  # a mistake in the settings comes before everything else
        bare = accelerator.unwrap_model(model, keep_torch_compile=False)
        refuse_unsupported(accelerator, asked, bare, has_stages=stage is not None)
        refuse_second(bare)
        inner = InnerOptimizer(
            optimizer, bare, reads_lr=method.reads_lr, begins_anew=asked.on_nonfinite == "restart"
        )
        self.about = about or of_loop(accelerator, bare, optimizer)
        self.tokens = Tokens(accelerator, asked.weights == "tokens", alike=stage is not None)
        self._undo: list[Callable[[], object]] = []
        # meet. "auto" is compared as such: what it means in a run that is continued, its checkpoints say
        is_own_link = link is None
        link = meet(link, accelerator, bare, asked, regions, max_steps, stage=stage, about=self.about)
        begin_over(link)
        self.link, self.model = link, bare
        self._accelerator, self._inner, self._asked, self._max_steps = accelerator, inner, asked, max_steps
        self._allowed, self._has_stages = regions.allowed, stage is not None
        try:
            start = start_point(link, accelerator, bare, inner, saved, loaded, journal, agreed=has_agreed)
            self._agree(start)
            self._begin(start, regions, journal)
            if not has_agreed:  # Trainer's callback forgets no call of `step`
                self._undo.append(self._inner.watch_steps())
        except BaseException as error:
            self._undo_all()
            if is_own_link:
                link.close(f"{type(error).__name__}: {error}")
            raise

    def _agree(self, start: StartPoint) -> None:
        """Fix the run's settings, with values in place of "auto", and check that it may go on from there. A collective call."""
        self.started = start.started
        self._config = config_of(self.link, self._accelerator, self._asked, start.saved, self._max_steps)
        self.settings = settings(self._config)
        """Every setting of the method, defaults filled in."""
        self._inner.warn_unless_fitting(str(self.settings["method"]))
        if start.saved is not None:
            self._check(start.saved, self.settings, start.is_new)

    def _begin(self, start: StartPoint, regions: RegionConfig, journal: str | Path | None) -> None:
        """Make what trains, and hook into what saves; catch up with a run that trains already. A collective call."""
        link, accelerator, saved = self.link, self._accelerator, start.saved
        path = Path(journal) if journal is not None and accelerator.is_main_process else None
        self._place = "" if path is None else f"{platform.node()}:{path.absolute().parent.parent}"
        self.journal = Journal(path, record_of(saved, path, run_of(link)), link.clock)
        self.endings = Endings(link, regions.when_one_ends, self._max_steps)
        self.finished = False
        self._has_read_verdict = False
        self.synchronizer = self._engine(saved)
        if saved is not None:
            self.endings.continue_from(self.inner_step)
            if saved.facts.taken_over:
                self.synchronizer.take_over()
        self._note_start(saved)
        self._undo += [claim(self.model), self._inner.note_clipping(accelerator)]
        self._undo += hook_into_saving(accelerator, self, self._inner)
        if link.agreement is not None:
            link.agreement.start(self.inner_step)
            self._undo.append(link.agreement.close)
        self.inner: Callable[[], Inner] = partial(inner_of, accelerator)
        """Returns the rest of the training, for newcomers."""
        self.has_jumped: Callable[[int, int], object] = partial(advance, accelerator, is_new=False)
        """Called with the inner step before and after, where steps were made without training."""
        self.takes_over: Callable[[Path], object] = lambda base: None
        """Called with the folder of a base from which this region goes on in the same process."""
        self.elastic: Elastic | None = None
        session = session_of(link)
        if session is not None:
            session.link.beat = replace(session.link.beat, max_steps=self._max_steps or 0)
        if link.is_elastic:
            self.elastic = Elastic(self, accelerator, session, regions.resolved(), start.bases)
            self._undo.append(self.elastic.close)
            if start.follows:
                self.elastic.begin(partial(advance, accelerator, is_new=True))
            elif not start.is_new:
                self.elastic.begin()

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the regions that take part now, as far as this one knows."""
        return self.link.members

    @property
    def inner_step(self) -> int:
        """Inner steps made so far."""
        return self.synchronizer.inner_step

    @property
    def verdict(self) -> str | None:
        """What the regions have agreed to do before max_steps: "finish" or "stop"; None to train on.

        "leave": this region alone has left, and the others train on. A script that has read "stop" or "leave" ends as it
        chooses; in any other, `finish` raises RunStopped.
        """
        self._has_read_verdict = self._has_read_verdict or self.endings.verdict is not None
        return self.endings.verdict

    @property
    def why(self) -> str:
        """The reason for the verdict, in words."""
        return self.endings.why

    @property
    def should_stop(self) -> bool:
        """Whether the run has ended here, or all `max_steps` are made: leave the loop.

        With `verdict` "finish" the model holds the global weights; with "stop" call `accelerator.save_state` before you
        leave, and resume later.
        """
        return self.finished or self._is_all_made or self.endings.verdict is not None

    @property
    def _is_all_made(self) -> bool:
        return self._max_steps is not None and self.inner_step >= self._max_steps

    def note_loss(self, loss: float) -> None:
        """Tell the others this region's training loss with the next transfers."""
        value = float(loss)
        self.endings.tell(loss=math.inf if math.isnan(value) else value)  # NaN says that it is unknown

    def say(self, ending: Ending) -> None:
        """Tell the others with the next transfer that this region is about to end; train on until `should_stop`."""
        self.endings.tell(ending=ending)

    def ask_to_stop(self, reason: str) -> None:
        """Ask all regions to stop with a checkpoint; train on until `should_stop`, which takes about a second.

        Regions agree on the step through the coordinator. One rank of one region is enough, and a signal's handler may call this.
        """
        self.endings.ask_to_stop(reason)

    def leave(self, reason: str) -> None:
        """After an error: tell the others why, and `coast`. Steps since the last sends are lost: they may be incomplete.

        The others save the transfers that are in flight then; this region takes part in them to their end.
        """
        self.synchronizer.give_up_unsent()
        self.ask_to_stop(reason)
        self.coast()
        self.synchronizer.wait_for_transfers()

    def coast(self, end: Callable[[], None] = lambda: None) -> None:
        """Keep step with the others without training, until they have heard of it and all `end` together."""
        while not self.should_stop and not self.is_at_the_end:
            self._advance(trained=False)
            if self.is_at_the_end:
                end()
            self.endings.while_coasting()

    def finish(self) -> None:
        """End the run: the model holds the global weights afterwards. A collective call; calling it again does nothing.

        Regions may come here after different numbers of inner steps: an early one coasts until the others have heard of
        it. After a `verdict` to stop or leave nothing is exchanged and the model keeps its local weights.

        Raises:
            RunStopped: the regions have stopped, or this one has left (RunLeft), and the script knows nothing of it: it has
                saved no checkpoint of this step, and has not read `verdict`. It would go on as if the run were complete.
        """
        self.end()
        self._refuse_unnoticed()

    def end(self) -> None:
        """`finish` for a caller that looks at `finished` and `verdict` afterwards: raises no RunStopped."""
        if not self.finished:
            self._inner.refuse_uncounted()
            self._inner.copies.refuse()
        if not self.finished and not self.is_at_the_end:
            self.say(Ending.DONE)
            self.coast(self._finish)
        self._finish()

    def _refuse_unnoticed(self) -> None:
        step, region = self.inner_step, self.link.region
        if self.finished or self._has_read_verdict or 0 < self.endings.word.saved_at == step:
            return
        if self.endings.verdict == "leave":
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
        while not self.finished and self.endings.verdict not in ("stop", "leave"):
            try:
                words = self.synchronizer.finish(self.endings.word)
            except LeftBehind as error:
                self._go_on_to_the_end(error)
                continue
            self.endings.note_saved_everywhere(words)
            if ruined := self._ruined_at_the_end():
                self.endings.stop(ruined)
                continue
            self.finished = True
            if not self.endings.keep_link:
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

    @property
    def is_at_the_end(self) -> bool:
        """Whether every region is known to end at this step, so that the last round can take place."""
        is_alone = self.link.num_regions == 1 and not self.link.is_elastic  # else others may come
        return self._is_all_made or is_alone or self.endings.verdict is not None

    def coast_one(self, alone: bool = False) -> None:
        """Make an inner step without training; `alone`: without what comes after it in an elastic run."""
        if alone:
            self._step(trained=False)
        else:
            self._advance(trained=False)
        self.endings.while_coasting()

    def _advance(self, inner_lr: float = 0.0, trained: bool = True) -> None:
        """Count an inner step, and end if the regions have agreed to."""
        if self.elastic is None:
            self._step(inner_lr, trained)
        else:
            self.elastic.guard(lambda: self._step(inner_lr, trained))
        if self.endings.verdict == "finish":
            self._finish()

    @property
    def report(self) -> dict[str, float]:
        """Figures at the last landing: rounds, staleness, seconds blocked, bytes sent (`Totals`), mean loss of the regions."""
        return self.synchronizer.report

    def step(self, loss: float | None = None, tokens: int | Tensor | None = None) -> None:
        """Call after every `optimizer.step()`; does nothing on micro-batches that only accumulate. A second step of PyTorch's
        optimizers without this call raises InputError.

        The learning rate is read here: step a schedule after this call, or call `note_lr` before. Of groups with different
        rates counts the mean, weighted by the number of values that they train, without groups whose rate is 0. Only CO2 and
        `compensation=lr_normalized` compute with it.

        A step that a gradient scaler skipped counts, as in Trainer's `global_step`: scalers of different regions skip
        at different times, and regions that count differently would wait for each other for ever.

        Args:
            loss: this region's training loss, for the mean over regions in `report`.
            tokens: of this rank's micro-batch; needed at every call with `weights=tokens`, otherwise not used.
        """
        if self.should_stop:
            length = f" (max_steps={self._max_steps})" if self._is_all_made else ""
            raise InputError(
                f"step() after the run has ended at step {self.inner_step}{length}. Leave the loop when outer.should_stop is "
                "True; make a new OuterOptimizer to train on."
            )
        if tokens is not None:
            self.tokens.note(tokens)
        self._inner.count()
        if not self._accelerator.sync_gradients:
            return
        if loss is not None:
            self.note_loss(loss)
        self._advance(self._inner.take_lr())
        self.journal.check()

    def note_lr(self) -> None:
        """Read the learning rate now, for the inner step that has just been made; without this call `step` reads it.

        Only needed if the learning rate schedule is stepped before `step`.
        """
        self._inner.note_lr()

    def _step(self, inner_lr: float = 0.0, trained: bool = True) -> Words | None:
        """Count an inner step, and hold its events."""
        self.endings.before_step()
        tokens = self.tokens.take() if trained else None
        if trained:
            self._inner.copies.look()
        words = self.synchronizer.step(inner_lr, self.endings.word, trained=trained, tokens=tokens)
        if words is not None:
            self._inner.copies.landed()
        parts = self.synchronizer, self._inner, self._config, self.endings, self.journal
        recover(*parts, has_landed=words is not None, has_stages=self._has_stages)
        self.endings.after_step(self.inner_step, words)
        return words

    def _ruined_at_the_end(self) -> str:
        """Why the run must not end as if it were well; empty if it may."""
        return ruined_at_the_end(self.synchronizer, self._config)

    def _undo_all(self) -> None:
        while self._undo:
            self._undo.pop(0)()

    def timer(self) -> Callable[[], dict[str, float]]:
        """Returns a function that gives, for the journal, the seconds for which training has been held since now (`took_s`),
        and those of them that were for sends, landings and means (`blocked_s`).
        """
        began, blocked = self.link.clock(), self.synchronizer.totals.blocked_s

        def spent() -> dict[str, float]:
            took, waited = self.link.clock() - began, self.synchronizer.totals.blocked_s - blocked
            return {"took_s": round(took, 6), "blocked_s": round(waited, 6)}

        return spent

    def close(self, reason: str | None = None) -> None:
        """Leave the other regions without finishing, and tell them the `reason`. Calling it again does nothing."""
        if not self._undo:
            return
        self._undo_all()
        if self.endings.verdict in ("stop", "leave"):
            spare_traceback()
        session = session_of(self.link)
        if session is not None:
            how = (
                "finished"
                if self.finished
                else {"stop": "stopped", "leave": "left"}.get(str(self.endings.verdict), "failed")
            )
            session.end(Bye(how=how, step=self.inner_step, place=self._place))
        self.link.close(reason)

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
        facts = facts_of(self)
        saved = Saved(self.synchronizer.state_dict(), facts)
        write(self._accelerator, self.link, self.model, Path(checkpoint), saved, weights)

    def seal(self, checkpoint: str | Path) -> None:
        """Declare a checkpoint complete, once every rank of the region has written its part."""
        seal(self._accelerator, self.link, Path(checkpoint))
        self.endings.tell(saved_at=self.inner_step)
        if self.link.num_regions == 1:
            self.endings.saved_everywhere = self.inner_step

    def load(self, saved: Saved) -> None:
        """Continue from a checkpoint whose weights the model already holds. A collective call.

        Raises:
            CheckpointError: it is of another run, or the model holds other weights.
        """
        config = continuing(self._asked, saved.facts.settings)
        self._check(saved, settings(config))
        is_same = self.synchronizer.layout == saved.state["layout"] and settings(config) == self.settings
        self._config, self.settings = config, settings(config)
        if is_same:
            self.synchronizer.load_state_dict(saved.state)
        else:
            self.synchronizer.wait_for_transfers()
            self.synchronizer = self._engine(saved)
        if saved.facts.taken_over:
            self.synchronizer.take_over()
        self._inner.begin()
        self.endings.continue_from(self.inner_step)
        self.journal.go_on(record_of(saved, self.journal.path, run_of(self.link)))
        self._note_start(saved)

    def _note_start(self, saved: Saved | None) -> None:
        facts = self.settings, self.about.facts
        note_start(self.journal, self.synchronizer, saved, self._max_steps, *facts, run_of(self.link))

    def _check(self, saved: Saved, settings: dict[str, Any], is_new: bool = False) -> None:
        """Raise CheckpointError if the regions cannot go on from there."""
        own = saved, settings, self.link, self.about, self._allowed, self.model, is_new
        in_all(self.link, lambda: check(*own), "whether regions can go on")

    def _engine(self, saved: Saved | None) -> Engine:
        def is_bounded() -> bool:
            return self._inner.is_bounded

        return engine_for(self.model, self._config, self.link, self.journal, saved, is_bounded)

    def global_weights(self) -> contextlib.AbstractContextManager[None]:
        """The model holds the global weights inside the block; see `Synchronizer.global_weights`. A collective call.

        At the end of a run it holds them already: the block changes nothing then.
        """
        return contextlib.nullcontext() if self.finished else self.synchronizer.global_weights()

    def own_global_weights(self, everywhere: bool = True) -> contextlib.AbstractContextManager[None]:
        """The same without asking the other regions: with eager updates each region has its own global weights.

        A collective call of the region's ranks. If not `everywhere`, DDP ranks do not ask each other either: only rank 0 shows
        the global weights, which is enough to save them.
        """
        if self.finished:
            return contextlib.nullcontext()
        return self.synchronizer.global_weights(averaged=False, everywhere=everywhere)

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
            if self.endings.is_hopeless:
                raise RunStopped(self.why)
        else:  # never communicate after an exception: the others may not come
            if issubclass(kind, RunStopped):
                spare_traceback()
            self.close(f"{kind.__name__} at step {self.inner_step}: {error}")
