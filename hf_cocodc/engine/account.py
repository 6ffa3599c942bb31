"""Counts and records the sends, the landings and the waiting of a run."""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec
import torch

from ..link.base import Arrival, Link
from ..parts.guard import CLIPPED, DROPPED, NOT_BOUNDED, VOID
from ..parts.schedules import AgreedStats
from ..parts.tensors.memory import HOST, has_streams
from ..validation import Count, Number, Size

logger = logging.getLogger(__name__)

LOW = 0.05
"""Below this mean cosine over `ROUNDS` rounds, regions hardly help each other."""
ROUNDS = 16
_STEPS_TIMED = 255
"""Number of inner steps before an event whose times count."""
_SAVED = ("lr", "lr_sum", "step_time_s", "sync_time_s", "change")

_SAID = {
    CLIPPED: "outer.guard has clipped the outer gradient of region %d for fragment %d sent at step %d",
    DROPPED: "outer.guard has dropped the outer gradient of region %d for fragment %d sent at step %d",
    VOID: "the outer gradient of region %d makes the mean of fragment %d sent at step %d void",
}
_VOID = {
    False: (
        "not finite, or far larger than what the regions sent",
        "A number has overflowed, or was altered on its way.",
    ),
    True: (
        "void",
        "Half of the regions or more are far out of the ordinary, and nobody can say who is right.",
    ),
}


class Measurements:
    """What one region measures while it trains; `now` is always in seconds by the link's clock.

    With a GPU as `device` inner steps are timed by events of its stream: the host runs ahead of what it has queued.

    Attributes:
        change: for each fragment ||mean outer gradient||_2 / its length, at its last landing.
        agreed: from the trailers of landed transfers; equal in all regions.
        step_time_s: median seconds of the inner steps before the last event, without time at events; 0 if unknown.
        sync_time_s: seconds from the last region's send to the mean of the last transfer; 0 if unknown.
    """

    def __init__(self, now: float, device: torch.device = HOST) -> None:
        self._clock = StreamClock(_STEPS_TIMED, device) if has_streams(device) else None
        self.lr = self.lr_sum = 0.0
        self.step_time_s = self.sync_time_s = 0.0
        self.agreed = AgreedStats()
        self.begin(())
        self._left_at = now
        self._durations: deque[float] = deque(maxlen=_STEPS_TIMED)

    def begin(self, lengths: Sequence[float]) -> None:
        """Start anew, with fragments of these lengths: numbers of values over all lanes of the region."""
        self._lengths = lengths
        self.change = [0.0] * len(lengths)
        self.agreed = self.agreed._replace(change=(), compression=1.0)

    def note_step(self, inner_lr: float, now: float) -> None:
        """Count an inner step that has ended."""
        if self._clock is not None:
            self._clock.note_step()
        else:
            self._durations.append(now - self._left_at)
        self._left_at = now
        self.lr = inner_lr
        self.lr_sum += inner_lr

    def mean_lr(self, lr_sum: float, steps: int) -> float:
        """Mean learning rate of the last `steps` inner steps; `lr_sum` is the sum before them."""
        return (self.lr_sum - lr_sum) / max(steps, 1)

    def note_event(self) -> bool:
        """Call before a transfer is sent or landed; returns whether inner steps were timed since the last call."""
        # not the mean: one evaluation among the steps must not count
        durations = self._clock.take() if self._clock is not None else list(self._durations)
        self._durations.clear()
        if durations:
            self.step_time_s = median(durations)
        return bool(durations)

    def leave_events(self, now: float) -> None:
        """Call after events: from now on, time counts as training again."""
        self._left_at = now
        if self._clock is not None:
            self._clock.begin()

    def hear(self, fragment: int, arrival: Arrival) -> None:
        """Take in this region's measurements of a transfer, and those of all regions from its trailers."""
        self.sync_time_s = arrival.seconds
        if arrival.is_finite:
            self.change[fragment] = math.sqrt(arrival.square) / self._lengths[fragment]
        self.agreed = AgreedStats(
            step_time_s=max(trailer.step_time_s for trailer in arrival.trailers),
            sync_time_s=max(trailer.sync_time_s for trailer in arrival.trailers),
            change=tuple(self.change),
            compression=arrival.trailers[0].compression,
        )

    def correct(self, fragment: int, change: float) -> None:
        """Take another region's change of a fragment, where regions have come apart."""
        self.change[fragment] = change
        self.agreed = self.agreed._replace(change=tuple(self.change))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, under the names in checkpoints."""
        return {name: getattr(self, name) for name in _SAVED} | {"stats": self.agreed._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned. Raises KeyError, TypeError or ValueError if `state` is damaged."""
        change = state["change"]
        stats = AgreedStats(**state["stats"] | {"change": tuple(state["stats"]["change"])})
        msgspec.convert([state["lr"], state["lr_sum"]], list[Number])
        times = [state["step_time_s"], state["sync_time_s"], stats.step_time_s, stats.sync_time_s]
        msgspec.convert([*change, *stats.change, *times, stats.compression], list[Size])
        if len(change) != len(self._lengths) or len(stats.change) not in (0, len(change)):
            raise ValueError(f"it has changes of {len(change)} fragments, and there are {len(self._lengths)}")
        for name in _SAVED:
            setattr(self, name, list(map(float, change)) if name == "change" else float(state[name]))
        self.agreed = stats


