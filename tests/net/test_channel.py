"""Channels: what waits for an end that reads late, or not at all."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from hf_cocodc.net import channel
from hf_cocodc.net.channel import Channel

MOST, LINE = 1 << 20, channel.line_of({"text": "x" * 65_000})


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    both = Channel(one), Channel(other)
    yield both
    for each in both:
        each.close()


def test_who_takes_nothing_is_given_up_once_too_much_waits_for_it(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel holds some of it; what waits here is bounded."""
    monkeypatch.setattr(channel, "_MOST_UNSENT", MOST)
    sender, _ = ends
    while not sender.ended:
        assert len(sender._unsent) <= MOST + len(LINE)
        sender.write(LINE)
    assert len(sender._unsent) > MOST


def test_who_reads_late_gets_everything(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_MOST_UNSENT", MOST)
    sender, reader = ends
    written = 0
    while len(sender._unsent) < MOST:
        sender.write(LINE)
        written += 1
    came = 0
    while came < written:
        reader.receive()
        sender.flush()
        while reader.num_lines:
            assert reader.take_line() + b"\n" == LINE
            came += 1
    assert not sender.ended and sender.unsent_since is None
