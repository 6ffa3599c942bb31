"""How fast the kernel sends: TCP's congestion control, and the rate limit, which spreads what a connection sends evenly over
time (Linux, SO_MAX_PACING_RATE).

What a region sends in one go fills the buffer before a slow link. Packets are dropped there, and a connection that loses them
is slow for seconds; with bbr it is not.
"""

import functools
import logging
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from ..errors import InputError, shown
from .pipe import Seen

_SO_MAX_PACING_RATE = 47
_MOST = (1 << 32) - 2
"""The largest rate that every kernel takes; one more means none."""
NOT_KEPT = (
    "this machine's kernel does not keep a rate limit (SO_MAX_PACING_RATE): this package does, with one piece after the "
    "other, and a lossy link is used less well"
)
LOSES = (
    "region %d: %.0f %% of the packets that it sends are lost on the way, and sent again: it sends faster than the link carries. "
    "Set regions.rate_limit to nine tenths of the link's rate (Mbit/s): docs/guides/network.md"
)
_MANY = 0.05
"""A larger part of lost packets than lines lose by themselves."""
_ENOUGH = 10_000
"""Packets after which a part is one."""
logger = logging.getLogger(__name__)


def part_lost(pairs: Iterable[Seen]) -> float | None:
    """The part of this region's packets that were sent again, if it is so large that a rate limit would spare them."""
    total = functools.reduce(Seen.plus, pairs, Seen())
    return (
        total.resent / total.packets
        if total.packets > _ENOUGH and total.resent > _MANY * total.packets
        else None
    )


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


def congestion_of(wanted: str) -> str | None:
    """The congestion control for `regions.congestion`; None for that of the machine, which "auto" keeps where there is no bbr.

    Raises InputError if this process may not use the one that is named.
    """
    if wanted == "system":
        return None
    name = "bbr" if wanted == "auto" else wanted
    with socket.socket() as probe:
        if set_congestion(probe, name):
            return name
    if wanted == "auto":
        return None
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    known = allowed.read_text().strip() if allowed.is_file() else "none that is known"
    raise InputError(
        f"regions.congestion={shown(wanted)} is none that this process may use (it may: {known}). Choose one of these, or let "
        f"root allow it: modprobe tcp_{wanted}; sysctl -w net.ipv4.tcp_allowed_congestion_control='{known} {wanted}'."
    )


def set_congestion(connection: socket.socket, name: str) -> bool:
    """Let a connection use a congestion control. Returns whether it may."""
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except (OSError, AttributeError):  # not allowed, or not Linux
        return False
    return True


@functools.cache
def say_who_keeps_the_limit(region: int) -> None:
    """Say once that it is not the kernel."""
    logger.warning("region %d: %s (regions.rate_limit).", region, NOT_KEPT)
