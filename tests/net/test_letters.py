"""What processes tell each other over the coordinator before they are connected."""

from __future__ import annotations

from typing import Any

import pytest

from hf_cocodc.net import letters as letters_module
from hf_cocodc.net.letters import Letters, from_plain
from hf_cocodc.net.members import Member, Whereabouts

TOKEN = bytes(range(32))
WHERE = Whereabouts((("10.0.0.1", 4000), ("::1", 1)), TOKEN, TOKEN)
PLAIN = WHERE.to_plain()


def test_what_is_told_comes_as_it_was() -> None:
    assert from_plain(PLAIN) == WHERE


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"token": None},
            {"token": "no hex"},
            {"token": "ab"},
            {"share": None},
            {"share": "ab"},
            {"at": None},
            {"at": []},
            {"at": [["h"]]},
        ),
        *(
            {"at": [["h", 0]]},
            {"at": [["h", 65536]]},
            {"at": [["h", "1"]]},
            {"at": [[1, 1]]},
            {"at": [["", 1]]},
        ),
        *({"at": [["h" * 256, 1]]}, {"at": [["h", 1]] * 17}, {"at": "h:1"}),
    ],
    ids=str,
)
def test_what_says_nowhere_is_no_letter(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        from_plain({**PLAIN, **change})
    letters = Letters()
    letters.put(Member(1, 2), {"key": "k", **PLAIN, **change})
    with pytest.raises(TimeoutError):
        letters.take(Member(1, 2), "k", 0.0)


@pytest.mark.parametrize("content", [{}, PLAIN, {"key": 3, **PLAIN}, {"key": "k"}], ids=str)
def test_what_has_no_key_is_ignored(content: dict[str, Any]) -> None:
    letters = Letters()
    letters.put(Member(1, 2), content)
    with pytest.raises(TimeoutError):
        letters.take(Member(1, 2), "k", 0.0)


def test_letters_take_no_more_memory_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest stay; each is taken once, from its sender alone."""
    monkeypatch.setattr(letters_module, "_MOST_LETTERS", 2)
    letters, sender = Letters(), Member(1, 2)
    for number in range(3):
        letters.put(sender, {"key": str(number), **PLAIN})
    assert letters.take(sender, "2", 0.0) == WHERE
    for who, key in ((sender, "0"), (sender, "2"), (Member(1, 3), "1")):
        with pytest.raises(TimeoutError):
            letters.take(who, key, 0.0)
    assert letters.take(sender, "1", 0.0) == WHERE
