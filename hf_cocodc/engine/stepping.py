"""When outer steps are taken: ahead of the landing, in the link's thread, or at the landing, in the training thread."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..link.base import Arrival, Link
from ..link.records import Trailer
from ..methods import Method
from ..parts import guard as rules
from ..parts.guard import DROPPED, Guard, Ordinary, Said, Verdict
from ..parts.info import OuterInfo
from ..parts.tensors.memory import HOST
from .fragment import FragmentState
from .outer_step import OuterStep
from .transfer import Transfer


class Guarding:
    """Judges transfers by their trailers and those of landed ones. Without a guard, every region counts as it says."""

    def __init__(self, guard: Guard | None, region: int) -> None:
        self._guard, self._region = guard, region

    def ordinary(self, fragment: FragmentState) -> Ordinary:
        """What is ordinary for a transfer sent now; equal in all regions."""
        return Ordinary() if self._guard is None else rules.ordinary(fragment.norms, fragment.paces)

    def judge(self, ordinary: Ordinary) -> Callable[[Sequence[Trailer]], Verdict]:
        """A function that judges the trailers of a transfer that is sent now."""
        return lambda trailers: rules.judge(self._guard, ordinary, _said(trailers))

    def verdict(self, ordinary: Ordinary, arrival: Arrival) -> Verdict:
        """The verdict by which a transfer was averaged."""
        return self.judge(ordinary)(arrival.trailers)

    def own_fate(self, transfer: Transfer, arrival: Arrival) -> str:
        """What the guard did to this region's outer gradient: "", "clipped", "dropped" or "void"."""
        if not transfer.is_own or self._region not in arrival.members:
            return ""
        return self.verdict(transfer.ordinary, arrival).fates[arrival.members.index(self._region)]

    def fresh(
        self, fragment: FragmentState, norm: float, rate: float, landing: Transfer, arrival: Arrival
    ) -> tuple[float, float]:
        """What counts of an outer gradient of this norm that no other region judges, and the norm that it is held against.

        As for a transfer, that norm is the larger of two: by the history, and of the regions in the transfer that lands. Those
        are one round older: if the learning rate has grown since, so may the norm.
        """
        verdict = self.verdict(landing.ordinary, arrival)
        rates = [each.round_lr for each in arrival.trailers if each.round_lr]
        grown = max(rate / min(rates), 1.0) if rates else 1.0
        limit = max(self.ordinary(fragment).at(rate), verdict.limit * grown)
        if self._guard is None or not limit or verdict.outside:
            return 1.0, 0.0
        return rules.share(self._guard, limit, norm), limit

    def remember(self, fragment: FragmentState, transfer: Transfer, arrival: Arrival) -> None:
        """Let a transfer that has landed be part of what is ordinary, unless it was out of the ordinary itself."""
        trailers = arrival.trailers
        counted = [each for each in trailers if each.weight]
        trained = [each for each in trailers if each.weight or each.trained_at == each.inner_step]
        # where every region that has trained is excluded, nothing lands either
        is_void = not arrival.is_finite or (bool(trained) and not counted)
        fragment.voids = fragment.voids + 1 if is_void else 0
        if self._guard is None:
            return
        verdict = self.verdict(transfer.ordinary, arrival)
        fates = zip(arrival.members, verdict.fates, strict=False)
        fragment.far_regions = tuple(region for region, fate in fates if fate)
        known = [each.loss for each in counted if not math.isnan(each.loss)]
        if known:
            loss = rules.lower_median(known)
            is_far = rules.is_far(loss, fragment.losses)
            fragment.far_losses = fragment.far_losses + 1 if is_far else 0
            if math.isfinite(loss) and not (is_far or is_void or any(verdict.fates)):
                fragment.losses = self._kept(fragment.losses, loss)
        if is_void or verdict.outside:
            return
        now = rules.agreed(_said(trailers), verdict, self._guard)
        if now is None or not now[0]:
            return
        norm, rate = now
        fragment.norms = self._kept(fragment.norms, norm)
        if rate:
            fragment.paces = self._kept(fragment.paces, norm / rate)

    def _kept(self, values: Sequence[float], value: float) -> list[float]:
        assert self._guard is not None
        return [*values, value][-self._guard.history :]


def _said(trailers: Sequence[Trailer]) -> list[Said]:
    return [Said(each.norm, each.weight, each.round_lr, each.carried, each.is_bounded) for each in trailers]


def steps_ahead(method: Method, device: torch.device, num_lanes: int) -> bool:
    """Whether outer steps are taken ahead of their landings (`Stepping`)."""
    needs_nobody = method.outer.regions_agree and (num_lanes == 1 or not method.outer.asks_region)
    return method.schedule.overlaps and device == HOST and needs_nobody


