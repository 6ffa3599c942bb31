"""When a fragment is sent and when it lands. Integers only; no torch.

A schedule consists of pure functions: every region calls them with the same arguments and gets the same events. If one region
sent and another did not, the first would wait forever.

In one step, sends come before landings. With a delay of one round, a fragment is sent and lands in the same step: a landing
before the send would reset the local params, and every outer gradient would be zero.
"""

import logging
import math
from typing import Any, NamedTuple, Protocol

logger = logging.getLogger(__name__)

ScheduleState = dict[str, Any]
"""The state of a schedule: fits into JSON, is equal in all regions and saved in checkpoints; its keys never change."""


class Send(NamedTuple):
    """Take a snapshot of `fragment`, and start to average its outer gradient over the regions."""

    fragment: int


class Land(NamedTuple):
    """Wait for the transfer of `fragment` that was sent after inner step `sent_at`, and apply the result.

    Regions are equal at step 0 and send nothing there. A landing with `sent_at` = 0 applies a mean of zero.
    """

    fragment: int
    sent_at: int


class AgreedStats(NamedTuple):
    """Measurements that are equal in all regions, because they traveled with earlier transfers; times are 0 until known.

    Attributes:
        step_time_s: seconds of an inner step in the slowest region.
        sync_time_s: seconds to synchronize one fragment in the slowest region.
        change: for each fragment, ||mean outer gradient||_2 / length at its last landing; 0 until known.
        compression: current rank of the codec / its first rank; 1 if the codec has no rank.
    """

    step_time_s: float = 0.0
    sync_time_s: float = 0.0
    change: tuple[float, ...] = ()
    compression: float = 1.0

    @property
    def sync_steps(self) -> int:
        """Duration of one fragment's synchronization in inner steps, rounded up; 0 until known."""
        known = self.step_time_s > 0 and self.sync_time_s > 0
        return math.ceil(self.sync_time_s / self.step_time_s - 1e-9) if known else 0


class Schedule(Protocol):
    """Decides the events of an inner step from values that are equal in all regions.

    Attributes:
        back_to_back: whether a fragment is sent again in the step in which its previous transfer lands. Sends come first: the
            fragment then has two transfers for a moment.
        overlaps: whether transfers land later than in the step of their send, so that training goes on meanwhile.
    """

    back_to_back: bool
    overlaps: bool

    def init(self, num_fragments: int, inner_step: int = 0) -> ScheduleState:
        """The state after inner step `inner_step`, if nothing was sent before: at the start of a run, or with new fragments."""
        ...

    def events(
        self, inner_step: int, stats: AgreedStats, state: ScheduleState
    ) -> tuple[tuple[Send | Land, ...], ScheduleState]:
        """Events after inner step `inner_step` (the first is 1), all sends before all landings; and the next state."""
        ...

    def next_event(self, inner_step: int, state: ScheduleState) -> int:
        """The next inner step that can have events, given the state after `inner_step`.

        The engine does not call `events` before it. New measurements cannot move it forward: they arrive only at events.
        """
        ...


