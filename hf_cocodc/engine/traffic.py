"""The transfers of one region: how they are sent, landed, and all brought to their end."""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..errors import LinkError, short
from ..link.base import Arrival, Link, MeanRequest
from ..link.records import Ending, Trailer, Word, Words
from ..methods import Method
from ..parts.codecs import share_of_rank, square_of_residuals, with_residuals_of, without_residuals
from ..parts.codecs.base import CodecState, Conversation, Plain, Result
from ..parts.guard import DROPPED, Guard
from ..parts.info import MergeInfo, OuterInfo
from ..parts.merges import Merge, follow
from ..parts.tensors.flat import moved
from ..parts.tensors.memory import Departure
from ..validation import Count
from .account import Account, Measurements
from .agreement import check_in_step, differs, reunite
from .balance import Balance
from .fragment import FragmentState, Trained, Transfer
from .saved import take_global
from .shares import Guarding, Shares


class Traffic:
    """Sends and lands the transfers of one region; its other arguments are those of `Synchronizer`.

    Nothing here reads a value of the device in the training thread: numbers come with trailers, and scalars stay where they are.

    Attributes:
        trained_at: last inner step that trained; -1 once this region has given up what it has trained.
        broken: what has failed halfway, so that this region holds no state of any step; empty if nothing has.
        judge: makes the function that judges a transfer, from what was ordinary when it was sent.
    """

    def __init__(
        self,
        method: Method,
        link: Link,
        measured: Measurements,
        account: Account,
        digest_interval: int,
        weights: str,
        guard: Guard | None,
        is_bounded: Callable[[], bool],
        balance: Balance,
    ) -> None:
        self._method, self._link = method, link
        self._measured, self._account, self._balance = measured, account, balance
        self._digest_interval = digest_interval
        self.inner_step = self.trained_at = 0
        self.broken = ""
        self.shares = Shares(weights, link.is_elastic)
        self._guarding, self._is_bounded = Guarding(guard, link.region), is_bounded
        self.judge = self._guarding.judge

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the fragments."""
        return {"inner_step": self.inner_step, "trained": list(self.shares.trained)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.inner_step = self.trained_at = msgspec.convert(state["inner_step"], Count)
        self.broken = ""
        self.shares.trained = msgspec.convert(state["trained"], Trained)

    @contextmanager
    def whole(self, what: str, *harmless: type[BaseException]) -> Iterator[None]:
        """Remember if the block fails halfway, unless with an error that is `harmless`. Of two blocks the inner one tells."""
        try:
            yield
        except harmless:
            raise
        except BaseException as error:
            words = short(error, 400).rstrip(". ")
            said = f": {words}" if words else ""
            why = f"{what} at step {self.inner_step} failed halfway: {type(error).__name__}{said}"
            self.broken = self.broken or why
            raise

    def send(self, fragment: FragmentState, word: Word, lands_at_once: bool = False) -> None:
        """Send the outer gradient of a fragment. `lands_at_once`: nothing changes the local params before it lands."""
        index, step, began = fragment.fragment.index, self.inner_step, self._link.clock()
        whole = self.whole(f"a send of fragment {index}", LinkError)  # as in `Synchronizer.step`
        with torch.profiler.record_function("hf_cocodc::send"), whole:
            is_own = not self._link.is_elastic or self._link.takes_part()
            snapshot, outer_grad, own_square = fragment.prepare(
                fragment.base(), keep=not (lands_at_once and is_own)
            )
            [square] = self._link.total(own_square.view(1))
            share = self.shares.share(fragment.trained, step - fragment.sent_at)
            fragment.clear_(outer_grad, ~square.isfinite() if share else torch.ones_like(square).bool())
            measured, link = self._measured, self._link
            transfer = Transfer(
                sent_at=step,
                snapshot=snapshot,
                global_params=fragment.global_params,
                lr_sum=measured.lr_sum,
                outer_grad=outer_grad,
                square=square,
                is_own=is_own,
                ordinary=self._guarding.ordinary(fragment),
                trained=fragment.trained,
            )
            codec = self._codec_before(fragment)
            is_checked = self._method.outer.regions_agree and fragment.num_sends % self._digest_interval == 0
            request = self._request(fragment, transfer, share, word, codec, is_checked)
            transfer.handle = link.mean(request)
            fragment.in_flight.append(transfer)
            fragment.num_sends += 1
            fragment.sent_at, fragment.lr_sum = step, measured.lr_sum
            if transfer.is_own:
                fragment.trained = self.shares.trained
            self._account.sent(step, index, fragment.fragment.numel, link.clock() - began)

    def _request(
        self,
        fragment: FragmentState,
        transfer: Transfer,
        share: float,
        word: Word,
        codec: Callable[[], tuple[CodecState, Tensor]],
        is_checked: bool,
    ) -> MeanRequest:
        """What the link gets of a transfer: its thread reads what the training thread must not wait for."""
        index, step, measured, home = fragment.fragment.index, self.inner_step, self._measured, fragment.home
        said = Trailer(
            fragment=index,
            inner_step=step,
            step_time_s=measured.step_time_s,
            sync_time_s=measured.sync_time_s,
            round_lr=measured.mean_lr(fragment.lr_sum, step - fragment.sent_at),
            knows=self._link.knows,
            is_bounded=self._is_bounded(),
            trained_at=self.trained_at,
            samples=self._balance.said.samples,
            unit=self._balance.said.unit,
            **word._asdict(),
        )
        departure, checksum = Departure(home.device), fragment.checksum() if is_checked else None
        square, outer_grad = transfer.square, transfer.outer_grad
        assert square is not None and outer_grad is not None

        @functools.cache
        def trailer() -> Trailer:
            departure.wait(square, outer_grad)
            state, residuals = codec()
            norm, carried = map(math.sqrt, torch.stack([square, residuals]).cpu().tolist())
            transfer.is_finite = math.isfinite(norm)
            counts = bool(share) and transfer.is_finite
            transfer.norm = norm if counts else 0.0
            return said._replace(
                weight=share if counts else 0.0,
                norm=transfer.norm,
                carried=min(carried, sys.float_info.max) if counts else 0.0,
                compression=share_of_rank(state),
                digest=-1 if checksum is None else checksum(),
            )

        def converse() -> Conversation:
            state, counts, plan = codec()[0], bool(trailer().weight), self._method.codec
            # a plain codec's values stay where they rest, and visit the device slice by slice; others compute with all of them
            values = outer_grad if isinstance(plan, Plain) else home.visit(outer_grad)
            mean, own, after = yield from plan.converse(
                values, fragment.fragment, moved(state, values.device)
            )
            if mean.device != home.rest:
                mean = home.take(len(mean)).copy_(mean)
            # what has counted nowhere has lost nothing
            return Result(mean, own, moved(after if counts else with_residuals_of(after, state), home.rest))

        return MeanRequest(
            converse,
            fragment.fragment.numel,
            trailer,
            f"fragment {index} sent at step {step}",
            self._guarding.judge(transfer.ordinary),
            home,
        )

    def _codec_before(self, fragment: FragmentState) -> Callable[[], tuple[CodecState, Tensor]]:
        """For the link's thread: the codec's state for a transfer sent now, and its residuals' sum of squares over all lanes.

        A codec with memory continues from the end of the fragment's transfer before, which the link's thread knows by then.
        """
        earlier = fragment.in_flight[-1] if fragment.codec and fragment.in_flight else None
        now, device = fragment.codec, fragment.home.device

        @functools.cache
        def find() -> tuple[CodecState, Tensor]:
            state = now if earlier is None else self._codec_after(earlier, earlier.handle.wait())
            # added on the device: this may be the training thread, and bringing a number there would wait
            carried = torch.zeros(1, dtype=torch.float64, device=device) + square_of_residuals(state)
            return state, self._link.total(carried)[0]

        if self._link.num_lanes > 1:
            find()  # the ranks of a region call each other only in their training threads
        return find

    def land(self, fragment: FragmentState, sent_at: int, merge: Merge) -> Words | None:
        """Land a transfer; returns the words of all regions that it carried.

        A mean that is not finite changes nothing, in any region: the next outer gradient has the transfer's inner steps again.
        Not where a fragment is sent again before its transfer lands (`Schedule.back_to_back`): the landing before has set the
        local params back, and these inner steps are lost with the mean.
        """
        with torch.profiler.record_function("hf_cocodc::land"):
            transfer, began = fragment.transfer_of(sent_at), self._link.clock()
            arrival = transfer.handle.wait()
            blocked_s = self._link.clock() - began
            index = fragment.fragment.index
            with self.whole(f"a landing of fragment {index}"):
                check_in_step(self._link.region, arrival, index, sent_at)
                if arrival.trailers:
                    self._measured.hear(index, arrival)
                    self._balance.hear(arrival, self.inner_step, self._account.num_fragments)
                if self._guarding.own_fate(transfer, arrival) == DROPPED:
                    take_global(fragment)
                fragment.in_flight = [other for other in fragment.in_flight if other is not transfer]
                fragment.codec = self._codec_after(transfer, arrival)
                self._count_round(fragment, transfer, arrival)
                if arrival.is_finite:
                    self._take_in(fragment, transfer, arrival, merge)
                else:
                    self._pass_over(fragment, transfer, arrival)
                self._guarding.remember(fragment, arrival)
                if differs(self._link, {trailer.digest for trailer in arrival.trailers}):
                    reunite(self._link, fragment, self._measured)
            self._account.count_broadcasts(self._link)
            self._account.landed(
                self.inner_step, index, sent_at, arrival, blocked_s, began, self._link.clock()
            )
            self._link.landed(arrival)
            return arrival.words or None

    def _count_round(self, fragment: FragmentState, transfer: Transfer, arrival: Arrival) -> None:
        """Count rounds in a row that did not count although this region had trained."""
        trailers = dict(zip(arrival.members, arrival.trailers, strict=True))
        own = trailers.get(self._link.region)
        if not transfer.is_own or own is None:
            return
        if not transfer.is_finite:
            fragment.nonfinite_rounds += 1
            if own.ending is Ending.NO:
                self._account.sat_out(transfer.sent_at, fragment.fragment.index, self._link.region)
        elif not own.weight:
            return
        elif not arrival.is_finite or self._guarding.own_fate(transfer, arrival):
            fragment.nonfinite_rounds += 1
        else:
            fragment.nonfinite_rounds = 0

    def _take_in(self, fragment: FragmentState, transfer: Transfer, arrival: Arrival, merge: Merge) -> None:
        """Move the global params of a fragment by a mean, and merge them into the local ones."""
        keeps = merge.keeps_local_steps
        if self._link.is_elastic and not transfer.is_own:
            fragment.measure_own_steps(transfer)
            merge = follow()
        measured, link, staleness = self._measured, self._link, self.inner_step - transfer.sent_at
        counted = zip(arrival.trailers, arrival.verdict.fates, strict=True)
        info = OuterInfo(
            fragment=fragment.fragment.index,
            round_lr=max((trailer.round_lr for trailer, fate in counted if fate != DROPPED), default=0.0),
            global_at_send=transfer.global_params,
            global_params=fragment.global_params,
            home=fragment.home,
            total=link.total,
        )
        merge_info = MergeInfo(
            sent_at=transfer.sent_at,
            landed_at=self.inner_step,
            flight_lr=measured.mean_lr(transfer.lr_sum, staleness) if staleness else measured.lr,
            total=link.total,
        )
        fresh = None
        if not self._method.outer.regions_agree:
            info, fresh = self._with_own(info, fragment, transfer, arrival)
        if self._guarding.is_clipped(transfer.judged, transfer.norm):
            index, norm, ordinary = fragment.fragment.index, transfer.norm, transfer.judged
            self._account.counts_less(transfer.sent_at, index, link.region, norm, ordinary)
        fragment.land(transfer, arrival.result.mean, self._method.outer, merge, info, merge_info, fresh)
        if fresh is not None and all(fresh is not each.outer_grad for each in fragment.in_flight):
            fragment.home.give(fresh)
        settled = transfer.sent_at if keeps else self.inner_step
        fragment.settled_at = max(fragment.settled_at, settled)

    def _pass_over(self, fragment: FragmentState, transfer: Transfer, arrival: Arrival) -> None:
        """Give up a transfer, no longer in flight, whose mean changes nothing."""
        if not self._method.outer.regions_agree:
            for other in fragment.in_flight:
                other.taken = 0.0 if other.taken is None else other.taken
        fragment.home.give(arrival.result.mean)
        fragment.drop(transfer)

    def end(self, fragments: Sequence[FragmentState], word: Word) -> Words | None:
        """Bring all inner steps into the global params, as the closing says; nothing stays in flight. Returns the
        words of all regions, if a transfer landed.
        """
        closing = self._method.closing(self._method.merge)
        words: Words | None = None
        for fragment in fragments:
            flying = [transfer.sent_at for transfer in fragment.in_flight]
            for sent_at in flying if flying and flying[-1] > fragment.settled_at else ():
                words = self.land(fragment, sent_at, closing.early) or words
        sent = [each for each in fragments if max(each.settled_at, each.sent_at) < self.inner_step]
        for fragment in sent:
            self.send(fragment, word)
        for fragment in fragments:
            while fragment.in_flight and not (closing.drops_taken and self._all_taken(fragment)):
                words = self.land(fragment, fragment.in_flight[0].sent_at, closing.last) or words
            fragment.in_flight.clear()
        return words

    def _all_taken(self, fragment: FragmentState) -> bool:
        """Whether this region was alone in all transfers in flight, and has taken in their means already."""
        return all(
            transfer.taken is not None
            and float(transfer.taken) == 1 == self._own_share(transfer, transfer.handle.wait())
            for transfer in fragment.in_flight
        )

    def _codec_after(self, transfer: Transfer, arrival: Arrival) -> CodecState:
        """The codec's state after a transfer, without residuals of an outer gradient out of the ordinary."""
        state = arrival.result.state
        is_wrong = arrival.verdict.is_void or self._guarding.own_fate(transfer, arrival)
        return without_residuals(state) if is_wrong else state

    def _with_own(
        self, info: OuterInfo, fragment: FragmentState, transfer: Transfer, arrival: Arrival
    ) -> tuple[OuterInfo, Tensor]:
        """The facts of a transfer that lands now, with those in which regions differ; and the fresh outer gradient."""
        share, taken = self._own_share(transfer, arrival), transfer.taken
        rate = self._measured.mean_lr(transfer.lr_sum, self.inner_step - transfer.sent_at)
        limit = self._guarding.limit_of_fresh(fragment, rate, arrival)
        flat, square = self._fresh_outer_grad(fragment, limit)
        fresh_share = share * self._guarding.share_of_fresh(limit, square)
        for other in fragment.in_flight:  # the fresh outer gradient has theirs in it
            other.taken = fresh_share if other.taken is None else other.taken
        return replace(info, taken_share=share if taken is None else taken, fresh_share=fresh_share), flat

    def _own_share(self, transfer: Transfer, arrival: Arrival) -> float:
        """This region's share in the mean of a transfer that has ended; as if it had not been clipped."""
        if not arrival.trailers:
            return 1 / self._link.num_regions
        if not transfer.is_own and self._link.is_elastic:
            return 0.0
        weights = {r: each.weight for r, each in zip(arrival.members, arrival.trailers, strict=True)}
        own = weights.get(self._link.region, 0.0)
        # one that sat out, or was dropped, says nothing about its next share
        if not own or self._guarding.own_fate(transfer, arrival) == DROPPED:
            return 1 / len(weights)
        return own / arrival.verdict.total

    def _fresh_outer_grad(self, fragment: FragmentState, limit: float) -> tuple[Tensor, Tensor]:
        """Global minus local now (zero if not finite), and its sum of squares; it is held against `limit`."""
        for transfer in fragment.in_flight:
            # a transfer of this step carries the same values, unless it was sent without training or a landing came between
            just_left = transfer.sent_at == self.trained_at == self.inner_step
            if just_left and transfer.global_params is fragment.global_params:
                assert transfer.outer_grad is not None and transfer.square is not None
                transfer.judged = limit
                return transfer.outer_grad, transfer.square
        _, outer_grad, own_square = fragment.prepare(fragment.global_params)
        [square] = self._link.total(own_square.view(1))
        fragment.clear_(outer_grad, ~square.isfinite())
        return outer_grad, square
