"""Network addresses of this machine."""

import errno
import ipaddress
import socket
from typing import Any

import psutil

from ..errors import InputError


def own_address(address_there: str, interface: str | None) -> str:
    """The address of `interface`, IPv4 if it has one; without an interface, the address from which this machine reaches the
    coordinator.

    Raises InputError if the interface does not exist or has no address that others reach, or if the coordinator's host has none.
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
    known = {name: usable for name, each in psutil.net_if_addrs().items() if (usable := _reached(each))}
    if interface not in known:
        exists = interface in psutil.net_if_addrs()
        raise InputError(
            f"regions.interface={interface!r} "
            + (
                "has no address that other machines reach"
                if exists
                else "is not a network interface of this machine"
            )
            + f". Set it to one that has: {', '.join(known)}."
        )
    return known[interface][0]


def _reached(addresses: list[Any]) -> list[str]:
    """Of an interface's addresses, those that other machines reach: IPv4 first, and no link-local ones of IPv6."""
    found = [each.address for each in addresses if each.family == socket.AF_INET]
    wide = [each.address.partition("%")[0] for each in addresses if each.family == socket.AF_INET6]
    return found + [each for each in wide if not ipaddress.ip_address(each).is_link_local]


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
