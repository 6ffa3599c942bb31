"""When a fragment is sent and when it lands. Integers only; no torch.

A schedule is pure functions. Every region calls them with the same arguments, so every region gets the same events: a
region that sent while another did not would wait for ever. Sends come before landings of the same step: with a delay of
one round both fall on one step, and landing first would reset the local params, making every outer gradient zero.
"""

import logging
import math
from typing import Any, NamedTuple, Protocol

logger = logging.getLogger(__name__)

State = dict[str, Any]
"""A schedule's state: JSON-able, equal in all regions, saved in checkpoints."""


class Send(NamedTuple):
    """Take a snapshot of `fragment` and start the mean of its outer gradient over the regions."""

    fragment: int


class Land(NamedTuple):
    """Wait for the transfer of `fragment` that left after inner step `sent_at`, and apply it.

    Nothing is ever sent at step 0, where regions are equal: landing what was "sent" there applies a mean of zero.
    """

    fragment: int
    sent_at: int


class AgreedStats(NamedTuple):
    """Measurements that every region holds with equal value, because they rode on earlier transfers.

    Attributes:
        step_time_s: seconds of an inner step, the slowest region's; 0 until known.
        sync_time_s: seconds to synchronise one fragment, the slowest region's; 0 until known.
        change: for each fragment ||mean outer gradient||_2 / its length, of its last landing; 0 until known.
        compression: share of its full rank that the codec uses at present, 1 where it has none.
    """

    step_time_s: float = 0.0
    sync_time_s: float = 0.0
    change: tuple[float, ...] = ()
    compression: float = 1.0

    @property
    def sync_steps(self) -> int:
        """Inner steps that synchronising a fragment takes, rounded up; 0 while unknown."""
        known = self.step_time_s > 0 and self.sync_time_s > 0
        return math.ceil(self.sync_time_s / self.step_time_s - 1e-9) if known else 0


class Schedule(Protocol):
    """Decides the events of an inner step from values all regions share.

    Attributes:
        back_to_back: whether a fragment is sent again in the very step in which its last transfer lands: sends come first,
            so two of its transfers are there then.
    """

    back_to_back: bool

    def init(self, num_fragments: int) -> State:
        """State before inner step 1. Called once, at the start of training."""
        ...

    def events(
        self, inner_step: int, stats: AgreedStats, state: State
    ) -> tuple[tuple[Send | Land, ...], State]:
        """Events after inner step `inner_step` (from 1), all sends before all landings, and the next state."""
        ...

    def next_event(self, inner_step: int, state: State) -> int:
        """The next inner step that may have events, given the state after `inner_step`; none before it is asked for.

        Whatever is measured meanwhile: it is an event by which regions hear of it.
        """
        ...


