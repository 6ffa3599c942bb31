"""Messages that nobody else can write, and with encryption nobody else can read."""

from __future__ import annotations

import pytest

from hf_cocodc.net.keys import Altered, Cipher, Keys, Share, ciphers

KEYS = Keys(bytes(range(32)))


@pytest.mark.parametrize("message", [b"", b"x", bytes(100_000)])
def test_a_message_comes_as_it_was_sent(message: bytes) -> None:
    sends, receives = Cipher(KEYS), Cipher(KEYS)
    for _ in range(2):
        sealed = sends.seal(message)
        assert len(sealed) == len(message) + sends.overhead
        assert receives.open(bytearray(sealed)) == message


def test_nothing_else_is_believed() -> None:
    """A flipped bit anywhere, another place, another key, too few bytes."""
    sealed = Cipher(KEYS).seal(b"weights")
    wrong = [b"", sealed[:-1], sealed + b"\0", sealed[:10]]
    for position in range(len(sealed)):
        flipped = bytearray(sealed)
        flipped[position] ^= 4
        wrong.append(bytes(flipped))
    for each in wrong:
        with pytest.raises(Altered):
            Cipher(KEYS).open(each)
    with pytest.raises(Altered):
        Cipher(KEYS.of("other")).open(sealed)
    later = Cipher(KEYS)
    assert later.open(sealed) == b"weights"
    with pytest.raises(Altered):
        later.open(sealed)


def test_the_two_ends_have_each_others_ciphers() -> None:
    """One for each way: what is sent back does not open."""
    (seals, opens), (answers, hears) = ciphers(KEYS, True), ciphers(KEYS, False)
    sealed = seals.seal(b"weights")
    assert b"weights" not in sealed and hears.open(sealed) == b"weights"
    assert opens.open(answers.seal(b"mean")) == b"mean"
    with pytest.raises(Altered):
        opens.open(sealed)


def test_two_shares_make_keys_that_nobody_else_makes() -> None:
    """Without the private halves, the secret does not help; nor do they without the secret."""
    one, other, third = Share(), Share(), Share()
    keys = one.keys_with(other.public, KEYS, "run", 1)
    assert keys.raw == other.keys_with(one.public, KEYS, "run", 1).raw
    others = (
        one.keys_with(other.public, KEYS, "run", 2),
        one.keys_with(other.public, KEYS.of("another"), "run", 1),
        one.keys_with(other.public, None, "run", 1),
        one.keys_with(third.public, KEYS, "run", 1),
        third.keys_with(other.public, KEYS, "run", 1),
    )
    assert keys.raw not in [each.raw for each in others]
    with pytest.raises(ValueError):
        one.keys_with(bytes(32), KEYS)