Record = Callable[..., None]
"""record(kind, **facts): keeps an event of the run."""


@dataclass
class Totals:
    """Counters of a run on this rank; those of the leader where the ranks hold the same parameters (DDP).

    `bytes_sent` counts payload bytes that this region has sent to all others together, over all its lanes: transfers, means of
    global params, and broadcasts (first parameters, global params that had come apart, a checkpoint that another region takes
    over), passed on by regions that receive them. `blocked_s` is the time for which the training thread was held here: it
    waited for the link, or sent, or landed.
    """

    sends: Count = 0
    landings: Count = 0
    bytes_sent: Count = 0
    blocked_s: Size = 0.0


class StreamClock:
    """Seconds of inner steps on a GPU, of those that it has finished: reading them makes nobody wait."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._device = device
        self._steps: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=most)
        self.begin()

    def begin(self) -> None:
        """The next inner step begins."""
        self._last = self._now()

    def note_step(self) -> None:
        """An inner step has ended, and the next one begins."""
        now = self._now()
        self._steps.append((self._last, now))
        self._last = now

    def take(self) -> list[float]:
        """The seconds of the steps that the GPU has finished since the last call."""
        found = []
        while self._steps and self._steps[0][1].query():
            first, last = self._steps.popleft()
            found.append(first.elapsed_time(last) / 1e3)
        return found

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class Account:
    """Counts and records what one region does; `report` holds the figures at the last landing, for logs and trackers."""

    def __init__(self, record: Record, region: int = 0) -> None:
        self.num_fragments = 1
        self.shows_cosine = True
        """Whether means are averages of what regions say that they send."""
        self._cosines: list[float] = []
        self.totals = Totals()
        self.report: dict[str, float] = {}
        self._record, self._region = record, region
        self._is_told = False

    def go_on(self, own: Totals) -> None:
        """Keep this region's `own` bytes and seconds, in a state that it has taken over from another region."""
        self.totals.bytes_sent, self.totals.blocked_s = own.bytes_sent, own.blocked_s

    def count_broadcasts(self, link: Link) -> None:
        """Count the bytes of broadcasts since the last call. A collective call of the region's ranks."""
        sent = link.total(torch.tensor([float(link.count_broadcasts())], dtype=torch.float64, device=HOST))
        self.totals.bytes_sent += round(sent.item())

    def held(self, seconds: float) -> None:
        """Count time for which the training thread was held."""
        self.totals.blocked_s += seconds
        if self.report:
            self.report["blocked_s"] = self.totals.blocked_s

    def sent(self, step: int, fragment: int, numel: int, took_s: float) -> None:
        """Record a send, which held training for `took_s` seconds."""
        self.totals.sends += 1
        self._record("send", step=step, fragment=fragment, numel=numel, took_s=round(took_s, 6))

    def sat_out(self, step: int, fragment: int, region: int) -> None:
        """Warn that this region is excluded from a transfer, because its outer gradient is not finite."""
        logger.warning(
            "the outer gradient of fragment %d at step %d is not finite in region %d: this region sits the transfer out, and "
            "the others continue without it. Look at its loss; a lower learning rate or gradient clipping (max_grad_norm) "
            "helps.",
            *(fragment, step, region),
        )
        self._record("sit_out", step=step, fragment=fragment)

    def landed(
        self,
        step: int,
        fragment: int,
        sent_at: int,
        arrival: Arrival,
        blocked_s: float,
        began: float,
        ended: float,
    ) -> None:
        """Record a landing, between these times of the link's clock. A mean that is not finite is void.

        `blocked_s`: how long it waited for the mean.
        """
        verdict = arrival.verdict
        if any(verdict.fates):
            self._guarded(step, fragment, sent_at, arrival)
        if verdict.outside and not self._is_told:
            self._is_told = True
            self._not_judged(step, arrival)
        losses = [trailer.loss for trailer in arrival.trailers if math.isfinite(trailer.loss)]
        totals = self.totals
        totals.landings += 1
        totals.bytes_sent += arrival.bytes_sent
        self.report = {
            "rounds": totals.landings / self.num_fragments,
            "staleness": step - sent_at,
            "blocked_s": totals.blocked_s,
            "bytes_sent": totals.bytes_sent,
            "transfer_s": arrival.seconds,
            "regions": sum(weight > 0 for weight in verdict.weights),
        }
        if arrival.is_finite:
            self.report["outer_grad_norm"] = math.sqrt(arrival.square)
        cosine = self._cosine(arrival)
        if cosine is not None:
            self.report["cosine"] = cosine
            self._judge_directions(step, cosine, arrival)
        if losses:
            self.report["loss"] = sum(losses) / len(losses)
        if not arrival.is_finite:
            logger.warning(
                "the mean of fragment %d sent at step %d is %s: it changes nothing, in any region. %s "
                "Look at the losses of all regions.",
                *(fragment, sent_at, *_VOID[verdict.is_void]),
            )
        self._record(
            "land" if arrival.is_finite else "void",
            step=step,
            fragment=fragment,
            sent_at=sent_at,
            staleness=step - sent_at,
            blocked_s=round(blocked_s, 6),
            took_s=round(ended - began, 6),
            transfer_s=round(arrival.seconds, 6),
            rested_s=None if arrival.ended_at is None else round(max(ended - arrival.ended_at, 0.0), 6),
            bytes_sent=arrival.bytes_sent,
            outer_grad_norm=math.sqrt(arrival.square) if arrival.is_finite else None,
            cosine=None if cosine is None else round(cosine, 6),
            regions=self.report["regions"],
            members=list(arrival.members),
            norms=_shown([trailer.norm for trailer in arrival.trailers]),
            **_coasted(sent_at, arrival),
            **_common_digest(arrival),
        )

    def _cosine(self, arrival: Arrival) -> float | None:
        """See `mean_cosine`. Equal in all regions."""
        if not self.shows_cosine or not arrival.is_finite or not arrival.trailers:
            return None
        norms, verdict = [each.norm for each in arrival.trailers], arrival.verdict
        return mean_cosine(norms, verdict.weights, verdict.total, math.sqrt(arrival.square))

    def _judge_directions(self, step: int, cosine: float, arrival: Arrival) -> None:
        """Say once that regions pull in different directions, if they do for long."""
        most = ROUNDS * self.num_fragments
        if len(self._cosines) > most:  # it has been said
            return
        self._cosines = [*self._cosines, cosine][-most:]
        mean = sum(self._cosines) / len(self._cosines)
        if len(self._cosines) < most or mean >= LOW:
            return
        self._cosines.append(cosine)
        message = (
            f"the outer gradients of the regions hardly agree: their mean cosine over the last {ROUNDS} rounds is {mean:.2g}. "
            "Either their data differ too much (mix them), or they train apart for too long (lower outer.sync_interval), or all "
            "that is left is noise (a larger batch, a lower learning rate, or the end of the run)."
        )
        self.note(step, message, speaks=self._region == arrival.members[0])  # the others would say the same

    def _guarded(self, step: int, fragment: int, sent_at: int, arrival: Arrival) -> None:
        """Record outer gradients that counted less because they were out of the ordinary."""
        verdict = arrival.verdict
        fates = {
            str(region): fate for region, fate in zip(arrival.members, verdict.fates, strict=True) if fate
        }
        norms = [trailer.norm for trailer in arrival.trailers]
        for region, norm, fate in zip(arrival.members, norms, verdict.fates, strict=True):
            if fate:
                logger.warning(
                    "%s: its norm of %.3g is %.3g times the ordinary one. Look at the loss and the learning rate of that region.",
                    _SAID[fate] % (region, fragment, sent_at),
                    *(norm, norm / verdict.limit),
                )
        facts = {"regions": fates, "norms": _shown(norms), "limit": verdict.limit}
        self._record("guard", step=step, fragment=fragment, sent_at=sent_at, **facts)

    def _not_judged(self, step: int, arrival: Arrival) -> None:
        """Record that the norm guard cannot compare the regions of this run."""
        pairs = list(zip(arrival.members, arrival.trailers, strict=True))
        rates = ", ".join(f"region {region}: {each.round_lr:.3g}" for region, each in pairs)
        why = f"regions have different learning rates ({rates}), and norms follow them"
        if arrival.verdict.outside == NOT_BOUNDED:
            free = " and ".join(f"region {region}" for region, each in pairs if not each.is_bounded)
            why = (
                f"the inner optimizer of {free} does not bound its steps (SGD's follow the gradient), and nobody clips gradients "
                "(Trainer's max_grad_norm, accelerator.clip_grad_norm_)"
            )
        message = (
            f"outer.guard leaves all finite outer gradients as they are: {why}. A region whose numbers are wrong but finite is "
            "not noticed. Values that are not finite are."
        )
        self.note(step, message, speaks=self._region == arrival.members[0])

    def counts_less(self, step: int, fragment: int, region: int, norm: float, ordinary: float) -> None:
        """Record that this region's own outer step scales down its fresh outer gradient."""
        message = (
            f"outer.guard: at step {step} the fresh outer gradient of region {region} for fragment {fragment} counts less in its "
            f"own outer step: its norm of {norm:.3g} is {norm / ordinary:.3g} times the ordinary one. Look at its loss and "
            "learning rate."
        )
        self.note(step, message)

    def note(self, step: int, message: str, speaks: bool = True) -> None:
        """Record a sentence, and warn with it if this region `speaks`."""
        if speaks:
            logger.warning("%s", message)
        self._record("note", step=step, message=message)

    def finished(self, step: int, digest: int) -> None:
        """Record the end of the run, with a checksum of the weights."""
        totals = self.totals
        self._record(
            "finish",
            step=step,
            blocked_s=round(totals.blocked_s, 6),
            bytes_sent=totals.bytes_sent,
            sends=totals.sends,
            digest=digest,
        )


