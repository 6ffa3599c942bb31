"""A store with tags: whoever has the secret uses it like any other, and nobody else changes what anyone believes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hf_cocodc.errors import MeetingError
from hf_cocodc.meeting.board import TICKETS, newest_ticket, take_ticket
from hf_cocodc.meeting.sealed import SEAL, SealedStore, check, mark, mark_again, sealed, within
from hf_cocodc.meeting.secret import Keys
from hf_cocodc.meeting.store import SteadyStore, connect_store, peek, serve_store

KEYS, OTHER = Keys.from_secret("the secret of a run"), Keys.from_secret("the secret of another")


@pytest.fixture
def server() -> Iterator[dist.TCPStore]:
    """A store as everyone on the network sees it."""
    found = serve_store()
    yield found
    del found


def own(server: dist.TCPStore, timeout_s: float = 5.0) -> dist.Store:
    return connect_store(f"127.0.0.1:{server.port}", timeout_s, KEYS)


@pytest.mark.parametrize("prefix", ["", "run/place"])
@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "open"])
def test_a_sealed_store_does_what_a_store_does(server: dist.TCPStore, is_sealed: bool, prefix: str) -> None:
    """The same calls give the same answers, with and without tags; also under a prefix."""
    store = connect_store(f"127.0.0.1:{server.port}", 5.0, KEYS if is_sealed else None)
    store = within(prefix, store) if prefix else store
    assert (peek(store, "a"), store.check(["a"]), store.delete_key("a")) == (b"", False, False)
    store.set("a", "1")
    assert (peek(store, "a"), store.get("a"), store.check(["a"])) == (b"1", b"1", True)
    assert store.check(["a", "b"]) is False
    assert store.compare_set("a", "2", "3") == b"1"
    assert store.compare_set("a", "1", "") == b""
    assert store.compare_set("a", "", "4") == b"4"
    assert store.compare_set("a", "", "5") == b"4"
    assert store.compare_set("b", "not there", "6") == b"not there"
    assert store.check(["b"]) is False
    assert store.compare_set("c", "", "7") == b"7" == store.get("c")
    assert [store.add("n", amount) for amount in (2, 5, 0, -1)] == [2, 7, 7, 6]
    store.set("bytes", b"\xff\0")  # type: ignore[arg-type]
    assert store.get("bytes") == b"\xff\0"
    store.wait(["a", "c"], timedelta(seconds=1))
    with pytest.raises(dist.DistStoreError, match="wait timeout after .*, keys: .*d"):
        store.wait(["d"], timedelta(seconds=0.05))
    assert store.delete_key("a") is True
    assert store.check(["a"]) is False


def test_a_value_is_waited_for(server: dist.TCPStore) -> None:
    """As long as the store's time-out."""
    threading.Timer(0.2, lambda: own(server).set("late", "here")).start()
    assert own(server).get("late") == b"here"
    with pytest.raises(RuntimeError, match="wait timeout after 0.1 s"):
        own(server, 0.1).get("never")


