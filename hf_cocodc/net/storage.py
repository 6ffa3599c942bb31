"""Objects in a storage that all regions reach: a shared folder, a bucket, a directory behind SSH.

An object is whole or absent: it is written at once (conditionally, where only one of several writers may win), begins with a
checksum, and one that does not fit its checksum counts as absent until it does. Names of objects are relative to the URL.
"""

import contextlib
import errno
import hashlib
import math
import os
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, unquote, urlsplit

from ..errors import CocodcError, InputError, LinkError, short
from ..threads import side_by_side

T = TypeVar("T")

_MAGIC = b"hf_cocodc object 1\n"
_DIGEST_BYTES = 16
_TRIES = 8
"""With the waits between them they outlast a storage that is away for ten seconds, or for eight at least."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 4.0
_AT_ONCE = 8
"""Requests of one thread that are under way at once."""
_HUB_DELETES = 1000
"""Objects that the Hub deletes at one request."""
_REQUEST_S = 30.0
"""Seconds for one request, where the storage's library takes a time-out."""
_SETTLE_S = 3.0
"""Where a storage accepts two writers of one name, the last one has written after so many seconds."""
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "ssh": "ssh", "sftp": "ssh"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "max_concurrency": 1,  # more would ask for the size before each read
        "config_kwargs": {
            "connect_timeout": 10,
            "read_timeout": _REQUEST_S,
            "retries": {"max_attempts": 0},
        },
    },
    "ssh": {"timeout": 10, "banner_timeout": 10, "auth_timeout": 10},
}
_CONDITIONAL = ("s3", "s3a", "gs", "gcs")
"""Storages that create an object only if there is none of its name; else they say one of the following."""
_FILES = ("ssh", "sftp")
_TAKEN = ("FileExistsError", "PreconditionFailed", "ConditionalRequestConflict")
_PRICES = {"s3": ("S3 Standard", 5.0, 0.4), "gs": ("Google Cloud Storage Standard", 5.0, 0.4)}
"""List prices of November 2026 in dollars, in one region of the US, of a million requests: that write or list, and that read. It
costs nothing to delete. No other storage is known to charge for requests.
"""


_UNSUPPORTED = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)


class StorageError(LinkError, OSError):
    """The storage does not do what it is asked for. Whoever waits for a socket through it takes it as a failed one."""

    may_pass = True
    """Whether it may do so later as things are; not if its credentials, or its name, are wrong."""


