"""The transfers of one region: how they are sent, landed, and all brought to their end."""

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..link.base import Arrival, Link, MeanRequest
from ..link.records import Ending, Trailer, Word, Words
from ..methods import Method
from ..parts.codecs import share_of_rank, square_of_residuals, without_residuals
from ..parts.codecs.base import CodecState
from ..parts.guard import DROPPED, Guard, Ordinary
from ..parts.info import MergeInfo
from ..parts.merges import Merge, follow
from ..parts.schedules import Land, Send
from ..parts.tensors.flat import tensors_in
from .account import Account, Measurements, Seconds
from .agreement import check_in_step
from .compatibility import HISTORIES, sound_counts
from .fragment import FragmentState
from .stepping import Guarding, Stepping
from .transfer import Shares, Trained, Transfer
from .transfers import take_global

logger = logging.getLogger(__name__)


class Traffic:
    """Sends and lands the transfers of one region; its other arguments are those of `Synchronizer`.

    Attributes:
        trained_at: last inner step that trained; -1 once this region has given up what it has trained.
        is_ahead: whether outer steps are taken ahead of their landings.
    """

    def __init__(
        self,
        method: Method,
        link: Link,
        device: torch.device,
        measured: Measurements,
        account: Account,
        digest_interval: int,
        weights: str,
        guard: Guard | None,
        is_bounded: Callable[[], bool],
    ) -> None:
        self._method, self._link = method, link
        self._measured, self._account = measured, account
        self._digest_interval = digest_interval
        self.inner_step = self.trained_at = 0
        self.shares = Shares(weights, link.is_elastic)
        self._guarding, self._is_bounded = Guarding(guard, link.region), is_bounded
        called = self._fresh_outer_grad, self._guarding, self._tell_of_fresh
        self._stepping = Stepping(method, link, device, *called)
        self.is_ahead = self._stepping.is_ahead

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the fragments."""
        return {"inner_step": self.inner_step, "trained": list(self.shares.trained)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        sound_counts(state["inner_step"])
        self.inner_step = self.trained_at = state["inner_step"]
        # earlier versions did not count: every inner step was trained, on an unknown number of tokens
        self.shares.trained = Trained.of(state.get("trained", (self.inner_step, 0)))

    def hold(
        self, events: Sequence[Send | Land], fragments: Sequence[FragmentState], word: Word
    ) -> Words | None:
        """Send and land what is due; returns the words of all regions, if a transfer landed."""
        words: Words | None = None
        for event in events:
            fragment = fragments[event.fragment]
            if isinstance(event, Send):
                self.send(fragment, word, self.is_ahead)
            else:
                words = self.land(fragment, event.sent_at, self._method.merge) or words
        return words

    def send(self, fragment: FragmentState, word: Word, ahead: bool) -> None:
        """Send the outer gradient of a fragment; `ahead`: its outer step may be taken before it lands."""
        with torch.profiler.record_function("hf_cocodc::send"):
            index, step, began = fragment.fragment.index, self.inner_step, self._link.clock()
            snapshot, outer_grad, square = fragment.prepare(fragment.base())
            blocked_s = 0.0
            # a codec with memory continues from the end of its last transfer
            if fragment.codec_remembers and fragment.in_flight:
                arrival, blocked_s = self._wait(fragment.in_flight[-1])
                fragment.codec = self._codec_after(fragment.in_flight[-1], arrival)
            norm, carried = self._region_norms(square, square_of_residuals(fragment.codec))
            finite = math.isfinite(norm)
            fragment.nonfinite_rounds += not finite
            if not finite and word.ending is Ending.NO:
                self._account.sat_out(step, index, self._link.region)
            is_own = not self._link.is_elastic or self._link.takes_part()
            share = self.shares.share(fragment.trained, step - fragment.sent_at) if finite else 0.0
            if not share:
                outer_grad.zero_()
                norm = carried = 0.0
            is_checked = self._method.outer.regions_agree and fragment.num_sends % self._digest_interval == 0
            checksum = fragment.checksum() if is_checked else None
            measured = self._measured
            trailer = Trailer(
                weight=share,
                fragment=index,
                inner_step=step,
                step_time_s=measured.step_time_s,
                sync_time_s=measured.sync_time_s,
                compression=share_of_rank(fragment.codec),
                round_lr=measured.mean_lr(fragment.lr_sum, step - fragment.sent_at),
                knows=self._link.knows,
                norm=norm,
                carried=carried if math.isfinite(carried) else sys.float_info.max,
                is_bounded=self._is_bounded(),
                trained_at=self.trained_at,
                **word._asdict(),
            )
            converse = partial(self._method.codec.converse, fragment=fragment.fragment, state=fragment.codec)
            transfer = Transfer(
                sent_at=step,
                snapshot=snapshot,
                global_params=fragment.global_params,
                lr_sum=measured.lr_sum,
                outer_grad=None if ahead else outer_grad,
                is_own=is_own,
                norm=norm,
                ordinary=self._guarding.ordinary(fragment),
                is_finite=finite,
                trained=fragment.trained,
            )
            begin, transfer.departure = fragment.converse(converse, outer_grad)

            def with_checksum() -> Trailer:
                return trailer if checksum is None else trailer._replace(digest=checksum())

            request = MeanRequest(
                begin,
                fragment.fragment.numel,
                with_checksum,
                f"fragment {index} sent at step {step}",
                then=self._stepping.ahead(fragment, transfer, outer_grad) if ahead else None,
                judge=self._guarding.judge(transfer.ordinary),
            )
            transfer.handle = self._link.mean(request)
            fragment.in_flight.append(transfer)
            fragment.num_sends += 1
            fragment.sent_at, fragment.lr_sum = step, measured.lr_sum
            if is_own:
                fragment.trained = self.shares.trained
            took_s = self._link.clock() - began
            self._account.sent(step, index, fragment.fragment.numel, blocked_s, took_s, norm)

    def land(self, fragment: FragmentState, sent_at: int, merge: Merge) -> Words | None:
        """Land a transfer; returns the words of all regions that it carried.

        A mean that is not finite changes nothing, in any region: the next outer gradient has the transfer's inner steps again.
        Not where a fragment is sent again before its transfer lands (`Schedule.back_to_back`): the landing before has set the
        local params back, and these inner steps are lost with the mean.
        """
        with torch.profiler.record_function("hf_cocodc::land"):
            transfer, began = fragment.transfer_of(sent_at), self._link.clock()
            arrival, blocked_s = self._wait(transfer)
            index = fragment.fragment.index
            check_in_step(self._link.region, arrival, index, sent_at)
            if arrival.trailers:
                self._measured.hear(index, arrival, transfer.step_s)
            verdict = self._guarding.verdict(transfer.ordinary, arrival)
            if self._guarding.own_fate(transfer, arrival) == DROPPED:
                take_global(fragment)
            fragment.in_flight = [other for other in fragment.in_flight if other is not transfer]
            fragment.codec = self._codec_after(transfer, arrival)
            self._count_round(fragment, transfer, arrival)
            if arrival.is_finite:
                self._take_in(fragment, transfer, arrival, merge)
            else:
                self._stepping.without_step(fragment, transfer)
                self._link.give(arrival.result.mean)
            self._guarding.remember(fragment, transfer, arrival)
            if len({trailer.digest for trailer in arrival.trailers}) > 1:
                reunite(self._link, fragment, transfer, self._measured)
            self._account.count_broadcasts(self._link)  # always: lanes call together, but may reunite alone
            seconds = Seconds.of(arrival, blocked_s, began, self._link.clock())
            self._account.landed(self.inner_step, index, sent_at, arrival, seconds, verdict)
            self._link.landed(arrival)
            return arrival.words or None

    def _count_round(self, fragment: FragmentState, transfer: Transfer, arrival: Arrival) -> None:
        """Count rounds in a row that did not count; one whose outer gradient was not finite counted at its send."""
        weights = {
            region: each.weight for region, each in zip(arrival.members, arrival.trailers, strict=True)
        }
        if not transfer.is_own or not weights.get(self._link.region):
            return
        if not arrival.is_finite or self._guarding.own_fate(transfer, arrival):
            fragment.nonfinite_rounds += 1
        elif all(other.is_finite for other in fragment.in_flight):
            fragment.nonfinite_rounds = 0

    def _take_in(self, fragment: FragmentState, transfer: Transfer, arrival: Arrival, merge: Merge) -> None:
        """Move the global params of a fragment by a mean, and merge them into the local ones."""
        mean, keeps = arrival.result.mean, merge.keeps_local_steps
        if self._link.is_elastic and not transfer.is_own:
            fragment.measure_own_steps(transfer)
            merge = follow()
        step = self._stepping.at_landing(fragment, transfer, arrival)
        finite = fragment.land(transfer, mean, step, merge, self._merge_info(transfer))
        transfer.step = step  # the next transfer of the fragment may be stepped ahead from it
        self._link.give(mean)
        if merge.reads_local and not self._everywhere(finite):
            fragment.local.show(fragment.global_params)
        settled = transfer.sent_at if keeps else self.inner_step
        fragment.settled_at = max(fragment.settled_at, settled)

    def end(self, fragments: Sequence[FragmentState], word: Word) -> Words | None:
        """Bring all inner steps into the global params, as the closing says; nothing stays in flight. Returns like `hold`."""
        closing = self._method.closing(self._method.merge)
        words: Words | None = None
        for fragment in fragments:
            flying = [transfer.sent_at for transfer in fragment.in_flight]
            for sent_at in flying if flying and flying[-1] > fragment.settled_at else ():
                words = self.land(fragment, sent_at, closing.early) or words
        sent = [each for each in fragments if max(each.settled_at, each.sent_at) < self.inner_step]
        for fragment in sent:
            self.send(fragment, word, ahead=False)
        for fragment in fragments:
            while fragment.in_flight and not (closing.drops_taken and self._all_taken(fragment)):
                words = self.land(fragment, fragment.in_flight[0].sent_at, closing.last) or words
            fragment.in_flight.clear()
        return words

    def _all_taken(self, fragment: FragmentState) -> bool:
        """Whether this region was alone in all transfers in flight, and has taken in their means already."""
        return all(
            transfer.taken == 1 == self._stepping.own_share(transfer, self._wait(transfer)[0])
            for transfer in fragment.in_flight
        )

    def of_loaded(self, fragment: FragmentState) -> None:
        """Take the steps of loaded transfers, where they are taken ahead."""
        self._stepping.of_loaded(fragment)

    def _wait(self, transfer: Transfer) -> tuple[Arrival, float]:
        """Wait for a transfer; the seconds are what the link costs training."""
        start = self._link.clock()
        transfer.awaited = True
        arrival = transfer.handle.wait()
        blocked_s = self._link.clock() - start
        self._account.totals.blocked_s += blocked_s
        return arrival, blocked_s

    def _codec_after(self, transfer: Transfer, arrival: Arrival) -> CodecState:
        """The codec's state after a transfer, without residuals of an outer gradient out of the ordinary."""
        state, verdict = arrival.result.state, self._guarding.verdict(transfer.ordinary, arrival)
        is_wrong = verdict.is_void or self._guarding.own_fate(transfer, arrival)
        return without_residuals(state) if is_wrong else state

    def _region_norms(self, *squares: float) -> list[float]:
        """Norms from sums of squares, over all lanes of this region; not finite if a value is not."""
        return self._link.total(torch.tensor(squares, dtype=torch.float64)).sqrt().tolist()

    def _everywhere(self, holds: bool) -> bool:
        """Whether something holds in every lane of this region."""
        return not self._link.total(torch.tensor([float(not holds)], dtype=torch.float64)).item()

    def _merge_info(self, transfer: Transfer) -> MergeInfo:
        measured, staleness = self._measured, self.inner_step - transfer.sent_at
        flight_lr = measured.mean_lr(transfer.lr_sum, staleness) if staleness else measured.lr
        return MergeInfo(
            sent_at=transfer.sent_at, landed_at=self.inner_step, flight_lr=flight_lr, total=self._link.total
        )

    def _tell_of_fresh(self, fragment: FragmentState, norm: float, ordinary: float) -> None:
        """Record that this region's own outer step scales down its fresh outer gradient."""
        index, region = fragment.fragment.index, self._link.region
        self._account.counts_less(self.inner_step, index, region, norm, ordinary)

    def _fresh_outer_grad(self, fragment: FragmentState, landing: Transfer) -> tuple[Tensor, float, float]:
        """Global minus local now (zero if not finite), its norm, and the mean learning rate since `landing` was sent."""
        rate = self._measured.mean_lr(landing.lr_sum, self.inner_step - landing.sent_at)
        for transfer in fragment.in_flight:
            # a transfer of this step carries the same values, unless it was sent without training or a landing came between
            just_left = transfer.sent_at == self.trained_at == self.inner_step
            if just_left and transfer.global_params is fragment.global_params:
                assert transfer.outer_grad is not None
                return transfer.outer_grad, transfer.norm, rate
        local, outer_grad, square = fragment.prepare(fragment.global_params)
        fragment.pool.give(local)
        [norm] = self._region_norms(square)
        return (outer_grad, norm, rate) if math.isfinite(norm) else (outer_grad.zero_(), 0.0, rate)


