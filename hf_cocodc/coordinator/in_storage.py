"""Where the coordinator is found that serves in a storage (`standby`)."""

import contextlib
import socket
import threading
from secrets import token_hex

import msgspec

from ..errors import InputError, short
from ..net.mailbox import Mailbox, has_died, mailbox
from ..net.storage import StorageError

_ANSWER_S = 10.0
SERVING = "coordinator"
"""The object that says who serves."""


class Serving(msgspec.Struct, frozen=True):
    """Who serves: a process with a mailbox. `count` moves."""

    process: str
    count: int


def calls_of(process: str) -> str:
    """The folder of those who call a process that serves: an object for each, with the name under which both meet."""
    return f"calls/{process}"


def is_served(url: str) -> bool:
    """Whether a process says that it serves as coordinator in a storage; it may have ended. Raises like `Mailbox.begin`."""
    return mailbox(url).storage.get(SERVING) is not None


def refuse_missing(url: str) -> None:
    """Raise InputError if a storage is a folder that is not there: no region has ever begun there."""
    if mailbox(url).storage.is_missing:
        raise InputError(
            f"no run is in {short(url, 200)}: this machine has no such folder. Correct the URL, or mount the file system that "
            "all regions share."
        )


def call_in_storage(url: str, timeout_s: float) -> socket.socket:
    """A socket to the coordinator in a storage; nothing is written if none serves. Raises OSError if none answers in time."""
    box = mailbox(url)
    if box.serves_at is not None:
        box.called = box.process
        return socket.create_connection(("127.0.0.1", box.serves_at))
    process = _serving(box)

    def look() -> None:
        if _serving(box) != process:
            raise ConnectionRefusedError("another one serves by now")

    box.begin()
    name = f"call-{token_hex(8)}"
    threading.Thread(target=_call, args=(box, f"{calls_of(process)}/{name}"), daemon=True).start()
    connection = box.meet(name, True, min(timeout_s, _ANSWER_S), look)
    box.called = process
    return connection


def _call(box: Mailbox, name: str) -> None:
    with contextlib.suppress(StorageError):  # then nobody answers
        box.storage.put(name, b"")


def _serving(box: Mailbox) -> str:
    """The process that serves. Raises OSError if there is none, as far as that is known."""
    content = box.storage.get(SERVING)
    if content is None:
        raise ConnectionRefusedError("nobody serves there yet")
    try:
        process = msgspec.json.decode(content, type=Serving).process
    except msgspec.MsgspecError as error:
        raise StorageError(
            f"{box.storage.url}: {SERVING!r} is nothing that this version writes ({error})."
        ) from error
    if has_died(process):
        raise ConnectionRefusedError("the process that served has died")
    return process
