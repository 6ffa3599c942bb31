"""Whatever a storage's library raises, the error names the URL, what was asked, and what helps."""

from __future__ import annotations

import errno
import importlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.net import storage
from hf_cocodc.net.storage import Storage, StorageError

from .storages import buckets, folder_url

BUCKET = "Create the bucket, or correct the URL"
CLOCK = "Correct this machine's clock, or make a new token"
FULL = "The storage is full, or asks for fewer requests"
CREDENTIALS = "Give this machine the credentials of the storage"
CONDITION = "It knows no conditional writes"
NETWORK = "Look at the network between this machine and the storage"


def s3(code: str, message: str) -> BaseException:
    """What s3fs makes of an answer of S3."""
    botocore, errors = needed("botocore.exceptions", "s3"), needed("s3fs.errors", "s3")
    answer = {"Error": {"Code": code, "Message": message}}
    error = errors.translate_boto_error(botocore.ClientError(answer, "PutObject"))
    assert isinstance(error, BaseException)
    return error


def boto(name: str, **words: str) -> Any:
    return getattr(needed("botocore.exceptions", "s3"), name)(**words)


def gcs(status: int, message: str) -> BaseException:
    """What gcsfs makes of an answer of Google's."""
    retry = needed("gcsfs.retry", "gcs")
    content = f'{{"error": {{"code": {status}, "message": "{message}"}}}}'
    try:
        retry.validate_response(status, content, "b/bucket/o/run7")
    except Exception as error:
        return error
    raise AssertionError(status)


def google(name: str, message: str) -> Any:
    return getattr(needed("google.auth.exceptions", "gcs"), name)(message)


def ssh(name: str, *words: Any) -> Any:
    return getattr(needed("paramiko.ssh_exception", "ssh"), name)(*words)


def hub(status: int, **headers: str) -> BaseException:
    """What the client makes of an answer of the Hub."""
    http = needed("huggingface_hub.utils._http")
    web = importlib.import_module(
        http.get_session().__class__.__module__.partition(".")[0]
    )  # httpx, or httpx2
    request = web.Request("POST", "https://huggingface.co/api/buckets/me/run7/batch")
    try:
        http.hf_raise_for_status(web.Response(status, headers=headers, request=request))
    except Exception as error:
        return error
    raise AssertionError(status)


def needed(module: str, extra: str = "") -> Any:
    package = module.partition(".")[0]
    how = f" (pip install 'hf_cocodc[{extra}]')" if extra else ""
    return pytest.importorskip(module, reason=f"no {package} here{how}")


def system(number: int) -> OSError:
    return OSError(number, os.strerror(number))


ERRORS: dict[str, tuple[Callable[[], BaseException], str]] = {
    "S3, no bucket": (lambda: s3("NoSuchBucket", "The specified bucket does not exist"), BUCKET),
    "S3, no name of a bucket": (
        lambda: s3("InvalidBucketName", "The specified bucket is not valid."),
        BUCKET,
    ),
    "S3, another region": (
        lambda: s3(
            "PermanentRedirect", "The bucket you are attempting to access must be addressed using ..."
        ),
        BUCKET,
    ),
    "S3, unknown key": (
        lambda: s3("InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."),
        CREDENTIALS,
    ),
    "S3, wrong key": (
        lambda: s3("SignatureDoesNotMatch", "The request signature we calculated does not match ..."),
        CREDENTIALS,
    ),
    "S3, no leave": (lambda: s3("AccessDenied", "Access Denied"), CREDENTIALS),
    "S3, a clock": (
        lambda: s3(
            "RequestTimeTooSkewed",
            "The difference between the request time and the current time is too large.",
        ),
        CLOCK,
    ),
    "S3, an old token": (lambda: s3("ExpiredToken", "The provided token has expired."), CLOCK),
    "S3, too fast": (lambda: s3("SlowDown", "Please reduce your request rate."), FULL),
    "S3, a quota": (lambda: s3("QuotaExceeded", "None"), FULL),
    "MinIO, full": (
        lambda: s3("XMinioStorageFull", "Storage backend has reached its minimum free drive threshold."),
        FULL,
    ),
    "S3, an old server": (
        lambda: s3("NotImplemented", "A header you provided implies functionality that is not implemented."),
        CONDITION,
    ),
    "S3, its own fault": (
        lambda: s3("InternalError", "We encountered an internal error. Please try again."),
        NETWORK,
    ),
    "S3, no credentials": (lambda: boto("NoCredentialsError"), CREDENTIALS),
    "S3, half credentials": (
        lambda: boto("PartialCredentialsError", provider="env", cred_var="AWS_SECRET_ACCESS_KEY"),
        CREDENTIALS,
    ),
    "S3, no profile": (lambda: boto("ProfileNotFound", profile="mine"), CREDENTIALS),
    "S3, no server": (
        lambda: boto("EndpointConnectionError", endpoint_url="http://127.0.0.1:40404"),
        NETWORK,
    ),
    "S3, no answer": (lambda: boto("ReadTimeoutError", endpoint_url="http://127.0.0.1:40312/401x"), NETWORK),
    "GCS, no bucket": (lambda: gcs(404, "The specified bucket does not exist."), BUCKET),
    "GCS, no leave": (lambda: gcs(403, "me does not have storage.objects.create access"), CREDENTIALS),
    "GCS, wrong token": (lambda: gcs(401, "Invalid Credentials"), CREDENTIALS),
    "GCS, too fast": (
        lambda: gcs(429, "The object exceeded the rate limit for object mutation operations"),
        FULL,
    ),
    "GCS, no credentials": (
        lambda: google("DefaultCredentialsError", "Your default credentials were not found."),
        CREDENTIALS,
    ),
    "GCS, a clock": (
        lambda: google(
            "RefreshError",
            "('invalid_grant: Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable timeframe.')",
        ),
        CLOCK,
    ),
    "SSH, no key": (lambda: ssh("AuthenticationException", "Authentication failed."), CREDENTIALS),
    "SSH, a key with a password": (
        lambda: ssh("PasswordRequiredException", "Private key file is encrypted"),
        CREDENTIALS,
    ),
    "SSH, no server": (
        lambda: ssh("NoValidConnectionsError", {("10.0.0.1", 22): ConnectionRefusedError(111, "refused")}),
        NETWORK,
    ),
    "SSH, no banner": (lambda: ssh("SSHException", "Error reading SSH protocol banner"), NETWORK),
    "SSH, no leave": (lambda: OSError(errno.EACCES, "Permission denied"), CREDENTIALS),
    "SSH, full": (lambda: OSError("Failure"), FULL),
    "Hub, no bucket": (lambda: hub(404, **{"X-Error-Code": "RepoNotFound"}), BUCKET),
    "Hub, no token": (lambda: hub(401), CREDENTIALS),
    "Hub, no leave": (lambda: hub(403, **{"X-Error-Message": "You have read access alone"}), CREDENTIALS),
    "Hub, too fast": (lambda: hub(429), FULL),
    "Hub, full": (lambda: hub(403, **{"X-Error-Message": "Private repository storage limit reached"}), FULL),
    "Hub, its own fault": (lambda: hub(500), NETWORK),
    "a folder, full": (lambda: system(errno.ENOSPC), FULL),
    "a folder, a quota": (lambda: system(errno.EDQUOT), FULL),
    "a folder, no leave": (lambda: system(errno.EACCES), CREDENTIALS),
    "a folder, not to be written": (lambda: system(errno.EROFS), CREDENTIALS),
    "a folder, its server is away": (lambda: system(errno.EIO), NETWORK),
    "a name": (lambda: socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), NETWORK),
    "nothing said": (lambda: TimeoutError(), NETWORK),
}


