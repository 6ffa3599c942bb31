"""Three members, two faults, and every order in which messages arrive, to a depth: no order breaks what must hold."""

import pytest

from .orders import Action, Search, after, first_state

DEPTH = 5
"""Actions, all orders of them, after all members have made their first call. Every fifth state then goes on to its end."""
SLOW_DEPTH = 6

PAIRS: list[tuple[Action, Action]] = [
    (("kill", 0), ("kill", 1)),
    (("kill", 0), ("leave", 1)),
    (("kill", 0), ("split", 0, 1)),
    (("kill", 0), ("split", 1, 2)),
    (("kill", 0), ("away", 0)),
    (("kill", 0), ("away", 1)),
    (("kill", 0), ("coordinator", True)),
    (("kill", 0), ("coordinator", False)),
    (("leave", 0), ("leave", 1)),
    (("leave", 0), ("split", 0, 1)),
    (("leave", 0), ("split", 1, 2)),
    (("leave", 0), ("away", 1)),
    (("leave", 0), ("coordinator", True)),
    (("leave", 0), ("coordinator", False)),
    (("split", 0, 1), ("split", 1, 2)),
    (("split", 0, 1), ("away", 2)),
    (("split", 0, 1), ("coordinator", True)),
    (("split", 0, 1), ("coordinator", False)),
    (("coordinator", True), ("coordinator", False)),
]


def _look(faults: tuple[Action, Action], depth: int) -> Search:
    state = first_state(3, faults)
    for member in range(3):
        state = after(state, ("make", member))
    search = Search(every=5)
    search.look(state, depth)
    return search


@pytest.mark.parametrize("faults", PAIRS, ids=str)
def test_every_order(faults: tuple[Action, Action]) -> None:
    search = _look(faults, DEPTH)
    assert search.num_states > 250 and search.num_ends > 20


@pytest.mark.slow
@pytest.mark.parametrize("faults", PAIRS, ids=str)
def test_every_order_for_longer(faults: tuple[Action, Action]) -> None:
    assert _look(faults, SLOW_DEPTH).num_states > 600
