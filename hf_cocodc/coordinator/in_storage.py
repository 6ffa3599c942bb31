"""Where the coordinator is found that serves in a storage (`standby`)."""

import socket
from secrets import token_hex

import msgspec

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
    """Whether a process says that it serves as coordinator in a storage; it may have ended. Raises like `Mailbox`."""
    return mailbox(url).storage.get(SERVING) is not None


def call_in_storage(url: str, timeout_s: float) -> socket.socket:
    """A socket to the coordinator in a storage. Raises OSError if none answers in time."""
    box = mailbox(url)
    if box.serves_at is not None:
        box.called = box.process
        return socket.create_connection(("127.0.0.1", box.serves_at))
    process = _serving(box)

    def look() -> None:
        if _serving(box) != process:
            raise ConnectionRefusedError("another one serves by now")

    name = f"call-{token_hex(8)}"
    box.storage.put(f"{calls_of(process)}/{name}", b"")
    connection = box.meet(name, True, min(timeout_s, _ANSWER_S), look)
    box.called = process
    return connection


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
