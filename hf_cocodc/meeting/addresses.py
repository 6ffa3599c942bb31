"""Network addresses of this machine."""

import fcntl
import socket
import struct

from ..errors import InputError

SIOCGIFADDR = 0x8915  # Linux: get an interface's address


def own_address(store_address: str, interface: str | None) -> str:
    """This machine's address on `interface`, or, without one, the address by which it reaches the store.

    Raises:
        InputError: no such interface, or it has no IPv4 address.
    """
    if interface is None:
        host, _, port = store_address.rpartition(":")
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: picks a route, sends nothing
            return str(probe.getsockname()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise InputError(
                f"regions.interface={interface!r} is no network interface with an IPv4 address here "
                f"({error.strerror}). This machine has {known}."
            ) from error
    return socket.inet_ntoa(packed[20:24])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
