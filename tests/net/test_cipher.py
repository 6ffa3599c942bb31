"""Messages that nobody else can write, and with encryption nobody else can read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from hf_cocodc.errors import LinkError
from hf_cocodc.net.keys import Altered, Cipher, Keys, ciphers

KEYS = Keys(bytes(range(32)))


@pytest.mark.parametrize("message", [b"", b"x", bytes(100_000)])
def test_a_message_comes_as_it_was_sent(message: bytes) -> None:
    sends, receives = Cipher(KEYS), Cipher(KEYS)
    sealed = sends.seal(message, b"piece 3")
    assert len(sealed) == len(message) + sends.overhead
    assert receives.open(sealed, b"piece 3") == message
    assert receives.open(bytearray(sealed), b"piece 3") == message, "the order is free"


def test_nothing_else_is_believed() -> None:
    """A flipped bit anywhere, another place, another key, too few bytes."""
    sends, receives = Cipher(KEYS), Cipher(KEYS)
    sealed = sends.seal(b"weights", b"piece 3")
    for position in range(len(sealed)):
        flipped = bytearray(sealed)
        flipped[position] ^= 4
        with pytest.raises(Altered):
            receives.open(flipped, b"piece 3")
    for short in (b"", sealed[:-1], sealed + b"\0", sealed[:20]):
        with pytest.raises(Altered):
            receives.open(short, b"piece 3")
    for wrong, about in ((receives, b"piece 4"), (Cipher(KEYS.of("other")), b"piece 3")):
        with pytest.raises(Altered):
            wrong.open(sealed, about)


def test_no_two_messages_have_the_same_number() -> None:
    """AES-GCM with the same nonce twice would show both messages, and the key of its tags."""
    sends = Cipher(KEYS)
    with ThreadPoolExecutor(8) as pool:
        sealed = list(pool.map(lambda _: sends.seal(b"same"), range(2000)))
    assert len({message[:8] for message in sealed}) == len(set(sealed)) == 2000
    sends._num_sealed = 1 << 63
    with pytest.raises(LinkError, match="connect again"):
        sends.seal(b"one too many")


def test_the_two_ends_have_each_others_ciphers() -> None:
    """One for each way: what is sent back does not open."""
    (seals, opens), (answers, hears) = ciphers(KEYS, True), ciphers(KEYS, False)
    sealed = seals.seal(b"weights")
    assert b"weights" not in sealed and hears.open(sealed) == b"weights"
    assert opens.open(answers.seal(b"mean")) == b"mean"
    with pytest.raises(Altered):
        opens.open(sealed)
