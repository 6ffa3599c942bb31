"""A newcomer without a number claims the lowest that is free, before its process starts: folder and data depend on it.

A claim is a value at the store that its holder renews every second. Another newcomer takes a claim over when it has not been
renewed for `STALE_S`, by its own clock: no clocks of two machines are compared.
"""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Collection
from urllib.parse import quote

from ..errors import InputError
from .store import SteadyStore, StoreAwayError

RENEW_S = 1.0
STALE_S = 5.0


class Claim:
    """A region's number that nobody else claims while this object is open.

    Args:
        store: where the members of the run are.
        key: of the claim.
        region: the number.
    """

    def __init__(self, store: SteadyStore, key: str, region: int, token: str) -> None:
        self.region = region
        self._store, self._key, self._token = store, key, token
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="hf_cocodc-claim", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the number back; call it when the newcomer has ended. Where the store is away, the claim ends by itself."""
        self._closed.set()
        self._thread.join()
        with contextlib.suppress(StoreAwayError):
            self._store.delete_key(self._key)

    def _renew(self) -> None:
        count = 0
        while not self._closed.wait(RENEW_S):
            count += 1
            with contextlib.suppress(StoreAwayError):
                held = self._store.peek(self._key)
                if not held or _holder(held) == self._token:  # of another holder it stays as it is
                    self._store.compare_set(self._key, held, f"{self._token} {count}")


def claim(
    store: SteadyStore,
    run: str,
    most: int,
    taken: Callable[[], Collection[int]],
    timeout_s: float = 3 * STALE_S,
) -> Claim:
    """Claim the lowest number that no member and no other newcomer has.

    Args:
        store: where the members of the run are.
        run: its name.
        most: regions are numbered 0 .. most - 1.
        taken: returns the numbers of the members.
        timeout_s: how long to wait for a number.

    Raises:
        InputError: all numbers are taken.
        StoreAwayError: the store does not answer.
    """
    token = uuid.uuid4().hex
    seen: dict[int, tuple[bytes, float]] = {}
    deadline = time.monotonic() + timeout_s
    while True:
        members = taken()
        for region in range(most):
            key = f"hf_cocodc/claim/{quote(run)}/{region}"
            if region in members:
                continue
            held = store.compare_set(key, "", f"{token} 0")
            if _holder(held) != token:
                if held != seen.get(region, (b"", 0.0))[0]:
                    seen[region] = (held, time.monotonic())
                if time.monotonic() - seen[region][1] < STALE_S:
                    continue
                held = store.compare_set(key, held, f"{token} 0")
            if _holder(held) == token:
                return Claim(store, key, region, token)
        if time.monotonic() > deadline:
            raise InputError(
                f"run {run!r} has as many regions as it may have (regions.max={most}). Start this one again when another has "
                "left, or raise regions.max when you start the run anew."
            )
        time.sleep(RENEW_S)


def _holder(held: bytes) -> str:
    """Whose claim it is. What nobody of ours has written is of a holder that does not renew it."""
    return held.partition(b" ")[0].decode(errors="replace")
