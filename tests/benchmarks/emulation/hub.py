"""The hub of an emulated WAN: it makes the regions and carries the packets between them.

`wan.Wan` starts the hub as a separate process, `python hub.py SPEC`. They exchange lines of JSON. The
hub runs until its standard input ends: when the parent closes the WAN, or dies.
"""

import contextlib
import ctypes
import fcntl
import heapq
import json
import math
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

INTERFACE = "wan0"
"""Name of the network interface in every region."""

TUN = "/dev/net/tun"
SYSCTL = Path("/proc/sys/net/ipv4")
MTU = 1500
_NET = "198.18.0"  # RFC 2544 reserves it for benchmarks: no machine has its own route to it
_QUEUE_PACKETS = 4000  # of a TUN device; the hub's own buffer models the link

# <linux/if_tun.h>, <linux/virtio_net.h>, <linux/sched.h>
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 1, 2
_CLONE_NEWNET = 0x40000000
_VNET = struct.Struct("=BBHHHH")  # flags, GSO type, header length, GSO size, checksum start, checksum offset
_LARGEST = _VNET.size + (1 << 16)
_FIN_PSH, _CWR = 0x09, 0x80


@dataclass
class Counters:
    """Traffic from one region to another, in IP packets as on a wire (segments, not GSO bundles).

    Attributes:
        packets: packets that entered the link, including lost ones.
        bytes: their bytes, including headers.
        lost: how many of them were lost on the way.
        dropped: packets that did not enter the link because its buffer was full.
    """

    packets: int = 0
    bytes: int = 0
    lost: int = 0
    dropped: int = 0


def address(region: int) -> str:
    """The IPv4 address of a region."""
    return f"{_NET}.{region + 1}"


def _enter_new_region(region: int, congestion: str | None, rate: float | None) -> tuple[int, int]:
    """Move this process into a new network namespace for `region`; return descriptors of it and of its TUN device."""
    _system("unshare", _CLONE_NEWNET)
    tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    own = address(region)
    # Set it on the route, not for the namespace: a namespace may choose only what the machine's allowed list contains.
    control = f"congctl {congestion}" if congestion else ""
    setup = f"""\
link set lo up
link set {INTERFACE} mtu {MTU} txqueuelen {_QUEUE_PACKETS} up
address add {own}/32 dev {INTERFACE}
route add {_NET}.0/24 dev {INTERFACE} src {own} {control}
"""
    done = subprocess.run(["ip", "-batch", "-"], input=setup, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip: {done.stderr.strip()}")
    _set("tcp_no_metrics_save", "1")
    _set("tcp_min_tso_segs", str(_smallest_bundle(rate)))
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC), tun


def _set(name: str, value: str) -> None:
    """Set an IPv4 option of the current network namespace."""
    try:
        (SYSCTL / name).write_text(value)
    except OSError as error:
        raise OSError(
            f"cannot write {SYSCTL / name} ({error.strerror}), which every region must set. Start a container with "
            "--privileged; elsewhere run `sudo mount -o remount,rw /proc/sys`."
        ) from error


def _smallest_bundle(rate: float | None) -> int:
    """The least number of segments that TCP should bundle: 0.25 ms at the link's rate, a burst too short to matter.

    With a smaller number, many slow connections send bundles of two, and the hub needs one read for each bundle.
    """
    quarter = math.inf if rate is None else 0.25e-3 * rate / 8 / MTU
    return int(min(max(quarter, 2), 40))  # 2 is Linux's minimum; 44 segments fill 64 KB


def _system(name: str, *arguments: int) -> None:
    """Make a system call that Python 3.10 has no function for."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


class _Pair:
    """One direction between two regions: a buffer that drains at the link's rate, random losses, and a delay."""

    def __init__(
        self, delay_s: float, rate: float | None, queue_s: float, loss: float, seed: tuple[int, int]
    ) -> None:
        self.counters = Counters()
        self._delay_s, self._queue_s = delay_s, queue_s
        self._byte_s = 0.0 if rate is None else 8 / rate
        self._free_at = 0.0
        self._random = random.Random(f"{seed}")
        self._log_kept = math.log1p(-loss)
        self._until_loss = self._gap()

    def take(self, packet: bytes, now: float) -> tuple[float, list[bytes]]:
        """Send a packet at `now`; return its arrival time and the parts that arrive."""
        header, size, segments = _shape(packet)
        start = max(self._free_at, now)
        fits = segments
        if self._byte_s:
            room_s = self._queue_s - (start - now)
            # A buffer with any room left takes one more segment.
            fits = min(segments, max(math.ceil(room_s / (self._byte_s * (header + size))), 0))
        carried = _wire_bytes(packet, header, size, fits)
        self._free_at = start + carried * self._byte_s
        arrives = self._free_at + self._delay_s
        lost = self._losses(fits)
        self.counters.packets += fits
        self.counters.bytes += carried
        self.counters.lost += len(lost)
        self.counters.dropped += segments - fits
        if fits == segments and not lost:
            return arrives, [packet]
        ends = [*lost, fits]
        starts = [0, *(position + 1 for position in lost)]
        kept = [(a, b) for a, b in zip(starts, ends, strict=True) if a < b]
        return arrives, [_cut(packet, header, size, a, b) for a, b in kept]

    def _losses(self, count: int) -> list[int]:
        """Positions of the lost packets among the next `count`."""
        found = []
        at = self._until_loss
        while at < count:
            found.append(int(at))
            at += 1 + self._gap()
        self._until_loss = at - count
        return found

    def _gap(self) -> float:
        """Number of packets before the next loss. It is geometric: each packet has the same probability of loss."""
        return math.log(1 - self._random.random()) // self._log_kept if self._log_kept else math.inf


