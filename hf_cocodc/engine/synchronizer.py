"""The engine of one region: the only loop over events.

It owns the global params, the outer state and the transfers in flight, and asks the method's parts what to do. It names no
method, codec, outer transform or merge. Its tensors are flat fp32, on the host or with the params; local params are written
in place, only through `FragmentState`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ..links.base import Link
from ..links.trailer import NOTHING_TO_SAY, Word, Words
from ..methods import Method
from ..parts.schedules import Send
from ..tensors.flat import digest
from ..tensors.pools import HOST
from . import saving
from .account import Account, Record, Totals
from .agreement import Standing, check_same_end, check_same_start
from .compatibility import layout, same_layout, same_structure
from .fragment import adopt
from .measurements import Measurements
from .memory import Memory, memory
from .traffic import Traffic
from .weights import local_digest, local_kept, show_global


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
        self.measured = Measurements(link.clock())
        self.account = Account(record)
        self._traffic = Traffic(method, link, device, self.measured, self.account, digest_interval)
        fragments = method.fragments(model)
        ahead = self._traffic.is_ahead
        self.fragments = adopt(fragments, model, method, link, device, state is None, ahead)
        link.bring_to(self.fragments[0].pool)
        numels = torch.tensor([float(fragment.numel) for fragment in fragments], dtype=torch.float64)
        lengths: list[float] = link.total(numels).tolist()
        self.num_params = round(sum(lengths))
        """Parameters that this region synchronises."""
        self.measured.begin(lengths)
        self.account.num_fragments = len(fragments)
        self._schedule_state = method.schedule.init(len(fragments))
        self._next_event = 0  # no inner step before this one has events
        if state is not None:
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
        traffic = self._traffic
        traffic.inner_step += 1
        if trained:
            traffic.trained_at = traffic.inner_step
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
                self._traffic.send(fragment, word, self._traffic.is_ahead)
            else:
                words = self._traffic.land(fragment, event.sent_at, self.method.merge) or words
        return words

    @torch.no_grad()
    def finish(self, word: Word = NOTHING_TO_SAY) -> Words | None:
        """End the run as the method's closing says, and leave the global weights in the model.

        A last check compares the weights of all regions.

        Returns:
            The words of all regions, if a transfer landed.
        """
        words = self._traffic.end(self.fragments, word)
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
        return memory(self.fragments, self.method, self.link.num_regions, self._traffic.is_ahead)

    def give_up_unsent(self) -> None:
        """Give no weight to this region's inner steps since the last sends: they may be incomplete."""
        self._traffic.trained_at = -1

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
            self._traffic.of_loaded(fragment)
        self.measured.load_state_dict(state)
        self._schedule_state = state["schedule_state"]
        self._next_event = 0
        self._traffic.inner_step = self._traffic.trained_at = state["inner_step"]
        self.account.totals = Totals(**state["totals"])
        own = self.global_digest() if self.method.outer.regions_agree else -1
        check_same_start(self.link, Standing(self.inner_step, own))

    def _show_global(self, averaged: bool) -> None:
        mean = averaged and not self.method.outer.regions_agree
        show_global(self.fragments, self.link, self.inner_step, self.account.totals, mean)
