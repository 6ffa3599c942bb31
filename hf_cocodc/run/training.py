"""The training of one rank in a run: what it trains with, and how one inner step is made."""

import logging
import platform
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator
from msgspec import structs
from torch import nn

from .. import __version__
from ..engine.footprint import in_words
from ..engine.replicas import Engine, Replicas
from ..engine.synchronizer import Synchronizer
from ..errors import RegionLostError
from ..link.base import Link
from ..link.ranks import SharedLink
from ..link.records import NOTHING_TO_SAY, Words
from ..link.within import main_says
from ..parts.tensors.memory import HOST
from ..resolve import from_config, guard_of, settings
from ..settings import OuterConfig
from ..snapshot.checkpoint import Facts, Saved
from .about import About
from .endings import Endings
from .fresh_start import recover
from .inner_optimizer import InnerOptimizer, Tokens
from .journal import Journal, name_of
from .loop import Loop
from .progress import Progress
from .resuming import StartPoint, check, in_all, warn_of_losses
from .session import RegionSession, lane_of, session_of
from .supported import home_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
        has_stages: whether every rank of the region holds its own pipeline stage.
        started: what the regions agreed on before step 1, for newcomers; JSON-able.
        finished: whether the model holds the global weights that all regions have ended with.
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
    has_stages: bool
    finished: bool = False
    saved_in: Path | None = None
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
        warn_of_losses(link, self.accelerator, self.config, self.max_steps)
        self.settings = settings(self.config)
        self.inner.warn_unless_fitting(str(self.settings["method"]))
        if saved is not None:
            self._check(saved, start.is_new)
        self.journal = Journal(journal, self._record_of(saved, journal), link.clock)
        self.progress = Progress(self)
        self.journal.on_event = self.progress.hear
        self.endings = Endings(link, when_one_ends, self.max_steps)
        self.engine = engine_for(self.model, self.config, link, self.journal, saved, self._is_bounded)
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
        self.inner.note_weights(self.inner_step)
        self._note_start(saved, joins=is_base)

    def step(self, inner_lr: float = 0.0, trained: bool = True) -> Words | None:
        """Count an inner step, and hold its events; returns the words of the regions that have landed."""
        self.endings.before_step()
        tokens = self.tokens.take() if trained else None
        if trained:
            self.inner.copies.look()
        words = self.engine.step(inner_lr, self.endings.word, trained=trained, tokens=tokens)
        if words is not None:
            self.inner.copies.landed()
        parts = self.engine, self.inner, self.config, self.endings, self.journal
        recover(*parts, has_landed=words is not None, has_stages=self.has_stages)
        self.endings.after_step(self.inner_step, words)
        if self.endings.verdict is None:
            self.stop_if_lost(words)
        self.progress.stepped()
        return words

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

    def say(
        self, call: Callable[[RegionSession], T], what: str, read: Callable[[Any], T] = lambda plain: plain
    ) -> T:
        """What `call` returns on the region's leader, in all ranks. It travels as JSON, from which `read` makes what it was."""

        def on_the_leader() -> T:
            assert self.session is not None
            return call(self.session)

        return main_says(self.link, self.accelerator, on_the_leader, what, read)

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

    def _is_bounded(self) -> bool:
        return self.inner.is_bounded

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
        """Write into the journal what begins, or goes on from `saved`; log its memory, and that fragments are uneven."""
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


def engine_for(
    model: nn.Module,
    config: OuterConfig,
    link: Link,
    journal: Journal,
    saved: Saved | None,
    is_bounded: Callable[[], bool] = lambda: True,
    trains: bool = True,
) -> Engine:
    """The engine for a model as it is, at the start of a run or where it was saved. A collective call. Raises InputError if the
    host has no room for what it keeps and, where it `trains`, a transfer takes.
    """
    method, home = from_config(config), home_of(model, config)

    def build(link: Link) -> Synchronizer:
        engine = Synchronizer(
            model,
            method,
            link,
            record=journal.write,
            digest_interval=config.digest_interval,
            weights=config.weights,
            guard=guard_of(config),
            is_bounded=is_bounded,
            state=None if saved is None else saved.state,
            home=home,
        )
        if trains:
            home.try_to_pin(engine.memory()[HOST].per_transfer)  # better now than at the first landing
        return engine

    return Replicas(build, model, method, link, home.rest) if isinstance(link, SharedLink) else build(link)


def versions() -> dict[str, str]:
    """The versions that a run's numbers may depend on."""
    packages = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    return {"hf_cocodc": __version__, **packages, "python": platform.python_version()}
