"""What waits for an end that reads late, or not at all."""

from __future__ import annotations

import asyncio
import socket

import pytest

from hf_cocodc.net import channel
from hf_cocodc.net.channel import put

MOST, LINE = 1 << 20, channel.line_of({"text": "x" * 65_000})


def test_who_takes_nothing_is_given_up_and_who_reads_late_gets_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel holds some of it; what waits here is bounded."""
    monkeypatch.setattr(channel, "_MOST_UNSENT", MOST)

    async def work() -> None:
        one, other = socket.socketpair()
        kept, writer = await asyncio.open_connection(sock=one)
        transport, written = writer.transport, 0
        while put(transport, LINE):
            written += 1
            assert transport.get_write_buffer_size() <= MOST + len(LINE)
        assert transport.get_write_buffer_size() > MOST
        reader, other_writer = await asyncio.open_connection(sock=other)
        for _ in range(written):
            assert await reader.readuntil() == LINE
        assert not transport.get_write_buffer_size() and put(transport, LINE)
        for each in (transport, other_writer.transport):
            each.abort()
        assert not kept.at_eof()

    asyncio.run(work())
