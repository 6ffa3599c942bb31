"""The engine of one region: the only loop over events.

It owns the global params, the outer state and the transfers in flight, and asks the method's parts what to do. It names no
method, codec, outer transform or merge. Its tensors are flat fp32, on the host or with the params; local params are written
in place, only through `FragmentState`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..links.base import Arrival, Link, Parcel
from ..links.trailer import NOTHING_TO_SAY, Ending, Trailer, Word, Words
from ..methods import Method
from ..parts.codecs import share_of_rank
from ..parts.info import MergeInfo
from ..parts.merges import Merge
from ..parts.schedules import Send
from ..tensors.flat import digest
from ..tensors.pools import HOST
from . import saving
from .account import Account, Record, Totals
from .agreement import Standing, check_in_step, check_same_end, check_same_start
from .compatibility import layout, same_layout, same_structure
from .fragment import FragmentState, adopt
from .measurements import Measurements
from .memory import Memory, memory
from .outer_step import Outcome
from .reunion import reunite
from .stepping import Stepping
from .transfer import Transfer
from .weights import local_digest, local_kept, show_global

logger = logging.getLogger(__name__)


class Synchronizer:
    """Keeps one region's model in step with the other regions.

    Args:
        model: its trainable parameters are synchronised; unwrapped (no DDP around it).
        method: the parts.
        link: reaches the other regions, or `loopback()`.
        record: called as record(kind, **facts) at sends, at landings and at the end.
        digest_interval: sends of a fragment between two checks that its global params are equal in all regions.
        state: from `state_dict`, to continue with the model's parameters as they are.
        device: device of global params, outer state and transfers; what the link and codecs need is on the host.

    Without `state` all regions start from region 0's parameters. The constructor is a collective call.

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
        state: dict[str, Any] | None = None,
        device: torch.device = HOST,
    ) -> None:
        self.method = method
        self.link = link
        self._model = model
        self.inner_step = 0
        self._trained_at = 0
        """Last inner step that trained; a transfer of this region has weight only if it carries such a step."""
        self._digest_interval = digest_interval
        self._stepping = Stepping(method, link, device, self._fresh_outer_grad)
        fragments = method.fragments(model)
        ahead = self._stepping.is_ahead
        self.fragments = adopt(fragments, model, method, link, device, state is None, ahead)
        link.bring_to(self.fragments[0].pool)
        numels = torch.tensor([float(fragment.numel) for fragment in fragments], dtype=torch.float64)
        lengths: list[float] = link.total(numels).tolist()
        self.num_params = round(sum(lengths))
        """Parameters that this region synchronises."""
        self.measured = Measurements(lengths, link.clock())
        self.account = Account(len(fragments), record)
        self._schedule_state = method.schedule.init(len(fragments))
        self._next_event = 0  # no inner step before this one has events
        if state is not None:
            self.load_state_dict(state)

    @property
    def totals(self) -> Totals:
        """Counters since the start of the run."""
        return self.account.totals

    def step(
        self, inner_lr: float = 0.0, word: Word = NOTHING_TO_SAY, *, trained: bool = True
    ) -> Words | None:
        """Call after each inner step, with the learning rate it used. Nearly free if no event is due.

        Args:
            inner_lr: learning rate of the inner step.
            word: what the training loop tells the other regions, with transfers that are sent now.
            trained: False to keep step with the others without training: a transfer that carries no step of this region
                has no weight in the mean.

        Returns:
            If a transfer landed: the words of all regions that it carried.

        Raises:
            LinkError: a transfer failed; nothing of it was applied.
        """
        self.inner_step += 1
        if trained:
            self._trained_at = self.inner_step
        self.link.tick(self.inner_step)
        self.measured.note_step(inner_lr, self.link.clock())
        if self.inner_step < self._next_event:
            return None
        words = self._hold_events(word)
        self.measured.leave_events(self.link.clock())
        return words

    @torch.no_grad()
    def _hold_events(self, word: Word) -> Words | None:
        """Do the events of this inner step."""
        schedule, words = self.method.schedule, None
        events, self._schedule_state = schedule.events(
            self.inner_step, self.measured.agreed, self._schedule_state
        )
        self._next_event = schedule.next_event(self.inner_step, self._schedule_state)
        if events:
            self.measured.note_event()
        for event in events:
            fragment = self.fragments[event.fragment]
            if isinstance(event, Send):
                self._send(fragment, word, self._stepping.is_ahead)
            else:
                words = self._land(fragment, event.sent_at, self.method.merge) or words
        return words

    @torch.no_grad()
    def finish(self, word: Word = NOTHING_TO_SAY) -> Words | None:
        """End the run as the method's closing says, and leave the global weights in the model.

        A last check compares the weights of all regions.

        Returns:
            The words of all regions, if a transfer landed.
        """
        closing = self.method.closing(self.method.merge, self.link.num_regions)
        words: Words | None = None
        for fragment in self.fragments:
            flying = [transfer.sent_at for transfer in fragment.in_flight]
            for sent_at in flying if flying and flying[-1] > fragment.settled_at else ():
                words = self._land(fragment, sent_at, closing.early) or words
        sent = [each for each in self.fragments if max(each.settled_at, each.sent_at) < self.inner_step]
        for fragment in sent:
            self._send(fragment, word, ahead=False)
        for fragment in self.fragments:
            flying = [transfer.sent_at for transfer in fragment.in_flight]
            for sent_at in closing.landings(flying, fragment in sent):
                words = self._land(fragment, sent_at, closing.last) or words
            fragment.in_flight.clear()
        self._show_global(averaged=True)
        own = local_digest(self.fragments)
        check_same_end(self.link, Standing(self.inner_step, own))
        self.account.finished(self.inner_step, own)
        self._schedule_state = self.method.schedule.init(len(self.fragments))
        self._next_event = 0
        return words

    @contextmanager
    def global_weights(self, averaged: bool = True) -> Iterator[None]:
        """Inside the block the model holds the global weights; after it the local ones again, bit for bit.

        If a method lets global params differ between regions (eager updates), the model holds their average, and this is a
        collective call; if not `averaged`, it holds this region's own.
        """
        with local_kept(self._model, self.fragments):
            self._show_global(averaged)
            yield

    def global_digest(self) -> int:
        """A checksum of all global params of this rank."""
        return digest(*(fragment.global_params for fragment in self.fragments))

    def memory(self) -> dict[torch.device, Memory]:
        """The memory that outer state and transfers take, by device."""
        return memory(self.fragments, self.method, self.link.num_regions, self._stepping.is_ahead)

    def give_up_unsent(self) -> None:
        """Give no weight to this region's inner steps since the last sends: they may be incomplete."""
        self._trained_at = -1

    def state_dict(self) -> dict[str, Any]:
        """Everything but the local params: nested dicts and lists of numbers, texts and tensors.

        Waits for the transfers in flight, and saves their results without landing them: saving changes no number. A
        collective call of the region's ranks.
        """
        return {
            "layout": layout([each.fragment for each in self.fragments]),
            **self.measured.state_dict(),
            "schedule_state": self._schedule_state,
            "inner_step": self.inner_step,
            "totals": asdict(self.account.totals),
            "fragments": [saving.saved(fragment) for fragment in self.fragments],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the model must hold the local params of that moment. A collective call.

        Raises:
            CheckpointError: it is of another model or method, or differs from the other regions'.
        """
        same_layout(state["layout"], [each.fragment for each in self.fragments])
        same_structure(state["schedule_state"], self._schedule_state, "the schedule's state")
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            saving.load(fragment, saved)
            self._stepping.of_loaded(fragment)
        self.measured.load_state_dict(state)
        self._schedule_state = state["schedule_state"]
        self._next_event = 0
        self.inner_step = self._trained_at = state["inner_step"]
        self.account.totals = Totals(**state["totals"])
        own = self.global_digest() if self.method.outer.regions_agree else -1
        check_same_start(self.link, Standing(self.inner_step, own))

    def _send(self, fragment: FragmentState, word: Word, ahead: bool) -> None:
        with torch.profiler.record_function("hf_cocodc::send"):
            index, step = fragment.fragment.index, self.inner_step
            snapshot, outer_grad, finite = fragment.prepare(fragment.base())
            blocked_s = 0.0
            # a codec with memory continues from the end of its last transfer
            if fragment.codec_remembers and fragment.in_flight:
                arrival, blocked_s = self._wait(fragment.in_flight[-1])
                fragment.codec = arrival.result.state
            finite = self._everywhere(finite)
            fragment.nonfinite_rounds = 0 if finite else fragment.nonfinite_rounds + 1
            if not finite and word.ending is Ending.NO:
                self.account.sat_out(step, index, self.link.region)
            shares = finite and self._trained_at > fragment.sent_at
            if not shares:
                outer_grad.zero_()
            is_checked = self.method.outer.regions_agree and fragment.num_sends % self._digest_interval == 0
            checksum = fragment.checksum() if is_checked else None
            measured = self.measured
            trailer = Trailer(
                weight=float(shares),
                fragment=index,
                inner_step=step,
                step_time_s=measured.step_time_s,
                sync_time_s=measured.sync_time_s,
                compression=share_of_rank(fragment.codec),
                round_lr=measured.mean_lr(fragment.lr_sum, step - fragment.sent_at),
                **word._asdict(),
            )
            converse = partial(self.method.codec.converse, fragment=fragment.fragment, state=fragment.codec)
            conversation, departure = fragment.converse(converse, outer_grad)
            outcome = Outcome()
            then = self._stepping.ahead(fragment, outer_grad, outcome) if ahead else None
            what = f"fragment {index} sent at step {step}"

            def told() -> Trailer:
                return trailer if checksum is None else trailer._replace(digest=checksum())

            handle = self.link.mean(Parcel(conversation, fragment.fragment.numel, told, what, then))
            kept = (snapshot, fragment.global_params, measured.lr_sum)
            transfer = Transfer(step, *kept, handle, None if ahead else outer_grad, departure, outcome)
            fragment.in_flight.append(transfer)
            fragment.num_sends += 1
            fragment.sent_at, fragment.lr_sum = step, measured.lr_sum
            self.account.sent(step, index, fragment.fragment.numel, blocked_s)

    def _land(self, fragment: FragmentState, sent_at: int, merge: Merge) -> Words | None:
        """Land a transfer; returns the words of all regions that it carried."""
        with torch.profiler.record_function("hf_cocodc::land"):
            transfer = fragment.transfer_of(sent_at)
            arrival, blocked_s = self._wait(transfer)
            index = fragment.fragment.index
            check_in_step(self.link.region, arrival.trailers, index, sent_at)
            if arrival.trailers:
                self.measured.hear(index, arrival, transfer.outcome.seconds)
            fragment.in_flight = [other for other in fragment.in_flight if other is not transfer]
            fragment.codec = arrival.result.state
            mean = arrival.result.mean
            step = self._stepping.at_landing(fragment, transfer, arrival)
            finite = fragment.land(transfer, mean, step, merge, self._merge_info(transfer))
            transfer.outcome.step = step  # the next transfer of the fragment may be stepped ahead from it
            self.link.give(mean)
            if merge.reads_local and not self._everywhere(finite):
                fragment.local.show(fragment.global_params)
            settled = sent_at if merge.keeps_local_steps else self.inner_step
            fragment.settled_at = max(fragment.settled_at, settled)
            if len({trailer.digest for trailer in arrival.trailers}) > 1:
                reunite(self.link, fragment, transfer)
            self.account.landed(self.inner_step, index, sent_at, arrival, blocked_s)
            return tuple(trailer.word for trailer in arrival.trailers) or None

    def _wait(self, transfer: Transfer) -> tuple[Arrival, float]:
        """Wait for a transfer; the seconds are what the link costs training."""
        start = self.link.clock()
        transfer.outcome.awaited = True
        arrival = transfer.handle.wait()
        blocked_s = self.link.clock() - start
        self.account.totals.blocked_s += blocked_s
        return arrival, blocked_s

    def _show_global(self, averaged: bool) -> None:
        mean = averaged and not self.method.outer.regions_agree
        show_global(self.fragments, self.link, self.inner_step, self.account.totals, mean)

    def _everywhere(self, holds: bool) -> bool:
        """Whether something holds in every lane of this region."""
        return not self.link.total(torch.tensor([float(not holds)], dtype=torch.float64)).item()

    def _merge_info(self, transfer: Transfer) -> MergeInfo:
        staleness = self.inner_step - transfer.sent_at
        flight_lr = self.measured.mean_lr(transfer.lr_sum, staleness) if staleness else self.measured.lr
        return MergeInfo(
            sent_at=transfer.sent_at, landed_at=self.inner_step, flight_lr=flight_lr, total=self.link.total
        )

    def _fresh_outer_grad(self, fragment: FragmentState) -> Tensor:
        """Global minus local as they are now; zero if this region's local params are not finite."""
        for transfer in fragment.in_flight:
            # a transfer of this step carries the same values, unless it was sent without training or a landing came between
            just_left = transfer.sent_at == self._trained_at == self.inner_step
            if just_left and transfer.global_params is fragment.global_params:
                assert transfer.outer_grad is not None
                return transfer.outer_grad
        local, outer_grad, finite = fragment.prepare(fragment.global_params)
        fragment.pool.give(local)
        return outer_grad if self._everywhere(finite) else outer_grad.zero_()
