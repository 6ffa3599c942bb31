"""Says how far a region's training has come: to the command that has started it (see `status`), and what changes, in the log.

The command has no other source. It hears, beside `doing`: `step` (the inner step; not before the region takes part), `max_steps`
(0 if unknown), `steps_made`, `batches_made` (by the region's own settings: with a dealt share an inner step has more or less than
one), `trained_s` and `blocked_s` (in this process), `stepped_at` (seconds since the epoch), `awaits` (the
region for which a transfer waits), `loss` (the last one, None if unknown), `landed` (inner step of the last landing), `saved_at`
(of the newest checkpoint here), `saved_everywhere`, `folder` (where the region writes; None without a journal), `has_stopped`
(with all others), `rules` (of the run: fields of RegionConfig), `members` and `epoch` (of runs whose regions come and go).
Trainer adds `tokens_per_step`, if it knows them.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..coordinator.hello import may_differ
from ..engine.balance import Batch
from ..errors import short
from ..parts.deal import FIXED, PER_REGION
from ..settings import RegionConfig
from ..settings.environment import ENV_RESUME
from ..status import ENV_STATUS, LEFT, is_heard, say, tell
from . import figures

if TYPE_CHECKING:
    from .training import Training

logger = logging.getLogger(__name__)

TELL_S = 1.0
_LONGEST_WHY = 300
_WAY_BACK = (
    "A process that lives comes back by itself. For a region whose process has died, start its command again; one that still "
    "runs has said how to bring it back."
)

_READ = {
    False: "Until a lost region is back, nobody reads its part of the data.",
    True: "The others read on in the place of a lost region; nobody reads what was dealt to it since its last send that landed.",
}
"""What happens to the data of a lost region, by whether samples are dealt."""


def announce(message: str, *args: object) -> None:
    """Log what happens to the run: as information, or, where nobody has set up logging, as a warning, which Python shows."""
    logger.log(logging.INFO if logger.hasHandlers() else logging.WARNING, message, *args)


class Progress:
    """Tells once a second, from its own thread: also while training waits. Hears the events of the journal."""

    def __init__(self, training: "Training") -> None:
        self._training = training
        self._landed: int | None = None
        self._members: list[int] = []
        self._losses = 0
        self._began_at = self._stepped_at = self._ended_at = self._blocked_before = 0.0
        self._coasted = 0
        self.batches_made = 0.0
        self._first_step = 0
        self._has_warned = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell_regularly, name="hf_cocodc-progress", daemon=True)

    def begin(self) -> None:
        """This region takes part, and is about to train."""
        training = self._training
        self._first_step = training.inner_step
        self._blocked_before = training.engine.totals.blocked_s
        self._began_at = self._stepped_at = time.time()
        folder = self._folder
        self._tell(
            "training", max_steps=training.max_steps or 0, folder=None if folder is None else str(folder)
        )
        if is_heard():
            self._thread.start()

    def stepped(self, trained: bool = True, batches: float = 1.0) -> None:
        """An inner step is made, or only counted (not `trained`); it had so many of the region's own `batches`."""
        if not self._began_at:  # a newcomer goes along with the others, and does not take part yet
            return
        self._coasted += not trained
        self.batches_made += batches if trained else 0.0
        is_first = self._stepped_at == self._began_at
        self._stepped_at = time.time()
        if is_first:
            self._tell()
            self._say_unresumed()

    def note_untrained(self) -> None:
        """The global weights are evaluated: say once that they are those from before training, if they are."""
        training = self._training
        if training.engine.totals.landings or not training.inner_step or self._has_warned:
            return
        self._has_warned = True
        line = (
            f"the evaluation at step {training.inner_step} shows the weights from before training: no outer gradient has landed "
            f"yet (outer.sync_interval={training.settings.get('sync_interval')})."
        )
        announce(line)
        say(line, once="untrained")

    def _say_unresumed(self) -> None:
        """A loop of a user's own loads its checkpoint itself: say it where --resume was for nothing."""
        is_plain = self._training.loop.started is None
        if (
            is_plain
            and self._first_step == 0 == self._training.inner_step - 1
            and os.environ.get(ENV_RESUME) == "1"
        ):
            line = "training begins at step 0: the script has loaded no checkpoint (accelerator.load_state)"
            announce("region %d: %s", self._training.link.region, line)
            say(line, once="unresumed")

    def close(self) -> None:
        """Training has ended here, however it has."""
        self._ended.set()
        self._ended_at = time.time()
        if self._thread.ident is not None:
            self._thread.join()
            verdict = self._training.endings.verdict
            doing = LEFT if verdict == "leave" else "running the rest of the script"
            self._tell(doing, has_stopped=verdict == "stop")

    def summarize(self) -> None:
        """After the end of a run that has finished, one region says what a command would say of it, if there is none."""
        training = self._training
        speaks = training.accelerator.is_main_process and training.link.region == min(training.link.members)
        if (
            training.finished
            and speaks
            and training.link.timing == "measured"
            and ENV_STATUS not in os.environ
        ):
            announce("\n".join(self._summary()))

    def _summary(self) -> list[str]:
        training, totals, folder = self._training, self._training.engine.totals, self._folder
        trained_s, regions = max(self._ended_at - self._began_at, 1e-9), len(training.link.members)
        blocked_s, fragments = totals.blocked_s - self._blocked_before, len(training.engine.facts)
        same = regions if not training.link.is_elastic else 1  # else there may have been others
        others = figures.data_parallel_bytes(training.engine.num_params, training.inner_step, same)
        rows = {
            "finished": f"{training.inner_step} inner steps"
            + (
                f", {self._coasted} of them not trained here, to keep step with the others"
                if self._coasted
                else ""
            )
            + ("" if regions == 1 else f"; the models of all {regions} regions are equal"),
            "outer steps": figures.outer_steps(totals.landings, fragments),
            "training blocked": figures.blocked(blocked_s, trained_s),
            "sent by this region": figures.sent(totals.bytes_sent, others),
            "global model": "in this process"
            + ("" if training.saved_in is None else f"; its newest checkpoint: {training.saved_in}"),
            "journal": None if folder is None else str(training.journal.path),
            "report": None if folder is None else f"hf-cocodc report {folder.parent}",
        }
        return figures.lines((name, value) for name, value in rows.items() if value is not None)

    @property
    def _folder(self) -> Path | None:
        """Where the region writes."""
        path = self._training.journal.path
        return None if path is None else path.absolute().parent.parent

    def hear(self, kind: str, facts: Mapping[str, Any]) -> None:
        """An event is written to the journal."""
        match kind:
            case "land" | "void":
                self._landed = facts["step"]
            case "note":
                say(facts["message"], once=facts["message"])
            case "deal":
                line = _deal(facts)
                announce(line)
                say(line, once=f"deal {facts['step']}")
            case "evaluate":
                say(_evaluation(facts), by_one=True)
            case "resume" if "joins" not in facts:
                step, checkpoint = facts["step"], facts.get("checkpoint", "a checkpoint")
                announce(f"region {self._training.link.region} resumes from {checkpoint} (step {step})")
                say(f"resumed from step {step} ({checkpoint})", once="resume")
            case "epoch":
                self._hear_members(facts)

    def _hear_members(self, event: Mapping[str, Any]) -> None:
        members, epoch, losses = event["members"], event["epoch"], event["losses"]
        lost = set(self._members).difference(members) if losses > self._losses else set()
        tell(members=members, epoch=epoch)
        if epoch:
            why = f" ({short(event['why'], _LONGEST_WHY)})" if event["why"] else ""
            who = "only region" if len(members) == 1 else f"{len(members)} regions:"
            line = f"step {event['step']}: from here on {who} {', '.join(map(str, members))}{why}"
            if self._members and self._members != members:
                line += f". {of_batch(*self._batch, len(self._members), len(members))}"
            line += f" {_READ[self._training.is_dealt]}" if lost else ""
            is_real = self._training.link.timing == "measured"
            logger.warning("%s", f"{line} {_WAY_BACK}" if lost and is_real else line)
            say(line, once=f"epoch {epoch}", lost=sorted(lost), hint=_WAY_BACK)
        self._members, self._losses = members, losses

    @property
    def _batch(self) -> tuple[str | None, Batch | None]:
        """The rule of the global batch, and the batch of each region, if all have the same."""
        training = self._training
        # a plain loop's regions do not compare theirs
        is_alike = training.loop.started is not None and not may_differ("batch", training.allowed)
        return training.rule_of_batch, training.batch if is_alike else None

    def _tell_regularly(self) -> None:
        while not self._ended.wait(TELL_S):
            self._tell()

    def _tell(self, doing: str = "", **facts: Any) -> None:
        training = self._training
        word = training.endings.word
        tell(
            doing,
            step=training.inner_step,
            steps_made=training.inner_step - self._first_step,
            batches_made=self.batches_made,
            trained_s=time.time() - self._began_at,
            blocked_s=training.engine.totals.blocked_s - self._blocked_before,
            stepped_at=self._stepped_at,
            awaits=training.link.awaits,
            loss=word.loss if math.isfinite(word.loss) else None,
            landed=self._landed,
            saved_at=word.saved_at,
            saved_everywhere=training.endings.saved_everywhere,
            **facts,
        )


