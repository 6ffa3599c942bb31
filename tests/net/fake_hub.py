"""A FAKE of the Hugging Face Hub's buckets, as huggingface_hub's own client (2.x) asks for them. Nothing here is the Hub.

The real client runs; only two things are made up. `FakeHub` answers its HTTP requests as the client's code expects it (`HfApi`,
`HfFileSystem`): bucket, tree (pages, a prefix that is matched as text), batch (lines of JSON, failures in the body), resolve (a
redirect to the content). `_FakeXet` stands for the native library that uploads content by its hash.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import Request, urlopen

import pytest

TOKEN = "hf_fake"
BUCKET = "me/run7"
PAGE = 3
"""Entries of a page of a list."""
TIME = "2026-11-29T12:00:00.000Z"


class FakeHub(ThreadingHTTPServer):
    """Serves one bucket. `answers`: by a part of a path, a status and headers that requests get in place of an answer. `stalls`:
    by a part of a path, for how many requests it says nothing.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.files: dict[str, str] = {}
        self.contents: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self.answers: dict[str, tuple[int, dict[str, str]]] = {}
        self.stalls: Counter[str] = Counter()
        self.ends = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def batch(self, lines: bytes) -> tuple[int, list[dict[str, str]]]:
        """Carry out what a batch says: how many operations, and those that failed."""
        failed, operations = [], [json.loads(line) for line in lines.splitlines()]
        for each in operations:
            path = each["path"]
            with self.lock:
                if each["type"] == "addFile" and each["xetHash"] in self.contents:
                    self.files[path] = each["xetHash"]
                elif each["type"] == "deleteFile" and path in self.files:
                    del self.files[path]
                else:
                    failed.append({"path": path, "error": "not found"})
        return len(operations), failed

    def tree(self, prefix: str, recursive: bool) -> list[dict[str, Any]]:
        """Entries whose paths begin with a text; folders stand for what is in them unless the list is recursive."""
        found: dict[str, dict[str, Any]] = {}
        with self.lock:
            files = sorted(self.files.items())
        for path, digest in files:
            if not path.startswith(prefix):
                continue
            cut = path.find("/", len(prefix) + 1 if prefix else 0)
            if recursive or cut < 0:
                size = len(self.contents[digest])
                entry = {"type": "file", "path": path, "size": size, "xetHash": digest, "mtime": TIME}
            else:
                entry = {"type": "directory", "path": path[:cut]}
            found[entry["path"]] = {**entry, "uploadedAt": TIME}
        return list(found.values())


