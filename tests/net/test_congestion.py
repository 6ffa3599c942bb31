"""Which congestion control of TCP the connections of a pair have."""

from __future__ import annotations

import contextlib
import socket

import pytest

from hf_cocodc import RegionConfig
from hf_cocodc.errors import InputError
from hf_cocodc.net import pacing
from hf_cocodc.net.connection import Connection
from hf_cocodc.net.pacing import congestion_of, part_lost, set_congestion
from hf_cocodc.net.pipe import Seen
from hf_cocodc.net.wire import Wire
from tests.link.memory import connect, wait_until
from tests.net.test_ways import mapped, speak

OTHER = "reno"
"""Every kernel has it, and none begins with it."""


def congestion(connection: Connection) -> str:
    assert connection._pipe is not None
    return (
        connection._pipe.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        .rstrip(b"\0")
        .decode()
    )


def test_what_the_setting_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel does not let this process use bbr, "auto" keeps what there is; a name must be one that it lets."""
    assert congestion_of("system") is None and congestion_of(OTHER) == OTHER
    with pytest.raises(
        InputError, match="regions.congestion='nothing' is none that this process may use .it may: .*reno"
    ):
        congestion_of("nothing")
    for has_bbr in (False, True):
        monkeypatch.setattr(pacing, "set_congestion", lambda probe, name, has_bbr=has_bbr: has_bbr)
        assert congestion_of("auto") == ("bbr" if has_bbr else None)
    for wrong in ("", "a name that is too long"):
        with pytest.raises(InputError, match="must be auto, system, or a name"):
            RegionConfig(congestion=wrong)


def test_a_wire_refuses_what_the_kernel_does_not_have() -> None:
    with pytest.raises(InputError, match="regions.congestion='nothing'"):
        Wire(0, congestion="nothing")


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
@pytest.mark.parametrize("wanted", ["auto", "system", OTHER])
def test_payloads_have_it_over_long_ways(
    wanted: str, delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the kernel lets a process use another one than bbr. The next socket of a broken connection has it, too."""
    monkeypatch.setattr(pacing, "set_congestion", lambda probe, name: set_congestion(probe, OTHER))
    chosen = OTHER if congestion_of(wanted) else None
    monkeypatch.setattr("hf_cocodc.net.wire.congestion_of", lambda name: chosen)
    with socket.socket() as fresh:
        usual = fresh.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    told: list[tuple[str, int]] = []
    both = [
        Wire(0, 2, timeout_s=20.0, announce=lambda port: [("127.0.0.1", 9)], congestion=wanted),
        Wire(1, 2, timeout_s=20.0, announce=lambda port: told, congestion=wanted),
    ]
    with mapped(both[1], delay_s) as address:
        both[1].addresses = (address,)
        connect(*both)
        expected = OTHER if wanted == OTHER or (wanted == "auto" and delay_s) else usual
        pair = both[0]._pairs[1]
        assert [congestion(each) for each in pair.bulk] == [expected, expected]
        assert pair.control is not None and congestion(pair.control) == usual
        broken = pair.bulk[0]._pipe
        assert broken is not None
        with contextlib.suppress(OSError):
            broken.socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: pair.bulk[0]._pipe not in (None, broken))
        assert congestion(pair.bulk[0]) == expected
        speak(*both)
        for wire in both:
            wire.close()


def test_losses_that_a_rate_limit_would_spare() -> None:
    """They are told once enough packets are sent, over all pairs together, and more are lost than lines lose."""
    assert part_lost([Seen(packets=6_000, resent=900)]) is None, "too few packets"
    assert part_lost([Seen(packets=6_000, resent=900), Seen(packets=6_000, resent=300)]) == 0.1
    assert part_lost([Seen(packets=100_000, resent=1_000)]) is None, "a hundredth is lost on many lines"
