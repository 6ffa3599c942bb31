"""The emulated WAN: its packets, and what it needs."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.benchmarks.emulation import hub, privileges

SIZE = 1448
VNET = struct.Struct("=BBHHHH")


def bundle(payload: bytes, sequence: int = 0, flags: int = 0x98) -> bytes:
    """A TCP/IPv4 bundle as a TUN device gives it: from 198.18.0.1 to 198.18.0.2, flags CWR, PSH and ACK."""
    ends = bytes([198, 18, 0, 1, 198, 18, 0, 2])
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 40 + len(payload), 7, 0x4000, 64, 6, 0) + ends
    tcp = struct.pack("!HHIIBBHHH", 1, 2, sequence, 9, 0x50, flags, 512, 0, 0)
    gso = (1, SIZE) if len(payload) > SIZE else (0, 0)
    return VNET.pack(1, gso[0], 40, gso[1], 20, 16) + ip + tcp + payload


def one_way(**changes: float | None) -> hub._Pair:
    """A link with 10 ms one way, on which a full packet takes a millisecond."""
    shape = {"delay_s": 0.01, "rate": (SIZE + 40) * 8e3, "queue_s": 0.05, "loss": 0.0, **changes}
    return hub._Pair(**shape, seed=(0, 1))  # type: ignore[arg-type]


def test_a_packet_takes_its_time_at_the_rate_and_the_delay() -> None:
    """Packets queue one after another; every segment of a bundle has its own headers."""
    pair, alone = one_way(), bundle(bytes(SIZE))
    assert pair.take(alone, 1.0) == (pytest.approx(1.011), [alone])
    assert pair.take(alone, 1.0)[0] == pytest.approx(1.012)
    assert pair.take(alone, 2.0)[0] == pytest.approx(2.011)
    assert pair.take(bundle(bytes(3 * SIZE)), 3.0)[0] == pytest.approx(3.013)
    assert pair.counters == hub.Counters(packets=6, bytes=6 * (SIZE + 40))
    assert one_way(rate=None).take(alone, 1.0)[0] == pytest.approx(1.01)


def test_a_full_buffer_drops_the_end_of_a_bundle() -> None:
    """The segments that fit go on, as if they had come one by one."""
    pair = one_way(queue_s=0.0025)
    arrives, parts = pair.take(bundle(bytes(9 * SIZE)), 1.0)
    assert (pair.counters.packets, pair.counters.dropped) == (3, 6)
    assert arrives == pytest.approx(1.013)
    assert [len(part) for part in parts] == [10 + 40 + 3 * SIZE]
    assert pair.take(bundle(bytes(SIZE)), 1.0)[1] == []


def test_losses_come_as_often_as_asked_for_whatever_the_bundles() -> None:
    """Each segment is lost with the same probability, alone or in a bundle."""
    for segments in (1, 40):
        pair = one_way(loss=0.01, rate=None)
        for _ in range(40_000 // segments):
            pair.take(bundle(bytes(segments * SIZE)), 0.0)
        assert pair.counters.packets == 40_000
        assert pair.counters.lost == pytest.approx(400, rel=0.2)


def test_a_cut_bundle_is_what_the_sender_would_have_sent() -> None:
    """Each part has the lengths, sequence numbers, flags and checksums of a separate bundle."""
    payload = bytes(range(256)) * 20
    whole = bundle(payload, sequence=2**32 - 1000)
    first, second = hub._cut(whole, 40, SIZE, 0, 1), hub._cut(whole, 40, SIZE, 2, 4)
    for part, offset, flags in ((first, 0, 0x90), (second, 2 * SIZE, 0x18)):
        ip, tcp = part[10:30], part[30:50]
        body = payload[offset : offset + 2 * SIZE] if offset else payload[:SIZE]
        assert part[50:] == body
        assert struct.unpack_from("!H", ip, 2) == (40 + len(body),)
        assert hub._ones_sum(ip) == 0xFFFF  # the sum of a correct IPv4 header
        assert struct.unpack_from("!I", tcp, 4) == ((2**32 - 1000 + offset) % 2**32,)
        assert tcp[13] == flags
        pseudo = struct.pack("!8sHH", ip[12:20], 6, 20 + len(body))
        assert struct.unpack_from("!H", tcp, 16) == (hub._ones_sum(pseudo),)
    assert VNET.unpack_from(first)[1:4] == (0, 40, 0)  # one segment is not a bundle
    assert VNET.unpack_from(second)[1:4] == (1, 40, SIZE)


@pytest.mark.parametrize(
    ("file", "value", "said"),
    [
        ("kernel/unprivileged_userns_clone", "0", "Run `sudo sysctl kernel.unprivileged_userns_clone=1`, or"),
        ("user/max_user_namespaces", "0", "Run `sudo sysctl user.max_user_namespaces=10000`, or"),
        ("user/max_net_namespaces", "0", "Run `sudo sysctl user.max_net_namespaces=10000`, or"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "Run `sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`, or",
        ),
        (
            "user/max_user_namespaces",
            "9",
            "the kernel refuses it: unshare: not today. Start a container with",
        ),
    ],
)
def test_a_wan_without_privileges_names_the_way_out(
    file: str,
    value: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without root or a user namespace, the message names the kernel setting that forbids it and the command to run."""
    for tool in ("ip", "nsenter", "unshare"):
        (tmp_path / tool).write_text("#!/bin/sh\necho 'unshare: not today' >&2\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(f"{value}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(privileges, "_KERNEL", tmp_path)
    monkeypatch.setattr(privileges, "may_administer", lambda: False)
    error = str(privileges.obstacle())
    assert said in error
    assert "run the command as root (`sudo env" in error


def test_a_wan_names_the_device_and_the_command_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names what is missing, with the way out."""
    monkeypatch.setattr(privileges, "may_administer", lambda: True)
    monkeypatch.setattr(privileges, "TUN", "/dev/net/no-tun")
    assert "modprobe tun" in str(privileges.obstacle())
    monkeypatch.setattr(privileges, "TUN", str(tmp_path))
    assert f"sudo chmod 0666 {tmp_path}" in str(privileges.obstacle())
    monkeypatch.setattr(privileges, "TUN", "/dev/null")
    assert privileges.obstacle() is None
    monkeypatch.setenv("PATH", "")
    assert "Install iproute2" in str(privileges.obstacle())