def test_two_processes_never_count_the_same(server: dist.TCPStore) -> None:
    """Also at the same moment."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: [take_ticket(store) for store in [own(server)] * 25], range(4)))
    assert sorted(sum(found, [])) == list(range(1, 101))
    assert newest_ticket(own(server)) == 100
    assert newest_ticket(SteadyStore(f"127.0.0.1:{server.port}", keys=KEYS)) == 100


def test_many_processes_count_at_the_same_moment() -> None:
    """As the ranks of a large region do: whenever this one has looked, another one has counted. It counts in the end."""
    others = 300

    class Contested(dist.Store):
        """Another process counts before this one does."""

        def __init__(self) -> None:
            super().__init__()
            self.store = dist.HashStore()
            self.num_counted = 0

        def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:  # type: ignore[override]
            if b"\0" not in desired and self.num_counted < others:
                self.num_counted += 1
                sealed(self.store, KEYS).add("heard", 1)
            return self.store.compare_set(key, expected, desired)  # type: ignore[arg-type]

    assert sealed(Contested(), KEYS).add("heard", 1) == others + 1


def put(server: dist.TCPStore, name: str, value: bytes) -> None:
    """Write, and wait until it is there: `set` has no answer, and another connection may ask before it arrives."""
    server.set(name, value)  # type: ignore[arg-type]  # a store takes bytes, too
    assert server.get(name) == value


def test_a_stranger_reads_no_names_and_writes_nothing_that_counts(server: dist.TCPStore) -> None:
    """What it overwrites counts as absent, and is written again; what another key or another secret has tagged does, too."""
    store = own(server)
    store.set("place", "1")
    store.set("other", "2")
    assert store.add(TICKETS, 3) == 3
    names = server.list_keys()
    assert not [name for name in names if any(word in name for word in ("place", "other", "tickets"))]
    values = {name: server.compare_set(name, "\0", "\0") for name in names}
    forged = [b"", b"1", b"\xff\0", b"0" * 32, b"0" * 32 + b"1", *values.values()]
    [place] = [name for name, value in values.items() if value.endswith(b"1") and len(value) == 33]
    for value in forged:
        if value == values[place]:
            continue
        put(server, place, value)
        assert (peek(store, "place"), store.check(["place"])) == (b"", False)
        assert store.compare_set("place", "1", "3") == b"1", "as if there were none"
        assert store.compare_set("place", "", "1") == b"1", "a value that is not ours is replaced"
        assert store.get("place") == b"1"
    connect_store(f"127.0.0.1:{server.port}", 5.0, OTHER).set("place", "9")
    assert store.get("place") == b"1"
    for name in server.list_keys():
        put(server, name, b"abc")
    assert take_ticket(store) == 1, "like a store that came back empty"


def test_what_a_stranger_can_still_do(server: dist.TCPStore) -> None:
    """Delete, and put back what the same key has held: README says so."""
    store = own(server)
    store.set("place", "old")
    assert store.get("place") == b"old"
    [name] = [each for each in server.list_keys() if each.startswith("s/")]
    old = server.get(name)
    store.set("place", "new")
    assert store.get("place") == b"new", "it has arrived, so the stranger's is the later one"
    put(server, name, old)
    assert store.get("place") == b"old"
    server.delete_key(name)
    assert peek(store, "place") == b""


@pytest.mark.parametrize(
    ("begun", "comes", "said"),
    [
        (None, None, None),
        (KEYS, KEYS, None),
        (None, KEYS, "begun without a secret, and this process has one.*Start a new store"),
        (
            KEYS,
            None,
            r"with a secret, and this process has none.*secret_file \(where .* no recipe: --secret-file\) or HF_COCODC_SECRET",
        ),
        (KEYS, OTHER, "begun with another secret"),
    ],
)
def test_who_comes_with_another_secret_hears_so(
    begun: Keys | None, comes: Keys | None, said: str | None
) -> None:
    """At once, and in words."""
    store = dist.HashStore()
    check(sealed(store, begun))
    if said is None:
        check(sealed(store, comes))
        return
    with pytest.raises(MeetingError, match=said) as caught:
        check(sealed(store, comes))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_without_a_secret_only_the_mark_is_new(server: dist.TCPStore) -> None:
    """Keys and values stay as they were."""
    store = connect_store(f"127.0.0.1:{server.port}", 5.0)
    before = set(server.list_keys())
    check(store)
    store.set("key", "value")
    within("run", store).set("key", "other")
    assert set(server.list_keys()) - before == {SEAL, "key", "run/key"}
    assert (server.get(SEAL), server.get("key"), server.get("run/key")) == (b"open", b"value", b"other")
    assert not isinstance(store, SealedStore)
    assert mark(store) == "open"


@pytest.mark.parametrize("keys", [KEYS, None], ids=["sealed", "open"])
def test_a_mark_that_nobody_of_ours_has_written_is_replaced(keys: Keys | None) -> None:
    """Or one word of a stranger would keep newcomers out for ever. A member of a sealed run puts back any other mark, too."""
    store = dist.HashStore()
    store.set(SEAL, b"\xff")  # type: ignore[arg-type]
    check(sealed(store, keys))
    right = store.get(SEAL)
    for forged in (b"gone", b"open", b"sealed:00"):
        store.set(SEAL, forged)  # type: ignore[arg-type]
        mark_again(sealed(store, keys))
        assert store.get(SEAL) == (right if keys else forged)
