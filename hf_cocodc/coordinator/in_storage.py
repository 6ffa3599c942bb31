"""Where the coordinator is found that serves in a storage (`standby`)."""

import socket
from secrets import token_hex

import msgspec

from ..net.mailbox import mailbox
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
    content = box.storage.get(SERVING)
    if content is None:
        raise ConnectionRefusedError("nobody serves there yet")
    try:
        serving = msgspec.json.decode(content, type=Serving)
    except msgspec.MsgspecError as error:
        raise StorageError(f"{url}: {SERVING!r} is nothing that this version writes ({error}).") from error
    name = f"call-{token_hex(8)}"
    box.storage.put(f"{calls_of(serving.process)}/{name}", b"")
    return box.meet(name, True, min(timeout_s, _ANSWER_S))  # whoever serves may be another one by then