def reunite(link: Link, fragment: FragmentState, landed: Transfer, measured: Measurements) -> None:
    """Take the lowest region's global params and outer state of a fragment, and what schedule and guard know of it.

    Processors that round differently drift apart by bits. A collective call of all regions, after the landing that showed it.
    """
    what = f"the lowest region's global params of fragment {fragment.fragment.index}"
    sent = [transfer.global_params for transfer in fragment.in_flight]
    flats = {id(each): each for each in (fragment.global_params, *tensors_in(fragment.outer), *sent)}
    for flat in flats.values():
        on_host = flat.cpu()
        link.broadcast(on_host, what)
        flat.copy_(on_host)
    logger.warning(
        "the global params of fragment %d differ between regions: all regions take region %d's.",
        *(fragment.fragment.index, link.parties[0]),
    )
    index, histories = fragment.fragment.index, [list(getattr(fragment, name)) for name in HISTORIES]
    at_sends = [number for transfer in fragment.in_flight for number in transfer.ordinary]
    counts = fragment.voids, fragment.far_losses, *map(len, histories)
    numbers = [*_numbers_in(fragment.outer), measured.change[index], *at_sends, *counts]
    answers = iter(_of_all_regions(link, numbers, what))
    fragment.outer = _with_numbers(fragment.outer, answers)
    measured.correct(index, next(answers))
    for transfer in fragment.in_flight:
        transfer.ordinary = Ordinary(next(answers), next(answers))
    fragment.voids, fragment.far_losses, *lengths = map(int, answers)
    for name, values, length in zip(HISTORIES, histories, lengths, strict=True):
        setattr(fragment, name, _of_all_regions(link, [*values, *[0.0] * length][:length], what))
    # Steps that were taken ahead, or would start from the landed one, have the old values: they are left to their landings.
    # A link's thread is no longer at these tensors, because the broadcasts came after all its earlier work.
    for transfer in (landed, *fragment.in_flight):
        transfer.step = None


def _of_all_regions(link: Link, numbers: Sequence[float], what: str) -> list[float]:
    """The lowest region's numbers, as many as there are here."""
    if not numbers:
        return []
    answers = torch.tensor(numbers, dtype=torch.float64)
    link.broadcast(answers.view(torch.float32), what)  # the bits of each number, as two halves
    return answers.tolist()


def _numbers_in(state: dict[str, Any]) -> Iterator[float]:
    """Every number of a nested state, in the order of its keys."""
    for value in state.values():
        if isinstance(value, dict):
            yield from _numbers_in(value)
        elif not isinstance(value, Tensor):
            yield float(value)


def _with_numbers(state: dict[str, Any], numbers: Iterator[float]) -> dict[str, Any]:
    """The state with other numbers, each of the type that it had."""
    changed: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            changed[name] = _with_numbers(value, numbers)
        else:
            changed[name] = value if isinstance(value, Tensor) else type(value)(next(numbers))
    return changed
