"""The simulated network keeps what the real one promises."""

from typing import Any

import pytest

from .network import Actor, Connection, Network


class Listener(Actor):
    """Keeps what it hears."""

    def __init__(self, network: Network, place: int) -> None:
        super().__init__(network, place)
        self.heard: list[Any] = []

    def hear(self, connection: Connection, item: Any) -> None:
        self.heard.append(item)


@pytest.mark.parametrize("seed", range(5))
def test_a_connection_keeps_its_order_through_cuts(seed: int) -> None:
    """What a cut has held back comes before what was on its way when the cut ended."""
    network = Network(seed)
    sender, receiver = Listener(network, 0), Listener(network, 1)
    connection = Connection("log", sender, receiver)
    for number in range(100):
        network.at(number * 0.05, sender, lambda number=number: connection.send(sender, number))
    for begin, end in ((1.0, 1.7), (1.8, 2.0), (3.0, 4.6)):
        network.at(begin, None, lambda: network.cut(0, 1))
        network.at(end, None, lambda: network.heal(0, 1))
    network.at(1.5, None, receiver.freeze)
    network.at(1.9, None, receiver.thaw)
    network.run(10.0, lambda: True)
    assert receiver.heard == list(range(100))
