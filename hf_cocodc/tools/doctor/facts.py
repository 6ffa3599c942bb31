"""What this machine says about itself: packages, devices, memory, disk, network. Only reads; None for what it does not say."""

import contextlib
import ipaddress
import os
import platform
import socket
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from packaging.requirements import Requirement

from ... import __version__
from ...net.addresses import is_loopback, own_address, parts_of
from ...net.pacing import can_pace
from ...parts.tensors.slices import cores

OK, WARN, WRONG, UNKNOWN = "ok", "warn", "wrong", "-"
_WIDTH = 100
_TOPIC = 11
"""Width of a topic; fixed, as lines are shown one by one."""

T = TypeVar("T")
SYSCTL = Path("/proc/sys/net/ipv4")
_PACKAGE = "hf-cocodc"
_SHOWN = ("torch", "transformers", "accelerate", "datasets")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor; `command` mends what is wrong.

    `level` is OK, WARN (the run may work, but not well), WRONG (it cannot work) or UNKNOWN (this machine does not say).
    """

    topic: str
    level: str
    words: str
    command: str | None = None


def unknown(topic: str, why: str = "not known here") -> Finding:
    """A line about something that this machine does not say."""
    return Finding(topic, UNKNOWN, why)


def lines(finding: Finding) -> list[str]:
    """A finding as lines of text, with the command below the words.

    >>> print("\\n".join(lines(Finding("clock", WARN, "not synchronized", "timedatectl set-ntp true"))))
    warn   clock        not synchronized
                        $ timedatectl set-ntp true
    """
    margin = " " * (7 + _TOPIC + 2)
    head = f"{finding.level:<7}{finding.topic:<{_TOPIC}}  "
    text = textwrap.wrap(
        finding.words, _WIDTH, initial_indent=head, subsequent_indent=margin, break_on_hyphens=False
    )
    return text + ([f"{margin}$ {finding.command}"] if finding.command else [])


@dataclass(frozen=True)
class Device:
    """A GPU or the like; `free` and `total` are bytes."""

    name: str
    free: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this machine has.

    Attributes:
        unmet: this package's requirements that the installed packages do not meet, with what is installed.
        devices: those that torch can use; if it can use none, `unused` counts those of the driver.
        accelerator: one of another kind, whose memory is not known here.
        available, total: bytes of memory.
        cores: those that this process may use.
    """

    versions: Mapping[str, str]
    unmet: Mapping[str, str | None] = field(default_factory=dict)
    devices: Sequence[Device] = ()
    accelerator: str | None = None
    unused: int = 0
    available: int
    total: int
    cores: int


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The disk of a run's folder: `folder` is the nearest one that exists, or a file in its way; `free`, `total` in bytes."""

    folder: Path
    is_writable: bool
    free: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Network:
    """How this machine reaches the others.

    Attributes:
        address: the one that this machine announces; None without a coordinator.
        known: congestion controls that this kernel can use now.
        ports: first and last of the ephemeral port range.
        rtt_s: seconds of a round trip to the coordinator; None on its own machine.
        paces: whether the kernel keeps a rate limit.
    """

    address: str | None = None
    interface: str | None = None
    is_up: bool | None = None
    congestion: str | None = None
    known: Sequence[str] = ()
    ports: tuple[int, int] | None = None
    rtt_s: float | None = None
    paces: bool | None = None


def machine() -> Machine:
    """What this machine has. Starts CUDA if there is a GPU, because only then its free memory is known."""
    kind = torch.accelerator.current_accelerator()
    devices = []
    if kind is not None and kind.type == "cuda":
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            devices.append(Device(torch.cuda.get_device_name(index), free, total))
    cards = len(list(Path("/dev").glob("nvidia[0-9]*")))
    memory = psutil.virtual_memory()
    shown = {_PACKAGE: __version__, **{name: _version(name) or "none" for name in _SHOWN}}
    return Machine(
        versions={**shown, "Python": platform.python_version()},
        unmet=_unmet(),
        devices=devices,
        accelerator=None if kind is None or kind.type in ("cpu", "cuda") else kind.type,
        unused=0 if devices or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") else cards,
        available=memory.available,
        total=memory.total,
        cores=cores(),
    )


def _unmet() -> dict[str, str | None]:
    unmet: dict[str, str | None] = {}
    try:
        needs = metadata.requires(_PACKAGE) or ()
    except metadata.PackageNotFoundError:  # a folder with the source, which nobody has installed
        return {}
    for text in needs:
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        version = _version(need.name)
        if version is None or not need.specifier.contains(version, prereleases=True):
            unmet[f"{need.name}{need.specifier}"] = version
    return unmet


def _version(package: str) -> str | None:
    """The version that is installed; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def disk(folder: Path) -> Disk:
    """The disk that will hold `folder`."""
    there = folder.absolute()
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    usage = psutil.disk_usage(str(there))
    is_writable = there.is_dir() and os.access(there, os.W_OK)
    return Disk(folder=there, is_writable=is_writable, free=usage.free, total=usage.total)


def network(coordinator: str | None, interface: str | None) -> Network:
    """How this machine reaches the coordinator, and how others reach it. Raises InputError if the interface does not exist."""
    address = None if coordinator is None else own_address(coordinator, interface)
    names = psutil.net_if_addrs()
    there = [name for name, each in names.items() if address in [one.address for one in each]]
    name = interface if interface is not None or not there else there[0]
    stats = psutil.net_if_stats().get(name) if name is not None else None
    return Network(
        address=address,
        interface=name,
        is_up=None if stats is None else stats.isup,
        congestion=_read("tcp_congestion_control", str),
        known=_read("tcp_available_congestion_control", str.split) or (),
        ports=_read("ip_local_port_range", lambda text: (int(text.split()[0]), int(text.split()[1]))),
        rtt_s=_rtt_s(coordinator) if coordinator is not None and leads_away(coordinator, address) else None,
        paces=can_pace(),
    )


def _read(name: str, understand: Callable[[str], T]) -> T | None:
    """A setting of the kernel; None where there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return understand((SYSCTL / name).read_text().strip())
    return None


def leads_away(coordinator: str, address: str | None) -> bool:
    """Whether the way to the coordinator is like that to other regions: not on its own machine, unless it serves only that one.

    >>> leads_away("10.0.0.1:29650", "10.0.0.2"), leads_away("10.0.0.1:29650", "10.0.0.1")
    (True, False)
    """
    host, port = parts_of(coordinator)
    with contextlib.suppress(OSError):
        there = {each[4][0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        return is_loopback(host) or address not in there
    return True


def _rtt_s(coordinator: str) -> float | None:
    """The shortest time of three connections to the coordinator; None if it does not answer within a second each."""
    best = None
    with contextlib.suppress(OSError):
        for _ in range(3):
            began = time.perf_counter()
            socket.create_connection(parts_of(coordinator), timeout=1.0).close()
            took = time.perf_counter() - began
            best = took if best is None else min(best, took)
    return best


def is_private(address: str) -> bool:
    """Whether an address is known only inside a network (10.x, 192.168.x, ...)."""
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address)
        return parsed.is_private and not parsed.is_loopback
    return False
