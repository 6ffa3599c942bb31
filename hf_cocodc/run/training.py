"""The training of one rank in a run: what it trains with, and how one inner step is made."""

import logging
import platform
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator
from msgspec import structs
from torch import nn

from .. import __version__
from ..auto import warnings_of
from ..engine.balance import Batch
from ..engine.footprint import in_words
from ..engine.replicas import Engine, Replicas
from ..engine.synchronizer import Synchronizer
from ..errors import CocodcError, RegionLostError
from ..link.base import Link
from ..link.group import main_says
from ..link.ranks import SharedLink
from ..link.records import NOTHING_TO_SAY, Ending, Words
from ..parts.deal import FIXED, PER_REGION
from ..parts.fragments import Fragment
from ..parts.tensors.memory import HOST
from ..resolve import from_config, guard_of, settings
from ..settings import OuterConfig
from ..snapshot.checkpoint import Facts, Saved
from .about import About
from .endings import Endings
from .inner_optimizer import InnerOptimizer, Tokens
from .journal import Journal, name_of
from .loop import Loop
from .progress import Progress
from .resuming import StartPoint, check, in_all
from .session import RegionSession, lane_of, session_of
from .supported import home_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OFTEN = 3
"""After so many fresh starts of a region, another one will not help."""
UNEVEN = 1.5
"""The log names a largest fragment that is more than this many times the mean."""


