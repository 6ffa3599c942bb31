"""The rate limit, kept by the kernel: it spreads what a connection sends evenly over time (Linux, SO_MAX_PACING_RATE).

What a region sends in one go fills the buffer before a slow link. Packets are dropped there, and a connection that loses them is
slow for seconds.
"""

import functools
import logging
import socket
import struct

_SO_MAX_PACING_RATE = 47
_MOST = (1 << 32) - 2
"""The largest rate that every kernel takes; one more means none."""
NOT_KEPT = (
    "this machine's kernel does not keep a rate limit (SO_MAX_PACING_RATE): this package does, with one piece after the "
    "other, and a lossy link is used less well"
)
logger = logging.getLogger(__name__)


def can_pace() -> bool:
    """Whether this machine's kernel keeps a limit."""
    with socket.socket() as probe:
        return pace(probe, _MOST)


def pace(connection: socket.socket, rate: float) -> bool:
    """Let the kernel send at most `rate` bytes per second on a connection. Returns whether it does."""
    wanted = struct.pack("I", max(min(int(rate), _MOST), 1))
    try:
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, wanted)
        return connection.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, len(wanted)) == wanted
    except OSError:
        return False


@functools.cache
def say_who_keeps_the_limit(region: int) -> None:
    """Say once that it is not the kernel."""
    logger.warning("region %d: %s (regions.rate_limit).", region, NOT_KEPT)
