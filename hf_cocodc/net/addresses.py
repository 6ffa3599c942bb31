"""Network addresses of this machine."""

import errno
import ipaddress
import socket
from typing import Any

import psutil

from ..errors import InputError, MeetingError


class Unreachable(MeetingError, InputError):
    """The coordinator's host has no address, or no way leads there. This may pass: a name server may be away."""

    exit_code = 1


def own_address(address_there: str, interface: str | None) -> str:
    """The address of `interface`, IPv4 if it has one; without an interface, the address from which this machine reaches the
    coordinator. Where regions meet in a storage, it is the loopback address: nobody calls.

    Raises InputError if the interface does not exist or has no address that others reach; Unreachable if the
    coordinator has none.
    """
    if interface is None and is_url(address_there):
        return "127.0.0.1"
    if interface is None:
        why: str | None = "it has no address"
        for family, kind, _, _, there in resolve(address_there, socket.SOCK_DGRAM):
            try:
                with socket.socket(family, kind) as probe:
                    probe.connect(there)  # a datagram socket only picks a route and sends nothing
                    return str(probe.getsockname()[0])
            except OSError as error:
                why = error.strerror
        raise Unreachable(
            f"no way leads from this machine to the coordinator at {address_there} ({why}). Look at its network, or correct "
            "regions.coordinator."
        )
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


def is_url(address: str) -> bool:
    """Whether an address names a storage, where regions meet (`mailbox`).

    >>> is_url("s3://bucket/run7"), is_url("10.0.0.1:29650")
    (True, False)
    """
    return "://" in address


def parts_of(address: str) -> tuple[str, int]:
    """Host and port of a coordinator, as the settings have checked it; of a storage, its URL and 0.

    >>> parts_of("[::1]:29650"), parts_of("file:///mnt/run7")
    (('::1', 29650), ('file:///mnt/run7', 0))
    """
    if is_url(address):
        return address, 0
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def resolve(address: str, kind: socket.SocketKind) -> list[Any]:
    """What `socket.getaddrinfo` says of the coordinator's HOST:PORT. Raises Unreachable if the host has no address."""
    host, port = parts_of(address)
    try:
        return socket.getaddrinfo(host, port, type=kind)
    except (socket.gaierror, UnicodeError) as error:
        raise Unreachable(
            f"the coordinator's host {host!r} has no address ({getattr(error, 'strerror', error)}). Correct "
            f"regions.coordinator={address!r}."
        ) from error


def listen_at(host: str, port: int, backlog: int = 128) -> socket.socket:
    """A socket that listens: on the first address of a host at which it can; if it is empty or "::", on all, IPv4 and IPv6.

    Raises OSError if that fails.
    """
    if port > 65_535:
        raise OSError(errno.EINVAL, "no machine has a port above 65535")
    if host in ("", "::") and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    failure = OSError(errno.EADDRNOTAVAIL, f"{host} has no address")
    for family, _, _, _, where in socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        try:
            return socket.create_server(where[:2], family=family, backlog=backlog)
        except OSError as error:
            failure = error
    raise failure


def named(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets; of a storage, its URL."""
    if is_url(host):
        return host
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
