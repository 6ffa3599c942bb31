"""Network addresses of this machine."""

import errno
import fcntl
import ipaddress
import socket
import struct
from typing import Any

from ..errors import InputError

SIOCGIFADDR = 0x8915  # Linux: get the address of an interface


def own_address(address_there: str, interface: str | None) -> str:
    """The address of `interface`; without one, the address from which this machine reaches the coordinator.

    Raises InputError if the interface does not exist or has no IPv4 address, or if the coordinator's host has none.
    """
    if interface is None:
        family, kind, _, _, there = resolve(address_there, socket.SOCK_DGRAM)[0]
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(there)  # a datagram socket only picks a route and sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise InputError(
                f"no way leads from this machine to the coordinator at {address_there} ({error.strerror}). Look at its network, "
                "or correct regions.coordinator."
            ) from error
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise InputError(
                f"regions.interface={interface!r} is not a network interface with an IPv4 address "
                f"({error.strerror}). Set it to one of this machine's interfaces: {known}."
            ) from error
    return socket.inet_ntoa(packed[20:24])


def resolve(address: str, kind: socket.SocketKind) -> list[Any]:
    """What `socket.getaddrinfo` says of the coordinator's HOST:PORT. Raises InputError if the host has no address."""
    host, _, port = address.rpartition(":")
    try:
        return socket.getaddrinfo(host.strip("[]"), int(port), type=kind)
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(
            f"the coordinator's host {host.strip('[]')!r} has no address ({getattr(error, 'strerror', error)}). Correct "
            f"regions.coordinator={address!r}."
        ) from error


def listen_at(host: str, port: int, backlog: int = 128) -> socket.socket:
    """A socket that listens: on one address, or with an empty host on all, IPv4 and IPv6. Raises OSError if that fails."""
    if port > 65_535:
        raise OSError(errno.EINVAL, "no machine has a port above 65535")
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=both)


def named(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`; False where nobody knows."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return False
    return bool(host) and all(ipaddress.ip_address(address[0]).is_loopback for *_, address in addresses)


def is_from(connection: socket.socket, host: str) -> bool:
    """Whether a connection has come from an address of this host; False where nobody knows."""
    try:
        address = str(connection.getpeername()[0]).removeprefix("::ffff:")
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return False
    return any(each[0] == address for *_, each in addresses)


def free_port() -> int:
    """A TCP port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
