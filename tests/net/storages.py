"""Storages for tests: folders, buckets of a server on this machine, and ones that misbehave."""

from __future__ import annotations

import getpass
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

import pytest

from hf_cocodc.net import storage
from hf_cocodc.net.storage import Storage
from tests.link.memory import wait_until
from tests.listening import free_port

REACHES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")


@contextmanager
def buckets() -> Iterator[str]:
    """The URL of an empty S3 bucket, which this process reaches by its environment (`REACHES`). Skips the test where there is no
    server of buckets.
    """
    pytest.importorskip("s3fs", reason="no s3fs here (pip install 'hf_cocodc[s3]')")
    server = pytest.importorskip(
        "moto.server", reason="no moto here, which serves buckets (pip install 'moto[server]')"
    )
    with pytest.MonkeyPatch.context() as env:
        for key in REACHES:
            env.setenv(key, "us-east-1")
        serving = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        serving.start()
        try:
            host, port = serving.get_host_and_port()
            env.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
            import s3fs

            name = f"bucket-{token_hex(4)}"  # the server keeps what there was
            s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
            yield f"s3://{name}/runs/run7"
        finally:
            serving.stop()


class Faulty:
    """A storage's backend whose requests fail, whose answers are lost, late, torn or old, as `seed` draws it."""

    def __init__(self, objects: Storage, seed: int, share: float = 0.2) -> None:
        self._backend, self._random, self._share = objects._backend, random.Random(seed), share
        self._lock = threading.Lock()
        self._old: dict[str, bytes] = {}
        self.faults = 0
        objects._backend = self
        self.has_one_winner = self._backend.has_one_winner

    def write(self, name: str, content: bytes) -> None:
        self._fail("before")
        self._backend.write(name, content)
        self._fail("after")

    def create(self, name: str, content: bytes) -> bool:
        self._fail("before")
        is_ours = self._backend.create(name, content)
        self._fail("after")
        return is_ours

    def read(self, name: str) -> bytes:
        self._fail("before")
        content = self._backend.read(name)
        if self._draws():
            return content[: self._random.randrange(len(content))]
        if self._draws():
            raise FileNotFoundError(name)
        return content

    def delete(self, name: str) -> None:
        self._fail("before")
        self._backend.delete(name)
        self._fail("after")

    def names(self, folder: str) -> list[str]:
        self._fail("before")
        found = self._backend.names(folder)
        return found[:-1] if self._draws() else found

    def _draws(self) -> bool:
        with self._lock:
            drawn = self._random.random() < self._share
            self.faults += drawn
            return drawn

    def _fail(self, when: str) -> None:
        if self._draws():
            raise OSError(f"503 Slow Down, {when} the request")
        if self._draws():
            time.sleep(0.01)


def folder_url(path: Path) -> str:
    return f"file://{path}"


@contextmanager
def ssh_server(folder: Path, host: str = "127.0.0.1", machine: Sequence[str] = ()) -> Iterator[int]:
    """An OpenSSH server, which lets in who has the key `folder/user`; its port. Skips the test where there is none.

    `machine`: words before its command, which lead to another machine.
    """
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None:
        pytest.skip("no sshd here (apt install openssh-server)")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = free_port()
    settings = {
        "Port": port,
        "ListenAddress": host,
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "PermitRootLogin": "yes",
        "Subsystem": "sftp internal-sftp",
    }
    (folder / "settings").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    with (folder / "log").open("wb") as log:
        serving = subprocess.Popen([*machine, server, "-D", "-e", "-f", folder / "settings"], stderr=log)
    try:
        wait_until(lambda: "listening" in (folder / "log").read_text() or serving.poll() is not None)
        if serving.poll() is not None:
            pytest.skip(f"sshd does not start here: {(folder / 'log').read_text()}")
        yield port
    finally:
        serving.terminate()
        serving.wait()


@contextmanager
def directories(folder: Path) -> Iterator[str]:
    """The URL of an empty directory behind an OpenSSH server of this machine. Skips the test where there is none."""
    pytest.importorskip("paramiko", reason="no paramiko here (pip install 'hf_cocodc[ssh]')")
    with ssh_server(folder) as port, pytest.MonkeyPatch.context() as patch:
        key = {"key_filename": str(folder / "user"), "look_for_keys": False, "allow_agent": False}
        patch.setitem(storage._OPTIONS, "ssh", {**storage._OPTIONS["ssh"], **key})
        yield f"ssh://{getpass.getuser()}@127.0.0.1:{port}{folder}/storage"
