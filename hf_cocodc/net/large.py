"""Whether large packets pass where small ones do.

A router or a tunnel may swallow packets that are too large for it, without a word. Connections come about there, and small
messages pass: only a round trip of some kilobytes shows it.
"""

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
