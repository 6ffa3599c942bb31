"""Distinguish a late region from a lost one.

Regions differ in speed. A fast region waits at the next transfer as long as the slow region is alive and makes progress.
Each region therefore regularly writes a sign of life and its inner step to the store. A waiting region reads the signs of
the region that it waits for.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

logger = logging.getLogger(__name__)

_GONE = "gone"


class Heartbeat:
    """Writes the signs of life of this region and watches the region that it waits for.

    Args:
        store: shared by all regions, with a prefix that only the heartbeat uses.
        region: this region.
        timeout_s: a region counts as lost after this many seconds without a sign of life.
        stuck_timeout_s: a region that is alive but makes no inner step counts as lost after this many seconds.
        lost: called once, from the heartbeat's thread, as lost(region, awaited transfer, seconds waited, reason).
    """

    def __init__(
        self,
        store: dist.Store,
        region: int,
        timeout_s: float,
        stuck_timeout_s: float,
        lost: Callable[[int, str, float, str], None],
    ) -> None:
        self.inner_step = 0
        self._stuck_timeout_s = stuck_timeout_s
        self._store = store
        self._region = region
        self._timeout_s = timeout_s
        self._lost = lost
        self._waits: tuple[int, str, float] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hf_cocodc-heartbeat", daemon=True)
        self._thread.start()

    def wait_for(self, region: int, what: str) -> None:
        """Watch `region` until `arrived` is called. Messages call the awaited transfer `what`."""
        self._waits = (region, what, time.monotonic())

    @property
    def awaits(self) -> int | None:
        """The region that is watched; None if there is none."""
        waits = self._waits
        return None if waits is None else waits[0]

    def arrived(self) -> None:
        """End the watch: the awaited transfer is here."""
        self._waits = None

    def close(self, gone: bool = False) -> None:
        """Write no more signs of life; `gone` tells waiting regions that this region will not send."""
        self._ended.set()
        self._thread.join(timeout=1.0)  # with a limit: the store's machine may be unreachable
        if gone:
            self._tell(_GONE)

    def _beat(self) -> None:
        period_s = min(self._timeout_s / 4, 5.0)
        count = 0
        waits, seen, alive_at, moved_at, warned_at = None, ("", ""), 0.0, 0.0, 0.0
        while not self._ended.wait(period_s):
            count += 1
            self._tell(f"{count} {self.inner_step}")
            now = time.monotonic()
            if self._waits is None or self._waits != waits:
                waits = self._waits
                alive_at = moved_at = warned_at = waits[2] if waits else now
                continue
            region, what, since = waits
            beat, _, step = self._ask(region).partition(" ")
            alive_at = now if beat != seen[0] else alive_at
            moved_at = now if step != seen[1] else moved_at
            seen = (beat, step)
            if beat == _GONE:
                self._lost(region, what, now - since, "it has left")
                return
            if now - alive_at > self._timeout_s:
                self._lost(
                    region,
                    what,
                    now - since,
                    f"it has given no sign of life for {now - alive_at:.0f} s (regions.timeout_s={self._timeout_s:g})",
                )
                return
            if now - moved_at > self._stuck_timeout_s:
                self._lost(
                    region,
                    what,
                    now - since,
                    f"it is alive, but has been stuck at step {step} for {now - moved_at:.0f} s "
                    f"(regions.stuck_timeout_s={self._stuck_timeout_s:g})",
                )
                return
            if now - warned_at > self._timeout_s:
                warned_at = now
                logger.warning(
                    "region %d has waited %.0f s for region %d (%s). Region %d is alive, at step %s.",
                    *(self._region, now - since, region, what, region, step or "?"),
                )

    def _tell(self, sign: str) -> None:
        # without a store no region sees signs of life, and time-outs alone decide
        with contextlib.suppress(RuntimeError):
            self._store.set(str(self._region), sign)

    def _ask(self, region: int) -> str:
        with contextlib.suppress(RuntimeError):
            if self._store.check([str(region)]):
                return self._store.get(str(region)).decode()
        return ""
