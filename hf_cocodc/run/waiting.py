"""What a region says while it waits for the others, and when they are there: also in a script that has not set up logging."""

import logging
import time
from collections.abc import Sequence

from .status import tell

FIRST_S = 10.0
"""Seconds after which a region says for whom it waits."""
AGAIN_S = 60.0

logger = logging.getLogger(__name__)


class Waiting:
    """Says for whom a region waits: to the command that started it at once, in the log after 10 s and then every minute.

    Args:
        region: this one.
        run: name of the run.
        store: address of the store at which it waits.
        wait_s: seconds for which it waits at most (`regions.start_timeout_s`).
    """

    def __init__(self, region: int, run: str, store: str, wait_s: float) -> None:
        self._where = f"run {run!r} at the store {store}"
        self._region, self._wait_s = region, wait_s
        self._began = time.monotonic()
        self._says_at = self._began + FIRST_S
        self._told: Sequence[int] = ()

    def __call__(self, absent: Sequence[int]) -> None:
        """Call it often, with the regions that have not come yet."""
        whom = " and ".join(f"region {region}" for region in absent)
        if absent != self._told:
            self._told = absent
            tell(f"waiting for {whom}")
        self.say(whom)

    def say(self, what: str) -> None:
        """Say what it waits for, if it is time to."""
        now = time.monotonic()
        if now < self._says_at:
            return
        self._says_at = now + AGAIN_S
        waited_s = now - self._began
        logger.warning(
            "region %d has waited %.0f s for %s (%s). It waits %.0f s more (regions.start_timeout_s).",
            *(self._region, waited_s, what, self._where, max(self._wait_s - waited_s, 0.0)),
        )


def announce(message: str, *args: object) -> None:
    """Log that regions are there: as information; where nobody has set up logging, as a warning, which Python shows then."""
    logger.log(logging.INFO if logger.hasHandlers() else logging.WARNING, message, *args)
