"""What others say is believed only where it can be true: numbers in their range, addresses that can be called."""

import ipaddress
import re
from typing import Any

MOST = (1 << 53) - 1
"""No count of ours is larger: so far fp64 tells whole numbers apart."""


def whole(said: Any, least: int = 0, most: int = MOST) -> int:
    """A whole number in least .. most, as it is.

    >>> whole(3)
    3
    >>> whole(True)
    Traceback (most recent call last):
    ValueError: True is no whole number in 0 .. 9007199254740991

    Raises:
        ValueError: it is something else.
    """
    if type(said) is not int or not least <= said <= most:
        raise ValueError(f"{str(said)[:40]} is no whole number in {least} .. {most}")
    return said


def host_and_port(address: Any) -> tuple[str, int]:
    """Both parts of IP:PORT, as every member gives its address: no name that somebody would have to look up.

    >>> host_and_port("[::1]:29400")
    ('::1', 29400)

    Raises:
        ValueError: it is no such address.
    """
    host, _, port = str(address).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
        if not re.fullmatch("[0-9]{1,5}", port):
            raise ValueError(port)
        return host, whole(int(port), 1, 65535)
    except ValueError:
        raise ValueError(f"{str(address)[:80]!r} is no address IP:PORT") from None
