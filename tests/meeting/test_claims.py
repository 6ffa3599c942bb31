"""Newcomers without a number claim one."""

from __future__ import annotations

import threading

import pytest

from hf_cocodc.errors import InputError
from hf_cocodc.meeting import claims
from hf_cocodc.meeting.store import SteadyStore, serve_store
from tests.meeting.waiting import eventually


def test_newcomers_at_the_same_time_get_different_numbers() -> None:
    """The lowest that no member has; each its own."""
    server = serve_store()
    found: list[claims.Claim] = []

    def enter() -> None:
        found.append(claims.claim(SteadyStore(f"127.0.0.1:{server.port}"), "a run", 8, lambda: [0, 2]))

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.region for each in found) == [1, 3, 4, 5]
    other = claims.claim(SteadyStore(f"127.0.0.1:{server.port}"), "another run", 8, list)
    assert other.region == 0, "runs at one store do not share their numbers"
    for each in [*found, other]:
        each.close()


def test_a_number_that_was_given_back_or_left_is_claimed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once if its holder closes; after a while if it has died; not while it lives."""
    monkeypatch.setattr(claims, "RENEW_S", 0.05)
    monkeypatch.setattr(claims, "STALE_S", 0.5)
    server = serve_store()
    store = SteadyStore(f"127.0.0.1:{server.port}")
    first = claims.claim(store, "run", 1, list)
    with pytest.raises(InputError, match=r"as many regions as it may have \(regions.max=1\)"):
        claims.claim(store, "run", 1, list, timeout_s=1.5)
    first._closed.set()  # as if its process had been killed
    second = claims.claim(store, "run", 1, list, timeout_s=30)
    assert second.region == 0
    second.close()
    third = claims.claim(store, "run", 1, list, timeout_s=0)
    assert third.region == 0
    store.ask(lambda found: found.set("hf_cocodc/claim/run/0", b"\xff"))
    eventually(lambda: store.peek("hf_cocodc/claim/run/0") == b"\xff" and third._thread.is_alive())
    fourth = claims.claim(store, "run", 1, list, timeout_s=30)
    assert fourth.region == 0, "a claim that nobody renews"
    third.close()
    fourth.close()
