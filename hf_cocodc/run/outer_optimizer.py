"""The outer optimizer of a plain Accelerate loop; the Trainer callback stands on it too."""

import contextlib
import logging
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..engine.memory import memory
from ..engine.synchronizer import Synchronizer
from ..errors import InputError
from ..links.base import Link
from ..links.trailer import Ending
from ..resolve import from_config, settings
from ..settings import OuterConfig, RegionConfig
from ..tensors.pools import HOST
from . import checkpoint as state
from .connect import join, outer_device, refuse_unsupported
from .endings import verdict
from .journal import Journal
from .resume import Saved, check
from .saving import hook_into_saving
from .take_over import JOINING

logger = logging.getLogger(__name__)

_WORDS = {Ending.DONE: "has come to the end of its training", Ending.INTERRUPTED: "was interrupted"}


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
                if outer.should_stop:       # another region has come to its end, or was interrupted
                    break
        # left without an exception, finish() has been called: the model holds the global weights

    While it lives, `accelerator.save_state(folder)` saves the outer optimizer too, and `accelerator.load_state(folder)`
    loads it, transfers in flight included; `outer.inner_step` says where the loop has to go on. Regions save and load at
    the same inner step, each in a folder of its own.

    Args:
        accelerator: of this region; its processes are the region's ranks.
        model: as `accelerator.prepare` returned it.
        optimizer: the inner optimizer, as `accelerator.prepare` returned it; read for its learning rate.
        config: method and its settings.
        regions: which region this is; by default the environment says so.
        max_steps: inner steps of the run where known; regions must agree on it.
        journal: file for one JSON line an event; none by default.
        link: reaches the other regions; by default one is made from `regions`.
        saved: a checkpoint's part that is ours, to start from; the model has to hold the weights saved with it.
        stage: (index, number of stages) where every rank of the region holds a pipeline stage of its own: `model` is that
            stage, not prepared by Accelerate, and exchanges with the same stage of the other regions only (DiLoCoX's dual
            optimizer, 2506.21263). See below.

    Constructing it is a collective call: it waits for all regions, compares their settings, and starts them from region
    0's parameters.

    With `stage`, what is measured or chosen holds for one stage: times, a low rank and the rounds that follow it, which
    fragment goes next, whether an outer gradient is finite. Stages of a region may so send and land at different inner
    steps. Nobody waits for ever for that: a landing waits only for sends of its own step or an earlier one. But they would
    hear of another region's early end at different steps too, and the first to leave would keep the others waiting for
    activations: give `max_steps` and make them all, in every region. An error in one stage ends its region, where the
    launcher ends the other ranks, and so every region.

    Raises:
        InputError: settings that cannot work.
        HandshakeError: regions disagree.
        CheckpointError: `saved` is of another run.
        LinkError: the store or a region cannot be reached in time.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        config: OuterConfig,
        regions: RegionConfig | None = None,
        *,
        max_steps: int | None = None,
        journal: str | Path | None = None,
        link: Link | None = None,
        saved: Saved | None = None,
        stage: tuple[int, int] | None = None,
    ) -> None:
        method = from_config(config)
        refuse_unsupported(accelerator, config)
        regions = regions or RegionConfig()
        bare = accelerator.unwrap_model(model, keep_torch_compile=False)
        if link is None:
            link = join(accelerator, bare, config, regions, max_steps, stage=stage)
        self.link = link
        self.verdict: str | None = None
        """"finish" or "stop" once the regions have agreed to end before max_steps."""
        self.why = ""
        """What made them agree, in words."""
        self.finished = False
        self._accelerator = accelerator
        self.settings = settings(config)
        """Every setting of the method, defaults filled in."""
        self._policy = regions.when_one_ends
        self._max_steps = max_steps
        self._inner_lr = 0.0
        if saved is not None:
            check(saved, self.settings, link)
        record = Journal(
            Path(journal) if journal is not None and accelerator.is_main_process else None,
            saved.facts["journal"] if saved is not None and not saved.facts.get(JOINING) else 0,
        )
        self.journal = record
        self.synchronizer = Synchronizer(
            bare,
            method,
            link,
            record=record.write,
            digest_interval=config.digest_interval,
            state=None if saved is None else saved.state,
            device=outer_device(bare, config),
        )
        if saved is not None and saved.facts.get(JOINING):
            self.synchronizer.join()
        record.write(
            "start" if saved is None or saved.facts.get(JOINING) else "resume",
            step=self.inner_step,
            region=link.region,
            num_regions=link.num_regions,
            num_params=self.synchronizer.num_params,
            num_fragments=len(self.synchronizer.fragments),
            max_steps=max_steps,
            outer=self.settings,
        )
        held = memory(self.synchronizer.fragments, method, link.num_regions)
        for device, (kept, adds) in held.items():
            logger.info(
                "outer state: %.4g MB on %s, and up to %.4g MB more for each transfer in flight.",
                *(kept / 1e6, "the host" if device == HOST else device, adds / 1e6),
            )
        hook = getattr(optimizer, "optimizer", optimizer).register_step_post_hook(self._note_lr)
        self._undo = [hook.remove, *hook_into_saving(accelerator, self)]

    @property
    def inner_step(self) -> int:
        """Inner steps made so far."""
        return self.synchronizer.inner_step

    @property
    def report(self) -> dict[str, float]:
        """What the last landing told: rounds, staleness, seconds blocked, bytes sent, mean loss of the regions."""
        return self.synchronizer.report

    @property
    def should_stop(self) -> bool:
        """Whether the run has ended here: leave the loop.

        With `verdict` "finish" the model holds the global weights; with "stop" call `accelerator.save_state` before you
        leave, and resume later.
        """
        return self.finished or self.verdict is not None

    def step(self, loss: float | None = None) -> None:
        """Call after every `optimizer.step()`; does nothing on micro-batches that only accumulate.

        A step that a gradient scaler skipped counts, as in Trainer's `global_step`: scalers of different regions skip
        at different times, and regions that counted differently would wait for each other for ever.

        Args:
            loss: this region's training loss, if you want the mean over regions in `report`.
        """
        if self.should_stop:
            raise InputError(
                f"step() after the run has ended at step {self.inner_step}. Leave the loop when outer.should_stop says so; "
                "make a new OuterOptimizer to train on."
            )
        if not self._accelerator.sync_gradients:
            return
        if loss is not None:
            self.synchronizer.loss = float(loss)
        self.synchronizer.step(self._inner_lr)
        self._hear()

    @property
    def saved_everywhere(self) -> int:
        """Step of the newest checkpoint that is known to be complete in every region; 0 while there is none."""
        return (
            self.synchronizer.saved_at if self.link.num_regions == 1 else self.synchronizer.saved_everywhere
        )

    def say(self, ending: Ending) -> None:
        """Tell the others with the next transfer that this region comes to its end; train on until `should_stop`."""
        self.synchronizer.ending = ending
        if self.link.num_regions == 1:
            self.synchronizer.endings = (ending,)

    def leave(self, reason: str) -> None:
        """After an error: `coast`, telling why; the steps since the last transfers are lost, for they may not be whole."""
        self.link.leave_note(reason)
        self.synchronizer.trained_at = -1
        self.say(Ending.INTERRUPTED)
        self.coast()

    def coast(self) -> None:
        """Keep step with the others without training, until they have heard of this region's end and all end together.

        Waits for the transfers that are due until then, at the others' pace.
        """
        while not self.should_stop and not self._at_the_end:
            self.synchronizer.step(trained=False)
            self._hear()

    def finish(self) -> None:
        """End the run: the model holds the global weights afterwards. A collective call; calling it again does nothing.

        Regions may come here after different numbers of inner steps: who is early coasts until the others have heard of
        it. After a `verdict` to stop nothing is exchanged and the model keeps its local weights.
        """
        if not self.finished and not self._at_the_end:
            self.say(Ending.DONE)
            self.coast()
        self._finish()

    def _finish(self) -> None:
        if not self.finished and self.verdict != "stop":
            self.synchronizer.finish()
            self.finished = True
            self.close()

    @property
    def _at_the_end(self) -> bool:
        """Whether every region is known to be here, so that the last round can be held."""
        known = self._max_steps is not None and self.inner_step >= self._max_steps
        return known or self.link.num_regions == 1 or self.verdict is not None

    def _hear(self) -> None:
        """Act on what the regions said of their ends with the transfer that has just landed."""
        endings = self.synchronizer.endings
        self.verdict = verdict(endings, self._policy)
        if self.verdict is None:
            return
        if self.inner_step == self._max_steps:
            self.verdict = "finish"  # nothing is left to stop
        self.why = "; ".join(
            f"region {region} {_WORDS[Ending(ending)]}" + (f" ({note})" if note else "")
            for region, ending in enumerate(endings)
            if ending != Ending.NO
            for note in [self.link.note_of(region)]
        )
        logger.warning(
            "%s: all regions %s here, at step %d (regions.when_one_ends=%s).",
            self.why,
            "finish" if self.verdict == "finish" else "stop, to be resumed from a checkpoint,",
            *(self.inner_step, self._policy),
        )
        if self.verdict == "finish":
            self._finish()

    def close(self, reason: str | None = None) -> None:
        """Leave the other regions without finishing; `reason` is what they are told. Calling it again does nothing."""
        if not self._undo:
            return
        for undo in self._undo:
            undo()
        self._undo = []
        self.link.close(reason)

    def save(self, checkpoint: str | Path) -> None:
        """Write the outer optimizer's state into a checkpoint's folder; `seal` it when everything else is there.

        A collective call of this region's ranks; saving changes no number and asks nothing of other regions.

        Raises:
            CheckpointError: the disk refuses.
        """
        saved = self.synchronizer.state_dict()
        facts = {
            "step": self.inner_step,
            "region": self.link.region,
            "num_regions": self.link.num_regions,
            "num_lanes": self.link.num_lanes,
            "settings": self.settings,
            "finished": self.finished,
            "journal": self.journal.position,
        }
        if self._accelerator.is_main_process:
            state.begin(Path(checkpoint))
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process or self.link.lane:
            state.write(Path(checkpoint), saved, facts, self.link.lane)

    def seal(self, checkpoint: str | Path) -> None:
        """Declare a checkpoint complete, once every rank of the region has written its part."""
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            state.seal(Path(checkpoint))
        self.synchronizer.saved_at = self.inner_step

    def load(self, saved: Saved) -> None:
        """Go on from a checkpoint whose weights the model holds already. A collective call.

        Raises:
            CheckpointError: it is of another run.
        """
        check(saved, self.settings, self.link)
        self.synchronizer.load_state_dict(saved.state)
        self.verdict, self.why = None, ""

    def global_weights(self) -> contextlib.AbstractContextManager[None]:
        """The model holds the global weights inside the block; see `Synchronizer.global_weights`."""
        return self.synchronizer.global_weights()

    def own_global_weights(self) -> contextlib.AbstractContextManager[None]:
        """The same without asking the other regions, where eager updates let each have global weights of its own."""
        return self.synchronizer.global_weights(averaged=False)

    def __enter__(self) -> "OuterOptimizer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
            self.close()  # where the verdict was to stop, nothing has been closed: there was a checkpoint to save
        else:  # never communicate while an exception passes: the others may not come
            self.close(f"{kind.__name__} at step {self.inner_step}: {error}")

    def _note_lr(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._inner_lr = float(optimizer.param_groups[0]["lr"])
