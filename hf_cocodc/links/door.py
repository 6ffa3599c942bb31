"""gloo's listening socket answers nobody, except while connections are being made.

gloo takes whoever connects first and says a small number. It keeps the connections of all others for ever, and if the process
may open no more files, it ends the process. On Linux a filter on the listening socket drops every packet for it; established
connections have sockets of their own. Elsewhere the socket stays as it is.
"""

import contextlib
import ctypes
import logging
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_BPF_RET = 0x06
_OPEN_FILES = Path("/proc/self/fd")
_libc = ctypes.CDLL(None, use_errno=True)
_making = threading.Lock()


class Door:
    """Opens and shuts a listening socket. It is shut at first. Any thread may use it.

    Args:
        listening: file number of the socket, of which the door keeps a copy; None for a door that is always open.
    """

    def __init__(self, listening: int | None) -> None:
        self._num_open = 0
        self._lock = threading.Lock()
        # the filter in the kernel's form: one instruction, "take 0 bytes of the packet"
        self._drop_all = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RET, 0, 0, 0))
        self._copy = None if listening is None else os.dup(listening)
        self._release = (
            contextlib.nullcontext if self._copy is None else weakref.finalize(self, os.close, self._copy)
        )
        try:
            self._filter(_SO_ATTACH_FILTER)
        except OSError as error:
            logger.debug("the listening socket of gloo stays open: %s", error)
            self.close()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Inside the block others can connect; also if it is open elsewhere."""
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._filter(_SO_DETACH_FILTER)
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                if not self._num_open:
                    self._filter(_SO_ATTACH_FILTER)

    def close(self) -> None:
        """Let go of the socket; it stays as it is."""
        with self._lock:
            self._copy = None
            self._release()

    def _filter(self, option: int) -> None:
        if self._copy is not None:
            program = struct.pack("HL", 1, ctypes.addressof(self._drop_all))
            if _libc.setsockopt(self._copy, socket.SOL_SOCKET, option, program, len(program)):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def with_door(make: Callable[[], T]) -> tuple[T, Door]:
    """What `make` returns, and the door of the one socket on which it has begun to listen."""
    with _making:
        before = _listening()
        made = make()
        new = [number for inode, number in _listening().items() if inode not in before]
        if len(new) != 1:  # another thread has begun to listen, too
            logger.debug("the listening socket of gloo stays open: %d may be it", len(new))
        return made, Door(new[0] if len(new) == 1 else None)


def _listening() -> dict[str, int]:
    """The listening sockets of this process, by their inodes."""
    found = {}
    for path in _OPEN_FILES.iterdir() if _OPEN_FILES.is_dir() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            inode, number = os.readlink(path), int(path.name)
            if _listens(number):
                found[inode] = number
    return found


def _listens(number: int) -> bool:
    """Whether a file is a listening socket. A `socket.socket` of it could change it: it sets the default time-out."""
    answer, size = ctypes.c_int(), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
    asked = socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(answer), ctypes.byref(size)
    return not _libc.getsockopt(number, *asked) and bool(answer.value)
