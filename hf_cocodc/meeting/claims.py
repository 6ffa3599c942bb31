"""A newcomer without a number claims the lowest that is free, before its process starts: folder and data depend on it.

A claim is a value at the store that its holder renews every second. Another newcomer takes a claim over when it has not been
renewed for `STALE_S`, by its own clock: no clocks of two machines are compared.
"""

import functools
import threading
import time
import uuid
from collections.abc import Callable, Collection
from urllib.parse import quote

import torch.distributed as dist

from ..errors import InputError
from .store import if_answered

RENEW_S = 1.0
STALE_S = 5.0


class Claim:
    """A region's number that nobody else claims while this object is open.

    Args:
        store: where the members of the run are.
        key: of the claim.
        region: the number.
    """

    def __init__(self, store: dist.Store, key: str, region: int, token: str) -> None:
        self.region = region
        self._store, self._key, self._token = store, key, token
        self._closed = threading.Event()
        threading.Thread(target=self._renew, name="hf_cocodc-claim", daemon=True).start()

    def close(self) -> None:
        """Give the number back; call it when the newcomer has ended. A store that does not answer is left alone."""
        self._closed.set()
        if_answered(lambda: self._store.delete_key(self._key), RENEW_S)

    def _renew(self) -> None:
        count = 0
        while not self._closed.wait(RENEW_S):
            count += 1
            if_answered(functools.partial(self._store.compare_set, self._key, *self._values(count)), STALE_S)

    def _values(self, count: int) -> tuple[str, str]:
        """What is there if nobody has taken the claim over, and what shall be there."""
        return f"{self._token} {count - 1}", f"{self._token} {count}"


def claim(
    store: dist.Store,
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
    """
    token = uuid.uuid4().hex
    seen: dict[int, tuple[str, float]] = {}
    deadline = time.monotonic() + timeout_s
    while True:
        members = taken()
        for region in range(most):
            key = f"hf_cocodc/claim/{quote(run)}/{region}"
            if region in members:
                continue
            held = store.compare_set(key, "", f"{token} 0").decode()
            if held.split(" ")[0] != token:
                if held != seen.get(region, ("", 0.0))[0]:
                    seen[region] = (held, time.monotonic())
                if time.monotonic() - seen[region][1] < STALE_S:
                    continue
                held = store.compare_set(key, held, f"{token} 0").decode()
            if held.split(" ")[0] == token:
                return Claim(store, key, region, token)
        if time.monotonic() > deadline:
            raise InputError(
                f"run {run!r} has as many regions as it may have (regions.max={most}). Start this one again when another has "
                "left, or raise regions.max when you start the run anew."
            )
        time.sleep(RENEW_S)
