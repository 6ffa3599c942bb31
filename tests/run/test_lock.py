"""One process writes into a region's folder at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.errors import InputError
from hf_cocodc.run.lock import hold, region_lock
from hf_cocodc.training import launch

HOLDER = """
import os, sys
from pathlib import Path
from hf_cocodc.run.lock import hold
with hold(Path(sys.argv[1])):
    if sys.argv[2:]:  # a child that outlives its parent, as a worker of a data loader does for a while
        if os.fork() == 0:
            print("held", flush=True)  # from here on by the parent alone
            os.close(1)
            sys.stdin.read()
            os._exit(0)
    else:
        print("held", flush=True)
    sys.stdin.read()
"""


def start(path: Path, *arguments: str) -> subprocess.Popen:
    """A process that holds the lock until it ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("arguments", [[], ["with a child"]])
def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path, arguments: list[str]) -> None:
    """The message names the holder and the ways out. SIGKILL frees the lock, whatever children are left."""
    lock = region_lock(tmp_path / "region-0")
    process = start(lock, *arguments)
    try:
        pid = process.pid
        refusal = rf"region-0 is in use by process {pid} on \S+, which started there at 20.*kill {pid} on .*output_dir"
        for _ in range(2):
            with pytest.raises(InputError, match=refusal), hold(lock):
                raise AssertionError("two processes hold the lock")
        with pytest.raises(InputError, match="region-0 is in use"), launch.sole_writer([lock.parent.parent]):
            raise AssertionError("a region trains there")
        process.kill()
        process.wait()
        with hold(lock), hold(lock):
            pass
    finally:
        process.kill()
        process.communicate()


def test_a_process_may_take_its_own_lock_again(tmp_path: Path) -> None:
    """The lock ends with the outermost block."""
    lock = tmp_path / "lock"
    with hold(lock):
        with hold(lock):
            pass
        with pytest.raises(InputError, match=f"process {os.getpid()} "):
            raise subprocess_refusal(lock)
    start(lock).communicate()


def subprocess_refusal(lock: Path) -> InputError:
    """What another process hears."""
    script = [sys.executable, "-c", HOLDER, str(lock)]
    said = subprocess.run(script, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    [line] = re.findall(r"InputError: (.*)", said.stderr)
    return InputError(line)


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on, with a warning."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold(tmp_path / "lock"):
        assert "without locks (No locks available)" in caplog.text


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path: Path) -> None:
    """One paragraph with the way out."""
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written: File exists. Change training.output_dir"):
        hold(tmp_path / "file" / "lock").__enter__()
