"""When outer steps are taken: ahead of the landing, in the link's thread, or at the landing, in the training thread."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..links.base import Arrival, Link
from ..methods import Method
from ..parts.info import OuterInfo
from ..tensors.pools import HOST
from .fragment import FragmentState
from .outer_step import Ahead, Outcome, OuterStep
from .transfer import Transfer


class Stepping:
    """Makes the outer steps of one region.

    Args:
        method: its outer optimizer is used, and its schedule tells whether there is time before the landing.
        link: reaches the other regions.
        device: device of the outer state.
        fresh_outer_grad: returns the global params minus the local params of a fragment as they are now.

    Attributes:
        is_ahead: whether steps are taken ahead. This has four conditions: transfers land later than they are sent; the outer
            state is on the host (a GPU takes a step in no time); the step reads no local params; and it asks nothing of
            other lanes, because only the training thread may do that.
    """

    def __init__(
        self,
        method: Method,
        link: Link,
        device: torch.device,
        fresh_outer_grad: Callable[[FragmentState], Tensor],
    ) -> None:
        self._transform, self._link, self._fresh = method.outer, link, fresh_outer_grad
        needs_nobody = method.outer.regions_agree and (link.num_lanes == 1 or not method.outer.asks_region)
        self.is_ahead = method.schedule.overlaps and device == HOST and needs_nobody

    def ahead(self, fragment: FragmentState, outer_grad: Tensor, outcome: Outcome) -> Ahead:
        """Takes the outer step of a transfer that is sent now, as soon as it arrives; reuses the outer gradient's memory."""
        at_send = fragment.global_params
        base: Outcome | tuple[Tensor, dict[str, Any]] = (at_send, fragment.outer)
        if fragment.in_flight:
            base = fragment.in_flight[-1].outcome

        def prepare(arrival: Arrival, global_params: Tensor, state: dict[str, Any]) -> OuterStep:
            fragment.pool.give(outer_grad)
            return self._in_new_memory(fragment, arrival, at_send, global_params, state)

        return Ahead(prepare, base, outcome, fragment.threads, self._link.clock)

    def of_loaded(self, fragment: FragmentState) -> None:
        """Take the steps of loaded transfers now: the steps of later transfers start from theirs."""
        if not self.is_ahead:
            return
        global_params, state = fragment.global_params, fragment.outer
        for transfer in fragment.in_flight:
            arrival = transfer.handle.wait()
            step = self._in_new_memory(fragment, arrival, transfer.global_params, global_params, state)
            step.run(fragment.threads.in_training)
            transfer.outcome.step = step
            global_params, state = step.global_params, step.state

    def at_landing(self, fragment: FragmentState, transfer: Transfer, arrival: Arrival) -> OuterStep:
        """The outer step of a transfer that lands now: already taken, or to be taken piece by piece."""
        if transfer.outcome.step is not None:
            return transfer.outcome.step
        at_send, now = transfer.global_params, fragment.global_params
        info = self._info(fragment, arrival, at_send, now, transfer)
        if not self._transform.regions_agree:
            for other in fragment.in_flight:  # the fresh outer gradient has theirs in it
                other.taken = info.own_share if other.taken is None else other.taken
        return fragment.step_now(self._transform, arrival.result.mean, info)

    def own_share(self, transfer: Transfer, arrival: Arrival) -> float:
        """This region's share in the mean of a transfer that has ended."""
        if not arrival.trailers:
            return 1 / self._link.num_regions
        if not transfer.is_own and self._link.is_elastic:
            return 0.0
        weights = {r: each.weight for r, each in zip(arrival.members, arrival.trailers, strict=True)}
        own = weights.get(self._link.region, 0.0)
        # one that sat out says nothing about its next share
        return own / sum(weights.values()) if own else 1 / len(weights)

    def _in_new_memory(
        self,
        fragment: FragmentState,
        arrival: Arrival,
        global_at_send: Tensor,
        global_params: Tensor,
        state: dict[str, Any],
    ) -> OuterStep:
        """The outer step of a transfer that has ended but not landed, from these global params and this outer state."""
        info = self._info(fragment, arrival, global_at_send, global_params, None)
        return OuterStep(self._transform, arrival.result.mean, state, info, fragment.take(), fragment.pool)

    def _info(
        self,
        fragment: FragmentState,
        arrival: Arrival,
        global_at_send: Tensor,
        global_params: Tensor,
        transfer: Transfer | None,
    ) -> OuterInfo:
        share = 0.0 if transfer is None else self.own_share(transfer, arrival)
        taken = None if transfer is None else transfer.taken
        return OuterInfo(
            fragment=fragment.fragment.index,
            cut=fragment.cut,
            own_share=share,
            taken_share=share if taken is None else taken,
            round_lr=max((trailer.round_lr for trailer in arrival.trailers), default=0.0),
            global_at_send=global_at_send,
            global_params=global_params,
            own_outer_grad=None if transfer is None else transfer.outer_grad,
            fresh_outer_grad=partial(self._fresh, fragment),
            total=self._link.total,
        )