def _deal(event: Mapping[str, Any]) -> str:
    samples = event["samples"]
    parts = figures.shares(samples, event["speeds"])
    return f"step {event['step']}: the global batch of {sum(samples.values())} samples is dealt anew ({event['why']}): {parts}"


def _evaluation(event: Mapping[str, Any]) -> str:
    shown = ", ".join(
        f"{name.removeprefix('eval_')} {event[name]:.3f}"
        for name in ("eval_loss", "eval_perplexity", "eval_accuracy")
        if isinstance(event.get(name), int | float)  # a script's own metric of this name need not be a number
    )
    return f"step {event['step']}: held out, {event['weights']} weights: {shown}"


def in_advance(regions: RegionConfig, why_fixed: str = "", has_stages: bool = False) -> str:
    """What happens when a region is lost, in a run with these settings, which are settled.

    Args:
        why_fixed: why the run, which would by default, cannot go on without it; empty if it can.
        has_stages: each rank of a region holds a pipeline stage.

    >>> in_advance(RegionConfig(count=2, on_loss="continue", min=1)).partition(":")[0]
    'if a region is lost, the others train on without it until it is back'
    """
    if regions.elastic:
        return (
            "if a region is lost, the others train on without it until it is back: at least "
            f"{regions.least} of {regions.count} (regions.min). With regions.on_loss=stop they would stop."
        )
    ends = "the run ends" if has_stages else "the others stop at one step, with a checkpoint"
    return f"if a region is lost, {ends} (regions.on_loss=stop)" + (f": {why_fixed}" if why_fixed else "")


def of_batch(rule: str | None, batch: Batch | None, before: int, now: int) -> str:
    """What the batch and the learning rates are from here on, where there are `now` regions, and there were others `before`.

    Args:
        rule: of the global batch (`RegionConfig.rule_of_batch`).
        batch: of each region; None if they may differ.

    >>> of_batch(None, Batch(4, 4), 2, 1)
    'The global batch is 4 samples an inner step (before: 8); the learning rates stay as they are.'
    """
    if rule == FIXED:
        what = "The global batch stays as large as it was: those that are there share it"
    elif rule == PER_REGION:
        what = "The global batch is the sum of the batches of those that are there"
    elif batch is None:
        what = "Each region keeps its own batch"
    else:
        what = f"The global batch is {now * batch.samples} samples an inner step (before: {before * batch.samples})"
    return f"{what}; the learning rates stay as they are."
