"""A tensor that leaves its device for the link."""

from __future__ import annotations

import torch

from hf_cocodc.parts.tensors.memory import Departure, Pool


def test_a_second_attempt_gets_the_same_copy() -> None:
    """A transfer may be tried again. The copy's memory comes back to the pool once, whoever fetched how often."""
    elsewhere = Pool(torch.device("cpu", 0))  # not the device of the tensor, for those who compare
    departure = Departure(torch.arange(5.0), elsewhere)
    first = departure.fetch()
    assert departure.fetch() is first and first.tolist() == [0, 1, 2, 3, 4]
    departure.end()
    spare = elsewhere.take(5)
    assert spare.data_ptr() == first.data_ptr() and elsewhere.take(5).data_ptr() != first.data_ptr()
