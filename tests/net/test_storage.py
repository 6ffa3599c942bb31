"""Objects in a storage are whole or absent, and of several writers of one name one wins."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_cocodc.errors import InputError
from hf_cocodc.net import storage
from hf_cocodc.net.storage import Storage, StorageError

from .fake_hub import BUCKET, fake_hub
from .storages import Faulty, Server, buckets, directories, folder_url

WAIT_S = storage._FIRST_WAIT_S


@pytest.fixture(params=["file", "s3", "ssh", "hub", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "file":
        yield folder_url(tmp_path / "a folder")
    elif request.param in ("memory", "hub"):  # accept two writers of one name
        monkeypatch.setattr(storage, "_SETTLE_S", 0.8)
        with fake_hub() if request.param == "hub" else contextlib.nullcontext():
            yield f"hf://buckets/{BUCKET}/runs/7" if request.param == "hub" else f"memory://{tmp_path}"
    else:
        with buckets() if request.param == "s3" else directories(tmp_path) as url:
            yield url


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_FIRST_WAIT_S", 0.001)


def test_what_is_put_is_there_until_it_is_removed(url: str) -> None:
    objects = Storage(url)
    assert objects.get("a/b") is None and objects.names("a") == []
    objects.put("a/b", b"one")
    objects.put("a/b", b"two")
    objects.put("a/c", b"")
    assert objects.get("a/b") == b"two" and objects.get("a/c") == b""
    assert objects.names("a") == ["b", "c"]
    assert Storage(url).get("a/b") == b"two", "another process finds it"
    objects.remove("a/b")
    objects.remove("a/b")
    assert objects.get("a/b") is None and objects.names("a") == ["c"]
    assert objects.requests["write"] == 3 and objects.num_bytes["write"] == 6


def test_one_of_several_writers_creates_an_object(url: str) -> None:
    won: list[int] = []

    def create(place: int) -> None:
        if Storage(url).create("state/7", bytes([place])):
            won.append(place)

    threads = [threading.Thread(target=create, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    objects = Storage(url)
    if won or not url.startswith(("hf:", "memory:")):
        assert len(won) == 1 and objects.get("state/7") == bytes(won)
    assert not objects.create("state/7", b"later")


def test_a_writer_that_was_slow_has_not_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a storage lets two write: one that found the name free long ago overwrites the winner, and knows that it may have."""
    monkeypatch.setattr(storage, "_SETTLE_S", 0.5)
    slow, quick = (Storage(f"memory://{tmp_path}") for _ in range(2))
    read, has_looked, may_go_on = slow._backend.read, threading.Event(), threading.Event()

    def read_slowly(name: str) -> bytes:
        try:
            return read(name)
        finally:
            has_looked.set()
            may_go_on.wait(10)

    monkeypatch.setattr(slow._backend, "read", read_slowly)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(slow.create("state/7", b"slow")))
    thread.start()
    assert has_looked.wait(10)
    assert quick.create("state/7", b"quick")
    may_go_on.set()
    thread.join(10)
    assert found == [False]


def test_an_object_that_is_not_whole_is_absent(tmp_path: Path) -> None:
    objects = Storage(folder_url(tmp_path))
    objects.put("a", b"all of it")
    whole = (tmp_path / "a").read_bytes()
    for damaged in (b"", whole[:-1], whole[:10], whole[:-1] + b"!", b"something else"):
        (tmp_path / "a").write_bytes(damaged)
        assert objects.get("a") is None
    (tmp_path / "a").write_bytes(whole)
    assert objects.get("a") == b"all of it"


@pytest.mark.parametrize("seed", range(5))
def test_creation_has_one_winner_where_answers_are_lost(seed: int, tmp_path: Path) -> None:
    """A try whose answer was lost finds its own object, and has won."""
    for number in range(20):
        won = []
        for place in (0, 1):
            objects = Storage(folder_url(tmp_path))
            Faulty(objects, 100 * seed + 2 * number + place)
            try:
                won.append(objects.create(f"state/{number}", bytes([place])))
            except StorageError:
                won.append(False)
        assert sum(won) <= 1
        content = Storage(folder_url(tmp_path)).get(f"state/{number}")
        for place in (0, 1):
            assert not won[place] or content == bytes([place])


