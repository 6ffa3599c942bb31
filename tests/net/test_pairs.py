"""Pairs with a secret: what is sealed arrives as it was sent, or not at all."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from hf_cocodc.errors import LinkError
from hf_cocodc.link import calls
from hf_cocodc.net.keys import Altered, Keys
from hf_cocodc.net.pairs import Pair
from hf_cocodc.net.reaching import Found, Search
from hf_cocodc.net.view import UnderWay, View
from hf_cocodc.net.wire import Wire
from tests.link.memory import at_once, connect
from tests.secret import secret

KEYS = Keys.from_secret(secret("a long secret of ours"))


def two_wires(**settings: object) -> list[Wire]:
    return [Wire(region, 2, timeout_s=20.0, **settings) for region in range(2)]  # type: ignore[arg-type]


def exchanged(views: list[View], payloads: list[torch.Tensor], tag: int = 0) -> list[torch.Tensor]:
    """What each of two views receives from the other."""

    def talk(view: View, payload: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        pending = [view.receive(1 - view.region, buffer, tag, 1, "a piece")]
        pending.append(view.send(1 - view.region, payload, tag, 1, "a piece"))
        view.wait(pending, "a piece")
        return buffer

    with ThreadPoolExecutor(2) as pool:
        buffers = [torch.zeros_like(payload) for payload in reversed(payloads)]
        return list(pool.map(talk, views, payloads, buffers))


PAYLOADS = [torch.arange(100_000).to(torch.uint8), torch.arange(100_000).flip(0).to(torch.uint8)]


@pytest.mark.parametrize("keys", [None, KEYS], ids=["open", "sealed"])
def test_messages_arrive_as_they_were_sent(keys: Keys | None) -> None:
    wires = two_wires(keys=keys)
    connect(*wires)
    got = exchanged([wire.view([0, 1], 1) for wire in wires], PAYLOADS)
    assert torch.equal(got[0], PAYLOADS[1]) and torch.equal(got[1], PAYLOADS[0])
    for wire in wires:
        wire.close()


def test_who_has_another_secret_does_not_connect() -> None:
    wires = [Wire(0, 1, timeout_s=1.0, keys=KEYS), Wire(1, 1, timeout_s=1.0, keys=KEYS.of("other"))]
    with pytest.raises(LinkError, match="region 0.* and region 1 do not reach each other"):
        connect(*wires)
    for wire in wires:
        wire.close()


def test_the_keys_of_a_pair_are_made_anew_each_time() -> None:
    """Also for the same two processes of the same run."""
    opens, sealed = [], []
    for _ in range(2):
        wires = two_wires(keys=KEYS)
        connect(*wires)
        for one, other in ((0, 1), (1, 0)):
            ciphers_for = wires[one]._pairs[other]._ciphers_for(0)
            assert ciphers_for is not None
            sealed.append(ciphers_for(b"", b"")[0].seal(b"x"))
            opens.append(lambda message, make=ciphers_for: make(b"", b"")[1].open(message))
        for wire in wires:
            wire.close()
    for end, open_it in enumerate(opens):
        for other, message in enumerate(sealed):
            if other == end ^ 1:
                assert open_it(message) == b"x"
            else:
                with pytest.raises(Altered):
                    open_it(message)


@pytest.mark.parametrize("keys", [None, KEYS], ids=["open", "secret"])
def test_no_token_is_used_again(keys: Keys | None) -> None:
    """Neither by the same two processes that meet again, nor by one that comes in the place of another: who has heard one cuts
    no later pair. The connections of the pair before end without a trace in the new one."""

    def tokens(wire: Wire) -> set[bytes]:
        [pair] = wire._pairs.values()
        return {pair._first_token(0), pair._first_token(1), pair._token, pair._resumes}

    wires = two_wires(keys=keys)
    connect(*wires)
    first, found = wires[0]._pairs[1], [tokens(wire) for wire in wires]
    assert found[0] == found[1] and len(found[0]) == 4
    connect(*wires)
    again = tokens(wires[0])
    assert again & found[0] == {first._first_token(0), first._first_token(1)}, "said before they have met"
    called = next(wire for wire in wires if next(iter(wire._pairs.values()))._called is None)
    assert set(called._port._expected) == again - found[0]
    got = exchanged([wire.view([0, 1], 1) for wire in wires], PAYLOADS)
    assert torch.equal(got[0], PAYLOADS[1]) and torch.equal(got[1], PAYLOADS[0])
    restarted = Wire(1, 2, timeout_s=20.0, keys=keys)
    connect(wires[0], restarted)
    assert not tokens(restarted) & (found[0] | again)
    for wire in (*wires, restarted):
        wire.close()


def test_a_pair_that_is_closed_while_it_meets_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another pair has failed: whoever meets in a thread of its own does not know that yet."""
    wires = two_wires()
    pairs = [
        here._pair(there.region, there.whereabouts, "pair")
        for here, there in zip(wires, wires[::-1], strict=True)
    ]
    run = Search.run

    def late(search: Search, *about: Any) -> Found:
        found = run(search, *about)
        next(pair for pair in pairs if pair._search is search).close()
        return found

    monkeypatch.setattr(Search, "run", late)

    def fails(pair: Pair) -> None:
        with pytest.raises(LinkError, match="the connection is closed"):
            pair.meet()

    at_once(*(partial(fails, pair) for pair in pairs))
    for wire, pair in zip(wires, pairs, strict=True):
        assert not wire._port._expected and pair.lost_at < math.inf
        wire.close()


@pytest.mark.parametrize("keys", [None, KEYS], ids=["open", "encrypted"])
def test_a_broadcast_takes_no_memory_for_all_of_it(
    keys: Keys | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some pieces are under way, not all of a model."""
    monkeypatch.setattr(calls, "_PIECE_BYTES", 1000)
    wires = two_wires(keys=keys)
    connect(*wires)
    begun: list[UnderWay] = []
    under_way: list[int] = []
    start = View._start

    def counted(view: View, *given: object) -> object:
        one = start(view, *given)  # type: ignore[arg-type]
        begun.append(one)
        under_way.append(sum(not each.operation._ended.is_set() for each in list(begun)))
        return one

    monkeypatch.setattr(View, "_start", counted)
    raws = [torch.arange(200_500).to(torch.uint8), torch.zeros(200_500, dtype=torch.uint8)]
    with ThreadPoolExecutor(2) as pool:
        views = [wire.view([0, 1], 1) for wire in wires]
        told = [calls.BroadcastCall(view, raw, 0, "weights") for view, raw in zip(views, raws, strict=True)]
        list(pool.map(calls.BroadcastCall.run, told))
    assert torch.equal(*raws)
    assert [call.bytes_sent for call in told] == [200_500, 0]
    assert max(under_way) <= 2 * calls._MOST_UNDER_WAY
    for wire in wires:
        wire.close()