@dataclass(kw_only=True, eq=False)
class Training:
    """What a rank trains with, from `begin` to the end of the run.

    Attributes:
        model: unwrapped.
        config: the settings as they were given, "auto" among them; `settings` has values instead, with defaults.
        allowed: names of what may differ from a checkpoint (`regions.may_differ`).
        max_steps: inner steps of the run; None if unknown.
        rule_of_batch: how regions share a global batch (`RegionConfig`); None if each keeps its own.
        is_dealt: whether regions have their samples from one order of all data (`regions.shards`); else each has a part.
        has_stages: whether every rank of the region holds its own pipeline stage.
        started: what the regions agreed on before step 1, for newcomers; JSON-able.
        finished: whether the model holds the global weights that all regions have ended with.
        micro_batches: of the next inner step.
        saved_in: the newest checkpoint of this region that was written by this process; None before.
    """

    link: Link
    accelerator: Accelerator
    model: nn.Module
    inner: InnerOptimizer
    tokens: Tokens
    about: About
    loop: Loop
    config: OuterConfig
    allowed: Collection[str]
    max_steps: int | None
    rule_of_batch: str | None
    is_dealt: bool
    has_stages: bool
    finished: bool = False
    saved_in: Path | None = None
    batch: Batch = field(init=False)
    micro_batches: int = field(init=False)
    settings: dict[str, Any] = field(init=False)
    started: dict[str, Any] = field(init=False)
    journal: Journal = field(init=False)
    progress: Progress = field(init=False)
    endings: Endings = field(init=False)
    engine: Engine = field(init=False)

    def begin(self, start: StartPoint, journal: Path | None, when_one_ends: str) -> None:
        """Fix the settings, check that the run may go on from there, and make what trains. A collective call.

        Raises CheckpointError if the regions cannot go on from there.
        """
        saved, link = start.saved, self.link
        self.started = start.started
        self.batch = self.loop.batch
        self.micro_batches = self.batch.samples // self.batch.unit
        if self.accelerator.is_main_process and link.region == link.members[0]:  # all have these settings
            for warning in warnings_of(self.config, self.max_steps):
                logger.warning(warning)
        self.settings = settings(self.config)
        self.inner.warn_unless_fitting(str(self.settings["method"]))
        if saved is not None:
            self._check(saved, start.is_new)
        self.journal = Journal(journal, self._record_of(saved, journal), link.clock)
        self.progress = Progress(self)
        self.journal.on_event = self.progress.hear
        self.endings = Endings(link, when_one_ends, self.max_steps)
        self.engine = self._engine(saved)
        if self.session is not None:
            self.session.link.beat = structs.replace(self.session.link.beat, max_steps=self.max_steps or 0)
        self._go_on(saved, start.is_new)
        self.journal.earlier = self._events
        if not link.is_elastic and len(link.parties) < link.most_regions:
            lost, why = self._losses(link.parties)
            raise RegionLostError(lost, f"{why}: nothing was trained. Start all regions again.")

    def load(self, saved: Saved) -> None:
        """Continue from a checkpoint whose weights the model already holds. A collective call.

        Raises:
            CheckpointError: it is of another run, or the model holds other weights.
        """
        self._check(saved)
        self.engine.load_state_dict(saved.state)
        self.inner.begin()
        self.journal.go_on(self._record_of(saved, self.journal.path))
        self._go_on(saved)

    def _go_on(self, saved: Saved | None, is_base: bool = False) -> None:
        if saved is not None:
            if saved.facts.taken_over:
                self.engine.take_over()
            self.endings.continue_from(self.inner_step, is_base)
        self._take_share()
        self.inner.note_weights(self.inner_step)
        self._note_start(saved, joins=is_base)

    def step(self, inner_lr: float = 0.0, trained: bool = True) -> Words | None:
        """Count an inner step, and hold its events; returns the words of the regions that have landed."""
        self.endings.before_step()
        tokens = self.tokens.take() if trained else None
        batches = self.micro_batches * self.batch.unit / self.batch.samples
        if trained:
            self.inner.copies.look()
        if self.session is not None:
            self.session.link.coasts = not trained
        words = self.engine.step(inner_lr, self.endings.word, trained=trained, tokens=tokens)
        if words is not None:
            self.inner.copies.landed()
        self._recover(has_landed=words is not None)
        self._take_share()
        if words is not None:
            self._show_landing()
        self.endings.after_step(self.inner_step, words)
        if self.endings.verdict is None:
            self.stop_if_lost(words)
        self.progress.stepped(trained, batches)
        return words

    def _recover(self, has_landed: bool) -> None:
        """Do what `outer.on_nonfinite` says, if this region did not count in the last `outer.nonfinite_rounds` rounds of a
        fragment. All regions stop if in so many rounds in a row the mean was void, or the losses were far above the ordinary
        ones.

        A step that is not finite, or far too large, stays in AdamW's moments. Global params at every landing do not help, and the
        region would not count in any later round.

        All ranks of a region decide alike: they know the same facts, and ask the leader whether the region is about to end.
        Pipeline stages have an engine each, and begin anew one by one; they are refused with "stop". Only if a
        transfer `has_landed` in this step can what all regions know have changed.

        Raises:
            CocodcError: pipeline stages would have to stop, and cannot do so at one step.
        """
        engine, inner, config = self.engine, self.inner, self.config
        endings, journal = self.endings, self.journal
        region, rounds = engine.link.region, max(each.nonfinite_rounds for each in engine.facts)
        most = config.nonfinite_rounds
        if has_landed and endings.verdict is None and (why := _why(engine, most, most)):
            journal.write("note", step=engine.inner_step, message=why)
            if self.has_stages:
                raise CocodcError(f"{why}. A stage cannot stop with a checkpoint: go back to the last one.")
            if config.on_nonfinite == "restart" and any(each.voids >= most for each in engine.facts):
                engine.begin_anew()
                inner.begin_anew()
            engine.forgive(most)
            endings.stop(why)
            return
        if rounds < config.nonfinite_rounds or not engine.as_leader(endings.word.ending is Ending.NO):
            return
        sentence = f"region {region} did not count in {rounds} rounds in a row (not finite, or clipped or dropped by outer.guard)"
        if config.on_nonfinite == "stop":
            endings.ask_to_stop(
                f"{sentence}; go back to an earlier checkpoint with a lower learning rate, or set outer.on_nonfinite=restart"
            )
            return
        logger.warning(
            "%s: after step %d it takes the global params, and a fresh state of its inner optimizer "
            "(outer.on_nonfinite=restart). Look at its loss; a lower learning rate or gradient clipping (max_grad_norm) helps.",
            *(sentence, engine.inner_step),
        )
        engine.begin_anew()
        inner.begin_anew()
        if inner.times_anew >= _OFTEN:
            logger.warning(
                "region %d has begun anew %d times: another time will not help. Compare its learning rate and data with those of "
                "the other regions, then start it again.",
                *(region, inner.times_anew),
            )
        journal.write("begin_anew", step=engine.inner_step, rounds=rounds, times=inner.times_anew)

    def _take_share(self) -> None:
        """Let the loop make as many micro-batches as the regions have dealt to this one."""
        dealt = max(1, round(self.engine.portion.samples / self.batch.unit))
        if dealt != self.micro_batches:
            self.micro_batches = dealt
            self.loop.deal(dealt)

    def _show_landing(self) -> None:
        """Let `hf-cocodc status` know how regions agree, and the share that was dealt to this one."""
        if self.session is not None:
            samples = self.engine.portion.samples if self.rule_of_batch in (FIXED, PER_REGION) else 0
            cosine = self.engine.report.get("cosine")
            link = self.session.link
            link.beat = structs.replace(link.beat, cosine=cosine, samples=samples)

    def stop_if_lost(self, words: Words | None) -> bool:
        """Stop here, where a landing shows that a region is lost and that ends the run; returns whether it is so. All others come
        to this at the same step, with the same global params. After the last step nothing is left to stop: they finish.

        Raises RegionLostError where regions have pipeline stages: these may land at different steps, and none may end alone.
        """
        if words is None or self.link.is_elastic or len(words) >= self.link.most_regions:
            return False
        # a transfer that a checkpoint holds may be of fewer regions than are here now
        self.link.gather(NOTHING_TO_SAY, f"who is left at step {self.inner_step}")
        if len(self.link.parties) == self.link.most_regions:
            return False
        lost, why = self._losses(self.link.parties)
        if self.is_all_made:  # from a checkpoint of this step nobody could train on
            logger.warning("%s: all steps are made, so the others finish without its last ones.", why)
            return False
        if self.has_stages:
            raise RegionLostError(lost, f"{why}. Start all regions again with --resume.")
        self.endings.lose(lost, why)
        return True

    def _losses(self, left: Collection[int]) -> tuple[int, str]:
        """The first region that is not among those that are left, and the losses in words. A collective call of the ranks."""
        why = self.say(lambda session: session.link.losses_in_words, "why a region is lost")
        return min(set(range(self.link.most_regions)) - set(left)), why

    @property
    def inner_step(self) -> int:
        """Inner steps made so far."""
        return self.engine.inner_step

    @property
    def is_all_made(self) -> bool:
        return self.max_steps is not None and self.inner_step >= self.max_steps

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be trained here."""
        return self.finished or self.is_all_made or self.endings.verdict is not None

    @property
    def is_at_the_end(self) -> bool:
        """Whether every region is known to end at this step, so that the last round can take place."""
        is_alone = not self.link.is_elastic and self.link.most_regions == 1  # else others may come
        return self.is_all_made or is_alone or self.endings.verdict is not None

    @property
    def session(self) -> RegionSession | None:
        """The leader's side of a run over a network; None on other ranks, and without a network."""
        return session_of(self.link)

    @property
    def lane(self) -> RegionSession | None:
        """The side of this rank, if it has a lane of its own or is the leader."""
        return lane_of(self.link)

    def _events(self) -> list[tuple[str, dict[str, Any]]]:
        """What has happened to the run, for the journal."""
        events = deque() if self.session is None else self.session.link.events
        happened = []
        while events:
            kind, facts = events.popleft()
            happened.append((kind, {"step": self.inner_step, **facts}))
        return happened

    def say(self, call: Callable[[RegionSession], T], what: str, kind: Any = Any) -> T:
        """What `call` returns on the region's leader, in all ranks. It is of this `kind`, and travels as JSON."""

        def on_the_leader() -> T:
            assert self.session is not None
            return call(self.session)

        return main_says(self.link, self.accelerator, on_the_leader, what, kind)

    @property
    def facts(self) -> Facts:
        """What identifies the run in a checkpoint, as it is now."""
        return Facts(
            step=self.inner_step,
            region=self.link.region,
            members=tuple(self.link.members),
            num_lanes=self.link.num_lanes,
            settings=self.settings,
            finished=self.finished,
            journal=self.journal.name,
            stopping=self.endings.verdict == "stop",
            model=dict(self.about.model),
            facts=dict(self.about.facts),
        )

    @property
    def round_steps(self) -> float:
        """Inner steps of a round: the method's sync_interval, or the mean so far for a user's own method without one."""
        interval = self.settings.get("sync_interval")
        if isinstance(interval, int | float) and interval > 0:
            return float(interval)
        landings = max(self.engine.totals.landings, 1)
        return max(1.0, self.inner_step * len(self.engine.facts) / landings)

    def timer(self) -> Callable[[], dict[str, float]]:
        """Returns a function that gives, for the journal, the seconds for which training has been held since now (`took_s`),
        and those of them that were for sends, landings and means (`blocked_s`).
        """
        began, blocked = self.link.clock(), self.engine.totals.blocked_s

        def spent() -> dict[str, float]:
            took, waited = self.link.clock() - began, self.engine.totals.blocked_s - blocked
            return {"took_s": round(took, 6), "blocked_s": round(waited, 6)}

        return spent

    def _check(self, saved: Saved, is_new: bool = False) -> None:
        """Raise CheckpointError if the regions cannot go on from there."""
        own = saved, self.settings, self.link, self.about, self.allowed, self.model, is_new
        in_all(self.link, self.accelerator, lambda: check(*own), "whether regions can go on")

    def _engine(self, saved: Saved | None) -> Engine:
        """The engine for the model as it is, at the start of a run or where it was saved. A collective call. Raises InputError if
        the host has no room for what it keeps, and for a transfer.
        """
        method, home = from_config(self.config), home_of(self.model, self.config)

        def build(link: Link) -> Synchronizer:
            engine = Synchronizer(
                self.model,
                method,
                link,
                record=self.journal.write,
                digest_interval=self.config.digest_interval,
                weights=self.config.weights,
                guard=guard_of(self.config),
                is_bounded=lambda: self.inner.is_bounded,
                state=None if saved is None else saved.state,
                home=home,
                balance=self.rule_of_batch,
                batch=self.batch,
            )
            home.try_to_pin(engine.memory()[HOST].per_transfer)  # better now than at the first landing
            return engine

        link = self.link
        return (
            Replicas(build, self.model, method, link, home.rest)
            if isinstance(link, SharedLink)
            else build(link)
        )

    @property
    def _run(self) -> str:
        """The number of the run in its journals, on which the regions agree whenever they meet."""
        return f"{self.started['run']:012x}"

    def _record_of(self, saved: Saved | None, path: Path | None) -> str:
        """The name of the record that goes on in a journal from `saved`; empty if a new one begins. A region that comes back to
        an elastic run goes on with its own.
        """
        if saved is None:
            return ""
        if not saved.facts.taken_over:
            return saved.facts.journal
        return name_of(path, self._run) if path is not None and self.link.is_elastic else ""

    def _note_start(self, saved: Saved | None, joins: bool) -> None:
        """Write into the journal what begins, or goes on from `saved`; log its memory, and what is uncommon in transfers."""
        link, engine = self.link, self.engine
        clock = {"at": round(time.time(), 3)} if link.timing == "measured" else {}
        self.journal.write(
            "start" if saved is None else "resume",
            step=engine.inner_step,
            region=link.region,
            num_regions=link.num_regions if link.takes_part() else link.most_regions,
            num_params=engine.num_params,
            num_fragments=len(engine.facts),
            max_steps=self.max_steps,
            timing=link.timing,
            bytes_sent=engine.totals.bytes_sent,
            outer=self.settings,
            run=self._run,
            **({"joins": True} if joins else {}),
            **({} if saved is None or saved.folder is None else {"checkpoint": str(saved.folder)}),
            **({} if saved is None or not saved.facts.taken_over else {"from_region": saved.facts.region}),
            **clock,
            versions=versions(),
            training=dict(self.about.facts),
        )
        for sentence in in_words(engine.memory()):
            logger.info(sentence)
        sizes = [each.numel for each in engine.facts]
        codec, values = from_config(self.config).codec, Fragment(0, ("values",), ((max(sizes),),), max(sizes))
        # where each region averages a part, it sends less than two payloads
        if link.num_regions > 2 and codec.wire_bytes(values, 0, link.num_regions) >= 2 * codec.wire_bytes(
            values, 0, 2
        ):
            logger.info(
                "each region sends its whole payload to each of the %d others: a mean of the codec %s is not encoded again. "
                "With other codecs each averages a part, and sends less than two payloads.",
                *(link.num_regions - 1, self.settings.get("codec", type(codec).__name__)),
            )
        if (
            self.settings.get("split_rows") is False
            and saved is None
            and max(sizes) * len(sizes) > UNEVEN * sum(sizes)
        ):
            logger.info(
                "the largest of %d fragments is %.3g times as large as the mean, and the link must carry it in the same time. "
                "outer.split_rows=true splits an embedding or a head over all fragments.",
                *(len(sizes), max(sizes) * len(sizes) / sum(sizes)),
            )