class Raising:
    """A backend whose requests all fail in one way."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fails(*words: Any) -> Any:
            raise self._error

        return fails


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_FIRST_WAIT_S", 0.001)


@pytest.fixture(name="objects")
def fixture_objects(tmp_path: Path) -> Storage:
    return Storage(folder_url(tmp_path))


@pytest.mark.parametrize("what", ERRORS)
def test_what_helps_is_named(what: str, objects: Storage) -> None:
    build, helps = ERRORS[what]
    objects._backend = Raising(build())  # type: ignore[assignment]
    with pytest.raises(StorageError) as found:
        objects.put("a/b", b"1")
    said = str(found.value)
    assert said.startswith(f"{objects.url}: cannot write 'a/b': ") and "\n" not in said
    assert [each for each in (BUCKET, CLOCK, FULL, CREDENTIALS, CONDITION, NETWORK) if each in said] == [
        helps
    ]


def test_each_request_says_what_was_asked(objects: Storage) -> None:
    objects._backend = Raising(system(errno.EIO))  # type: ignore[assignment]
    requests: dict[str, Callable[[], object]] = {
        "write 'a'": lambda: objects.put("a", b""),
        "write 'b'": lambda: objects.create("b", b""),
        "read 'c'": lambda: objects.get("c"),
        "delete 'd'": lambda: objects.remove("d"),
        "list 'e'": lambda: objects.names("e"),
    }
    for asked, request in requests.items():
        with pytest.raises(
            StorageError, match=f"^{objects.url}: cannot {asked}: Input/output error. {NETWORK}.$"
        ):
            request()


def test_a_storage_that_cannot_be_opened_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection by SSH is made before the first request."""

    def refuses(url: str) -> None:
        raise ERRORS["SSH, no key"][0]()

    monkeypatch.setattr(storage, "_backend_of", refuses)
    objects = Storage("ssh://me@host/run7")
    with pytest.raises(
        StorageError, match=f"cannot write 'a': Authentication failed. {CREDENTIALS}"
    ) as found:
        objects.put("a", b"")
    assert objects.requests["write"] == 1 and not found.value.may_pass


@pytest.mark.parametrize("what", ERRORS)
def test_what_waiting_cannot_mend_is_not_waited_for(what: str, objects: Storage) -> None:
    """Unless the storage has answered before: then it may refuse for a moment what it allows."""
    build, helps = ERRORS[what]
    error, backend = build(), objects._backend
    objects._backend = Raising(error)  # type: ignore[assignment]
    with pytest.raises(StorageError) as found:
        objects.put("a", b"1")
    assert found.value.may_pass == (helps in (FULL, NETWORK))
    is_at_once = not found.value.may_pass or isinstance(error, PermissionError)
    assert objects.requests["write"] == (1 if is_at_once else 8)
    objects._backend = backend
    objects.put("a", b"1")
    objects._backend = Raising(error)  # type: ignore[assignment]
    before = objects.requests["write"]
    with pytest.raises(StorageError):
        objects.put("a", b"1")
    assert objects.requests["write"] - before == (1 if isinstance(error, PermissionError) else 8)


def test_a_bucket_that_is_not_there_is_named_by_a_real_server() -> None:
    with buckets(), pytest.raises(StorageError, match=f"s3://nobody-has-this/run7.*{BUCKET}"):
        Storage("s3://nobody-has-this/run7").put("a", b"")
