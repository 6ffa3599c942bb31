"""The store: a TCP key-value server that every region reaches. Regions meet there and write why they left."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ..errors import InputError, LinkError, MeetingError, reason
from ..threads import NativeThread
from .addresses import is_loopback
from .sealed import sealed
from .secret import Keys

T = TypeVar("T")

CONNECT_S = 10.0
LOOKUP_S = 15.0
"""How much longer a new connection may take: torch first asks the name server for the name of the store's address, which it shows
in its log. If a question is lost, it is asked again after 5 s."""
_RARELY_S = 300.0


class StoreAwayError(LinkError):
    """A store does not answer now. It may come back."""


def serve_store(host: str = "127.0.0.1", port: int = 0) -> dist.TCPStore:
    """Start a store in this process, for as long as the returned object exists. Port 0 takes a free port (`.port`).

    Raises:
        InputError: this machine cannot listen on the address.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise InputError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another --host or --port."
        ) from error
    bound, port = listener.getsockname()[:2]
    # the object connects to its own store; where it listens on all addresses, the loopback's is one of them
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound)
    return dist.TCPStore(
        reached, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def connect_store(address: str, timeout_s: float, keys: Keys | None = None) -> dist.Store:
    """Connect to the store at HOST:PORT; sealed, if there are keys.

    Raises:
        InputError: the host name is unknown.
        MeetingError: nothing listens there for `timeout_s` (10 s at most), or it does not answer as a store does.
    """
    host, port = _parts(address)
    deadline = time.monotonic() + min(timeout_s, CONNECT_S)
    while True:
        try:
            socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 1.0)).close()
            break
        except socket.gaierror as error:
            raise InputError(
                f"the store's host {host!r} has no address ({error.strerror}). Correct regions.store={address!r}."
            ) from error
        except OSError as error:
            if time.monotonic() + 0.5 > deadline:
                secret = "" if is_loopback(host) else " --secret-file FILE"
                raise MeetingError(
                    f"no store answers at {address} ({error.strerror or error}). Start one there with `hf-cocodc store "
                    f"--host {host} --port {port}{secret}`, and check that no firewall keeps a region from it."
                ) from error
            time.sleep(0.5)
    # TCPStore would wait for ever for another kind of server to answer
    answer: queue.SimpleQueue[dist.TCPStore | RuntimeError] = queue.SimpleQueue()

    def connect() -> None:
        try:
            answer.put(_client(host, port, timeout_s))
        except RuntimeError as error:
            answer.put(error)

    NativeThread(connect, "hf_cocodc-connect").start()
    try:
        found = answer.get(timeout=min(timeout_s, CONNECT_S) + LOOKUP_S)
    except queue.Empty:
        found = RuntimeError("it does not answer as a store does")
    if isinstance(found, RuntimeError):
        raise MeetingError(
            f"what listens at {address} is not a store ({str(found).splitlines()[0][:200]}). Correct the address "
            f"(regions.store, --store), or start a store there with `hf-cocodc store`. If it is one: {_unnamed(host)}"
        )
    return sealed(found, keys)


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _client(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A connection whose calls end in `timeout_s`."""
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s + LOOKUP_S))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def line_of_hosts(host: str) -> str:
    """The line for /etc/hosts with which no name server is asked for the name of the store's address."""
    try:
        number = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        number = host
    return f"{number if ':' in number else f'::ffff:{number}'} store"


def _unnamed(host: str) -> str:
    return (
        "before it connects, torch asks this machine's name server for the name of the store's address; if no answer comes, put "
        f"the line '{line_of_hosts(host)}' into /etc/hosts."
    )


def peek(store: dist.Store, key: str) -> bytes:
    """The value of `key`, or nothing if there is none. `get` would wait for a key that another process deletes meanwhile."""
    nothing = "\0"
    value = store.compare_set(key, nothing, nothing)
    return b"" if value == nothing.encode() else value


class SteadyStore:
    """A store that may be away for a while: every call ends in time, and connects anew if it must. For any thread.

    Each call runs in a thread of its own, because calls to a store whose process is suspended ignore their time-out. A call
    that was given up may still be carried out later, once the store answers again.

    Args:
        address: HOST:PORT.
        timeout_s: seconds that a call waits for an answer; if it connects and something listens, `LOOKUP_S` more.
        keys: of a sealed store.
    """

    def __init__(self, address: str, timeout_s: float = 3.0, keys: Keys | None = None) -> None:
        self.address, self.timeout_s = address, timeout_s
        self._keys = keys
        self._idle: list[dist.Store] = []  # connections that no call uses now
        self._num_hanging = 0
        self._again_at = 0.0
        self._lock = threading.Lock()

    def peek(self, key: str) -> bytes:
        """The value of `key`; nothing if there is none. Raises StoreAwayError, as all calls do."""
        return self.ask(lambda store: peek(store, key))

    def set(self, key: str, value: str) -> None:
        """Returns when the store has the value."""

        def call(store: dist.Store) -> None:
            store.set(key, value)
            store.check([key])  # `set` alone awaits no answer

        self.ask(call)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replace the value if it is as expected ("": there is none); returns what the store then holds."""
        return self.ask(lambda store: store.compare_set(key, expected, desired))  # type: ignore[arg-type]

    def add(self, key: str, amount: int) -> int:
        """Add to a number; returns the sum."""
        return self.ask(lambda store: store.add(key, amount))

    def delete_key(self, key: str) -> bool:
        """Forget a key; returns whether there was one."""
        return self.ask(lambda store: store.delete_key(key))

    def ask(self, call: Callable[[dist.Store], T]) -> T:
        """What `call` returns for a connection to the store.

        Raises:
            StoreAwayError: no answer came in time, or the store has ended.
        """
        with self._lock:
            if self._num_hanging and time.monotonic() < self._again_at:
                raise StoreAwayError(f"the store at {self.address} does not answer.")
            connection = self._idle.pop() if self._idle else None
        patience_s = self.timeout_s + (0.0 if connection else LOOKUP_S)
        answers: queue.SimpleQueue[tuple[T] | BaseException] = queue.SimpleQueue()
        hangs = False

        def run() -> None:
            answer: tuple[T] | BaseException
            try:
                store = connection or self._connect()
                answer = (call(store),)
            except (RuntimeError, ValueError, OSError) as error:
                answer = error
            with self._lock:
                if not isinstance(answer, BaseException):
                    self._idle.append(store)
                self._num_hanging -= hangs
                answers.put(answer)

        NativeThread(run, "hf_cocodc-ask").start()
        with contextlib.suppress(queue.Empty):
            return self._value(answers.get(timeout=patience_s))
        with self._lock:
            if not answers.empty():  # just now
                return self._value(answers.get())
            hangs = True
            self._num_hanging += 1
            # every call that hangs keeps a thread: they become rare
            self._again_at = time.monotonic() + min(2.0**self._num_hanging, _RARELY_S)
        host = _parts(self.address)[0]
        hint = "" if connection else f" Something listens there. If the store is well: {_unnamed(host)}"
        raise StoreAwayError(f"the store at {self.address} does not answer.{hint}")

    def _connect(self) -> dist.Store:
        host, port = _parts(self.address)
        socket.create_connection((host, port), timeout=self.timeout_s).close()
        return sealed(_client(host, port, self.timeout_s), self._keys)

    def _value(self, answer: "tuple[T] | BaseException") -> T:
        if not isinstance(answer, BaseException):
            return answer[0]
        self._idle.clear()  # the other connections lead to the same store
        raise StoreAwayError(f"the store at {self.address} has gone ({reason(answer)}).") from answer
