import sys
from pathlib import Path

import pytest

from hf_cocodc.cli import coordinator
from hf_cocodc.cli.main import main
from hf_cocodc.coordinator import server
from hf_cocodc.net.keys import Keys
from hf_cocodc.settings.environment import ENV_SECRET
from tests.secret import secret


def secret_file(path: Path, content: str) -> str:
    path.write_text(content)
    path.chmod(0o600)
    return str(path)


def test_other_machines_need_a_secret_or_insecure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_SECRET, raising=False)
    assert main(["coordinator", "--host", "0.0.0.0"]) == 2
    assert "whoever reaches a coordinator without a secret" in capsys.readouterr().err
    file = secret_file(tmp_path / "secret", secret())
    assert main(["coordinator", "--secret-file", file, "--insecure"]) == 2
    assert "--insecure with a secret" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--port", "70000"], "--port 70000 must lie in 0 .. 65535"),
        (["--state", "/nowhere/state"], "--state /nowhere/state cannot be used"),
        (["--host", "192.0.2.1", "--insecure"], "Choose another --host or --port"),
    ],
)
def test_values_that_cannot_work_are_refused(
    options: list[str], why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_allow_many_connections", lambda: None)
    assert main(["coordinator", "--port", "0", *options]) == 2
    assert why in capsys.readouterr().err


def test_several_secrets_and_the_one_of_the_environment_all_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ENV_SECRET, secret("env"))
    monkeypatch.setattr(coordinator, "_allow_many_connections", lambda: None)
    served: list[list[Keys]] = []
    monkeypatch.setattr(server, "serve", lambda host, port, secrets, *rest: served.append(secrets))
    files = [secret_file(tmp_path / name, secret(name)) for name in ("one", "two", "one")]
    assert main(["coordinator", *(part for file in files for part in ("--secret-file", file))]) == 0
    expected = [secret(name) for name in ("env", "one", "two")]
    assert [keys.raw for keys in served[0]] == [Keys.from_secret(each).raw for each in expected]


def test_lines_that_nobody_reads_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def write(self, text: str) -> None:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Broken())
    with coordinator._printing() as say:
        for number in range(2000):
            say(f"line {number}")
