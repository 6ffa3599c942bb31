"""The engine: the only loop over events.

It owns the global params, the outer state and the transfers in flight, asks the method's parts what to do, and knows no
method by name. All tensors it keeps are flat fp32, on the host or with the params; local params are written in place, by what it
does with `transfers.FragmentState` and by nobody else.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from ..links.base import Arrival, Handle, Link
from ..links.trailer import Ending, Trailer
from ..methods import Method
from ..parts.codecs import compression, forget, fp32
from ..parts.codecs.base import State
from ..parts.info import SyncInfo
from ..parts.merges import Merge, additive, replace
from ..parts.schedules import AgreedStats, Send
from ..tensors.flat import copy_all_, digest, is_finite, tensors_in
from ..tensors.pools import HOST
from ..tensors.sharding import reshard
from .agreement import check_in_step, check_same_end, check_same_start
from .compatibility import layout, same_layout, same_structure
from .fragment import FragmentState, Totals, adopt
from .transfer import Transfer

logger = logging.getLogger(__name__)

_STEPS_TIMED = 255
"""Inner steps before an event whose times count."""
_COUNTERS = ("lr", "lr_sum", "step_time_s", "sync_time_s", "change", "schedule_state")


class Synchronizer:
    """Keeps one region's model in step with the others'.

    Args:
        model: its trainable parameters are synchronised; unwrapped (no DDP around it).
        method: the five parts.
        link: reaches the other regions, or `loopback()`.
        record: called as record(kind, **facts) at sends, landings and the end.
        digest_interval: sends of a fragment between two checks that its global params are equal everywhere.
        state: what `state_dict` gave, to go on from there with the model's parameters as they are.
        device: where global params, outer state and transfers are kept; what the link and codecs need is on the host.

    Without `state` all regions start from region 0's parameters. Constructing is a collective call.

    Raises:
        CheckpointError: `state` is of another model or method, or not the other regions'.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        link: Link,
        *,
        record: Callable[..., None] = lambda kind, **facts: None,
        digest_interval: int = 10,
        state: State | None = None,
        device: torch.device = HOST,
    ) -> None:
        self.method = method
        self.link = link
        self._model = model
        self.inner_step = 0
        self.stats = AgreedStats()
        self.totals = Totals()
        self.report: dict[str, float] = {}
        self.loss = math.nan
        self.ending = Ending.NO
        """This region's word on its end, for the others to hear."""
        self.endings: tuple[int, ...] = ()
        """Every region's word, as it rode on the transfer that landed last."""
        self.saved_at = self.saved_everywhere = 0
        """Steps of the newest complete checkpoints: this region's, and, as far as heard, the newest that all have."""
        self.trained_at = 0
        """Last inner step that trained; no transfer of this region has weight unless it carries such a step."""
        self._record = record
        self._digest_interval = digest_interval
        self._clock = link.clock
        self._lr = self._lr_sum = 0.0
        self._left_at = link.clock()
        self._durations: deque[float] = deque(maxlen=_STEPS_TIMED)
        self._step_time_s = self._sync_time_s = 0.0
        fragments = method.fragments(model)
        self.fragments = adopt(fragments, model, method, link, device, start=state is None)
        link.bring_to(self.fragments[0].buffers)
        self._change = [0.0] * len(fragments)
        lengths = torch.tensor([float(fragment.numel) for fragment in fragments], dtype=torch.float64)
        self._lengths: list[float] = link.total(lengths).tolist()
        self._schedule_state = method.schedule.init(len(fragments))
        self._next_event = 0
        """No inner step before this one has events."""
        if state is not None:
            self.load_state_dict(state)

    @property
    def num_params(self) -> int:
        """Parameters synchronised from this region."""
        return round(sum(self._lengths))

    def step(self, inner_lr: float = 0.0, trained: bool = True) -> None:
        """To be called after each inner step, with the learning rate it used; nearly free where no event is due.

        Args:
            inner_lr: learning rate of the inner step.
            trained: False to keep step with the others without training: transfers that carry no step of this region's
                have no weight in the mean.

        Raises:
            LinkError: a transfer failed; nothing of it was applied.
        """
        self.inner_step += 1
        if trained:
            self.trained_at = self.inner_step
        self.link.tick()
        now = self._clock()
        self._durations.append(now - self._left_at)
        self._left_at = now
        self._lr = inner_lr
        self._lr_sum += inner_lr
        if self.inner_step >= self._next_event:
            self._hold_events()
            self._left_at = self._clock()  # from here on it is the training's time again

    @torch.no_grad()
    def _hold_events(self) -> None:
        """Do what the schedule has for this inner step, if anything."""
        schedule = self.method.schedule
        events, self._schedule_state = schedule.events(self.inner_step, self.stats, self._schedule_state)
        self._next_event = schedule.next_event(self.inner_step, self._schedule_state)
        if events:
            self._step_time_s = median(self._durations)  # one evaluation among the steps does not count
            self._durations.clear()
        for event in events:
            state = self.fragments[event.fragment]
            if isinstance(event, Send):
                self._send(state)
            else:
                self._land(state, event.sent_at, self.method.merge)

    @torch.no_grad()
    def finish(self) -> None:
        """End the run: land what is in flight, send what is left, and leave the global weights in the model.

        Inner steps that no transfer has carried yet (max_steps is no multiple of the interval, or the merge keeps local
        steps) travel in one last round. Ends with a check that every region holds the same global params.
        """
        merge = self.method.merge
        for state in self.fragments:
            for transfer in list(state.in_flight):  # those that carry a part of what the local params hold
                if merge.keeps_local_steps or transfer.sent_at > state.settled_at:
                    self._land(state, transfer.sent_at, merge if merge.keeps_local_steps else additive())
        rest = [state for state in self.fragments if max(state.settled_at, state.sent_at) < self.inner_step]
        for state in rest:
            self._send(state)
        if self.method.outer.regions_agree:
            for state in self.fragments:
                for transfer in list(state.in_flight):
                    self._land(state, transfer.sent_at, replace())
        else:  # own parts are in then, and the mean over the regions brings in the others'
            for state in rest:
                self._land(state, state.in_flight[0].sent_at if len(state.in_flight) > 1 else 0, merge)
            for state in self.fragments:
                state.in_flight.clear()
        for state in self.fragments:
            self._show_global(state)
        self._check_the_end()
        self._schedule_state = self.method.schedule.init(len(self.fragments))
        self._next_event = 0

    @contextmanager
    def global_weights(self, averaged: bool = True) -> Iterator[None]:
        """The model holds the global weights inside the block, and again its local ones, bit for bit, behind it.

        Where a method lets global params differ between regions (eager updates), they are averaged, a collective call;
        or, if not `averaged`, they are this region's own.
        """
        with torch.no_grad():
            reshard(self._model)
            kept = [[param.clone() for param in state.params] for state in self.fragments]
            for state in self.fragments:
                self._show_global(state, averaged)
        try:
            yield
        finally:
            reshard(self._model)
            with torch.no_grad():
                for state, params in zip(self.fragments, kept, strict=True):
                    copy_all_(state.params, params)

    def global_digest(self) -> int:
        """A checksum of all global params of this rank."""
        return digest(*(state.global_params for state in self.fragments))

    def state_dict(self) -> State:
        """Everything but the local params: nested dicts and lists of numbers, texts and tensors.

        Transfers in flight are waited for and their results kept un-landed, so that saving changes no number. On every
        rank of a region a collective call of that region.
        """
        return {
            "layout": layout([each.fragment for each in self.fragments]),
            **{name: getattr(self, f"_{name}") for name in _COUNTERS},
            "inner_step": self.inner_step,
            "stats": self.stats._asdict(),
            "totals": asdict(self.totals),
            "fragments": [fragment.state_dict() for fragment in self.fragments],
        }

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Go on from `state`; the model has to hold the local params of that moment. A collective call.

        Raises:
            CheckpointError: it is of another model or method, or not the other regions'.
        """
        same_layout(state["layout"], [each.fragment for each in self.fragments])
        same_structure(state["schedule_state"], self._schedule_state, "the schedule's state")
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
        for name in _COUNTERS:
            setattr(self, f"_{name}", state[name])
        self._next_event = 0
        self.ending, self.endings = Ending.NO, ()
        self.inner_step = self.trained_at = self.saved_at = self.saved_everywhere = state["inner_step"]
        self.stats = AgreedStats(**state["stats"] | {"change": tuple(state["stats"]["change"])})
        self.totals = Totals(**state["totals"])
        check_same_start(
            self.link, self.inner_step, self.global_digest() if self.method.outer.regions_agree else -1
        )

    @torch.no_grad()
    def join(self) -> None:
        """Make a state that another region saved this region's own: global params, and no residuals nor snapshots."""
        for state in self.fragments:
            state.show(state.global_params)
            state.codec = forget(state.codec)
            for transfer in state.in_flight:
                transfer.join(state.gather())

    def _fresh_outer_grad(self, state: FragmentState) -> Tensor:
        """Global minus local as they are now; zero where a region's local params are not finite."""
        for transfer in state.in_flight:
            # what has just left carries exactly that, unless it was sent without training or a landing came between
            just_left = transfer.sent_at == self.trained_at == self.inner_step
            if just_left and transfer.global_params is state.global_params:
                return transfer.outer_grad
        local, outer_grad, finite = state.prepare()
        state.buffers.give(local)
        return outer_grad if self._everywhere(finite) else outer_grad.zero_()

    def _send(self, state: FragmentState) -> None:
        with torch.profiler.record_function("hf_cocodc::send"):
            fragment, step = state.fragment, self.inner_step
            snapshot, outer_grad, finite = state.prepare()
            # a codec with memory goes on from where its last transfer ended
            if state.codec_remembers and state.in_flight:
                state.codec = self._wait(state.in_flight[-1].handle).result.state
            finite = self._everywhere(finite)
            if not finite and self.ending is Ending.NO:
                logger.warning(
                    "the outer gradient of fragment %d at step %d is not finite in region %d: this region sits the "
                    "transfer out, so that the others do not take it in. Look at its loss; a lower learning rate or "
                    "gradient clipping (max_grad_norm) helps.",
                    *(fragment.index, step, self.link.region),
                )
            shares = finite and self.trained_at > state.sent_at
            if not shares:
                outer_grad.zero_()
            checked = self.method.outer.regions_agree and state.num_sends % self._digest_interval == 0
            checksum = state.checksum() if checked else None
            trailer = Trailer(
                weight=float(shares),
                fragment=fragment.index,
                inner_step=step,
                step_time_s=self._step_time_s,
                sync_time_s=self._sync_time_s,
                loss=self.loss,
                compression=compression(state.codec),
                ending=self.ending,
                saved_at=self.saved_at,
                round_lr=(self._lr_sum - state.lr_sum) / max(step - state.sent_at, 1),
            )
            conversation, departure = state.converse(self.method.codec, outer_grad, state.codec)
            what = f"fragment {fragment.index} sent at step {step}"
            handle = self.link.mean(conversation, fragment.numel, partial(_checked, trailer, checksum), what)
            kept = (snapshot, outer_grad, state.global_params, self._lr_sum)
            transfer = Transfer(step, *kept, handle, departure)
            state.in_flight.append(transfer)
            state.num_sends += 1
            state.sent_at, state.lr_sum = step, self._lr_sum
            self.totals.sends += 1
            self._record("send", step=step, fragment=fragment.index, numel=fragment.numel)

    def _land(self, state: FragmentState, sent_at: int, merge: Merge) -> None:
        with torch.profiler.record_function("hf_cocodc::land"):
            sent = (transfer for transfer in state.in_flight if transfer.sent_at == sent_at)
            transfer = next(sent, None) or state.nothing_sent()
            blocked_s = -self.totals.blocked_s
            arrival = self._wait(transfer.handle)
            blocked_s += self.totals.blocked_s
            self._hear(state, transfer, arrival)
            state.in_flight = [other for other in state.in_flight if other is not transfer]
            state.codec = arrival.result.state
            staleness = self.inner_step - sent_at
            info = SyncInfo(
                fragment=state.fragment.index,
                cut=state.cut,
                sent_at=sent_at,
                landed_at=self.inner_step,
                num_regions=self.link.num_regions,
                round_lr=max((trailer.round_lr for trailer in arrival.trailers), default=0.0),
                flight_lr=(self._lr_sum - transfer.lr_sum) / staleness if staleness else self._lr,
                global_at_send=transfer.global_params,
                global_params=state.global_params,
                own_outer_grad=transfer.outer_grad,
                fresh_outer_grad=lambda: self._fresh_outer_grad(state),
                total=self.link.total,
            )
            step, state.outer = self.method.outer.begin(state.outer, info)
            mean = arrival.result.mean
            finite = state.land(mean, step, merge, transfer.snapshot, info)
            self.link.give(mean)
            if merge.reads_local and not self._everywhere(finite):
                state.show(state.global_params)
            state.retire(transfer)
            state.settled_at = max(state.settled_at, sent_at if merge.keeps_local_steps else self.inner_step)
            self._reunite_if_needed(state, arrival)
            self._account(state, transfer, arrival, blocked_s)

    def _wait(self, handle: Handle) -> Arrival:
        """Wait for a transfer; what that takes is what the link costs training."""
        start = self._clock()
        arrival = handle.wait()
        self.totals.blocked_s += self._clock() - start
        return arrival

    def _everywhere(self, holds: bool) -> bool:
        """Whether it holds in every lane of this region."""
        return not self.link.total(torch.tensor([float(not holds)], dtype=torch.float64)).item()

    def _hear(self, state: FragmentState, transfer: Transfer, arrival: Arrival) -> None:
        """Take in what rode on a transfer; equal in all regions."""
        check_in_step(self.link.region, arrival.trailers, state.fragment.index, transfer.sent_at)
        if not arrival.trailers:
            return
        self.endings = tuple(int(trailer.ending) for trailer in arrival.trailers)
        saved_at = {int(trailer.saved_at) for trailer in arrival.trailers}
        if len(saved_at) == 1:
            self.saved_everywhere = max(saved_at)
        self._sync_time_s = arrival.seconds
        index = state.fragment.index
        self._change[index] = math.sqrt(arrival.square) / self._lengths[index]
        self.stats = AgreedStats(
            step_time_s=max(trailer.step_time_s for trailer in arrival.trailers),
            sync_time_s=max(trailer.sync_time_s for trailer in arrival.trailers),
            change=tuple(self._change),
            compression=arrival.trailers[0].compression,
        )

    def _reunite_if_needed(self, state: FragmentState, arrival: Arrival) -> None:
        """Regions whose processors round differently drift apart by bits: bring them back to region 0's value."""
        if len({trailer.digest for trailer in arrival.trailers}) > 1:
            index = state.fragment.index
            logger.warning(
                "the global params of fragment %d differ between regions: taking region 0's everywhere.",
                index,
            )
            what = f"region 0's global params of fragment {index}"
            for tensor in (state.global_params, *tensors_in(state.outer)):
                on_host = tensor.cpu()
                self.link.broadcast(on_host, what)
                tensor.copy_(on_host)

    def _account(self, state: FragmentState, transfer: Transfer, arrival: Arrival, blocked_s: float) -> None:
        losses = [trailer.loss for trailer in arrival.trailers if not math.isnan(trailer.loss)]
        totals = self.totals
        totals.landings += 1
        totals.bytes_sent += arrival.bytes_sent
        staleness = self.inner_step - transfer.sent_at
        self.report = {
            "rounds": totals.landings / len(self.fragments),
            "staleness": staleness,
            "blocked_s": totals.blocked_s,
            "bytes_sent": totals.bytes_sent,
        }
        if losses:
            self.report["loss"] = sum(losses) / len(losses)
        self._record(
            "land",
            step=self.inner_step,
            fragment=state.fragment.index,
            sent_at=transfer.sent_at,
            staleness=staleness,
            blocked_s=round(blocked_s, 6),
            transfer_s=round(arrival.seconds, 6),
            bytes_sent=arrival.bytes_sent,
            outer_grad_norm=math.sqrt(arrival.square),
            regions=sum(trailer.weight > 0 for trailer in arrival.trailers),
        )

    def _show_global(self, state: FragmentState, averaged: bool = True) -> None:
        """Make the global params the local ones; `averaged` over the regions where the method lets them differ."""
        if self.method.outer.regions_agree or not averaged:
            state.show(state.global_params)
            return
        index = state.fragment.index
        codec = fp32()
        conversation, departure = state.converse(codec, state.global_params, codec.init(state.fragment))
        trailer = Trailer(float(is_finite(state.global_params)), fragment=index, inner_step=self.inner_step)
        what = f"the mean of the global params of fragment {index}"
        arrival = self._wait(self.link.mean(conversation, state.fragment.numel, lambda: trailer, what))
        check_in_step(self.link.region, arrival.trailers, index, self.inner_step)
        self.totals.bytes_sent += arrival.bytes_sent
        state.show(arrival.result.mean)
        self.link.give(arrival.result.mean)
        departure.end()

    def _check_the_end(self) -> None:
        own = 0
        for state in self.fragments:
            local = state.gather()
            own = digest(local, start=own)
            state.buffers.give(local)
        check_same_end(self.link, self.inner_step, own)
        self._record(
            "finish",
            step=self.inner_step,
            blocked_s=round(self.totals.blocked_s, 6),
            bytes_sent=self.totals.bytes_sent,
            sends=self.totals.sends,
            digest=own,
        )


def _checked(trailer: Trailer, checksum: Callable[[], int] | None) -> Trailer:
    """The trailer with the checksum that it is to carry, if any."""
    return trailer if checksum is None else trailer._replace(digest=checksum())
