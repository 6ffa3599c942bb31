"""`bench link` through the URL of a storage: its requests, a region's rates, and a message between two ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hf_cocodc.cli.main import main
from hf_cocodc.net.storage import Storage, StorageError, _Folder
from hf_cocodc.tools.bench import storage
from hf_cocodc.tools.bench.report import read
from hf_cocodc.tools.plan import written
from tests.net.storages import folder_url

KINDS = {storage.WRITE: 0.004, storage.READ: 0.003, storage.LIST: 0.002, storage.DELETE: 0.001}


class Slow(_Folder):
    """A folder whose requests take `KINDS` seconds, and bytes 20 ns each."""

    def write(self, name: str, content: bytes) -> None:
        time.sleep(KINDS[storage.WRITE] + 20e-9 * len(content))
        super().write(name, content)

    def read(self, name: str) -> bytes:
        time.sleep(KINDS[storage.READ])
        return super().read(name)

    def names(self, folder: str) -> list[str]:
        time.sleep(KINDS[storage.LIST])
        return super().names(folder)

    def delete(self, names: Sequence[str]) -> None:
        time.sleep(KINDS[storage.DELETE])
        super().delete(names)


def test_each_request_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is not faster than the storage. Nothing stays."""
    monkeypatch.setattr("hf_cocodc.net.storage._Folder", Slow)
    monkeypatch.setattr(storage, "REQUESTS", 4)
    monkeypatch.setattr(storage, "PIECE", 1 << 20)
    found = storage.measure(folder_url(tmp_path), megabytes=5, repeat=2)
    took = {what: min(seconds) for what, seconds in found.seconds.items()}
    counts = {what: len(seconds) for what, seconds in found.seconds.items()}
    assert counts == {**dict.fromkeys(KINDS, 4), storage.UP: 2, storage.DOWN: 2}
    assert all(took[what] >= seconds for what, seconds in KINDS.items())
    assert took[storage.UP] >= 2 * KINDS[storage.WRITE] + 20e-9 * (1 << 20), "five pieces, four at once"
    assert took[storage.DOWN] >= 2 * KINDS[storage.READ]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_storage_is_measured_by_the_command(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table, and a file that `plan` reads: rates are those of the payloads without their requests."""
    url, path = f"{scheme}://{tmp_path}", tmp_path / "link.json"
    words = [
        "bench",
        "link",
        "--coordinator",
        url,
        "--megabytes",
        "0.5",
        "--repeat",
        "1",
        "--json",
        str(path),
    ]
    assert main(words) == 0
    assert f"a storage as a link: url={url}, megabytes=0.5" in capsys.readouterr().out
    [found] = read(path)
    ms = {row["what"]: row["median ms"] for row in found["rows"]}
    assert list(ms) == list(found["samples"])
    figures = written.link_of(path)
    assert figures["write_ms"] == ms["write"] and figures["is_near"] == (scheme == "file")
    rest_ms = max(ms[storage.UP] - ms["write"], ms[storage.UP] / 10)
    assert figures["up_mbit"] == pytest.approx(8 * 0.5e6 / (rest_ms / 1e3) / 1e6)


def test_a_storage_that_gives_back_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = Storage.get

    def forgets(objects: Storage, name: str) -> bytes | None:
        return None if name == "small/3" else get(objects, name)

    monkeypatch.setattr(Storage, "get", forgets)
    with pytest.raises(StorageError, match="'small/3' was written, and something else is read there"):
        storage.measure(folder_url(tmp_path), megabytes=1, repeat=1)
