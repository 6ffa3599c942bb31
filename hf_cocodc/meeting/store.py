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

from ..errors import InputError, MeetingError

T = TypeVar("T")

CONNECT_S = 10.0


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


def connect_store(address: str, timeout_s: float) -> dist.TCPStore:
    """Connect to the store at HOST:PORT.

    Raises:
        InputError: the host name is unknown.
        MeetingError: no store answers there within `timeout_s` (10 s at most).
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    deadline = time.monotonic() + min(timeout_s, CONNECT_S)
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=max(deadline - time.monotonic(), 1.0)).close()
            break
        except socket.gaierror as error:
            raise InputError(
                f"the store's host {host!r} has no address ({error.strerror}). Correct regions.store={address!r}."
            ) from error
        except OSError as error:
            if time.monotonic() + 0.5 > deadline:
                raise MeetingError(
                    f"no store answers at {address} ({error.strerror or error}). Start one there with `hf-cocodc store "
                    f"--host {host} --port {port}`, and check that no firewall keeps a region from it."
                ) from error
            time.sleep(0.5)
    # TCPStore would wait for ever for another kind of server to answer
    answer: queue.SimpleQueue[dist.TCPStore | RuntimeError] = queue.SimpleQueue()

    def connect() -> None:
        try:
            answer.put(dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s)))
        except RuntimeError as error:
            answer.put(error)

    threading.Thread(target=connect, name="hf_cocodc-connect", daemon=True).start()
    try:
        found = answer.get(timeout=min(timeout_s, CONNECT_S))
    except queue.Empty:
        found = RuntimeError("it does not answer as a store does")
    if isinstance(found, RuntimeError):
        raise MeetingError(
            f"what listens at {address} is not a store ({str(found).splitlines()[0][:200]}). Correct the address "
            "(regions.store, --store), or start a store there with `hf-cocodc store`."
        )
    return found


def if_answered(call: Callable[[], T], timeout_s: float) -> T | None:
    """What `call` asks a store; None if the store has ended, or does not answer in time.

    A store whose process is suspended or whose network is gone would keep the caller waiting for ever.
    """
    answers: list[T] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(call())

    thread = threading.Thread(target=ask, name="hf_cocodc-ask", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else None