def test_a_bucket_that_fails_now_and_then_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that fail before or after they were carried out are made again; an object stays whole, and has one winner."""
    monkeypatch.setattr(Server, "slow_s", 0.01)
    drawn, draws = Counter[str](), Server._draws
    monkeypatch.setattr(
        Server, "_draws", lambda self, what: drawn.update([what] * (hit := draws(self, what))) or hit
    )
    with buckets(faults=0.1, seed=3) as url:
        one, other = Storage(url), Storage(url)
        for number in range(4):
            content = os.urandom(1000)
            one.put("a/b", content)
            assert other.get("a/b") == content
            won = [
                objects.create(f"state/{number}", bytes([place]))
                for place, objects in enumerate((other, one))
            ]
            assert won == [True, False] and one.get(f"state/{number}") == bytes([0])
            one.remove(f"state/{number}")
        assert set(one.names("a")) <= {"b"}
    assert {"refused", "lost", "torn"} <= set(drawn)


def test_a_request_to_a_bucket_that_fails_is_made_eight_times_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its libraries do not make it again by themselves: the log counts each one, and a storage that is gone is soon named."""
    asked: list[str] = []
    monkeypatch.setattr(Server, "_draws", lambda self, what: asked.append(what) or True)
    with buckets() as url:
        objects = Storage(url)
        for request in (lambda: objects.get("a"), lambda: objects.put("a", b""), lambda: objects.names("a")):
            asked.clear()
            with pytest.raises(StorageError):
                request()
            assert asked == ["refused"] * 8


def test_a_storage_that_is_away_for_eight_seconds_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_FIRST_WAIT_S", WAIT_S)
    objects, waited = Storage(folder_url(tmp_path)), list[float]()
    monkeypatch.setattr(storage, "time", SimpleNamespace(sleep=waited.append, monotonic=time.monotonic))
    write = objects._backend.write

    def away(name: str, content: bytes) -> None:
        if sum(waited) < 7.5:
            raise OSError("503 Slow Down")
        write(name, content)

    monkeypatch.setattr(objects._backend, "write", away)
    objects.put("a", b"one")
    assert objects.get("a") == b"one"


def test_a_storage_that_refuses_is_named_with_what_helps(tmp_path: Path) -> None:
    objects = Storage(folder_url(tmp_path))

    class Refusing:
        def read(self, name: str) -> bytes:
            raise PermissionError("Access Denied")

    objects._backend = Refusing()  # type: ignore[assignment]
    with pytest.raises(
        StorageError, match=r"file://.*cannot read 'a': Access Denied\. Give this machine the credentials"
    ):
        objects.get("a")


@pytest.mark.parametrize(
    ("url", "dollars"),
    [("s3://bucket/run", 0.0115), ("gs://bucket/run", 0.0115)]
    + [(url, None) for url in ("file:///run", "ssh://host/run", "hf://buckets/me/b/run")],
)
def test_requests_have_a_price_where_the_storage_has_a_list_of_them(url: str, dollars: float | None) -> None:
    cost = storage.price(url, {"write": 1000, "list": 500, "read": 10_000, "delete": 10**6})
    assert (None if cost is None else round(cost[0], 6)) == dollars
    assert cost is None or "list price of November 2026" in cost[1]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_mounted_bucket_is_refused(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no hard links, and so nothing of which one of two writers wins. Nothing is left of the try."""

    def link(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(
        StorageError, match=r"cannot write 'a': this folder knows no hard links\. A mounted bucket"
    ):
        Storage(folder_url(tmp_path)).create("a", b"")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file://host/run", "three slashes"),
        ("nothing://bucket/run", "nothing"),
    ],
)
def test_a_url_that_cannot_work_is_refused(url: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Storage(url).get("a")


def test_a_folder_is_made_by_the_first_write(tmp_path: Path) -> None:
    """Its parent is there, or the path is wrong. Nothing else makes anything."""
    objects = Storage(folder_url(tmp_path / "run7"))
    assert objects.is_missing and objects.get("a") is None and objects.names("b") == []
    assert not [*tmp_path.iterdir()]
    objects.put("a", b"one")
    assert objects.get("a") == b"one" and not objects.is_missing
    wrong = Storage(folder_url(tmp_path / "mistyped" / "run7"))
    requests: list[Callable[[], object]] = [lambda: wrong.put("a", b""), lambda: wrong.is_missing]
    for request in requests:
        with pytest.raises(InputError, match=f"there is no folder {tmp_path}/mistyped on this machine"):
            request()
    assert not (tmp_path / "mistyped").exists()
