"""A model that computes layer by layer: an outer gradient leaves as soon as its layer is done (2501.18512), as in data-parallel.

A step has three nodes a layer: forward, backward to the activations, backward to the weights; the first layer needs no
gradient of its activations. All nodes take equally long. This package sends after the step; data-parallel training, and the
simulation in that paper, send during the backward pass.
"""

from collections.abc import Iterable

from .course import Cargo, Carried, Work


def layered(groups: Iterable[Iterable[int]], num_layers: int, layer_bytes: int, step_s: float) -> list[Work]:
    """Fragments of layers. A layer leaves when its gradient is known, and is needed when its forward pass begins.

    Args:
        groups: the layers of each fragment, from 0.
        num_layers: number of layers of the model.
        layer_bytes: bytes that a region sends for a layer.
        step_s: seconds of an inner step.
    """
    node_s = step_s / (3 * num_layers - 1)

    def part(layer: int) -> Cargo:
        later_nodes = 2 * layer - 1 if layer else 0  # two of each layer before it, and one of the first
        return Cargo(layer_bytes, early_s=later_nodes * node_s, late_s=layer * node_s)

    return [Work([part(layer) for layer in sorted(group, reverse=True)]) for group in groups]


class SerialLine:
    """A line that carries one part after the other at a constant rate.

    Args:
        rate: bytes per second.
        latency_s: seconds until a part is there; the next one need not wait for that.
    """

    def __init__(self, rate: float, latency_s: float = 0.0) -> None:
        self._rate, self._latency_s = rate, latency_s
        self._free_s = 0.0

    def carry(self, part: Cargo, sent_s: float) -> Carried:
        begin = max(self._free_s, sent_s)
        self._free_s = begin + part.num_bytes / self._rate
        return Carried(self._free_s + self._latency_s, self._free_s + self._latency_s - begin)
