"""Commands at a coordinator with a secret, and at one without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc import RegionConfig
from hf_cocodc.cli import coordinator
from hf_cocodc.cli.main import main
from hf_cocodc.coordinator.secret import secret_of
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.errors import InputError
from hf_cocodc.net.keys import Keys
from hf_cocodc.settings.environment import ENV_SECRET
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.training.launch import Launch, Program
from tests.coordinator.regions import hello, meet, part
from tests.secret import secret

SECRET, OTHER = secret("ours"), secret("another")


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file with the secret."""
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[list[bytes]]:
    """The secrets of the coordinators that the command has started; each ends at once."""
    found: list[list[bytes]] = []

    def serve(host: str, port: int, secrets: Sequence[Keys], *more: Any) -> None:
        found.append([keys.raw for keys in secrets])

    monkeypatch.setattr("hf_cocodc.coordinator.server.serve", serve)
    monkeypatch.setattr(coordinator, "_allow_many_connections", lambda: None)
    return found


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "coordinator.example.invalid"])
def test_a_coordinator_that_others_reach_needs_a_secret(
    host: str, served: list[list[bytes]], file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or --insecure; refused before it listens, with the way out."""
    assert main(["coordinator", "--host", host]) == 2
    said = capsys.readouterr().err
    assert f"--host {host} is reached by other machines" in said
    assert "hf-cocodc secret new secret" in said
    assert "--insecure" in said
    assert not served
    assert main(["coordinator", "--host", host, "--insecure"]) == 0
    assert main(["coordinator", "--host", host, "--secret-file", file]) == 0
    assert served == [[], [Keys.from_secret(SECRET).raw]]


def test_insecure_with_a_secret_is_a_contradiction(
    served: list[Any], file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file or the environment; on the loopback, a coordinator needs neither."""
    assert main(["coordinator", "--insecure", "--secret-file", file]) == 2
    assert "--insecure with a secret" in capsys.readouterr().err
    assert main(["coordinator"]) == 0
    monkeypatch.setenv(ENV_SECRET, SECRET)
    assert main(["coordinator", "--insecure"]) == 2
    assert SECRET not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "leave", "train", "join"])
@pytest.mark.parametrize(
    ("begun", "comes", "said"),
    [
        (SECRET, None, "the coordinator has a secret, and the caller has none"),
        (SECRET, OTHER, "has another secret"),
        (None, SECRET, "the caller has a secret, and the coordinator has none"),
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
    running = serve_in_thread(secrets=[] if begun is None else [Keys.from_secret(begun)])
    address = running.address
    if comes is not None:
        monkeypatch.setenv(ENV_SECRET, comes)
    words = ["train", "recipes/quickstart/diloco.yaml", "--set", f"training.output_dir={tmp_path}"]
    words += ["--set", "regions.min=1", "--region", "1", "--coordinator", address]
    words += ["--join"] if command == "join" else []
    if command in ("status", "leave"):
        words = [command, "--coordinator", address, *(["--region", "0"] if command == "leave" else [])]
    assert main(words) == 2
    found = capsys.readouterr()
    running.close()
    assert f"the coordinator at {address}" in found.err and said in found.err
    assert not any(each in found.err + found.out for each in (SECRET, OTHER))
    assert not list(tmp_path.iterdir())


def test_a_new_secret_is_for_its_owner_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It works as it is; a file that is there is never overwritten."""
    path = tmp_path / "secret"
    assert main(["secret", "new", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"export {ENV_SECRET}=$(cat {path})" in said
    assert path.stat().st_mode & 0o777 == 0o600
    written = path.read_text()
    assert written.strip() not in said
    assert secret_of(RegionConfig(secret_file=str(path)), {}) is not None
    for wrong, why in (
        (path, "is there already"),
        (tmp_path / "no" / "folder", "cannot be written: No such file"),
    ):
        assert main(["secret", "new", str(wrong)]) == 2
        assert why in capsys.readouterr().err
    assert path.read_text() == written
    printed = [capsys.readouterr().out for _ in range(2) if main(["secret", "new"]) == 0]
    assert len({Keys.from_secret(each.strip()).raw for each in printed}) == 2


def test_status_with_the_secret(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It sees the runs of its own secret, and no others."""
    served = serve_in_thread(secrets=[Keys.from_secret(SECRET), Keys.from_secret(OTHER)])
    address = served.address
    mine, theirs = hello(0, 1), hello(0, 1)
    others = meet(address, theirs, run="theirs", keys=Keys.from_secret(OTHER))
    assert main(["status", "--coordinator", address, "--secret-file", file]) == 2
    assert f"no run trains at {address}" in capsys.readouterr().err
    regions = meet(address, mine, run="mine", keys=Keys.from_secret(SECRET))
    assert main(["status", "--coordinator", address, "--secret-file", file]) == 0
    said = capsys.readouterr().out
    assert "run         mine" in said and "theirs" not in said
    assert main(["status", "--coordinator", address, "--secret-file", f"{file}.none"]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    part(*regions, *others)
    served.close()


def test_train_takes_the_file_as_its_coordinator_does(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The coordinator knows the command by it, and its regions get it."""
    given: list[str] = []

    def start(program: Program, planned: list[Launch], **kwargs: object) -> None:
        given.extend(program.words[4::2])
        assert planned[0].env["HF_COCODC_SECRET_FILE"] == file
        raise InputError("that is all")

    monkeypatch.setattr("hf_cocodc.training.launch.start", start)
    served = serve_in_thread(secrets=[Keys.from_secret(SECRET)])
    words = ["train", "quickstart/diloco", "--region", "1", "--coordinator", served.address]
    assert main(words) == 2
    assert "the coordinator has a secret, and the caller has none" in capsys.readouterr().err
    assert main([*words, "--secret-file", file]) == 2
    assert "that is all" in capsys.readouterr().err
    assert Recipe.load("quickstart/diloco", given).regions.secret_file == file
    served.close()