class Stepping:
    """Makes the outer steps of one region.

    They are taken ahead under four conditions: transfers land later than they are sent; the outer state is on the host (a GPU
    takes a step in no time); the step reads no local params; and it asks nothing of other lanes, because only the training
    thread may.

    Args:
        fresh_outer_grad: returns a fragment's present global minus local params, the norm of that, and the mean learning rate
            since a transfer was sent.
        tell: called with the norm of a fresh outer gradient that counts less, and with the ordinary norm.
    """

    def __init__(
        self,
        method: Method,
        link: Link,
        device: torch.device,
        fresh_outer_grad: Callable[[FragmentState, Transfer], tuple[Tensor, float, float]],
        guarding: Guarding,
        tell: Callable[[FragmentState, float, float], None],
    ) -> None:
        self._transform, self._link, self._fresh = method.outer, link, fresh_outer_grad
        self._guarding, self._tell = guarding, tell
        self.is_ahead = steps_ahead(method, device, link.num_lanes)

    def ahead(
        self, fragment: FragmentState, transfer: Transfer, outer_grad: Tensor
    ) -> Callable[[Arrival], None]:
        """A function for the link's thread: takes the outer step of a transfer sent now as soon as its mean is here.

        A mean that is not finite gets no step: its landing changes nothing. The step starts from that of the fragment's
        transfer before; if that has none yet, this one is left to its landing. The outer gradient's memory is used again.
        """
        before = fragment.in_flight[-1] if fragment.in_flight else None
        global_params, state = fragment.global_params, fragment.outer

        def then(arrival: Arrival) -> None:
            nonlocal before
            fragment.pool.give(outer_grad)
            base, earlier = (global_params, state), before
            before = None  # else each transfer would keep all earlier ones
            if earlier is not None:
                if earlier.step is None:
                    return
                base = (earlier.step.global_params, earlier.step.state)
            if not arrival.is_finite:
                return
            began = self._link.clock()
            step = self._in_new_memory(fragment, transfer, arrival, *base)
            step.run(lambda: fragment.threads.in_background(transfer.awaited))
            transfer.step, transfer.step_s = step, self._link.clock() - began

        return then

    def of_loaded(self, fragment: FragmentState) -> None:
        """Take the steps of loaded transfers now: the steps of later transfers start from theirs."""
        if not self.is_ahead:
            return
        global_params, state = fragment.global_params, fragment.outer
        for transfer in fragment.in_flight:
            arrival = transfer.handle.wait()
            if not arrival.is_finite:
                return  # steps of later transfers are left to their landings
            step = self._in_new_memory(fragment, transfer, arrival, global_params, state)
            step.run(fragment.threads.in_training)
            transfer.step = step
            global_params, state = step.global_params, step.state

    def at_landing(self, fragment: FragmentState, transfer: Transfer, arrival: Arrival) -> OuterStep:
        """The outer step of a transfer that lands now: already taken, or to be taken piece by piece."""
        if transfer.step is not None:
            return transfer.step
        info = self._info(fragment, transfer, arrival, fragment.global_params)
        if not self._transform.regions_agree:
            info = self._with_own(info, fragment, transfer, arrival)
            for other in fragment.in_flight:  # the fresh outer gradient has theirs in it
                other.taken = info.fresh_share if other.taken is None else other.taken
        return fragment.step_now(self._transform, arrival.result.mean, info)

    def without_step(self, fragment: FragmentState, transfer: Transfer) -> None:
        """Give up what was built on a transfer, no longer in flight, whose mean is not finite."""
        for other in fragment.in_flight:
            # another lane's part of the mean was the wrong one: here the link's thread has stepped ahead from it, or does so now
            other.handle.wait()
            fragment.forget_step(other)
            if not self._transform.regions_agree:
                other.taken = 0.0 if other.taken is None else other.taken
        fragment.drop(transfer)

    def own_share(self, transfer: Transfer, arrival: Arrival) -> float:
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
        return own / self._guarding.verdict(transfer.ordinary, arrival).total

    def _in_new_memory(
        self,
        fragment: FragmentState,
        transfer: Transfer,
        arrival: Arrival,
        global_params: Tensor,
        state: dict[str, Any],
    ) -> OuterStep:
        """The outer step of a transfer that has ended but not landed, from these global params and this outer state."""
        info = self._info(fragment, transfer, arrival, global_params)
        return OuterStep(self._transform, arrival.result.mean, state, info, fragment.take(), fragment.pool)

    def _info(
        self, fragment: FragmentState, transfer: Transfer, arrival: Arrival, global_params: Tensor
    ) -> OuterInfo:
        """The facts of a transfer that all regions have alike."""
        fates = self._guarding.verdict(transfer.ordinary, arrival).fates
        counted = zip(arrival.trailers, fates, strict=True)
        return OuterInfo(
            fragment=fragment.fragment.index,
            cut=fragment.cut,
            round_lr=max((trailer.round_lr for trailer, fate in counted if fate != DROPPED), default=0.0),
            global_at_send=transfer.global_params,
            global_params=global_params,
            total=self._link.total,
        )

    def _with_own(
        self, info: OuterInfo, fragment: FragmentState, transfer: Transfer, arrival: Arrival
    ) -> OuterInfo:
        """The facts of a transfer that lands now, with those in which regions differ."""
        share, taken = self.own_share(transfer, arrival), transfer.taken
        fresh, norm, rate = self._fresh(fragment, transfer)
        counts, limit = self._guarding.fresh(fragment, norm, rate, transfer, arrival)
        if counts < 1:
            self._tell(fragment, norm, limit)
        return replace(
            info,
            own_share=share,
            taken_share=share if taken is None else taken,
            fresh_share=share * counts,
            own_outer_grad=transfer.outer_grad,
            fresh_outer_grad=fresh,
        )
