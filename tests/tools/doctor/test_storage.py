"""What `doctor` finds about a storage in which regions meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.coordinator.in_storage import SERVING
from hf_cocodc.net.keys import Keys, new_secret
from hf_cocodc.net.storage import Storage, _Folder
from hf_cocodc.tools.doctor import storage
from hf_cocodc.tools.doctor.facts import OK, WARN, WRONG
from tests.net.storages import folder_url


def levels(url: str, keys: Keys | None = None) -> dict[str, str]:
    found = storage.examine(url, keys)
    return {each.topic: each.level for each in found}


def test_a_storage_that_does_what_a_run_needs(tmp_path: Path) -> None:
    """Every kind of request is tried, and nothing stays. Without a secret, everybody who reaches it reads all."""
    url = folder_url(tmp_path)
    found = storage.examine(url, Keys.from_secret(new_secret()))
    assert [(each.topic, each.level) for each in found] == [
        ("secret", OK),
        ("storage", OK),
        ("coordinator", OK),
    ]
    assert "nobody serves yet" in found[-1].words and not list((tmp_path / "doctor").iterdir())
    assert all(f"{what} " in found[1].words for what in ("create", "read", "list", "write", "delete"))
    Storage(url).put(SERVING, b"{}")
    assert "a region serves there" in storage.examine(url, None)[-1].words
    assert levels(url)["secret"] == WARN


@pytest.mark.parametrize(("slow", "level"), [("create", OK), ("read", WARN), ("list", WARN)])
def test_a_slow_request_is_told_if_transfers_make_it(
    slow: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub takes six seconds to create an object: only the coordinator's state is created."""
    took = {what: 6.1 if what == slow else 0.01 for what in ("create", "read", "list", "write", "delete")}
    monkeypatch.setattr(storage, "_tried", lambda objects: took)
    found = storage.examine(folder_url(tmp_path), None)
    assert found[1].level == level and f"{slow} 6.1 s" in found[1].words


@pytest.mark.parametrize(
    ("request_name", "answer", "says"),
    [
        ("create", True, "it creates what is there already"),
        ("read", b"something else", "to read an object gave None"),
        ("names", [], "to list an object gave 0, and not 1"),
    ],
)
def test_a_storage_that_cannot_carry_a_run_is_wrong(
    request_name: str, answer: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = getattr(_Folder, request_name)

    def wrong(*words: Any) -> Any:
        request(*words)
        return answer

    monkeypatch.setattr(_Folder, request_name, wrong)
    found = storage.examine(folder_url(tmp_path), None)
    assert found[-1].level == WRONG and says in found[-1].words


@pytest.mark.parametrize("name", ["mistyped", "mistyped/run7"])
def test_a_folder_that_is_not_there_is_wrong_and_not_made(name: str, tmp_path: Path) -> None:
    found = storage.examine(folder_url(tmp_path / name), None)[-1]
    assert found.level == WRONG and f"{tmp_path}/mistyped" in found.words and "Correct the URL" in found.words
    assert not [*tmp_path.iterdir()]


def test_a_url_that_cannot_be_reached_is_wrong() -> None:
    found = storage.examine("nothing://bucket/run7", None)
    assert found[-1].level == WRONG and "nothing" in found[-1].words
