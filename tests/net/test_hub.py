"""Buckets of the Hugging Face Hub through its own client, against a fake of the Hub that says so."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import huggingface_hub
import pytest

from hf_cocodc.errors import InputError
from hf_cocodc.net import storage
from hf_cocodc.net.storage import Storage, StorageError

from .fake_hub import BUCKET, PAGE, TOKEN, FakeHub, _FakeXet, fake_hub

URL = f"hf://buckets/{BUCKET}/runs/7"


@pytest.fixture(name="hub", autouse=True)
def fixture_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(storage, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(storage, "_SETTLE_S", 0.8)
    with fake_hub() as hub:
        yield hub


def test_what_another_process_writes_is_found_at_once(hub: FakeHub) -> None:
    """The Hub's file system answered from a list that it had kept: what was new was never found."""
    here, there = Storage(URL), Storage(URL)
    here.put("cards/mine", b"1")
    assert here.get("cards/mine") == b"1" and here.get("cards/theirs") is None
    there.put("cards/theirs", b"one")
    assert here.get("cards/theirs") == b"one"
    there.put("cards/theirs", b"two")
    assert here.get("cards/theirs") == b"two"
    assert hub.asked == {"xet-write-token": 3, "batch": 3, "resolve": 4}, "no list"


def test_a_list_has_all_pages_and_no_folder_that_begins_alike() -> None:
    """The Hub matches a prefix as text, and shows a few entries at once."""
    objects, names = Storage(URL), [f"{number:02}" for number in range(2 * PAGE + 1)]
    for name in names:
        objects.put(f"calls/{name}", b"")
    objects.put("calls-of-others/x", b"")
    assert objects.names("calls") == names and objects.names("call") == []
    at_root = Storage(f"hf://buckets/{BUCKET}")
    at_root.put("calls/x", b"")
    assert at_root.names("calls") == ["x"]


def test_no_bar_is_shown_for_an_object(capfd: pytest.CaptureFixture[str]) -> None:
    Storage(URL).put("lives/mine", b"1")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("url", "answers", "token", "says"),
    [
        ("hf://buckets/me/other/7", {}, TOKEN, "404 Not Found.*Create the bucket, or correct the URL"),
        (URL, {}, "hf_wrong", "401.*Give this machine the credentials"),
        (
            URL,
            {"/batch": (403, {"X-Error-Message": "read only"})},
            TOKEN,
            "read only.*Give this machine the cred",
        ),
        (URL, {"/batch": (413, {"X-Error-Message": "quota exceeded"})}, TOKEN, "The storage is full"),
    ],
)
def test_an_error_names_the_url_and_what_helps(
    url: str, answers: Any, token: str, says: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    hub.answers = answers
    with pytest.raises(StorageError, match=f"(?s)^{url}: cannot write 'a/b': .*{says}"):
        Storage(url).put("a/b", b"1")


def test_a_bucket_that_is_missing_is_not_an_empty_one() -> None:
    """An object that is not there is None; a bucket that is not there is an error, for each kind of request."""
    objects = Storage("hf://buckets/me/other/7")
    for request in (lambda: objects.get("a"), lambda: objects.names("a"), lambda: objects.remove("a")):
        with pytest.raises(StorageError, match="Not Found"):
            request()


@pytest.mark.parametrize("part", ["/batch", "/resolve/"])
def test_a_request_without_an_answer_is_made_again(
    part: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_REQUEST_S", 0.3)
    hub.stalls[part] = 1
    objects = Storage(URL)
    objects.put("a", b"1")
    assert objects.get("a") == b"1"
    assert not hub.stalls[part]


@pytest.mark.parametrize("url", ["hf://datasets/me/run7/x", "hf://me/run7"])
def test_a_repository_is_refused(url: str) -> None:
    with pytest.raises(
        InputError, match=r"is a repository, where each write is a commit\. Name a bucket: hf://buckets/"
    ):
        Storage(url).get("a")


def test_the_fake_answers_what_the_public_client_asks(hub: FakeHub) -> None:
    """Its file system does the same over the fake, with ranges, too; and the fake takes what the client's library is given."""
    files, path = huggingface_hub.HfFileSystem(skip_instance_cache=True), f"buckets/{BUCKET}/runs/7"
    Storage(URL).put("a/b", b"0123456789")
    whole = files.cat_file(f"{path}/a/b")
    assert whole.endswith(b"0123456789")
    assert files.cat_file(f"{path}/a/b", start=len(whole) - 4, end=len(whole) - 1) == b"678"
    files.pipe_file(f"{path}/a/c", whole)
    assert Storage(URL).get("a/c") == b"0123456789"
    files.invalidate_cache()
    assert sorted(files.ls(f"{path}/a", detail=False)) == [f"{path}/a/b", f"{path}/a/c"]
    files.rm_file(f"{path}/a/b")
    assert Storage(URL).names("a") == ["c"]
    hf_xet = pytest.importorskip("hf_xet")
    taken = inspect.signature(hf_xet.XetSession.new_upload_commit).parameters
    assert inspect.signature(_FakeXet.new_upload_commit).parameters.keys() <= taken.keys()
