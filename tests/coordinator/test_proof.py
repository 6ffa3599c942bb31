"""Two members that prove to each other that they have the secret."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hf_cocodc.coordinator.cipher import AesGcm, Altered, Tagged
from hf_cocodc.coordinator.proof import Proof, Refused
from hf_cocodc.coordinator.secret import Keys
from hf_cocodc.errors import InputError

KEYS, OTHERS = Keys.from_secret("a long secret of ours"), Keys.from_secret("a long secret of others")
ABOUT = {"run": "r-1", "from": [1, 9], "to": [0, 3]}


def sent(message: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(message))


def talk(caller: Proof, callee: Proof) -> list[dict[str, Any]]:
    said = []
    for speaks, hears in ((caller, callee), (callee, caller), (caller, callee)):
        said.append(sent(speaks.say({"kind": "hello", "shares": {1: 0.5}})))
        hears.hear(said[-1])
    return said


@pytest.mark.parametrize("encrypt", [False, True])
def test_both_have_the_secret(encrypt: bool) -> None:
    """Both end with the same ciphers, which no other conversation has; the secret does not travel."""
    caller, callee, again = (Proof(KEYS, ABOUT, encrypt) for _ in range(3))
    said = talk(caller, callee)
    assert KEYS.raw.hex() not in str(said)
    (sends, receives), (answers, hears) = caller.ciphers(), callee.ciphers()
    assert isinstance(sends, AesGcm if encrypt else Tagged)
    assert hears.open(sends.seal(b"to you")) == b"to you"
    sealed = answers.seal(b"to me")
    assert receives.open(sealed) == b"to me"
    with pytest.raises(Altered):
        hears.open(answers.seal(b"sent back"))
    talk(again, Proof(KEYS, ABOUT, encrypt))
    with pytest.raises(Altered):
        again.ciphers()[1].open(sealed)


def test_without_a_secret_nothing_changes() -> None:
    caller, callee = Proof(None, ABOUT), Proof(None, ABOUT)
    assert talk(caller, callee) == [{"kind": "hello", "shares": {"1": 0.5}}] * 3
    assert caller.ciphers() is callee.ciphers() is None


@pytest.mark.parametrize(
    ("caller", "callee", "reason"),
    [
        (OTHERS, KEYS, "region 1 has another secret than region 0"),
        (None, KEYS, "region 1 has no secret, and region 0 has one"),
        (KEYS, None, "region 1 has a secret, and region 0 has none"),
    ],
)
def test_a_wrong_secret_is_refused_at_the_first_message(
    caller: Keys | None, callee: Keys | None, reason: str
) -> None:
    with pytest.raises(Refused) as caught:
        Proof(callee, ABOUT).hear(sent(Proof(caller, ABOUT).say({})))
    assert caught.value.naming("region 1", "region 0").startswith(f"{reason}: give every region the same")
    assert "the other end" in str(caught.value) and "this end" in str(caught.value)


def test_an_old_conversation_is_of_no_use() -> None:
    """Who replays both messages of a caller fails at the second, and who replays those of a callee at the first."""
    first, answer, last = talk(Proof(KEYS, ABOUT), Proof(KEYS, ABOUT))
    callee = Proof(KEYS, ABOUT)
    callee.hear(first)
    callee.say({})
    with pytest.raises(Refused, match="old message"):
        callee.hear(last)
    caller = Proof(KEYS, ABOUT)
    caller.say({})
    with pytest.raises(Refused, match="old message"):
        caller.hear(answer)


def test_a_conversation_is_bound_to_its_members_and_its_run() -> None:
    for changed in ({"run": "r-2"}, {"from": [2, 9]}, {"to": [0, 4]}):
        with pytest.raises(Refused):
            Proof(KEYS, {**ABOUT, **changed}).hear(sent(Proof(KEYS, ABOUT).say({})))


@pytest.mark.parametrize("field", ["kind", "nonce", "public", "new", "proof"])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("value", ["00", 7, None])
def test_no_word_of_it_can_be_altered(field: str, position: int, value: Any) -> None:
    caller, callee = Proof(KEYS, ABOUT, True), Proof(KEYS, ABOUT, True)
    turns = [(caller, callee), (callee, caller), (caller, callee)]
    for speaks, hears in turns[:position]:
        hears.hear(sent(speaks.say({"kind": "hello"})))
    speaks, hears = turns[position]
    with pytest.raises(Refused):
        hears.hear({**sent(speaks.say({"kind": "hello"})), field: value})


def test_only_one_encrypts() -> None:
    for one, other in ((True, False), (False, True)):
        with pytest.raises(Refused, match="only one has regions.encrypt"):
            Proof(KEYS, ABOUT, one).hear(sent(Proof(KEYS, ABOUT, other).say({})))


def test_nothing_is_sent_plain_that_should_be_encrypted() -> None:
    with pytest.raises(InputError, match="regions.encrypt needs a secret"):
        Proof(None, ABOUT, encrypt=True)


def test_a_message_that_is_nested_too_deep_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    with pytest.raises(Refused, match="what no member says"):
        Proof(KEYS, ABOUT).hear({"proof": "00", "hello": deep})
