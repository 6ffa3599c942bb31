"""What a region says while it waits for the others, and when they are there: also in a script that has not set up logging."""

import logging
import time

from ..coordinator.messages import Waiting
from .status import tell

FIRST_S = 10.0
"""Seconds after which a region says for whom it waits."""
AGAIN_S = 60.0

logger = logging.getLogger(__name__)


class WaitingWords:
    """Says for whom a region waits: to the command that started it at once, in the log after 10 s and then every minute.

    Args:
        region: this one.
        run: name of the run.
        coordinator: address of the coordinator at which it waits.
        wait_s: seconds for which it waits at most (`regions.start_timeout_s`).

    Attributes:
        news: what the coordinator has told last.
    """

    def __init__(self, region: int, run: str, coordinator: str, wait_s: float) -> None:
        self._where = f"run {run!r} at the coordinator {coordinator}"
        self._region, self._wait_s = region, wait_s
        self._began = time.monotonic()
        self._says_at = self._began + FIRST_S
        self._told: Waiting | None = None
        self.news: Waiting | None = None

    def look(self) -> None:
        """Call it often."""
        news = self.news
        if news is None:
            return
        whom = " and ".join(f"region {region}" for region in news.absent)
        if news != self._told:
            self._told = news
            stage = f"waiting for {whom}" if whom else "waiting for its place"
            if news.why:
                self._tell_why(stage, news.why)
            elif whom:
                tell(stage)
        self._say(f" for {whom}" if whom else f": {news.why}")

    def _tell_why(self, stage: str, why: str) -> None:
        left_s = max(self._wait_s - (time.monotonic() - self._began), 0.0)
        logger.warning("region %d waits, for %.0f s at most: %s", self._region, left_s, why)
        tell(stage, news=f"waits for {left_s:.0f} s at most: {why}")

    def _say(self, what: str) -> None:
        """Say what it waits for, or why it does, if it is time to."""
        now = time.monotonic()
        if now < self._says_at:
            return
        self._says_at = now + AGAIN_S
        waited_s = now - self._began
        logger.warning(
            "region %d has waited %.0f s%s (%s). It waits %.0f s more (regions.start_timeout_s).",
            *(self._region, waited_s, what, self._where, max(self._wait_s - waited_s, 0.0)),
        )


def announce(message: str, *args: object) -> None:
    """Log that regions are there: as information; where nobody has set up logging, as a warning, which Python shows then."""
    logger.log(logging.INFO if logger.hasHandlers() else logging.WARNING, message, *args)
