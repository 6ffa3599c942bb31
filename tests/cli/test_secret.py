"""Commands at a store with a secret, and at one without."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hf_cocodc.cli.joining import way_back
from hf_cocodc.cli.main import main, parse
from hf_cocodc.errors import InputError
from hf_cocodc.meeting.sealed import SEAL, check, mark, sealed
from hf_cocodc.meeting.secret import Keys
from hf_cocodc.meeting.store import connect_store, serve_store
from hf_cocodc.recipes.recipe import Recipe
from hf_cocodc.settings import ENV_SECRET

SECRET, OTHER = "the secret of a run", "the secret of another"


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file with the secret."""
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The stores that the command has started; it ends at once."""
    found: list[Any] = []

    def serve(host: str, port: int) -> dist.TCPStore:
        found.append(serve_store("127.0.0.1"))
        return found[-1]

    monkeypatch.setattr("hf_cocodc.meeting.store.serve_store", serve)
    monkeypatch.setattr("signal.sigwait", lambda signals: None)
    return found


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "store.example.invalid"])
def test_a_store_that_others_reach_needs_a_secret(
    host: str, served: list[Any], file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or --insecure; refused before it listens, with the way out."""
    assert main(["store", "--host", host]) == 2
    said = capsys.readouterr().err
    assert f"--host {host} is reached by other machines" in said
    assert "openssl rand -hex 32 > secret" in said
    assert "--insecure" in said
    assert not served
    assert main(["store", "--host", host, "--insecure"]) == 0
    assert main(["store", "--host", host, "--secret-file", file]) == 0
    assert [store.get(SEAL)[:6] for store in served] == [b"open", b"sealed"]


def test_insecure_with_a_secret_is_a_contradiction(
    served: list[Any], file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file or the environment; of the loopback, a store needs neither."""
    assert main(["store", "--insecure", "--secret-file", file]) == 2
    assert "--insecure with a secret" in capsys.readouterr().err
    assert main(["store"]) == 0
    monkeypatch.setenv(ENV_SECRET, SECRET)
    assert main(["store", "--insecure"]) == 2
    assert SECRET not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "leave", "train", "join"])
@pytest.mark.parametrize(
    ("begun", "comes", "said"),
    [
        (SECRET, None, "was begun with a secret, and this process has none"),
        (SECRET, OTHER, "was begun with another secret"),
        (None, SECRET, "was begun without a secret, and this process has one"),
    ],
)
def test_another_secret_is_refused_at_once(
    command: str,
    begun: str | None,
    comes: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In every command, before anything is loaded, with exit code 2; no secret is shown."""
    monkeypatch.setattr("hf_cocodc.training.preflight.preflight", lambda *given: pytest.fail("it loads"))
    server = serve_store()
    address = f"127.0.0.1:{server.port}"
    check(connect_store(address, 5.0, None if begun is None else Keys.from_secret(begun)))
    if comes is not None:
        monkeypatch.setenv(ENV_SECRET, comes)
    words = ["train", "recipes/quickstart/diloco.yaml", "--set", f"training.output_dir={tmp_path}"]
    words += ["--set", "regions.min=1", "--region", "1", "--store", address]
    words += ["--join"] if command == "join" else []
    if command in ("status", "leave"):
        words = [command, "--store", address, *(["--region", "0"] if command == "leave" else [])]
    assert main(words) == 2
    found = capsys.readouterr()
    assert f"the store at {address} {said}" in found.err
    assert not any(each in found.err + found.out for each in (SECRET, OTHER))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["status", "leave"])
def test_who_only_looks_begins_no_store(command: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody looks at a store that a run is just about to begin: with or without the secret, that run then begins it."""
    server = serve_store()
    address = f"127.0.0.1:{server.port}"
    words = [command, "--store", address, *(["--region", "0"] if command == "leave" else [])]
    for secret in ([], ["--secret-file", file]):
        assert main([*words, *secret]) == 2
        assert "no run trains at" in capsys.readouterr().err
    check(connect_store(address, 5.0, Keys.from_secret(SECRET)))
    assert server.get(SEAL).startswith(b"sealed:")


@pytest.mark.parametrize(
    ("secret", "package", "said"),
    [
        (None, "cryptography", "regions.encrypt needs a secret"),
        (SECRET, "no_such_package", "regions.encrypt needs the package cryptography"),
    ],
)
@pytest.mark.parametrize("place", [[], ["--region", "1", "--store", "127.0.0.1:1"]], ids=["all", "one"])
def test_what_cannot_encrypt_is_refused_before_anything_is_loaded(
    secret: str | None,
    package: str,
    said: str,
    place: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a secret, and where the package is missing."""
    monkeypatch.setattr("hf_cocodc.training.preflight.preflight", lambda *given: pytest.fail("it loads"))
    real = importlib.import_module
    monkeypatch.setattr(
        "hf_cocodc.meeting.cipher.importlib.import_module",
        lambda name: real(name.replace("cryptography", package)),
    )
    if secret is not None:
        monkeypatch.setenv(ENV_SECRET, secret)
    words = ["train", "recipes/quickstart/diloco.yaml", "--set", f"training.output_dir={tmp_path}"]
    assert main([*words, "--set", "regions.encrypt=true", *place]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_status_with_the_secret(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It reads a sealed store."""
    server = serve_store()
    address = f"127.0.0.1:{server.port}"
    check(connect_store(address, 5.0, Keys.from_secret(SECRET)))
    assert main(["status", "--store", address, "--secret-file", file]) == 2
    assert f"no run trains at {address}" in capsys.readouterr().err
    assert main(["status", "--store", address, "--secret-file", f"{file}.none"]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_train_takes_the_file_as_its_store_does(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store knows the command by it, and its regions get it."""
    given: list[str] = []

    def start(recipe: Recipe, path: str, overrides: list[str], *args: object, **kwargs: object) -> None:
        given.extend(overrides)
        raise InputError("that is all")

    monkeypatch.setattr("hf_cocodc.training.launch.start", start)
    server = serve_store("127.0.0.1")
    mark(sealed(server, Keys.from_secret(SECRET)))
    words = ["train", "quickstart/diloco", "--region", "1", "--store", f"127.0.0.1:{server.port}"]
    assert main(words) == 2
    assert "was begun with a secret, and this process has none" in capsys.readouterr().err
    assert main([*words, "--secret-file", file]) == 2
    assert "that is all" in capsys.readouterr().err
    assert Recipe.load("quickstart/diloco", given).regions.secret_file == file
    options = parse([*words, "--secret-file", file])
    assert f"--store h:1 --secret-file {file}" in way_back(options, 1, "h:1")
