"""Whatever arrives is what a region can have sent, or is refused in words: never another exception."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_cocodc.coordinator.entrance import Entrance, key_id
from hf_cocodc.coordinator.messages import PROTOCOL
from hf_cocodc.errors import CheckpointError, InputError, LinkError
from hf_cocodc.link.log import Entry, Marker, from_plain, to_plain
from hf_cocodc.link.records import ROW, Trailer, from_row, to_row
from hf_cocodc.net.channel import object_of
from hf_cocodc.net.connection import Connection, Operation
from hf_cocodc.net.keys import Altered, Cipher, Keys
from hf_cocodc.net.members import Member
from hf_cocodc.net.pairs import STREAMS
from hf_cocodc.settings.regions import address_parts
from hf_cocodc.snapshot.checkpoint import Facts, put_together
from hf_cocodc.snapshot.donor import Frames, offered
from hf_cocodc.snapshot.files import check_files
from tests.net.ends import ends_on
from tests.secret import secret

ADDRESS = "127.0.0.1:29400"
MOST_BYTES = 4 << 20
NAMES = (
    *(
        "kind",
        "step",
        "done",
        "awaits",
        "text",
        "doing",
        "host",
        "port",
        "token",
        "from",
        "to",
        "hello",
        "address",
    ),
    *("op", "members", "rows", "values", "state", "seconds", "square", "what", "residual", "codec"),
    *("$tensor", "x", "cocodc/state.json", "../x.json", "number", "losses", "submitted", "held"),
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from((*NAMES, "alive", "note", "left", "mean", "nan", "float32", "int8"))
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=15,
)
TENSORS = st.builds(
    torch.zeros,
    st.lists(st.integers(0, 16), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int8, torch.uint8]),
)
WITH_TENSORS = st.recursive(
    LEAVES | TENSORS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=15,
)
ENTRY = to_plain(
    Entry(4, "mean", "a mean", (0, 2), torch.zeros(2, ROW).double(), torch.zeros(6), {"residual": [6]})
)["entry"]
MARKER = to_plain(Marker(5, 3, 1, 0, (Member(0, 4), Member(2, 9)), (9,)))["marker"]
KEYS = Keys.from_secret(secret("a secret of nobody"))
FACTS = asdict(Facts(step=4, region=0, members=(0, 1), num_lanes=1, settings={}, finished=False))


@contextlib.contextmanager
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        with one, other:
            yield one, other


@given(st.binary(max_size=300) | PLAIN.map(lambda said: json.dumps(said).encode() + b"\n"))
@example(b"[" * 100_000 + b"\n")
@example(b"9" * 5000 + b"\n")
@example(b'{"kind": "note", "text": "\\ud800"}\n')
def test_lines_of_a_channel(said: bytes) -> None:
    """A dict that can be shown, or nothing."""
    for line in said.split(b"\n"):
        message = object_of(line)
        assert message is None or json.dumps(message, ensure_ascii=False).encode()


@given(
    st.dictionaries(
        st.sampled_from(["hf_cocodc", "version", "key", "public", "nonce", "proof", "refused", "kind"]), PLAIN
    ),
    st.sampled_from([None, KEYS]),
)
@example({"hf_cocodc": PROTOCOL}, KEYS)
@example({"hf_cocodc": PROTOCOL, "key": key_id(KEYS)}, KEYS)
@example({"hf_cocodc": "\x1b[2J", "version": "9" * 5000}, None)
def test_first_lines_at_a_coordinator(said: dict[str, Any], keys: Keys | None) -> None:
    """A reason in words that can be shown, or nothing from who proves nothing yet: with a secret he says a nonce at least."""
    entrance: Any = SimpleNamespace(_secrets={} if keys is None else {key_id(keys): keys})
    why = Entrance._reason_to_refuse(entrance, said)
    if why is None:
        assert said["hf_cocodc"] == PROTOCOL and (said.get("key") or "") == key_id(keys)
    else:
        assert 0 < len(why) < 1000 and why.isprintable()
        json.dumps(why, ensure_ascii=False).encode()


@given(st.dictionaries(st.sampled_from(("number", "step")), PLAIN), LEAVES)
def test_offers_and_addresses(said: dict[str, Any], address: Any) -> None:
    with contextlib.suppress(ValueError, KeyError):
        offer = offered(said)
        assert STREAMS[0] <= offer.number <= STREAMS[1]
    with contextlib.suppress(InputError, ValueError):
        host, port = address_parts(str(address))
        assert host and (port is None or 0 < port < 65536)


@given(said=st.binary(max_size=100), place=st.integers(0, 59), bit=st.integers(0, 7))
def test_sealed_messages(said: bytes, place: int, bit: int) -> None:
    """What nobody sealed is none, nor is one of which a bit has changed."""
    altered = bytearray(Cipher(KEYS).seal(b"x" * 44))
    altered[place] ^= 1 << bit
    for each in (said, altered):
        with pytest.raises(Altered):
            Cipher(KEYS).open(each)


@given(
    st.lists(st.binary(min_size=1, max_size=300), max_size=3)
    | st.tuples(PLAIN, st.dictionaries(st.text(max_size=3), PLAIN, max_size=3), st.binary(max_size=99)).map(
        lambda said: [
            json.dumps({"kind": "item", "tree": said[0], "tensors": said[1]}).encode(),
            said[2] or b"x",
        ]
    )
)
@example([b'{"kind": "item", "tree": {}, "tensors": {"x": ["float32", [1152921504606846976]]}}'])
def test_frames(said: list[bytes]) -> None:
    """A value, or LinkError."""
    with stream_that_says(said) as stream:
        frames = Frames(stream)
        with contextlib.suppress(LinkError):
            frames.receive_tree(frames.receive(), 1 << 20)


def test_an_announcement_takes_no_memory() -> None:
    """Only bytes that have come do, and no more than may come."""
    shapes = {f"x{i}": ["float32", [1 << 24]] for i in range(16)}
    with stream_that_says([b"x" * 1000]) as stream:
        tracemalloc.start()
        try:
            with pytest.raises(LinkError, match="has closed the connection"):
                Frames(stream).receive_tree({"kind": "item", "tree": {}, "tensors": shapes}, 1 << 40)
            assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
        finally:
            tracemalloc.stop()


@contextlib.contextmanager
def stream_that_says(messages: list[bytes]) -> Iterator[Connection]:
    """The end of one on which these messages come, and then a goodbye."""
    with ends() as (one, other):
        there, here = ends_on((one, other))
        for message in messages:
            there.send(Operation(0, 0, torch.frombuffer(bytearray(message), dtype=torch.uint8), is_own=True))
        closing = threading.Thread(target=lambda: (there.drain(math.inf), there.close()))
        closing.start()
        yield here
        here.close()
        closing.join()


@given(
    WITH_TENSORS
    | st.dictionaries(st.sampled_from([*ENTRY]), WITH_TENSORS).map(lambda more: {"entry": {**ENTRY, **more}})
    | st.dictionaries(st.sampled_from([*MARKER]), WITH_TENSORS).map(
        lambda more: {"marker": {**MARKER, **more}}
    )
)
@example({"entry": {**ENTRY, "state": torch.zeros(())}})
def test_items_of_the_log(plain: Any) -> None:
    """An item that says the same, or LinkError."""
    with contextlib.suppress(LinkError):
        item = from_plain(plain)
        assert to_plain(item).keys() == plain.keys()
        assert all(each >= 0 for each in (item.members if isinstance(item, Entry) else item.lost))


@given(WITH_TENSORS)
def test_trees(value: Any) -> None:
    with contextlib.suppress(KeyError, ValueError):
        put_together(value, {"x": torch.zeros(1)})


@given(PLAIN)
def test_lists_of_files(said: Any) -> None:
    """Names that a checkpoint has, and sizes; no file lies outside the folder."""
    with contextlib.suppress(LinkError, CheckpointError):
        found = check_files(said, 0)
        assert all(size >= 0 and ".." not in name and name[0] != "/" for name, size in found.items())


@given(st.dictionaries(st.sampled_from([*FACTS]), PLAIN))
def test_facts_of_a_run(changed: dict[str, Any]) -> None:
    with contextlib.suppress(ValueError):
        facts = msgspec.convert({**FACTS, **changed}, Facts)
        assert facts.step >= 0 and all(region >= 0 for region in facts.members)


@given(st.lists(st.floats(), min_size=ROW, max_size=ROW))
def test_rows_of_records(numbers: list[float]) -> None:
    """A record of another kind is refused in words. What its numbers may be, the trailer says (tests/links)."""
    row = torch.tensor(numbers, dtype=torch.float64)
    with pytest.raises(LinkError):
        from_row(Trailer, row, 1)
    assert math.isnan(from_row(Trailer, to_row(Trailer()), 1).loss)