class _Folder:
    """A directory of this machine, of a network file system. Its methods are those of each kind of storage, with one request.

    They raise FileNotFoundError if there is no such object, or any other error.
    """

    def __init__(self, path: str) -> None:
        self.root = Path(path)
        if not self.root.parent.is_dir():
            raise InputError(
                f"{short(path, 200)} cannot be a storage: there is no folder {short(self.root.parent, 200)} on this machine. "
                "Correct the URL, or mount the file system that all regions share."
            )

    def write(self, name: str, content: bytes) -> None:
        os.replace(self._written(name, content), self.root / name)

    def create(self, name: str, content: bytes) -> bool:
        """Write it only if there is none. Returns whether this content is there for good: the answer to an earlier try may have
        been lost.
        """
        new = self._written(name, content)
        try:
            os.link(new, self.root / name)
        except FileExistsError:
            return _is_there(self, name, content)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                raise PermissionError(error.errno, "this folder knows no hard links") from error
            raise
        finally:
            new.unlink()
        return True

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def delete(self, names: Sequence[str]) -> None:
        """Delete those that are there."""
        for name in names:
            (self.root / name).unlink(missing_ok=True)

    def names(self, folder: str) -> list[str]:
        return [name for name in os.listdir(self.root / folder) if not name.endswith(".new")]

    def _written(self, name: str, content: bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{secrets.token_hex(6)}.new")
        new.write_bytes(content)
        return new


class _Bucket:
    """What `fsspec` reaches."""

    def __init__(self, url: str, scheme: str) -> None:
        import fsspec

        try:
            options = _OPTIONS.get({"s3a": "s3", "sftp": "ssh"}.get(scheme, scheme), {})
            self._system, root = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
        except ImportError as error:
            extra = _EXTRAS.get(scheme)
            how = f"pip install 'hf_cocodc[{extra}]'" if extra else str(error)
            raise InputError(f"{url}: this machine lacks what reaches {scheme}://: {how}.") from error
        except ValueError as error:
            raise InputError(f"{url}: {short(error, 300)}.") from error
        if scheme in ("s3", "s3a"):
            self._system.retries = 1  # a request that fails is made again by `Storage`, which counts it
        self._root, self._scheme = root.rstrip("/"), scheme
        self._turn = (
            threading.Lock() if self._is_files else contextlib.nullcontext()
        )  # paramiko takes one request at a time

    def write(self, name: str, content: bytes) -> None:
        if not self._is_files:
            self._system.pipe_file(self._path(name), content)
            return
        with self._turn:
            self._system.ftp.posix_rename(self._written(name, content), self._path(name))

    def create(self, name: str, content: bytes) -> bool:
        path = self._path(name)
        if self._is_files:
            with self._turn:
                new = self._written(name, content)
                try:
                    self._system.ftp.rename(new, path)  # it does not overwrite
                    return True
                except OSError:
                    self._system.ftp.remove(new)
                    self._system.ftp.stat(path)
        elif self._scheme in _CONDITIONAL:
            try:
                self._system.pipe_file(path, content, mode="create")
                return True
            except Exception as error:
                if not any(sign in repr(error) for sign in _TAKEN):
                    raise
        else:
            return _create_and_look(self, name, content)
        return _is_there(self, name, content)

    def read(self, name: str) -> bytes:
        with self._turn:
            return bytes(self._system.cat_file(self._path(name)))

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with self._turn, contextlib.suppress(FileNotFoundError):
                self._system.rm_file(self._path(name))

    def names(self, folder: str) -> list[str]:
        with self._turn:
            self._system.invalidate_cache()
            listed = self._system.ls(self._path(folder), detail=False)
        names = (str(path).rstrip("/").rpartition("/")[2] for path in listed)
        return [name for name in names if not name.endswith(".new")]

    @property
    def _is_files(self) -> bool:
        return self._scheme in _FILES

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _written(self, name: str, content: bytes) -> str:
        path = self._path(name)
        new = f"{path}.{secrets.token_hex(6)}.new"
        try:
            self._system.pipe_file(new, content)
        except FileNotFoundError:
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._system.pipe_file(new, content)
        return new


class _HubBucket:
    """A bucket of the Hugging Face Hub, by its client. `HfFileSystem` answers from lists that it keeps, and shows bars.

    Raises InputError if the URL names none, or if the client knows no buckets.
    """

    def __init__(self, url: str) -> None:
        import huggingface_hub as hub

        place = hub.parse_hf_uri(url)
        if place.type != "bucket":
            raise InputError(
                f"{url} is a repository, where each write is a commit. Name a bucket: hf://buckets/NAME/BUCKET/run7."
            )
        hub.utils.disable_progress_bars()
        self._hub, self._api, self._bucket, self._root = hub, hub.HfApi(), place.id, place.path_in_repo

    def write(self, name: str, content: bytes) -> None:
        self.write_all({name: content})

    def write_all(self, contents: Mapping[str, bytes]) -> None:
        self._bound_requests()
        added: list[Any] = [(content, self._path(name)) for name, content in contents.items()]
        self._api.batch_bucket_files(self._bucket, add=added)

    def create(self, name: str, content: bytes) -> bool:
        return _create_and_look(self, name, content)

    def read(self, name: str) -> bytes:
        url = f"{self._api.endpoint}/buckets/{self._bucket}/resolve/{quote(self._path(name))}"
        answer = self._hub.get_session().get(
            url, headers=self._hub.utils.build_hf_headers(), timeout=_REQUEST_S
        )
        if answer.status_code == 404 and answer.headers.get("X-Error-Code") != "RepoNotFound":
            raise FileNotFoundError(name)
        self._hub.hf_raise_for_status(answer)
        return bytes(answer.content)

    def delete(self, names: Sequence[str]) -> None:
        paths = [self._path(name) for name in names]
        self._bound_requests()
        try:
            self._api.batch_bucket_files(self._bucket, delete=paths)
        except self._hub.errors.HfHubHTTPError:  # the Hub deletes the others, and minds one that is not there
            if any(self._api.get_bucket_paths_info(self._bucket, paths)):
                raise

    def names(self, folder: str) -> list[str]:
        begin = f"{self._path(folder)}/"
        # the Hub takes a prefix as text: others may begin like it
        found = (entry.path for entry in self._api.list_bucket_tree(self._bucket, begin[:-1]))
        return [path.removeprefix(begin) for path in found if path.startswith(begin)]

    def _bound_requests(self) -> None:
        """By itself, the client waits for an answer for ever. It makes a new session after a failure."""
        self._hub.get_session().timeout = _REQUEST_S

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name


_Backend: TypeAlias = _Folder | _Bucket | _HubBucket


def _is_there(backend: "_Backend", name: str, content: bytes) -> bool:
    """Whether an object has this content: an earlier try has written it, and its answer was lost."""
    with contextlib.suppress(FileNotFoundError):
        return backend.read(name) == content
    return False


def _create_and_look(backend: _Backend, name: str, content: bytes) -> bool:
    """Create an object where a storage accepts two writers of one name: the one whose content stays has won.

    Who writes has found the name free at most `_SETTLE_S` before. So nobody writes any more when a winner looks.
    """
    began = time.monotonic()
    with contextlib.suppress(FileNotFoundError):
        backend.read(name)
        return False
    backend.write(name, content)
    if time.monotonic() - began > _SETTLE_S:
        return False  # another one may have won meanwhile
    time.sleep(2 * _SETTLE_S)
    return backend.read(name) == content


def _backend_of(url: str) -> _Backend:
    """What reaches a URL. Raises InputError, or an error of a library."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return _Folder(unquote(parts.path))
    return _HubBucket(url) if parts.scheme == "hf" else _Bucket(url, parts.scheme)


class Storage:
    """The objects below a URL, which the first request opens. Any thread may call it. Raises InputError if no storage has such a
    URL, and with any request, if this machine cannot reach it.

    Attributes:
        requests: how many of each kind were made; `num_bytes`: that were written, and read.
        is_near: whether a request costs next to nothing.
        fastest_s: seconds of the fastest request so far.
        create_s: seconds after which whoever creates an object knows that it has, if that is much longer than a request.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(url)
        self.is_near = parts.scheme == "file"
        self.create_s = 0.0 if parts.scheme in ("file", *_CONDITIONAL, *_FILES) else 4 * _SETTLE_S
        if self.is_near and (parts.netloc not in ("", "localhost") or not parts.path):
            raise InputError(f"{url}: a folder is named as file:///PATH, with three slashes.")
        self.requests: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self._counting, self.fastest_s = threading.Lock(), math.inf

    @cached_property
    def _backend(self) -> _Backend:
        return _backend_of(self.url)

    @property
    def is_missing(self) -> bool:
        """Whether it is a folder that no region has made yet. Raises InputError if none can make it."""
        return self.is_near and not _Folder(unquote(urlsplit(self.url).path)).root.is_dir()

    def put(self, name: str, content: bytes) -> None:
        """Write an object, whole, in the place of an earlier one. Raises StorageError."""
        self._ask("write", name, lambda: self._backend.write(name, _enveloped(content)), len(content))

    def put_all(self, contents: Mapping[str, bytes]) -> None:
        """Write objects, each as `put` does: side by side, or with one request where that can be. Raises StorageError."""
        backend = self._backend
        if not isinstance(backend, _HubBucket):
            together([partial(self.put, *each) for each in contents.items()])
            return
        whole = {name: _enveloped(content) for name, content in contents.items()}
        num_bytes = sum(map(len, contents.values()))
        self._ask("write", next(iter(whole)), lambda: backend.write_all(whole), num_bytes)

    def create(self, name: str, content: bytes) -> bool:
        """Write an object of which there must be none. Returns whether it is this call's. Raises StorageError.

        No two callers get True for one name; where the storage lets several write, it may be that none does. The content must
        differ from that of any other caller.
        """
        whole = _enveloped(content)
        return self._ask("write", name, lambda: self._backend.create(name, whole), len(content))

    def get(self, name: str) -> bytes | None:
        """The content of an object; None if there is none, or it is not whole yet. Raises StorageError."""

        def read() -> bytes | None:
            try:
                return _content_of(self._backend.read(name))
            except FileNotFoundError:
                return None

        content = self._ask("read", name, read)
        self._count("read", 0, len(content or b""))
        return content

    def remove(self, *names: str) -> None:
        """Delete objects, if they are there, several side by side. Raises StorageError."""
        most = _HUB_DELETES if self.url.startswith("hf:") else 1
        portions = [names[at : at + most] for at in range(0, len(names), most)]
        deletions = [
            partial(self._ask, "delete", each[0], partial(self._backend.delete, each)) for each in portions
        ]
        together(deletions)

    def names(self, folder: str) -> list[str]:
        """The last parts of the names in a folder, sorted; a storage may be late to show new ones. Raises StorageError."""

        def look() -> list[str]:
            try:
                return sorted(self._backend.names(folder))
            except FileNotFoundError:
                return []

        return self._ask("list", folder, look)

    def _ask(self, kind: str, name: str, request: Callable[[], T], num_bytes: int = 0) -> T:
        """Make a request, again if it fails."""
        wait_s = _FIRST_WAIT_S
        for left in reversed(range(_TRIES)):
            self._count(kind, 1, num_bytes)
            began = time.monotonic()
            try:
                answer = request()
            except CocodcError:
                raise
            except Exception as error:  # each library has its own
                words, may_pass = _remedy(error)
                # one that has answered before may refuse for a moment what it allows
                if (
                    not left
                    or isinstance(error, PermissionError)
                    or not (may_pass or self.fastest_s < math.inf)
                ):
                    failure = StorageError(f"{self.url}: cannot {kind} {name!r}: {words}.")
                    failure.may_pass = may_pass
                    raise failure from error
            else:
                self.fastest_s = min(self.fastest_s, time.monotonic() - began)
                return answer
            time.sleep(wait_s * random.uniform(0.5, 1.0))  # others try again, too
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise AssertionError

    def _count(self, kind: str, requests: int, num_bytes: int) -> None:
        with self._counting:
            self.requests[kind] += requests
            self.num_bytes[kind] += num_bytes


def together(requests: Sequence[Callable[[], T]]) -> list[T]:
    """The results of requests, in order; several are made side by side."""
    return [requests[0]()] if len(requests) == 1 else side_by_side(requests, _AT_ONCE)


def price(url: str, requests: Mapping[str, float]) -> tuple[float, str] | None:
    """What requests cost in dollars, by their kinds (write, list, read, delete), and of which list price that is; None if a
    storage has none.
    """
    scheme = urlsplit(url).scheme
    found = _PRICES.get({"s3a": "s3", "gcs": "gs"}.get(scheme, scheme))
    if found is None:
        return None
    name, writes, reads = found
    dollars = (requests.get("write", 0) + requests.get("list", 0)) * writes + requests.get("read", 0) * reads
    return dollars / 1e6, f"{name}, list price of November 2026"


def _enveloped(content: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(content).digest()[:_DIGEST_BYTES] + content


def _content_of(whole: bytes) -> bytes | None:
    at = len(_MAGIC) + _DIGEST_BYTES
    if (
        whole.startswith(_MAGIC)
        and hashlib.sha256(whole[at:]).digest()[:_DIGEST_BYTES] == whole[len(_MAGIC) : at]
    ):
        return whole[at:]
    return None


def _remedy(error: BaseException) -> tuple[str, bool]:
    """What has failed, and what helps; and whether to wait may help, too."""
    said = short(getattr(error, "strerror", None) or error, 300).rstrip(".") or type(error).__name__
    # s3fs keeps the sentence of an error; its cause has the code
    heard = f"{type(error).__name__} {said} {error.__cause__ or ''}".lower()
    for signs, way_out in _REMEDIES:
        if any(sign in heard for sign in signs.split(", ")):
            return f"{said}. {way_out}", way_out == _FULL
    return f"{said}. Look at the network between this machine and the storage", True


_FULL = "The storage is full, or asks for fewer requests"
# words alone: a number, such as 404, may be part of a name or of a port
_REMEDIES = (
    (
        "hard links",
        "A mounted bucket is such a folder, and two of its mounts may both create one object. Name the bucket itself (such as "
        "hf://buckets/NAME/BUCKET/run7), or a folder of a network file system",
    ),
    ("(notimplemented)", "It knows no conditional writes (If-None-Match). Name another storage"),
    (
        "nosuchbucket, invalidbucketname, permanentredirect, authorizationheadermalformed, bucket does not exist, "
        "bucket not found, (404 not found), filenotfounderror",
        "Create the bucket, or correct the URL (with S3: the region or AWS_ENDPOINT_URL)",
    ),
    ("skew, expired, reasonable timeframe", "Correct this machine's clock, or make a new token"),
    (
        "quota, no space, storagefull, storage limit, payment required, oserror failure, slowdown, too many requests, "
        "rate limit, request rate",
        _FULL,
    ),
    (
        "permission, denied, forbidden, credential, unauthorized, authentication, read-only, profilenotfound, "
        "passwordrequired, tokennotfound",
        "Give this machine the credentials of the storage, with leave to write, read, list and delete there",
    ),
)
