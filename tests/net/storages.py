"""Storages for tests: folders, buckets of a server on this machine, and ones that misbehave."""

from __future__ import annotations

import getpass
import io
import logging
import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from hf_cocodc.net import storage
from hf_cocodc.net.storage import Storage
from tests.link.memory import wait_until
from tests.listening import free_port

REACHES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")


class Server:
    """The WSGI application of a server of buckets, which creates an object for one of several writers alone: moto's looks first,
    and writes later.

    Of requests, `share` fail, before or after they were carried out, or take `slow_s`; so many answers are torn or old, as `seed`
    draws it.
    """

    slow_s = 1.0

    def __init__(self, server: Callable[..., Iterable[bytes]], share: float, seed: int) -> None:
        self._server, self._share, self._random = server, share, random.Random(seed)
        self._creating, self._listed = threading.Lock(), dict[str, list[bytes]]()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if not self._draws("refused"):
            if self._draws("slow"):
                time.sleep(self.slow_s)
            answer = self._answer(environ, start)
            if not self._draws("lost"):
                return answer
        code = self._random.choice(("500 Internal Server Error", "503 Service Unavailable"))
        start(code, [("Content-Type", "application/xml")])
        return [
            b"<Error><Code>SlowDown</Code></Error>"
            if code[:3] == "503"
            else b"<Error><Code>InternalError</Code></Error>"
        ]

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT":  # a writer that stops halfway keeps no other one waiting
            environ["wsgi.input"] = io.BytesIO(
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            )
        with self._creating if "HTTP_IF_NONE_MATCH" in environ else nullcontext():
            answer = list(self._server(environ, start))
        if environ["REQUEST_METHOD"] != "GET":
            return answer
        if "list-type" in environ["QUERY_STRING"]:
            earlier = self._listed.get(environ["QUERY_STRING"], answer)
            self._listed[environ["QUERY_STRING"]] = answer
            return earlier if self._draws("old") else answer
        whole = b"".join(answer)
        if not self._draws("torn"):
            return [whole]
        return self._torn(environ, whole[: len(whole) // 2])

    def _torn(self, environ: dict[str, Any], half: bytes) -> Iterator[bytes]:
        yield half
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)

    def _draws(self, what: str) -> bool:
        return self._random.random() < self._share


@contextmanager
def buckets(faults: float = 0.0, seed: int = 0) -> Iterator[str]:
    """The URL of an empty S3 bucket, which this process reaches by its environment (`REACHES`). Skips the test where there is no
    server of buckets. `faults`: see `Server`.
    """
    pytest.importorskip("s3fs", reason="no s3fs here (pip install 'hf_cocodc[s3]')")
    server = pytest.importorskip(
        "moto.server", reason="no moto here, which serves buckets (pip install 'moto[server]')"
    )
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # it has a line for each request
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
            serving._server.app = Server(serving._server.app, faults, seed)
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

    def delete(self, names: Sequence[str]) -> None:
        self._fail("before")
        self._backend.delete(names)
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
