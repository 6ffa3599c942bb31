"""Where the coordinator is found that serves in a storage (`standby`)."""

import contextlib
import socket
import threading
from secrets import token_bytes, token_hex

from ..errors import InputError, short
from ..net.mailbox import Mailbox, has_died, mailbox
from ..net.storage import Storage, StorageError

_ANSWER_S = 10.0
SERVING = "coordinator"
"""The object that names the process that serves."""
KNOCK = "knock"


def calls_of(process: str) -> str:
    """The folder of those who call a process that serves: an object for each, with the name under which both meet; and one,
    `KNOCK`, that differs once another one has called. To read it costs less than to list all.
    """
    return f"calls/{process}"


def serving_in(storage: Storage) -> str:
    """The process that says that it serves; empty if none does. It may have ended. Raises StorageError."""
    return (storage.get(SERVING) or b"").decode(errors="replace")


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
    process, name = _serving(box), f"call-{token_hex(8)}"
    calls = calls_of(process)

    def call() -> None:
        with contextlib.suppress(StorageError):  # then nobody answers
            box.storage.put(f"{calls}/{name}", b"")
            knock()

    def knock() -> None:
        box.storage.put(f"{calls}/{KNOCK}", token_bytes(8))

    def look() -> None:
        if _serving(box) != process:
            raise ConnectionRefusedError("another one serves by now")
        knock()  # a list may have been late

    box.begin()
    threading.Thread(target=call, daemon=True).start()
    connection = box.meet(name, True, min(timeout_s, _ANSWER_S), look)
    box.called = process
    return connection


def _serving(box: Mailbox) -> str:
    """The process that serves. Raises OSError if there is none, as far as that is known."""
    process = serving_in(box.storage)
    if not process:
        raise ConnectionRefusedError("nobody serves there yet")
    if has_died(process):
        raise ConnectionRefusedError("the process that served has died")
    return process