class _Periodic:
    """Sends fragments at fixed steps, all together or in turns. Each lands `overlap_steps` later."""

    def __init__(self, sync_interval: int, overlap_steps: int, primed: bool, in_turns: bool) -> None:
        self._sync_interval = sync_interval
        self._overlap_steps = overlap_steps
        self._primed = primed
        self._in_turns = in_turns
        self.back_to_back = overlap_steps >= sync_interval
        self.overlaps = overlap_steps > 0

    def init(self, num_fragments: int, inner_step: int = 0) -> ScheduleState:
        return {"num_fragments": num_fragments, "in_flight": [], "sent": [0] * num_fragments}

    def events(
        self, inner_step: int, stats: AgreedStats, state: ScheduleState
    ) -> tuple[tuple[Send | Land, ...], ScheduleState]:
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

    def next_event(self, inner_step: int, state: ScheduleState) -> int:
        landings = [sent_at + self._overlap_steps for _, sent_at in state["in_flight"]]
        return min([*landings, *self._next_sends(inner_step, state["num_fragments"])])

    def _next_sends(self, inner_step: int, num_fragments: int) -> list[int]:
        """For each fragment, the step of its next send after `inner_step`."""
        interval = self._sync_interval
        offsets = [p * interval // num_fragments if self._in_turns else 0 for p in range(num_fragments)]
        return [max((inner_step - offset) // interval + 1, 1) * interval + offset for offset in offsets]


def every(sync_interval: int, overlap_steps: int = 0, primed: bool = False) -> Schedule:
    """Send every fragment each `sync_interval` (H) inner steps; it lands `overlap_steps` (tau) later.

    DiLoCo (2311.08105) has tau = 0. A delay of one round (CO2, Eager updates) is tau = H. With a delay, nothing can land at
    the first send of a fragment; `primed` lands a mean of zero there.

    >>> schedule = every(sync_interval=2, overlap_steps=1)
    >>> state = schedule.init(num_fragments=1)
    >>> for step in range(1, 6):
    ...     events, state = schedule.events(step, AgreedStats(), state)
    ...     print(step, *events)
    1
    2 Send(fragment=0)
    3 Land(fragment=0, sent_at=2)
    4 Send(fragment=0)
    5 Land(fragment=0, sent_at=4)
    """
    return _Periodic(sync_interval, overlap_steps, primed, in_turns=False)


def staggered(sync_interval: int, overlap_steps: int, primed: bool = False) -> Schedule:
    """Send fragment p of P when (t - p H // P) mod H = 0, first at t = H + p H // P (Streaming DiLoCo, 2501.18512).

    The paper's example is H = 100, P = 2: fragment 0 is sent at 100, 200, ..., fragment 1 at 150, 250, ...

    >>> schedule = staggered(sync_interval=4, overlap_steps=1)
    >>> state = schedule.init(num_fragments=2)
    >>> for step in range(4, 9):
    ...     events, state = schedule.events(step, AgreedStats(), state)
    ...     print(step, *events)
    4 Send(fragment=0)
    5 Land(fragment=0, sent_at=4)
    6 Send(fragment=1)
    7 Land(fragment=1, sent_at=6)
    8 Send(fragment=0)
    """
    return _Periodic(sync_interval, overlap_steps, primed, in_turns=True)


class _Rounds:
    back_to_back = True
    overlaps = True

    def __init__(self, sync_interval: int) -> None:
        self._sync_interval = sync_interval

    def init(self, num_fragments: int, inner_step: int = 0) -> ScheduleState:
        return {"num_fragments": num_fragments, "sent_at": 0, "next": inner_step + self._sync_interval}

    def events(
        self, inner_step: int, stats: AgreedStats, state: ScheduleState
    ) -> tuple[tuple[Send | Land, ...], ScheduleState]:
        if inner_step < state["next"]:
            return (), state
        fragments = range(state["num_fragments"])
        landing = [Land(p, state["sent_at"]) for p in fragments] if state["sent_at"] else []
        interval = max(round(self._sync_interval * stats.compression), stats.sync_steps, 1)
        following = inner_step + min(interval, self._sync_interval)
        return (*map(Send, fragments), *landing), {**state, "sent_at": inner_step, "next": following}

    def next_event(self, inner_step: int, state: ScheduleState) -> int:
        return state["next"]


def rounds(sync_interval: int) -> Schedule:
    """A delay of one round; the round's length follows the codec's rank: H_t = H_1 r_t / r_1 (DiLoCoX, 2506.21263).

    At the end of a round all fragments are sent, and then the transfers of the previous round land. The length of the next
    round is chosen at this send, so r_t is the rank of the transfer that landed a round ago: after send k, that of send k - 2
    (r_1 after the first two sends). All regions know it, and the times that it carried. A round is at least as long as a
    transfer by these times, so that the next one hides, and never longer than `sync_interval` (H_1). Once the rank has fallen,
    sends can thus depend on measured times.

    >>> schedule, half_rank = rounds(sync_interval=4), AgreedStats(compression=0.5)
    >>> state = schedule.init(num_fragments=1)
    >>> for step in range(4, 9, 2):
    ...     events, state = schedule.events(step, half_rank, state)
    ...     print(step, *events)
    4 Send(fragment=0)
    6 Send(fragment=0) Land(fragment=0, sent_at=4)
    8 Send(fragment=0) Land(fragment=0, sent_at=6)
    """
    return _Rounds(sync_interval)


class _Adaptive:
    back_to_back = False
    overlaps = True

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

    def init(self, num_fragments: int, inner_step: int = 0) -> ScheduleState:
        # for each fragment, the steps of its last two sends; 0: never sent, and before its first send where it began
        sent = [[inner_step, 0] for _ in range(num_fragments)]
        first = inner_step + self._spacing(num_fragments, AgreedStats())
        return {"in_flight": [], "sent": sent, "next": first}

    def events(
        self, inner_step: int, stats: AgreedStats, state: ScheduleState
    ) -> tuple[tuple[Send | Land, ...], ScheduleState]:
        in_flight, sent = state["in_flight"], state["sent"]
        sends: list[Send] = []
        following = state["next"]
        if inner_step >= following:
            following = inner_step + self._spacing(len(sent), stats)
            fragment = self._choose(inner_step, stats, sent, {entry[0] for entry in in_flight})
            if fragment is not None:
                sends = [Send(fragment)]
                in_flight = [*in_flight, [fragment, inner_step, inner_step + self._overlap(len(sent), stats)]]
                sent = [
                    [last[1] or last[0], inner_step] if p == fragment else last for p, last in enumerate(sent)
                ]
        elif not in_flight:
            return (), state
        landing = [Land(p, sent_at) for p, sent_at, land_at in in_flight if land_at <= inner_step]
        flying = [entry for entry in in_flight if entry[2] > inner_step]
        return (*sends, *landing), {"in_flight": flying, "sent": sent, "next": following}

    def next_event(self, inner_step: int, state: ScheduleState) -> int:
        return min([state["next"], *(land_at for _, _, land_at in state["in_flight"])])

    def _spacing(self, num_fragments: int, stats: AgreedStats) -> int:
        """Inner steps between two sends: h = floor(H / N), N = max(K, floor(gamma H T_c / T_s))."""
        sends = self._sends_per_interval or num_fragments
        if self._sends_per_interval is None and stats.sync_steps:
            affordable = self._utilization * self._sync_interval * stats.step_time_s / stats.sync_time_s
            sends = max(num_fragments, math.floor(affordable + 1e-9))
            self._warn_of_a_slow_link(num_fragments, affordable, stats)
        return max(1, self._sync_interval // sends)

    def _warn_of_a_slow_link(self, num_fragments: int, affordable: float, stats: AgreedStats) -> None:
        """Warn once if the link cannot carry each fragment once in H steps within its share `utilization` of the time."""
        if self._has_warned or math.floor(affordable + 1e-9) >= num_fragments:
            return
        self._has_warned = True
        logger.warning(
            "the link cannot carry all %d fragments in sync_interval=%d inner steps with utilization=%g: one fragment takes "
            "%.3g s, one inner step %.3g s. Set sync_interval=%d, or use a smaller codec (int8, fp4).",
            *(num_fragments, self._sync_interval, self._utilization, stats.sync_time_s, stats.step_time_s),
            math.ceil(num_fragments * stats.sync_time_s / (self._utilization * stats.step_time_s)),
        )

    def _overlap(self, num_fragments: int, stats: AgreedStats) -> int:
        """tau. Before the first measurement: H / K, so that the first transfers do not block training."""
        if self._overlap_steps is not None:
            return self._overlap_steps
        return min(max(1, stats.sync_steps or self._sync_interval // num_fragments), self._sync_interval - 1)

    def _choose(self, step: int, stats: AgreedStats, sent: list[list[int]], flying: set[int]) -> int | None:
        """The fragment sent longest ago, if that was H steps ago or it was never sent; else the one that changes fastest."""
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

    K is the number of fragments, T_c the time of an inner step, T_s the time to synchronize one fragment. Every h steps one
    fragment that is not in flight is sent, by these priorities:

    1. a fragment not sent for H steps, the oldest first;
    2. a fragment that was never sent;
    3. the fragment with the largest R_p = ||Dbar_p|| / (n_p I_p); n_p is its length, I_p the steps between its last two sends.

    Args:
        sync_interval: H; no fragment waits longer for its turn.
        overlap_steps: tau; None follows the measured times.
        utilization: gamma, share of the link's time to use.
        sends_per_interval: N; None follows the measured times.

    >>> schedule = adaptive(sync_interval=4, overlap_steps=1, sends_per_interval=2)
    >>> state = schedule.init(num_fragments=2)
    >>> for step in range(1, 7):
    ...     events, state = schedule.events(step, AgreedStats(), state)
    ...     print(step, *events)
    1
    2 Send(fragment=0)
    3 Land(fragment=0, sent_at=2)
    4 Send(fragment=1)
    5 Land(fragment=1, sent_at=4)
    6 Send(fragment=0)
    """
    return _Adaptive(sync_interval, overlap_steps, utilization, sends_per_interval)
