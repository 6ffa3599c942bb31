"""Where processes listen that nobody calls, and ports that are free."""

import socket

from hf_cocodc.coordinator.messages import Lanes
from hf_cocodc.net.keys import SHARE_BYTES
from hf_cocodc.net.members import Whereabouts


def lanes(host: str = "h") -> Lanes:
    """Of a region with one process."""
    return (Whereabouts(((host, 1),), bytes(SHARE_BYTES)),)


def free_port() -> int:
    """A TCP port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
