"""What lies at a store is ours, or an error in words."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cocodc.errors import LinkError, MeetingError
from hf_cocodc.meeting import live
from hf_cocodc.meeting.addresses import is_loopback
from hf_cocodc.meeting.board import Entry, _read_entry
from hf_cocodc.meeting.heard import host_and_port
from hf_cocodc.meeting.promises import decision_in, promise_in, reason_in
from hf_cocodc.meeting.region_store import _said_in
from hf_cocodc.meeting.rendezvous import _roster_in
from hf_cocodc.meeting.values import Reader, number_of, read_json, text_of
from hf_cocodc.meeting.verdict import decision_from, report_from

DEEP = b"[" * 100_000
PARSERS = {
    "text": text_of,
    "number": number_of,
    "json": read_json,
    "record": live._parsed,
    "names": live._names_in,
    "roster": lambda found, key: _roster_in(found),
    "entry": lambda found, key: _read_entry(found),
    "reason": reason_in,
    "promise": promise_in,
    "decision to stop": decision_in,
    "said": _said_in,
    "report": lambda found, key: report_from(read_json(found, key)),
    "decision": lambda found, key: decision_from(read_json(found, key)),
}
WORDS = (
    *("run", "tickets", "hellos", "step", "reason", "reasons", "members", "member", "lost", "number", "done"),
    *("first", "last", "has", "sure", "failure", "kind", "news", "region", "count", "host", "signs", "left"),
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=6),
    max_leaves=12,
)


@pytest.mark.parametrize("kind", PARSERS)
@given(found=st.binary(max_size=60) | PLAIN.map(lambda plain: json.dumps(plain).encode()))
def test_any_value_is_parsed_or_refused_in_words(kind: str, found: bytes) -> None:
    """Never another exception."""
    with contextlib.suppress(LinkError):
        PARSERS[kind](found, "key")


@pytest.mark.parametrize(
    "found", [DEEP, b'{"a":' * 100 + b"1" + b"}" * 100, b'"\\ud800"', b"1" * 5000, b"\xff"]
)
@pytest.mark.parametrize(
    "kind", [kind for kind in PARSERS if kind not in ("text", "number", "names", "reason")]
)
def test_what_would_break_a_reader_is_refused(kind: str, found: bytes) -> None:
    """Nested too deep, half a character, a number without end, no text."""
    with pytest.raises(LinkError, match="of this version"):
        PARSERS[kind](found, "key")


def test_what_regions_write_is_read_again() -> None:
    """Also characters that JSON writes in two halves, and what a hello holds."""
    hello = {
        "model": {"a": [1, {"b": [None, 1.5]}]},
        "facts": {"data": "\U0001f600"},
        "trainable": ["w"] * 1000,
    }
    assert read_json(json.dumps(hello).encode(), "key") == hello
    assert (number_of(b"", "key"), number_of(b"12", "key"), number_of(b"12 abc", "key")) == (0, 12, 12)
    entry = {"run": "a", "region": 0, "count": 2, "host": "h", "signs": 3, "left": False, "because_of": 0}
    assert _read_entry(json.dumps(entry).encode()) == Entry(**entry)  # type: ignore[arg-type]
    for odd in ({"region": -1}, {"region": True}, {"host": "h" * 2000}, {"signs": 1 << 60}):
        with pytest.raises(MeetingError):
            _read_entry(json.dumps({**entry, **odd}).encode())


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("10.0.0.1:5", ("10.0.0.1", 5)),
        ("[::1]:65535", ("::1", 65535)),
        *((wrong, None) for wrong in ("", ":5", "h:5", "h" * 300 + ":5", "10.0.0.1", ["10.0.0.1:5"], None)),
        *(
            (f"10.0.0.1:{port}", None)
            for port in ("", "0", "65536", "-1", "+5", " 5", "1_0", "\u0663", "5" * 300)
        ),
    ],
)
def test_an_address_is_one_or_an_error(address: Any, found: Any) -> None:
    """Of a machine that nobody has to look up, with a port that exists."""
    if found is None:
        with pytest.raises(ValueError, match="is no address"):
            host_and_port(address)
    else:
        assert host_and_port(address) == found


def test_which_hosts_are_the_loopback() -> None:
    """Only what no other machine reaches; what cannot be known is not."""
    assert all(map(is_loopback, ("127.0.0.1", "127.0.0.2", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "", "no.such.host.invalid", "h" * 300)))


def test_what_is_not_ours_is_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """And counts as absent."""
    reader = Reader()
    with caplog.at_level(logging.WARNING):
        assert [reader.read(number_of, each, "key") for each in (b"x", b"", b"y", b"3")] == [
            None,
            None,
            None,
            3,
        ]
    assert len(caplog.records) == 1