def _shape(packet: bytes) -> tuple[int, int, int]:
    """Header bytes per segment, payload bytes of a full segment, number of segments."""
    size = _VNET.unpack_from(packet)[3]
    ip_header = (packet[_VNET.size] & 0x0F) * 4
    if not size:  # not a bundle: one packet of any protocol
        return ip_header, len(packet) - _VNET.size - ip_header, 1
    header = ip_header + (packet[_VNET.size + ip_header + 12] >> 4) * 4
    return header, size, -(-(len(packet) - _VNET.size - header) // size)


def _wire_bytes(packet: bytes, header: int, size: int, segments: int) -> int:
    """Bytes of the first `segments` segments, each with its own headers."""
    return segments * header + min(segments * size, len(packet) - _VNET.size - header)


def _cut(packet: bytes, header: int, size: int, first: int, last: int) -> bytes:
    """Segments `first` .. `last - 1` of a TCP bundle, as a separate bundle."""
    flags, kind, header_length, _, checksum_start, checksum_offset = _VNET.unpack_from(packet)
    payload = packet[_VNET.size + header :]
    part = payload[first * size : last * size]
    ends_it = last * size >= len(payload)
    ip = bytearray(packet[_VNET.size : _VNET.size + header])
    tcp = (ip[0] & 0x0F) * 4
    struct.pack_into("!H", ip, 2, header + len(part))
    ip[10:12] = b"\0\0"
    struct.pack_into("!H", ip, 10, 0xFFFF ^ _ones_sum(ip[:tcp]))
    sequence = struct.unpack_from("!I", ip, tcp + 4)[0]
    struct.pack_into("!I", ip, tcp + 4, (sequence + first * size) & 0xFFFFFFFF)
    ip[tcp + 13] &= (0xFF if ends_it else 0xFF ^ _FIN_PSH) & (0xFF if first == 0 else 0xFF ^ _CWR)
    # The receiver's device completes the checksum. It expects the sum of the pseudo header in that field.
    pseudo = bytes(ip[12:20]) + struct.pack("!HH", ip[9], header - tcp + len(part))
    struct.pack_into("!H", ip, tcp + 16, _ones_sum(pseudo))
    bundle = (kind, size) if len(part) > size else (0, 0)
    virtual = _VNET.pack(flags, bundle[0], header_length, bundle[1], checksum_start, checksum_offset)
    return virtual + bytes(ip) + part


def _ones_sum(data: bytes | bytearray) -> int:
    """The ones' complement sum of 16-bit words (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _forward(tuns: Sequence[int], pairs: Mapping[tuple[int, int], _Pair]) -> None:
    """Carry packets between regions until standard input ends; answer each input line with the counters."""
    control = sys.stdin.fileno()
    regions = {tun: region for region, tun in enumerate(tuns)}
    watched = [*tuns, control]
    on_their_way: list[tuple[float, int, int, bytes]] = []
    order = 0
    while True:
        while on_their_way and on_their_way[0][0] <= time.monotonic():
            _, _, tun, packet = heapq.heappop(on_their_way)
            with contextlib.suppress(OSError):  # the region's device is gone or full: the packet is lost
                os.write(tun, packet)
        pause = max(on_their_way[0][0] - time.monotonic(), 0) if on_their_way else None
        for ready in select.select(watched, [], [], pause)[0]:
            if ready == control:
                if not os.read(control, 4096):
                    return
                found = [[*ends, asdict(pair.counters)] for ends, pair in pairs.items()]
                _tell({"pairs": found, "cpu_s": time.process_time()})
                continue
            for _ in range(64):  # then deliver what is due
                try:
                    packet = os.read(ready, _LARGEST)
                except BlockingIOError:
                    break
                if packet[_VNET.size] >> 4 != 4:  # IPv6 neighbor discovery
                    continue
                to = packet[_VNET.size + 19] - 1
                pair = pairs.get((regions[ready], to))
                if pair is not None:
                    arrives, parts = pair.take(packet, time.monotonic())
                    for part in parts:
                        order += 1
                        heapq.heappush(on_their_way, (arrives, order, tuns[to], part))


def _kill_inhabitants(namespaces: Sequence[int]) -> None:
    """Kill every process in the namespaces; repeat for processes that they start meanwhile."""
    numbers = {os.fstat(namespace).st_ino for namespace in namespaces}
    found = True
    while found:
        found = False
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                if os.stat(f"/proc/{entry}/ns/net").st_ino in numbers:
                    os.kill(int(entry), signal.SIGKILL)
                    found = True
        time.sleep(0.01 * found)


def _tell(answer: dict[str, Any]) -> None:
    # If the parent has gone, the end of standard input tells the hub.
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _hub(spec: dict[str, Any]) -> None:
    """Make the regions, report their namespaces, carry their packets, clean up."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        made = [
            _enter_new_region(region, spec["congestion"], spec["rates"][region])
            for region in range(spec["regions"])
        ]
        _system("setns", home, _CLONE_NEWNET)
    except OSError as error:
        _tell({"error": str(error)})
        return
    namespaces, tuns = zip(*made, strict=True)
    shape = (spec["queue_s"], spec["loss"])
    regions, rates = range(spec["regions"]), spec["rates"]
    pairs = {
        (i, j): _Pair(spec["delay_s"], rates[i], *shape, seed=(i, j))
        for i in regions
        for j in regions
        if i != j
    }
    with contextlib.suppress(PermissionError):  # the root user of a user namespace may not
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # a packet that the hub forwards late makes the link longer
    _tell({"namespaces": namespaces})
    try:
        _forward(tuns, pairs)
    finally:
        _kill_inhabitants(namespaces)


if __name__ == "__main__":
    _hub(json.loads(sys.argv[1]))
