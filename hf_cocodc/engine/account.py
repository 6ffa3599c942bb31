"""Counts and records the sends, the landings and the waiting of a run."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..links.base import Arrival, Link

logger = logging.getLogger(__name__)

Record = Callable[..., None]
"""record(kind, **facts): keeps an event of the run."""


@dataclass
class Totals:
    """Counters of a run on this rank.

    Attributes:
        sends: transfers sent.
        landings: transfers landed.
        bytes_sent: payload bytes that this region has sent, to all other regions together, over all its lanes: transfers,
            means of global params for evaluations and exports, and broadcasts. Region 0 broadcasts the first parameters, and
            global params that had come apart; a region broadcasts the checkpoint that another one takes over. Of a region of
            DDP ranks only the leader sends.
        blocked_s: seconds that training waited for the link.
    """

    sends: int = 0
    landings: int = 0
    bytes_sent: int = 0
    blocked_s: float = 0.0


class Account:
    """Counts and records what one region does.

    Args:
        record: keeps events.

    Attributes:
        num_fragments: number of fragments; this many landings are a round.
        totals: counters since the start of the run.
        report: figures at the last landing, most of them since the start of the run, for people and for trackers.
    """

    def __init__(self, record: Record) -> None:
        self.num_fragments = 1
        self.totals = Totals()
        self.report: dict[str, float] = {}
        self._record = record

    def go_on(self, own: Totals) -> None:
        """Count sends and landings as the region does whose state this one has taken over, and its `own` bytes and seconds."""
        self.totals.bytes_sent, self.totals.blocked_s = own.bytes_sent, own.blocked_s

    def count_broadcasts(self, link: Link) -> None:
        """Count what broadcasts have sent since the last call. A collective call of the region's ranks."""
        sent = link.total(torch.tensor([float(link.count_broadcasts())], dtype=torch.float64))
        self.totals.bytes_sent += round(sent.item())

    def sent(self, step: int, fragment: int, numel: int, blocked_s: float) -> None:
        """A transfer has left."""
        self.totals.sends += 1
        self._record("send", step=step, fragment=fragment, numel=numel, blocked_s=round(blocked_s, 6))

    def sat_out(self, step: int, fragment: int, region: int) -> None:
        """This region sits a transfer out: its outer gradient is not finite."""
        logger.warning(
            "the outer gradient of fragment %d at step %d is not finite in region %d: this region sits the transfer out, and "
            "the others continue without it. Look at its loss; a lower learning rate or gradient clipping (max_grad_norm) "
            "helps.",
            *(fragment, step, region),
        )
        self._record("sit_out", step=step, fragment=fragment)

    def landed(self, step: int, fragment: int, sent_at: int, arrival: Arrival, blocked_s: float) -> None:
        """A transfer has landed; training was blocked on it for `blocked_s` seconds."""
        losses = [trailer.loss for trailer in arrival.trailers if not math.isnan(trailer.loss)]
        totals = self.totals
        totals.landings += 1
        totals.bytes_sent += arrival.bytes_sent
        self.report = {
            "rounds": totals.landings / self.num_fragments,
            "staleness": step - sent_at,
            "blocked_s": totals.blocked_s,
            "bytes_sent": totals.bytes_sent,
        }
        if losses:
            self.report["loss"] = sum(losses) / len(losses)
        self._record(
            "land",
            step=step,
            fragment=fragment,
            sent_at=sent_at,
            staleness=step - sent_at,
            blocked_s=round(blocked_s, 6),
            transfer_s=round(arrival.seconds, 6),
            bytes_sent=arrival.bytes_sent,
            outer_grad_norm=math.sqrt(arrival.square),
            regions=sum(trailer.weight > 0 for trailer in arrival.trailers),
            members=list(arrival.members),
            **_common_digest(arrival),
        )

    def adopted(
        self, step: int, num_params: int, num_fragments: int, averaged: Sequence[str], created: Sequence[str]
    ) -> None:
        """More parameters are synchronised from now on."""
        for names, source in ((averaged, "the mean of the regions"), (created, "region 0's values")):
            if names:
                logger.info(
                    "from step %d on %d more parameters are synchronised, beginning with %s: %s%s.",
                    *(step, len(names), source, ", ".join(names[:3]), ", ..." if names[3:] else ""),
                )
        self._record(
            "adopt",
            step=step,
            num_params=num_params,
            num_fragments=num_fragments,
            averaged=list(averaged),
            created=list(created),
        )

    def finished(self, step: int, digest: int) -> None:
        """The run has ended, with weights of this checksum."""
        totals = self.totals
        self._record(
            "finish",
            step=step,
            blocked_s=round(totals.blocked_s, 6),
            bytes_sent=totals.bytes_sent,
            sends=totals.sends,
            digest=digest,
        )


def _common_digest(arrival: Arrival) -> dict[str, int]:
    """Where regions come and go: the checksum of the global params that all of them had at the send, if they compared it."""
    digests = {trailer.digest for trailer in arrival.trailers}
    return (
        {"digest": digests.pop()} if arrival.changes >= 0 and len(digests) == 1 and min(digests) >= 0 else {}
    )
