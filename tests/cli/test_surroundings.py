"""Users and machines that lack what others have: each is told what to set, in one line."""

from __future__ import annotations

import errno
import io
import pwd
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from hf_cocodc.cli import secret
from hf_cocodc.cli.main import main
from hf_cocodc.errors import InputError
from hf_cocodc.training.building import cache_trouble
from hf_cocodc.training.data import load_text


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Containers run under numbers that no list of users has."""

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert main(["secret", "new", "~/key"]) == InputError.exit_code
    assert "'~/key': nothing says where the home folder is: HOME is not set" in capsys.readouterr().err


def test_an_encoding_without_the_letters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With LC_ALL=C and without UTF-8 mode, a name may be no text there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(["secret", "new", "schl\xfcssel"]) == InputError.exit_code
    said = "is no text in the encoding of this environment (ascii). Set PYTHONUTF8=1"
    assert f"'\\xfc' {said}" in capsys.readouterr().err
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    assert main(["recipe", "keys", "schl\udcc3\udcbcssel"]) == InputError.exit_code
    assert f"'\\udcc3\\udcbc' {said}" in capsys.readouterr().err


def test_no_folder_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuses(options: Any) -> int:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/nowhere']")

    monkeypatch.setattr(secret, "run", refuses)
    assert main(["secret", "new"]) == 1
    assert (
        "no folder for temporary files can be written (['/nowhere']). Set TMPDIR" in capsys.readouterr().err
    )


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is named, not the data, which are good; where it can be written, it is not."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.txt").write_text("a text\n")
    (tmp_path / "file").touch()
    assert not cache_trouble(FileNotFoundError(errno.ENOENT, "no such data"))
    for library, name in ((datasets.config, "HF_DATASETS_CACHE"), (constants, "HF_HUB_CACHE")):
        monkeypatch.setattr(library, name, str(tmp_path / "file" / "cache"))
    with pytest.raises(
        InputError, match="the cache of Hugging Face's libraries, .*file/cache, .*Set HF_HOME"
    ):
        load_text(None, str(tmp_path / "text"), None, "train", "text", streaming=False)
    assert not cache_trouble(ValueError("no such split"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "x" / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "x" / "cache"))
    made = str(tmp_path / "x")  # in /proc, root may write by its rights, and can make no folder
    assert "Set HF_HOME" in cache_trouble(FileNotFoundError(errno.ENOENT, "no such folder", made))
    assert not cache_trouble(FileNotFoundError(errno.ENOENT, "no such data", str(tmp_path / "data")))
