"""The outer optimizer: trains one model across regions from an ordinary Accelerate loop."""

import contextlib
import logging
import platform
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..auto import for_rounds, too_few_rounds
from ..coordinator.messages import Bye
from ..engine.compatibility import layout
from ..engine.saving import wait_for_transfers
from ..errors import InputError, RunStopped
from ..link.base import Link
from ..link.records import Words
from ..methods import Method
from ..newer import INNER
from ..resolve import as_config, continuing, from_config, lost_steps, settings
from ..settings import OuterConfig, RegionConfig
from ..snapshot.checkpoint import Saved
from ..snapshot.donor import Inner
from .about import About, of_loop
from .connect import begin_over, meet
from .elastic import Elastic
from .endings import Endings
from .finishing import Finishing
from .inner_optimizer import InnerOptimizer
from .journal import Journal
from .loaded import agree_on_beginning, check, in_all, take_loaded
from .newcomer import advance, inner_of, joins, place_for_bases, read_base
from .recovery import recover, ruined_at_the_end
from .saving import facts_of, hook_into_saving, seal, write
from .session import session_of
from .starting import engine_for, mark_of, note_start, run_of
from .supported import refuse_unsupported
from .unread import attendance_of, report_unread

logger = logging.getLogger(__name__)


class OuterOptimizer(Finishing):
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

    `accelerator.save_state(folder)` saves the outer optimizer too, and `accelerator.load_state(folder)` loads it, transfers
    in flight included, before or after the outer optimizer is made; `outer.inner_step` says where the loop must continue.
    Regions save and load at the same inner step, each in its own folder: a second region of the run that saves into a folder
    is refused.

    Args:
        accelerator: of this region; its processes are the region's ranks.
        model: as `accelerator.prepare` returned it.
        optimizer: the inner optimizer, as `accelerator.prepare` returned it, or a list of several; its learning rate is
            read. It need not be PyTorch's, but it has `param_groups`. It keeps one set of weights: schedule-free ones are
            refused.
        config: the method and its settings; or a `Method` with a name, for a method of your own.
        regions: which region this is; by default the environment says so.
        max_steps: inner steps of the run, if known; regions must agree on it.
        journal: file for one JSON line per event; none by default.
        link: reaches the other regions, which compare over it what they are; by default it is made from `regions`.
        saved: our part of a checkpoint, to start from; the model must hold the weights that were saved with it.
        about: the rest of the training, compared between regions and at a resume; by default what model and optimizer show,
            which is nothing of the data.
        stage: (index, number of stages) if every rank of the region holds its own pipeline stage. `model` is then that
            stage, not prepared by Accelerate, and exchanges only with the same stage of the other regions (DiLoCoX's dual
            optimizer, 2506.21263). See below.

    The learning rate is read when `step` is called: call `optimizer.step()`, `outer.step()`, `scheduler.step()` in this order, or
    `outer.note_lr()` before a schedule that steps earlier.

    The constructor is a collective call: it waits for all regions, compares their settings, and starts them from region
    0's parameters.

    With `stage`, each stage has its own measured times, low rank and rounds: stages of a region may send and land at different
    inner steps. They would also hear of another region's early end at different steps, and the first to leave would keep
    the others waiting for activations. Therefore give `max_steps`, and make all these steps in every region. An error in
    one stage ends every region. A stage that does not count for several rounds begins anew alone (`outer.on_nonfinite`); what
    came to it from broken stages breaks it too, and each of them begins anew in its turn.

    Raises:
        InputError: settings, an optimizer or a model that cannot work; or another outer optimizer trains the model.
        HandshakeError: regions disagree.
        CheckpointError: `saved`, or what the accelerator has loaded, is damaged, of another run, or of another step than the
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
        about: About | None = None,
        stage: tuple[int, int] | None = None,
    ) -> None:
        asked = as_config(config)
        method = from_config(asked)  # a mistake in the settings comes before everything else
        config = for_rounds(asked, max_steps)
        regions = regions or RegionConfig()
        bare = accelerator.unwrap_model(model, keep_torch_compile=False)
        refuse_unsupported(accelerator, config, bare, has_stages=stage is not None)
        refuse_second(bare)
        self._inner = InnerOptimizer(
            optimizer, bare, reads_lr=method.reads_lr, begins_anew=config.on_nonfinite == "restart"
        )
        self.tokens = Tokens(accelerator, config.weights == "tokens", alike=stage is not None)
        self.about = about or of_loop(accelerator, bare, optimizer)
        # "auto" is compared as such: what it means in a run that is continued, its checkpoints say
        link = meet(link, accelerator, bare, asked, regions, max_steps, stage=stage, about=self.about)
        begin_over(link)
        self.link = link
        bases = place_for_bases(link, accelerator, journal)
        is_new = joins(link, accelerator)
        is_lone = saved is None and is_new  # nobody else has got a base for it
        self.started: dict[str, Any] = {}
        if is_lone:
            take_loaded(accelerator)  # a base takes its place
            saved, run = read_base(link, accelerator, bare, bases)
            self.started = {"run": run}
        elif about is None:
            saved, run = agree_on_beginning(link, accelerator, bare, self._inner, saved)
            self.started = {"run": run}
        if saved is not None:
            config = for_rounds(continuing(asked, saved.facts.settings), max_steps)
        for warning in (lost_steps(config), too_few_rounds(config, max_steps)):
            # the settings are equal in all regions: one warning is enough
            if warning is not None and accelerator.is_main_process and link.region == link.members[0]:
                logger.warning(warning)
        self.settings = settings(config)
        """Every setting of the method, defaults filled in."""
        if (named_for := INNER.get(str(self.settings["method"]))) is not None:
            self._inner.warn_unless(named_for, str(self.settings["method"]))
        self._has_stages = stage is not None
        self.endings = Endings(link, regions.when_one_ends, max_steps)
        self.finished = False
        self._accelerator = accelerator
        self._allowed = regions.allowed
        self._max_steps = max_steps
        self._asked, self._config, self.model = asked, config, bare
        if saved is not None:
            told = saved, self.settings, link, self.about, self._allowed, bare, is_new
            in_all(link, lambda: check(*told), "whether regions can go on")
        path = Path(journal) if journal is not None and accelerator.is_main_process else None
        self._place = "" if path is None else f"{platform.node()}:{path.absolute().parent.parent}"
        named = run_of(link)
        self.journal = Journal(path, mark_of(saved, path, named), link.clock)
        self._is_bounded = lambda: self._inner.is_bounded
        self.synchronizer = engine_for(bare, config, link, self.journal, saved, self._is_bounded)
        if saved is not None:
            self.endings.continue_from(self.inner_step)
            if saved.facts.taken_over:
                self.synchronizer.take_over()
        facts = self.settings, self.about.facts
        note_start(self.journal, self.synchronizer, saved, max_steps, *facts, named)
        self._tell_unread: Callable[[int], None] = lambda step: None
        if accelerator.is_main_process:
            attendance = attendance_of(link, regions, self.about, self.inner_step, is_new)
            self._tell_unread = report_unread(self.journal, attendance)
        self._undo = [
            claim(bare),
            self._inner.note_clipping(accelerator),
            *hook_into_saving(accelerator, self, self._inner),
        ]
        if link.agreement is not None:
            link.agreement.start(self.inner_step)
            self._undo.append(link.agreement.close)
        self.inner: Callable[[], Inner] = partial(inner_of, accelerator)
        self.has_jumped: Callable[[int, int], object] = partial(advance, accelerator, is_new=False)
        self.takes_over: Callable[[Path], object] = lambda base: None
        self.elastic: Elastic | None = None
        session = session_of(link)
        if session is not None:
            session.link.beat = replace(session.link.beat, max_steps=max_steps or 0)
        if link.is_elastic:
            self.elastic = Elastic(self, accelerator, session, regions.resolved(), bases)
            self._undo.append(self.elastic.close)
            if is_lone or not is_new:
                self.elastic.begin(partial(advance, accelerator, is_new=True) if is_lone else None)

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the regions that take part now, as far as this one knows."""
        return self.link.members

    @property
    def report(self) -> dict[str, float]:
        """Figures at the last landing: rounds, staleness, seconds blocked, bytes sent (`Totals`), mean loss of the regions."""
        return self.synchronizer.account.report

    def step(self, loss: float | None = None, tokens: int | Tensor | None = None) -> None:
        """Call after every `optimizer.step()`; does nothing on micro-batches that only accumulate.

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
            raise InputError(
                f"step() after the run has ended at step {self.inner_step}. Leave the loop when outer.should_stop is True; "
                "make a new OuterOptimizer to train on."
            )
        if tokens is not None:
            self.tokens.note(tokens)
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
        words = self.synchronizer.step(inner_lr, self.endings.word, trained=trained, tokens=tokens)
        told = self.synchronizer, self._inner, self._config, self.endings, self.journal
        recover(*told, has_landed=words is not None, has_stages=self._has_stages)
        self.endings.after_step(self.inner_step, words)
        return words

    def _ruined_at_the_end(self) -> str:
        return ruined_at_the_end(self.synchronizer, self._config)

    def close(self, reason: str | None = None) -> None:
        """Leave the other regions without finishing, and tell them the `reason`. Calling it again does nothing."""
        if not self._undo:
            return
        for undo in self._undo:
            undo()
        self._undo = []
        session = session_of(self.link)
        if session is not None:
            how = (
                "finished"
                if self.finished
                else {"stop": "stopped", "leave": "left"}.get(str(self.verdict), "failed")
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
        self._tell_unread(self.inner_step)
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
        config = for_rounds(continuing(self._asked, saved.facts.settings), self._max_steps)
        told = saved, settings(config), self.link, self.about, self._allowed, self.model
        in_all(self.link, lambda: check(*told), "whether regions can go on")
        is_alike = layout([each.fragment for each in self.synchronizer.fragments]) == saved.state["layout"]
        if is_alike and settings(config) == self.settings:
            self.synchronizer.load_state_dict(saved.state)
        else:
            wait_for_transfers(self.synchronizer.fragments)
            self.synchronizer = engine_for(
                self.model, config, self.link, self.journal, saved, self._is_bounded
            )
        self._config, self.settings = config, settings(config)
        self._inner.begin()
        self.endings.continue_from(self.inner_step)

    def global_weights(self) -> contextlib.AbstractContextManager[None]:
        """The model holds the global weights inside the block; see `Synchronizer.global_weights`.

        At the end of a run it holds them already: the block changes nothing then.
        """
        return contextlib.nullcontext() if self.finished else self.synchronizer.global_weights()

    def own_global_weights(self) -> contextlib.AbstractContextManager[None]:
        """The same without asking the other regions: with eager updates each region has its own global weights."""
        return contextlib.nullcontext() if self.finished else self.synchronizer.global_weights(averaged=False)

    def __enter__(self) -> "OuterOptimizer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
            self.close()  # after a verdict to stop, the link is still open
            # a script must not save a ruined model, and end as if it were well
            if self.endings.is_hopeless:
                raise RunStopped(self.why)
        else:  # never communicate after an exception: the others may not come
            self.close(f"{kind.__name__} at step {self.inner_step}: {error}")


_TRAINED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models that an outer optimizer trains now."""


def refuse_second(model: nn.Module) -> None:
    """Check that no outer optimizer trains `model`. Raises InputError if one does."""
    if model in _TRAINED:
        raise InputError(
            f"another OuterOptimizer, or another CoCoDCCallback, trains this {type(model).__name__}: both would write its "
            "parameters. End the first one (finish() or close()), or train a model of its own."
        )


def claim(model: nn.Module) -> Callable[[], None]:
    """From now on an outer optimizer trains `model`; the returned function ends this."""
    _TRAINED.add(model)
    return lambda: _TRAINED.discard(model)


class Tokens:
    """Counts the tokens of an inner step over its micro-batches, and over the ranks of the region.

    Args:
        accelerator: of this region.
        counted: whether tokens are the weights; else nothing is counted, and ranks say nothing to each other.
        alike: whether all ranks of the region train on the same samples (pipeline stages).
    """

    def __init__(self, accelerator: Accelerator, counted: bool, alike: bool = False) -> None:
        self.counted = counted
        self._accelerator, self._alike = accelerator, alike
        self._noted: Any = None

    def note(self, tokens: Any) -> None:
        """Add the tokens of a micro-batch of this rank: a number, or a tensor of one, on any device."""
        if self.counted:
            self._noted = tokens if self._noted is None else self._noted + tokens

    def take(self) -> int | None:
        """The region's tokens since the last call; None if none were noted. If they are, a collective call of its ranks.

        Raises:
            InputError: their number is not a whole number from 0.
        """
        if self._noted is None:
            return None
        noted, self._noted = float(self._noted), None
        if noted < 0 or not noted.is_integer():
            raise InputError(
                f"outer.step(tokens={noted:g}): the tokens of an inner step must be a whole number from 0."
            )
        if self._alike or self._accelerator.num_processes == 1:
            return int(noted)
        own = torch.tensor([int(noted)], dtype=torch.int64, device=self._accelerator.device)
        return int(self._accelerator.reduce(own, "sum"))
