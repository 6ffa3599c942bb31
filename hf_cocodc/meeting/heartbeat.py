"""Telling a region that is late from one that is gone.

Regions differ in speed, and whoever comes first waits at the next transfer: for as long as the other needs, as long as it
lives and gets on. So every region writes a sign of life and its inner step to the store now and then, and who waits reads
those of the region it waits for.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

logger = logging.getLogger(__name__)

_GONE = "gone"
STUCK = 10
"""Time-outs after which a region that lives but makes no inner step counts as lost."""


class Heartbeat:
    """Signs of life of one region, and its watch over the one that it waits for.

    Args:
        store: shared by all regions; used under a prefix of its own.
        region: this region.
        timeout_s: silence after which a region counts as lost.
        lost: called once, from a thread of its own, as lost(region, what was waited for, seconds waited, why).
    """

    def __init__(
        self, store: dist.Store, region: int, timeout_s: float, lost: Callable[[int, str, float, str], None]
    ) -> None:
        self.inner_step = 0
        self._store = store
        self._region = region
        self._timeout_s = timeout_s
        self._lost = lost
        self._waits: tuple[int, str, float] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hf_cocodc-heartbeat", daemon=True)
        self._thread.start()

    def wait_for(self, region: int, what: str) -> None:
        """From now on this region waits for `region`; until `arrived`."""
        self._waits = (region, what, time.monotonic())

    def arrived(self) -> None:
        self._waits = None

    def close(self, gone: bool = False) -> None:
        """No more signs; `gone` tells the others that this region leaves them waiting."""
        self._ended.set()
        self._thread.join(timeout=1.0)  # not for ever: the store's machine may be gone
        if gone:
            self._tell(_GONE)

    def _beat(self) -> None:
        period_s = min(self._timeout_s / 4, 5.0)
        count = 0
        waits, seen, alive_at, moved_at, said_at = None, ("", ""), 0.0, 0.0, 0.0
        while not self._ended.wait(period_s):
            count += 1
            self._tell(f"{count} {self.inner_step}")
            now = time.monotonic()
            if self._waits is None or self._waits != waits:
                waits = self._waits
                alive_at = moved_at = said_at = waits[2] if waits else now
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
                self._lost(region, what, now - since, f"no sign of life for {now - alive_at:.0f} s")
                return
            if now - moved_at > STUCK * self._timeout_s:
                self._lost(
                    region,
                    what,
                    now - since,
                    f"it lives, but is stuck at step {step} for {now - moved_at:.0f} s",
                )
                return
            if now - said_at > self._timeout_s:
                said_at = now
                logger.warning(
                    "region %d waits for region %d since %.0f s, for %s: it lives and is at step %s.",
                    *(self._region, region, now - since, what, step or "?"),
                )

    def _tell(self, sign: str) -> None:
        # without a store nobody hears of us, and all go by time alone
        with contextlib.suppress(RuntimeError):
            self._store.set(str(self._region), sign)

    def _ask(self, region: int) -> str:
        with contextlib.suppress(RuntimeError):
            if self._store.check([str(region)]):
                return self._store.get(str(region)).decode()
        return ""
