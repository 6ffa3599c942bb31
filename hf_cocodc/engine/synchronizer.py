"""The engine of one region: the only loop over events.

It owns the global params, the outer state and the transfers in flight, and asks the method's parts what to do, without knowing
their names. It computes on the device of the local params with flat fp32 tensors; local params are written in place, only
through `FragmentState`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, CocodcError, LeftBehind, LinkError
from ..link.base import Link
from ..link.records import NOTHING_TO_SAY, Word, Words
from ..methods import Method
from ..parts.codecs import has_radial
from ..parts.deal import Portion
from ..parts.fragments import Fragment, names_in, only_trainable
from ..parts.guard import Guard
from ..parts.schedules import AgreedStats, Land, Schedule, ScheduleState, Send
from ..parts.tensors.flat import digest
from ..parts.tensors.memory import HOST, Home
from ..validation import whole
from .account import Account, Measurements, Record, Totals
from .agreement import StepChecksum, check_same_end, check_same_start, show_global
from .balance import NOT_DEALT, Balance, Batch
from .footprint import Memory, memory
from .fragment import FragmentFacts, FragmentState, adopt
from .local_params import Watch, local_kept
from .saved import (
    begin_anew,
    bring_back,
    give_up,
    layout,
    load,
    same_layout,
    same_structure,
    saved_fragment,
    take_over,
)
from .traffic import Traffic

_OF_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Synchronizer:
    """Keeps one region's model in step with the other regions. The constructor is a collective call.

    Args:
        model: without DDP around; its trainable parameters are synchronized. None may become trainable later (`Watch`).
        link: reaches the other regions, or `loopback()`.
        record: called as record(kind, **facts) at sends, at landings and at the end.
        digest_interval: sends of a fragment between two checks that its global params are equal in all regions.
        weights: a region's share in a mean: equal, steps or tokens (`Shares`).
        guard: from which norm on outer gradients count less (`parts.guard`); None: every region counts as it says.
        balance: rule of the global batch (`parts.deal`), which regions then share by their speeds; by default each has its own.
        batch: of this region, by its own settings.
        is_bounded: returns whether the inner optimizer bounds a step, so that the guard can judge.
        state: from `state_dict`, to continue with the model's parameters as they are; else all take region 0's parameters.
        home: where global params, outer state and transfers rest; by default with the model. They are computed with there.

    Raises:
        CheckpointError: `state` is of another model or method, or differs from the other regions'.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        link: Link,
        *,
        record: Record = lambda kind, **facts: None,
        digest_interval: int = 10,
        weights: str = "equal",
        guard: Guard | None = None,
        is_bounded: Callable[[], bool] = lambda: True,
        state: dict[str, Any] | None = None,
        home: Home | None = None,
        balance: str | None = None,
        batch: Batch = NOT_DEALT,
    ) -> None:
        self.method = method
        self.link = link
        self._model = model
        self._home = home or Home(next(model.parameters()).device)
        timed_on = self._home.device if link.timing == "measured" else HOST
        self.measured, self.account = Measurements(link.clock(), timed_on), Account(record, link.region)
        self._record = record
        self._balance = Balance(balance, batch, link, record)
        by_samples = "tokens" if self._balance.shares else weights
        counting = digest_interval, by_samples, guard, is_bounded, self._balance
        self._traffic = Traffic(method, link, self.measured, self.account, *counting)
        self._is_leaving = False
        self.fragments: list[FragmentState] = []
        self.num_params = 0
        """Parameters that this region synchronizes."""
        self._mended: list[str] = []
        self._agenda = Agenda(method.schedule)
        if state is None:
            self._adopt(method.fragments(model), start=True)
            self._balance.begin(self.inner_step)
        else:
            self._adopt(self._fragments_of(state), start=False)
            self.load_state_dict(state)
        self.account.count_broadcasts(link)

    @property
    def inner_step(self) -> int:
        """Inner steps made so far."""
        return self._traffic.inner_step

    @property
    def totals(self) -> Totals:
        """Counters since the start of the run."""
        return self.account.totals

    @property
    def report(self) -> dict[str, float]:
        """Figures at the last landing."""
        return self.account.report

    @property
    def facts(self) -> tuple[FragmentFacts, ...]:
        """What the training loop may know of each fragment."""
        return tuple(map(FragmentFacts.of, self.fragments))

    @property
    def layout(self) -> list[list[Any]]:
        """Which parameters are in which fragment (`saved.layout`)."""
        return layout([each.fragment for each in self.fragments])

    @property
    def portion(self) -> Portion:
        """The samples of this region in the next inner steps; its own batch, if nobody asks which."""
        return self._balance.portion

    @property
    def next_event(self) -> int:
        """No inner step before this one has events."""
        return self._agenda.next_event

    def take_written(self) -> tuple[list[int], list[str]]:
        """What was written in the model since the last call: indexes of fragments, and names of other tensors."""
        written = [each.fragment.index for each in self.fragments if each.has_written]
        for fragment in self.fragments:
            fragment.has_written = False
        mended, self._mended = self._mended, []
        return written, mended

    def step(
        self,
        inner_lr: float = 0.0,
        word: Word = NOTHING_TO_SAY,
        *,
        trained: bool = True,
        tokens: int | None = None,
    ) -> Words | None:
        """Call after each inner step, with the learning rate it used. Nearly free if no event is due.

        Args:
            word: what the training loop tells the other regions, with transfers that are sent now.
            trained: False to keep step only: a transfer that carries no step of this region has no weight in the mean.
            tokens: that the region has trained on in this step, if known.

        Returns:
            If a transfer landed: the words of all regions that it carried.

        Raises:
            LinkError: a transfer failed; nothing of it was applied.
            InputError: shares follow the tokens, and they are unknown.
            CocodcError: an earlier send or landing has failed halfway. So does every method that trains, shows or saves.
        """
        self._refuse_broken()
        traffic = self._traffic
        traffic.inner_step += 1
        if trained:
            traffic.trained_at = traffic.inner_step
            traffic.shares.count(self._balance.counted(tokens))
        self.link.tick(self.inner_step, self._balance.work)
        self.measured.note_step(inner_lr, self.link.clock())
        if not self._is_leaving:
            self._watch.notice()
        events = self._agenda.events(self.inner_step, self.measured.agreed)
        if not events:
            return None
        with self.held():
            words = self._handle_events(events, word)
        return words

    @torch.no_grad()
    def _handle_events(self, events: Sequence[Send | Land], word: Word) -> Words | None:
        """Do the events of this inner step."""
        traffic = self._traffic
        words: Words | None = None
        if self.measured.note_event():
            self._balance.note_timed()
        # the schedule counts them as done. Where the link has failed, the state cannot be saved, or another one is taken over
        with traffic.whole("what was due", LinkError):
            self._look()
            # the first landing of each fragment
            lands = {each.fragment: each.sent_at for each in reversed(events) if isinstance(each, Land)}
            try:
                for event in events:
                    fragment = self.fragments[event.fragment]
                    if isinstance(event, Send):
                        traffic.send(fragment, word, lands.get(event.fragment) == self.inner_step)
                    else:
                        words = traffic.land(fragment, event.sent_at, self.method.merge) or words
            except LinkError:
                for fragment in self.fragments:
                    fragment.keep_snapshots()
                raise
        return words

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count the time of the block as time for which training is held, and not as that of an inner step."""
        began = self.link.clock()
        try:
            yield
        finally:
            now = self.link.clock()
            self.account.held(now - began)
            self.measured.leave_events(now)

    @torch.no_grad()
    def finish(self, word: Word = NOTHING_TO_SAY) -> Words | None:
        """End the run as the method's closing says, and leave the global weights in the model, compared by `check_same_end`.

        Returns the words of all regions, if a transfer landed. Raises HandshakeError if regions hold different models.
        """
        self._refuse_broken()
        self._look()
        with self._traffic.whole("the end of the run", LeftBehind):
            with self.held():
                words = self._traffic.end(self.fragments, word)
                self._show_global(averaged=True)
            digest = self._check_same_end(self.inner_step)
            self.account.count_broadcasts(self.link)
            self.account.finished(self.inner_step, digest)
            self._agenda.begin(len(self.fragments), self.inner_step)
        return words

    @contextmanager
    def global_weights(self, averaged: bool = True, everywhere: bool = True) -> Iterator[None]:
        """Inside the block the model holds the global weights; after it the local ones again, bit for bit.

        If a method lets global params differ between regions (eager updates), it holds their mean, in a collective call; if not
        `averaged`, this region's own. `everywhere`: in all ranks of the region; else ranks without an engine are not asked.
        """
        self._refuse_broken()
        self._look()
        params = [param for each in self.fragments for param in each.local.params]
        with local_kept(self._model, params, self._home.rest):
            with self.held():
                self._show_global(averaged)
            yield

    @torch.no_grad()
    def show_saved(self, state: dict[str, Any]) -> None:
        """After a run, leave the global weights of `state` in the model. A collective call.

        Raises CheckpointError if `state` is of another model, HandshakeError if regions hold different ones.
        """
        same_layout(state["layout"], [each.fragment for each in self.fragments])
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.global_params.copy_(saved["global_params"])
        self._show_global(averaged=True)
        self._check_same_end(state["inner_step"])

    def global_digest(self) -> int:
        """A checksum of all global params of this rank."""
        self._home.settle()
        return digest(*(fragment.global_params for fragment in self.fragments))

    def memory(self) -> dict[torch.device, Memory]:
        """The memory that outer state and transfers take, by device."""
        fragments = [each.fragment for each in self.fragments]
        return memory(fragments, self.method, self.link.most_regions, self._home)

    def give_up_unsent(self) -> None:
        """Give no weight to this region's inner steps since the last sends: they may be incomplete."""
        self._traffic.trained_at = -1
        for fragment in self.fragments:
            fragment.trained = self._traffic.shares.trained
        self._is_leaving = True

    def wait_for_transfers(self) -> None:
        """Wait until the transfers in flight have ended, here and thus in other regions, which may be about to save them. Raises
        LinkError if one has failed.
        """
        for fragment in self.fragments:
            for transfer in fragment.in_flight:
                transfer.handle.wait()

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Give up the local params for the global ones, and count anew the rounds that do not count."""
        self._refuse_broken()
        self._look()
        begin_anew(self.fragments)

    def forgive(self, rounds: int) -> None:
        """Let a run that has stopped after so many void or ruined rounds stop again at the next one, once it resumes."""
        for each in self.fragments:
            each.voids = min(each.voids, rounds - 1)
            each.far_losses = min(each.far_losses, max(rounds - 1, 1))

    def as_leader(self, value: bool) -> bool:
        """The value that the leader gives, in all ranks with this engine."""
        return value

    def state_dict(self) -> dict[str, Any]:
        """Everything but the local params: nested dicts and lists of numbers, texts and tensors.

        Waits for the transfers in flight, and saves their results without landing them: saving changes no number. A collective
        call of the region's ranks.
        """
        self._refuse_broken()
        self.wait_for_transfers()
        self._home.settle()
        return {
            "layout": self.layout,
            **self.measured.state_dict(),
            "schedule_state": self._agenda.state,
            **self._traffic.state_dict(),
            **self._balance.state_dict(),
            "totals": asdict(self.account.totals),
            "fragments": [saved_fragment(fragment) for fragment in self.fragments],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the model must hold the local params of that moment. A collective call.

        Raises CheckpointError if it is of another model or method, or differs from the other regions'.
        """
        self.wait_for_transfers()
        with self.whole("a load"):
            self._load(state)
            own = self.global_digest() if self.method.outer.regions_agree else -1
            check_same_start(self.link, StepChecksum(self.inner_step, own))

    def take_over(self, own: Totals | None = None) -> None:
        """Adapt a state saved by another region, of which this one has trained nothing and counted only `own`."""
        take_over(self.fragments, takes_part=not self.link.is_elastic)
        if self.link.is_elastic:
            self.account.go_on(own or Totals())
            for fragment in self.fragments:
                fragment.trained = self._traffic.shares.trained

    @torch.no_grad()
    def catch_up(self, state: dict[str, Any], keep: bool) -> None:
        """Continue from another region's `state`, after the others have gone on without this one (`LeftBehind`).

        The inner step jumps to the later one of `state`, and local params take its global params. No other region is asked.
        `keep` adds what this region has trained and the others lack; its next sends carry it. Raises CheckpointError if `state`
        is of another model or method.
        """
        self._look()
        keep = keep and not self._traffic.broken
        kept = give_up(self.fragments, self.method.merge)
        totals, trained = self.totals, self._traffic.shares.trained
        self._load(state)
        self._traffic.shares.trained = trained
        self.take_over(totals)
        if keep:
            bring_back(self.fragments, kept)

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        try:
            self._take(state)
        except CocodcError:
            raise
        except _OF_DAMAGE as error:
            raise CheckpointError(
                f"the engine's state in the checkpoint is none that hf_cocodc saves ({type(error).__name__}: {error}). Resume "
                "from another checkpoint of the run."
            ) from error

    def _take(self, state: dict[str, Any]) -> None:
        same_layout(state["layout"], [each.fragment for each in self.fragments])
        self._look()
        self._agenda.load(state["schedule_state"])
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            load(fragment, saved, self._traffic.judge)
        self.measured.load_state_dict(state)
        self._traffic.load(state)
        self._balance.load(state)
        self.account.totals = whole(Totals, state["totals"])

    def whole(self, what: str) -> AbstractContextManager[None]:
        """Around what must not happen by halves to the model: after an error in the block, its state is not trained or saved."""
        return self._traffic.whole(what)

    def _refuse_broken(self) -> None:
        if self._traffic.broken:
            raise CocodcError(
                f"{self._traffic.broken}. What this region holds is no state of the run, and is not trained, shown or saved: go "
                "back to the last checkpoint (--resume; in a script accelerator.load_state)."
            )

    def _check_same_end(self, inner_step: int) -> int:
        digest, mended = check_same_end(self.link, self._model, self._watch.names, inner_step, self._record)
        self._mended += mended
        return digest

    def _show_global(self, averaged: bool) -> None:
        mean = averaged and not self.method.outer.regions_agree
        show_global(self.fragments, self.link, self.inner_step, self.account.totals, mean)

    def _look(self) -> None:
        """Let the fragments use the model's present memory, and refuse other changes of its parameters."""
        if not self._is_leaving:
            moved = self._watch.look()
            if moved is not None:
                for fragment in self.fragments:
                    fragment.move_to(moved)

    def _fragments_of(self, state: dict[str, Any]) -> tuple[Fragment, ...]:
        """The method's fragments of the parameters that `state` has: some may be frozen now."""
        with only_trainable(self._model, names_in(state["layout"])):
            return self.method.fragments(self._model)

    def _adopt(self, fragments: tuple[Fragment, ...], start: bool) -> None:
        """Begin with these fragments; `start`: from region 0's parameters."""
        link, traffic = self.link, self._traffic
        self.fragments = adopt(fragments, self._model, self.method, link, self._home, start)
        for fragment in self.fragments:
            fragment.settled_at = fragment.sent_at = self.inner_step
            fragment.lr_sum, fragment.trained = self.measured.lr_sum, traffic.shares.trained
        numels = torch.tensor([float(each.numel) for each in fragments], dtype=torch.float64, device=HOST)
        lengths: list[float] = link.total(numels).tolist()
        self.num_params = round(sum(lengths))
        self.measured.begin(lengths)
        self.account.num_fragments = len(fragments)
        remembers = any(fragment.codec for fragment in self.fragments)
        self.account.shows_cosine = not (remembers or has_radial(self.method.codec))
        self._agenda.begin(len(fragments), self.inner_step)
        self._watch = Watch(self._model, fragments)


class Agenda:
    """Follows a schedule, whose `state` is for a checkpoint. No inner step before `next_event` has events."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.state: ScheduleState = {}
        self.next_event = 0

    def begin(self, num_fragments: int, inner_step: int) -> None:
        """Start anew with so many fragments, none of them in flight."""
        self._continue_from(self._schedule.init(num_fragments, inner_step))

    def events(self, inner_step: int, stats: AgreedStats) -> tuple[Send | Land, ...]:
        """The events of this inner step. Nearly free if there are none; called once for each step."""
        if inner_step < self.next_event:
            return ()
        events, self.state = self._schedule.events(inner_step, stats, self.state)
        self.next_event = self._schedule.next_event(inner_step, self.state)
        return events

    def load(self, state: ScheduleState) -> None:
        """Continue from a saved state. Raises CheckpointError if it is another schedule's."""
        same_structure(state, dict.fromkeys(self.state), "the schedule's state")
        self._continue_from(state)

    def _continue_from(self, state: ScheduleState) -> None:
        self.state, self.next_event = state, 0  # no inner step before this one has events
