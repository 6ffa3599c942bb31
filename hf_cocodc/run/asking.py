"""How a newcomer gets a base from a member: it asks, and the member offers one, or says why it does not."""

import queue
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..coordinator.messages import Member
from ..errors import DonorLost, short
from .base import Base, receive
from .donor import offered
from .status import tell

_POLL_S = 0.1
_AGAIN_S = 10.0
"""A member is asked again after so many seconds: what travels while the coordinator is away is lost."""
_LONGEST_WHY = 400


class Donors:
    """The newcomer's side of it.

    Args:
        region: this one.
        post: sends a member a message of this topic.
        is_there: whether a member still takes part.
        stream: opens a stream to a member; see `TcpLink.stream`.
    """

    def __init__(
        self,
        region: int,
        post: Callable[[Member, str], object],
        is_there: Callable[[Member], bool],
        stream: Callable[..., socket.socket],
    ) -> None:
        self._region, self._post, self._is_there, self._stream = region, post, is_there, stream
        self._asked: Member | None = None
        self._answers: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()

    def hear(self, sender: Member, topic: str, content: dict[str, Any]) -> None:
        """Take a message of another process, if it is an answer. Any thread may call it."""
        if topic in ("offer", "no_base") and sender == self._asked:
            self._answers.put((topic, content))

    def base_of(self, member: Member, folder: Path, *, stuck_timeout_s: float, **how: Any) -> Base:
        """Ask a member for a base, which it has to offer within `stuck_timeout_s`; blocks until `folder` has it.

        `how`: see `receive`.

        Raises:
            DonorLost: it gives none.
            CheckpointError: what comes is no base, or the disk refuses.
        """

        def alive() -> None:
            if not self._is_there(member):
                raise DonorLost(f"region {member.region} is lost.")

        self._answers, self._asked = queue.SimpleQueue(), member
        began, ask_at = time.monotonic(), 0.0
        while True:
            alive()
            if time.monotonic() >= ask_at:
                self._post(member, "base")
                ask_at = time.monotonic() + _AGAIN_S
            try:
                topic, content = self._answers.get(timeout=_POLL_S)
                break
            except queue.Empty:
                if time.monotonic() > began + stuck_timeout_s:
                    raise DonorLost(
                        f"region {member.region} has offered no base for {stuck_timeout_s:.3g} s "
                        "(regions.stuck_timeout_s, or what is left of regions.start_timeout_s): does it make inner steps?"
                    ) from None
        if topic == "no_base":
            raise DonorLost(short(content.get("why"), _LONGEST_WHY))
        try:
            offer = offered(content)
        except (KeyError, ValueError) as error:
            raise DonorLost(f"region {member.region} offers what is no base ({error!r}).") from error
        tell("getting a base", news=f"gets a base of step {offer.step} from region {member.region}")
        return receive(
            offer, partial(self._stream, member), folder, self._region, member.region, alive, **how
        )
