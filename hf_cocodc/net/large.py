"""Whether large packets pass where small ones do.

A router or a tunnel may swallow packets that are too large for it, without a word. Connections come about there, and small
messages pass: only a round trip of some kilobytes shows it.
"""

import socket

SIZES = (4 << 10, 64 << 10)
"""Bytes of the messages that prove it, each way."""
SWALLOWED = (
    "small packets pass, and large ones vanish on the way without a word: something between the two carries smaller packets than "
    "their interfaces send (MTU)"
)
MEND = "ip link set INTERFACE mtu 1400    # at both ends; or sysctl -w net.ipv4.tcp_mtu_probing=1"


class Swallowed(OSError):
    """Small packets pass, and large ones do not."""

    def __init__(self) -> None:
        super().__init__(SWALLOWED)


def prove(connection: socket.socket) -> None:
    """Send messages of each size to an end that calls `echo`, and take them back. Raises Swallowed if one does not come in the
    time-out of the connection, OSError if the other end closes it.
    """
    try:
        for size in SIZES:
            connection.sendall(bytes(size))
            _take(connection, size)
    except TimeoutError as error:
        raise Swallowed from error


def echo(connection: socket.socket) -> None:
    """Send back what the other end sends to `prove` itself. Raises OSError if it does not come."""
    for size in SIZES:
        _take(connection, size)
        connection.sendall(bytes(size))


def _take(connection: socket.socket, size: int) -> None:
    while size:
        taken = len(connection.recv(size))
        if not taken:
            raise ConnectionResetError("the other end has closed the connection")
        size -= taken