class _Periodic:
    """Fragments sent at fixed steps, all at once or in turns, and landed `overlap_steps` later."""

    def __init__(self, sync_interval: int, overlap_steps: int, primed: bool, in_turns: bool) -> None:
        self._sync_interval = sync_interval
        self._overlap_steps = overlap_steps
        self._primed = primed
        self._in_turns = in_turns
        self.back_to_back = overlap_steps >= sync_interval

    def init(self, num_fragments: int) -> State:
        return {"num_fragments": num_fragments, "in_flight": [], "sent": [0] * num_fragments}

    def events(
        self, inner_step: int, stats: AgreedStats, state: State
    ) -> tuple[tuple[Send | Land, ...], State]:
        turns = self._next_sends(inner_step - 1, state["num_fragments"])
        due = [Send(fragment) for fragment, turn in enumerate(turns) if turn == inner_step]
        first = [Land(send.fragment, 0) for send in due if self._primed and not state["sent"][send.fragment]]
        in_flight = state["in_flight"] + [[send.fragment, inner_step] for send in due]
        landing = [Land(*entry) for entry in in_flight if entry[1] + self._overlap_steps <= inner_step]
        flying = [entry for entry in in_flight if entry[1] + self._overlap_steps > inner_step]
        sent = list(state["sent"])
        for send in due:
            sent[send.fragment] = inner_step
        return (*due, *first, *landing), {**state, "in_flight": flying, "sent": sent}

    def next_event(self, inner_step: int, state: State) -> int:
        landings = [sent_at + self._overlap_steps for _, sent_at in state["in_flight"]]
        return min([*landings, *self._next_sends(inner_step, state["num_fragments"])])

    def _next_sends(self, inner_step: int, num_fragments: int) -> list[int]:
        """For each fragment the first step after `inner_step` at which it is sent."""
        interval = self._sync_interval
        offsets = [p * interval // num_fragments if self._in_turns else 0 for p in range(num_fragments)]
        return [max((inner_step - offset) // interval + 1, 1) * interval + offset for offset in offsets]


def every(sync_interval: int, overlap_steps: int = 0, primed: bool = False) -> Schedule:
    """Every fragment is sent each `sync_interval` (H) inner steps and lands `overlap_steps` (tau) later.

    DiLoCo (2311.08105) has tau = 0; a delay of one round (CO2, Eager updates) has tau = H. `primed` lands a mean of zero at
    a fragment's first send, where a delayed method would have nothing to land yet.
    """
    return _Periodic(sync_interval, overlap_steps, primed, in_turns=False)


def staggered(sync_interval: int, overlap_steps: int, primed: bool = False) -> Schedule:
    """Fragment p of P is sent when (t - p H // P) mod H = 0, first at t = H + p H // P (Streaming DiLoCo, 2501.18512).

    Example of the paper, H = 100, P = 2: fragment 0 at 100, 200, ... and fragment 1 at 150, 250, ...
    """
    return _Periodic(sync_interval, overlap_steps, primed, in_turns=True)


class _Rounds:
    back_to_back = True

    def __init__(self, sync_interval: int) -> None:
        self._sync_interval = sync_interval

    def init(self, num_fragments: int) -> State:
        return {"num_fragments": num_fragments, "sent_at": 0, "next": self._sync_interval}

    def events(
        self, inner_step: int, stats: AgreedStats, state: State
    ) -> tuple[tuple[Send | Land, ...], State]:
        if inner_step < state["next"]:
            return (), state
        fragments = range(state["num_fragments"])
        landing = [Land(p, state["sent_at"]) for p in fragments] if state["sent_at"] else []
        interval = max(round(self._sync_interval * stats.compression), stats.sync_steps, 1)
        following = inner_step + min(interval, self._sync_interval)
        return (*map(Send, fragments), *landing), {**state, "sent_at": inner_step, "next": following}

    def next_event(self, inner_step: int, state: State) -> int:
        return state["next"]


def rounds(sync_interval: int) -> Schedule:
    """A delay of one round whose length follows the codec's rank: H_t = H_1 r_t / r_1 (DiLoCoX, 2506.21263).

    r_t is the rank of the transfer that landed last, which every region has heard: it was chosen one round earlier.
    At the end of a round all fragments are sent and what was sent at the end of the last one lands. A round is never so
    short that the transfer would no longer hide in it, nor longer than `sync_interval` (H_1).
    """
    return _Rounds(sync_interval)


class _Adaptive:
    back_to_back = False

    def __init__(
        self,
        sync_interval: int,
        overlap_steps: int | None,
        utilization: float,
        sends_per_interval: int | None,
    ) -> None:
        self._sync_interval = sync_interval
        self._overlap_steps = overlap_steps
        self._utilization = utilization
        self._sends_per_interval = sends_per_interval
        self._has_warned = False

    def init(self, num_fragments: int) -> State:
        sent = [[0, 0] for _ in range(num_fragments)]  # the steps of a fragment's last two sends
        return {"in_flight": [], "sent": sent, "next": self._spacing(num_fragments, AgreedStats())}

    def events(
        self, inner_step: int, stats: AgreedStats, state: State
    ) -> tuple[tuple[Send | Land, ...], State]:
        in_flight, sent = state["in_flight"], state["sent"]
        sends: list[Send] = []
        following = state["next"]
        if inner_step >= following:
            following = inner_step + self._spacing(len(sent), stats)
            fragment = self._choose(inner_step, stats, sent, {entry[0] for entry in in_flight})
            if fragment is not None:
                sends = [Send(fragment)]
                in_flight = [*in_flight, [fragment, inner_step, inner_step + self._overlap(len(sent), stats)]]
                sent = [[last[1], inner_step] if p == fragment else last for p, last in enumerate(sent)]
        elif not in_flight:
            return (), state
        landing = [
            Land(fragment, sent_at) for fragment, sent_at, land_at in in_flight if land_at <= inner_step
        ]
        flying = [entry for entry in in_flight if entry[2] > inner_step]
        return (*sends, *landing), {"in_flight": flying, "sent": sent, "next": following}

    def next_event(self, inner_step: int, state: State) -> int:
        return min([state["next"], *(land_at for _, _, land_at in state["in_flight"])])

    def _spacing(self, num_fragments: int, stats: AgreedStats) -> int:
        """h = floor(H / N), N = max(K, floor(gamma H T_c / T_s)): inner steps between two sends."""
        sends = self._sends_per_interval or num_fragments
        if self._sends_per_interval is None and stats.sync_steps:
            affordable = self._utilization * self._sync_interval * stats.step_time_s / stats.sync_time_s
            sends = max(num_fragments, math.floor(affordable + 1e-9))
            self._warn_of_a_slow_link(num_fragments, affordable, stats)
        return max(1, self._sync_interval // sends)

    def _warn_of_a_slow_link(self, num_fragments: int, affordable: float, stats: AgreedStats) -> None:
        """Once, if each fragment cannot go once in H steps in the share of the time that the link is to be used."""
        if self._has_warned or math.floor(affordable + 1e-9) >= num_fragments:
            return
        self._has_warned = True
        logger.warning(
            "the link cannot carry all %d fragments in sync_interval=%d inner steps within utilization=%g of the time: one takes "
            "%.3g s, an inner step %.3g s. It could with sync_interval=%d; a smaller codec (int8, fp4) helps as well.",
            *(num_fragments, self._sync_interval, self._utilization, stats.sync_time_s, stats.step_time_s),
            math.ceil(num_fragments * stats.sync_time_s / (self._utilization * stats.step_time_s)),
        )

    def _overlap(self, num_fragments: int, stats: AgreedStats) -> int:
        """tau; while nothing is measured as long as the next K sends take, so that the first transfers stall nobody."""
        if self._overlap_steps is not None:
            return self._overlap_steps
        return min(max(1, stats.sync_steps or self._sync_interval // num_fragments), self._sync_interval - 1)

    def _choose(self, step: int, stats: AgreedStats, sent: list[list[int]], flying: set[int]) -> int | None:
        """The oldest fragment not sent for H steps; else one never sent; else the one that changes fastest."""
        free = [p for p in range(len(sent)) if p not in flying]
        if not free:
            return None
        oldest = min(free, key=lambda p: sent[p][1])
        if step - sent[oldest][1] >= self._sync_interval or not sent[oldest][1]:
            return oldest

        def change_rate(p: int) -> float:
            change = stats.change[p] if stats.change else 0.0
            return change / max(sent[p][1] - sent[p][0], 1)

        return max(free, key=lambda p: (change_rate(p), -p))


def adaptive(
    sync_interval: int,
    overlap_steps: int | None = None,
    utilization: float = 0.4,
    sends_per_interval: int | None = None,
) -> Schedule:
    """Send fragments as often as the link allows, the fastest changing first (CoCoDC, 2504.17672, adaptive transmission).

    ::

        N = max(K, floor(gamma H T_c / T_s)) ;  h = floor(H / N) ;  tau = ceil(T_s / T_c)
        every h steps one fragment that is not in flight: one not sent for H steps (the oldest), else one never sent, else
        the largest R_p = ||Dbar_p|| / (n_p I_p), I_p the steps between its last two sends

    Args:
        sync_interval: H: no fragment waits longer for its turn.
        overlap_steps: tau; None follows the measured times.
        utilization: gamma, share of the link to use.
        sends_per_interval: N; None follows the measured times.
    """
    return _Adaptive(sync_interval, overlap_steps, utilization, sends_per_interval)
