"""The secret of a run, where it comes from, and where it never shows."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
from pathlib import Path

import pytest

from hf_cocodc import RegionConfig
from hf_cocodc.coordinator.secret import secret_of
from hf_cocodc.errors import InputError
from hf_cocodc.net.keys import Identity, Keys
from hf_cocodc.settings.environment import ENV_SECRET
from tests.secret import secret

SECRET = secret()


def written(folder: Path, text: str | bytes, mode: int = 0o600) -> RegionConfig:
    """Settings with a file that holds this."""
    path = folder / "secret"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return RegionConfig(secret_file=str(path))


def test_a_file_and_the_environment_give_the_same_keys(tmp_path: Path) -> None:
    """White space around a secret does not count; another secret gives other keys; without one there are none."""
    here, there = (
        secret_of(written(tmp_path, f"{SECRET}\n"), {}),
        secret_of(RegionConfig(), {ENV_SECRET: SECRET}),
    )
    assert here is not None
    assert there is not None
    assert here.raw == there.raw == Keys.from_secret(SECRET.upper()).raw
    assert here.raw != Keys.from_secret(SECRET[::-1]).raw
    assert secret_of(written(tmp_path, SECRET), {ENV_SECRET: SECRET}) is not None
    assert secret_of(RegionConfig(), {}) is None


@pytest.mark.parametrize(
    ("text", "env", "said"),
    [
        (None, {}, "secret_file='.*none' cannot be read: No such file.*hf-cocodc secret new FILE"),
        (b"\xff" * 20, {}, "cannot be read: it is no file of text"),
        (
            "too short",
            {},
            r"a secret is 32 random bytes, written as 64 hex digits, and this one is not .it has 9 char",
        ),
        (SECRET[:-1] + "g", {}, "and this one is not"),
        ("x" * 100_000, {}, "and this one is not"),
        (SECRET, {ENV_SECRET: "f" * 64}, "hold different secrets"),
        (SECRET, {ENV_SECRET: ""}, f"{ENV_SECRET}: a secret is 32"),
        (SECRET, {ENV_SECRET: os.fsdecode(b"\xff" * 20)}, f"{ENV_SECRET}: a secret is 32 random bytes"),
    ],
)
def test_a_secret_that_cannot_work_is_refused(
    text: str | bytes | None, env: dict[str, str], said: str, tmp_path: Path
) -> None:
    """The message says where it comes from, and never the secret."""
    settings = (
        written(tmp_path, text) if text is not None else RegionConfig(secret_file=str(tmp_path / "none"))
    )
    with pytest.raises(InputError, match=said) as caught:
        secret_of(settings, env)
    assert SECRET not in str(caught.value)
    assert "too short" not in str(caught.value)


def test_a_file_that_others_may_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a warning: some file systems know no other rights."""
    with caplog.at_level(logging.WARNING):
        secret_of(written(tmp_path, SECRET), {})
        assert not caplog.text
        secret_of(written(tmp_path, SECRET, 0o644), {})
    assert "chmod 600" in caplog.text


def test_keys_for_one_purpose_say_nothing_of_another() -> None:
    """Names are kept apart; nothing shows a key or writes it anywhere."""
    keys = Keys.from_secret(SECRET)
    assert len({each.raw for each in (keys, keys.of("run", "a"), keys.of("run", "b"), keys.of("runa"))}) == 4
    assert SECRET not in repr(keys)
    assert keys.raw.hex() not in repr(keys)
    with pytest.raises(TypeError, match="not written"):
        pickle.dumps(keys)


def test_keys_are_those_of_the_standard() -> None:
    """HKDF-SHA256 (RFC 5869), as another implementation computes it from the same secret."""
    import hashlib
    import hmac

    def hashed(key: bytes, data: bytes) -> bytes:
        return hmac.new(key, data, hashlib.sha256).digest()

    extracted = hashed(b"hf_cocodc", bytes.fromhex(SECRET))
    info = (3).to_bytes(8, "big") + b"run"
    assert Keys.from_secret(SECRET).of("run").raw == hashed(extracted, info + b"\x01")


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory")
def test_a_key_is_never_in_a_file_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda *args, **kwargs: 1 / 0)
    Identity(Keys.from_secret(secret("of nobody else")))