def versions() -> dict[str, str]:
    """The versions that a run's numbers may depend on."""
    packages = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    return {"hf_cocodc": __version__, **packages, "python": platform.python_version()}


def ruined_at_the_end(engine: Engine, config: OuterConfig) -> str:
    """Why a run must not end as if it were well, in words; empty if it may. No later landing can say more than the last one."""
    return _why(engine, config.nonfinite_rounds, 1)


def _why(engine: Engine, most_voids: int, most_losses: int) -> str:
    """Why training must not go on, in words; empty if it may. Equal in all regions."""
    for index, each in enumerate(engine.facts):
        if each.voids >= most_voids:
            return (
                f"the means of {each.voids} rounds in a row were void (fragment {index}), because "
                f"{_reason(each.far_regions)}. The global params are as before these rounds. Look at the losses and learning "
                "rates of all regions; if their norms in the log are as they should be, raise the limits of outer.guard"
            )
        if each.far_losses >= most_losses:
            return (
                f"the training losses of the regions were far above what they had been, in {each.far_losses} rounds in a row: "
                f"the model is ruined, or has other data. Their median was {each.ordinary_loss:.3g} before. Go back to an "
                "earlier checkpoint with a lower learning rate; outer.guard=none trains on whatever the losses"
            )
    return ""


def _reason(far_regions: Sequence[int]) -> str:
    """Why means were void. Of two regions, the one whose norms are far beyond the other's may be right."""
    if not far_regions:
        return "they were not finite or far too large, or no region had a finite outer gradient"
    names = ", ".join(f"region {region}" for region in far_regions)
    return f"half of the regions or more have broken (norms far beyond the others': {names})"