class _Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_PUT(self) -> None:
        """What the native library does, in its own way: bring content, by its hash."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.contents[self.path.removeprefix("/content/")] = content
        self._say(200)

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes) -> None:
        hub, parts = self.server, urlsplit(self.path)
        self._asks = parse_qs(parts.query)
        for part in hub.stalls:
            if part in parts.path and hub.stalls[part]:
                hub.stalls[part] -= 1
                hub.ends.wait()
                return
        for part, (status, headers) in hub.answers.items():
            if part in parts.path:
                self._say(status, b"{}", **headers)
                return
        if parts.path.startswith("/content/"):
            self._content(hub.contents[parts.path.removeprefix("/content/")])
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._say(401, **{"X-Error-Message": "Invalid credentials in Authorization header"})
        elif not parts.path.removeprefix("/api").startswith(f"/buckets/{BUCKET}"):
            self._say(404, **{"X-Error-Code": "RepoNotFound"})
        else:
            what, _, path = parts.path.partition(BUCKET)[2].strip("/").partition("/")
            hub.asked[what] += 1
            getattr(self, f"_{what.replace('-', '_') or 'info'}")(unquote(path), body)

    def _info(self, path: str, body: bytes) -> None:
        self._json(
            {
                "id": BUCKET,
                "private": True,
                "createdAt": TIME,
                "size": 0,
                "totalFiles": len(self.server.files),
            }
        )

    def _tree(self, prefix: str, body: bytes) -> None:
        entries = self.server.tree(prefix, self._asks.get("recursive") == ["true"])
        at = int(self._asks.get("cursor", ["0"])[0])
        more = at + PAGE < len(entries)
        following = f"{self.server.url}{urlsplit(self.path).path}?cursor={at + PAGE}"
        self._json(entries[at : at + PAGE], **({"Link": f'<{following}>; rel="next"'} if more else {}))

    def _paths_info(self, path: str, body: bytes) -> None:
        asked = json.loads(body)["paths"]
        self._json([entry for entry in self.server.tree("", True) if entry["path"] in asked])

    def _xet_write_token(self, path: str, body: bytes) -> None:
        self._json({"accessToken": "x", "exp": 2**31, "casUrl": self.server.url})

    def _batch(self, path: str, body: bytes) -> None:
        assert self.headers["Content-Type"] == "application/x-ndjson"
        count, failed = self.server.batch(body)
        self._json({"success": not failed, "failed": failed}, 422 if len(failed) == count else 200)

    def _resolve(self, path: str, body: bytes) -> None:
        with self.server.lock:
            digest = self.server.files.get(path)
        if digest is None:
            self._say(404, **{"X-Error-Code": "EntryNotFound"})
        else:
            self._say(302, Location=f"{self.server.url}/content/{digest}")

    def _content(self, content: bytes) -> None:
        begin, _, end = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        part = content[int(begin or 0) : int(end) + 1 if end else None]
        self._say(206 if begin else 200, part)

    def _json(self, value: Any, status: int = 200, **headers: str) -> None:
        self._say(status, json.dumps(value).encode(), **headers)

    def _say(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


class _FakeXet:
    """Stands for `hf_xet.XetSession`: uploads go straight to the fake at a URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    @contextmanager
    def new_upload_commit(
        self,
        *,
        token_refresh_url: str,
        token_refresh_headers: Any,
        custom_headers: Any,
        progress_callback: Any,
    ) -> Iterator[_FakeXet]:
        try:  # each time, as hf_xet 1.8 does, and these are its words
            urlopen(Request(token_refresh_url, headers=token_refresh_headers)).close()
        except HTTPError as error:
            error.close()
            raise ConnectionError(
                f"Network error: Request error: HTTP status client error ({error.code} {error.reason}), domain: "
                f"{token_refresh_url}"
            ) from None
        yield self

    def start_upload_bytes(self, content: bytes, sha256: Any) -> Any:
        digest = hashlib.sha256(content).hexdigest()
        urlopen(Request(f"{self._url}/content/{digest}", content, method="PUT")).close()
        done = SimpleNamespace(xet_info=SimpleNamespace(hash=digest, file_size=len(content)))
        return SimpleNamespace(result=lambda: done)

    def start_upload_file(self, path: str, sha256: Any) -> Any:
        return self.start_upload_bytes(Path(path).read_bytes(), sha256)


def reach(url: str, patch: pytest.MonkeyPatch) -> None:
    """Let this process reach the fake at a URL in the place of the Hub."""
    patch.setattr("huggingface_hub.constants.ENDPOINT", url)
    patch.setattr("huggingface_hub.utils._xet.get_xet_session", lambda: _FakeXet(url))
    patch.setenv("HF_TOKEN", TOKEN)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A fake of the Hub in the place of the Hub, for this process. Skips the test where huggingface_hub knows no buckets."""
    client = pytest.importorskip("huggingface_hub")
    if not hasattr(client.HfApi, "batch_bucket_files"):
        pytest.skip(
            f"huggingface_hub {client.__version__} knows no buckets (pip install 'huggingface_hub>=1.5')"
        )
    hub = FakeHub()
    threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True).start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            reach(hub.url, patch)
            client.get_session()  # older clients make one for each thread that asks first, and close one
            yield hub
    finally:
        hub.ends.set()
        hub.shutdown()
        hub.server_close()
        client.close_session()