def _shown(norms: Sequence[float]) -> list[float | None]:
    """Norms for the journal: six digits, and None for what JSON cannot express."""
    return [float(f"{norm:.6g}") if math.isfinite(norm) else None for norm in norms]


def _coasted(sent_at: int, arrival: Arrival) -> dict[str, dict[str, int]]:
    """For each region that has only kept step with the others since: its last inner step that trained."""
    pairs = zip(arrival.members, arrival.trailers, strict=True)
    last_steps = {str(region): each.trained_at for region, each in pairs if 0 <= each.trained_at < sent_at}
    return {"coasted": last_steps} if last_steps else {}


def _common_digest(arrival: Arrival) -> dict[str, int]:
    """In elastic runs: the checksum of the global params at the send, if regions compared it and agree."""
    digests = {trailer.digest for trailer in arrival.trailers}
    return (
        {"digest": digests.pop()} if arrival.changes >= 0 and len(digests) == 1 and min(digests) >= 0 else {}
    )


def mean_cosine(
    norms: Sequence[float], weights: Sequence[float], divisor: float, norm_of_mean: float
) -> float | None:
    """The mean cosine of all pairs of outer gradients g_r, weighted by what each pair adds to the length of their mean.

    ::

        m = sum_r w_r g_r / divisor
        cosine = sum_(r != s) a_r a_s cos(g_r, g_s) / sum_(r != s) a_r a_s,  a_r = w_r ||g_r||
               = ((divisor ||m||)^2 - sum_r a_r^2) / ((sum_r a_r)^2 - sum_r a_r^2)

    With equal norms and weights it is the mean of the cosines. None if fewer than two regions count.

    >>> round(mean_cosine([1.0, 1.0], [1.0, 1.0], 2.0, math.sqrt(0.5)), 6)  # at right angles
    0.0
    >>> mean_cosine([2.0, 0.0], [1.0, 1.0], 2.0, 1.0)
    """
    lengths = [norm * weight for norm, weight in zip(norms, weights, strict=True) if norm * weight > 0]
    if len(lengths) < 2:
        return None
    squares = math.fsum(length * length for length in lengths)
    most = math.fsum(lengths) ** 2 - squares
    cosine = ((divisor * norm_of_mean) ** 2 - squares) / most
    return min(max(cosine, -1.0), 1.0) if math.isfinite(cosine) else None
