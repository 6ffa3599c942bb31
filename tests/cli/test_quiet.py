"""What torch's C++ says of a host without a name does not reach a user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_cocodc.settings.environment import quiet_torch
from tests.processes.launching import flags, little_text

LINE = "The hostname of the client socket cannot be retrieved"
NETWORK = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
"""A network without a name server: no address has a name."""


def alone(*words: str) -> str:
    """What a Python process says that runs in such a network."""
    given = {key: value for key, value in os.environ.items() if key != "TORCH_CPP_LOG_LEVEL"}
    ended = subprocess.run(
        [*NETWORK, sys.executable, *words], env=given, stdout=-1, stderr=-2, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.fixture
def has_networks() -> None:
    """Linux, where the kernel lets this user have a network of its own."""
    if shutil.which("unshare") is None or subprocess.run([*NETWORK, "true"], capture_output=True).returncode:
        pytest.skip("this machine gives us no network of our own")


STORE = (
    "import torch.distributed as dist; server = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
    "dist.TCPStore('127.0.0.1', server.port).set('a', 'b'); "
)


def test_a_user_may_choose_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    quiet_torch()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"


@pytest.mark.slow
@pytest.mark.usefixtures("has_networks")
def test_commands_and_what_they_start_are_quiet() -> None:
    """A script of a user's own says what torch says."""
    command = (
        "import subprocess, sys; from hf_cocodc.cli import main, recipe\n"
        f"def run(options): exec({STORE!r}); return subprocess.call([sys.executable, '-c', {STORE!r}])\n"
        "recipe._keys = run\n"
        "sys.exit(main.main(['recipe', 'keys']))\n"
    )
    assert LINE in alone("-c", STORE)
    assert alone("-c", command) == ""


@pytest.mark.slow
@pytest.mark.usefixtures("has_networks")
def test_a_run_is_quiet(tmp_path: Path) -> None:
    """The command and the logs of its regions."""
    sets = [f"training.output_dir={tmp_path}", "training.max_steps=2", "outer.sync_interval=1"]
    sets += [f"training.{each}_strategy=no" for each in ("save", "eval")] + ["training.eval_on_start=false"]
    said = alone(
        "-m", "hf_cocodc", "train", "quickstart/diloco", *flags([*sets, *little_text(tmp_path / "text")])
    )
    for text in (said, *(path.read_text() for path in tmp_path.glob("region-?/log.txt"))):
        assert text and LINE not in text
