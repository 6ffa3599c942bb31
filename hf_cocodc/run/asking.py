"""How a newcomer gets a base from a member: it asks, and the member offers one, or says why it does not."""

import queue
import time
from pathlib import Path
from typing import Any

from ..errors import DonorLost
from ..meeting.presence import Member, Presence
from .base import Base, receive
from .donor import offered
from .place import Place
from .status import tell

_POLL_S = 0.1


class Asking:
    """The newcomer's side of it.

    Args:
        place: of this region.
        presence: of this process.
    """

    def __init__(self, place: Place, presence: Presence) -> None:
        self._place, self._presence = place, presence
        self._offers: queue.SimpleQueue[tuple[Member, dict[str, Any] | str]] = queue.SimpleQueue()
        presence.on("offer", lambda member, content: self._offers.put((member, content)))
        presence.on("no_base", lambda member, content: self._offers.put((member, str(content.get("why")))))

    def base_of(self, member: Member, address: str, folder: Path) -> Base:
        """Ask a member, whose presence listens at `address`, for a base; blocks until `folder` has it.

        Raises:
            DonorLost: it gives none.
            CheckpointError: what comes is no base, or the disk refuses.
        """
        place, presence, regions = self._place, self._presence, self._place.regions
        until = time.monotonic() + regions.stuck_timeout_s

        def alive() -> None:
            seen = presence.seen(member.region)
            if member not in presence.members or (seen is not None and seen.lost):
                raise DonorLost(f"region {member.region} is lost.")

        presence.tell(member, "base")
        while True:
            alive()
            seen = presence.seen(member.region)
            if time.monotonic() > until and seen is not None and seen.moved_s > regions.stuck_timeout_s:
                raise DonorLost(
                    f"region {member.region} has made no inner step for {seen.moved_s:.0f} s "
                    f"(regions.stuck_timeout_s={regions.stuck_timeout_s:g})."
                )
            try:
                who, said = self._offers.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if who != member:
                continue
            if isinstance(said, str):
                raise DonorLost(said)
            try:
                offer = offered(said, address)
            except (KeyError, TypeError, ValueError) as error:
                raise DonorLost(f"region {member.region} offers what is no base ({error!r}).") from error
            tell("getting a base", news=f"gets a base of step {offer.step} from region {member.region}")
            return receive(
                *(offer, folder, place.region, member.region, alive, regions.timeout_s),
                *(place.host, place.largest_base, place.prove(offer)),
            )
