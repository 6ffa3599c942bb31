"""Records that regions tell each other: typed again on arrival, and never one kind for another."""

from __future__ import annotations

import math

import pytest

from hf_cocodc.engine.agreement import StepChecksum
from hf_cocodc.errors import LinkError
from hf_cocodc.link.records import ROW, Ending, Trailer, Word, from_numbers, from_row, to_row
from hf_cocodc.run.resuming import Writer
from hf_cocodc.snapshot.resume import CanResume
from hf_cocodc.trainer import best
from hf_cocodc.trainer.beginning import Beginning


def test_a_trailer_arrives_as_it_left() -> None:
    """Integers are integers and the ending is an ending again; a loss that is not known is NaN."""
    left = Trailer(weight=0.5, fragment=3, inner_step=10**9, digest=2**32 - 1, ending=Ending.DONE, saved_at=7)
    arrived = from_row(Trailer, to_row(left), region=1)
    assert math.isnan(arrived.loss)
    assert arrived._replace(loss=0.0) == left._replace(loss=0.0)
    assert arrived.ending is Ending.DONE
    assert arrived.word._replace(loss=0.0) == Word(0.0, Ending.DONE, 7)
    assert [type(value) for value in arrived] == [type(value) for value in left]


@pytest.mark.parametrize(
    "record",
    [
        StepChecksum(10**9, -1),
        Writer(-1),
        CanResume(1),
        Beginning(10**6, 2**48 - 1),
    ],
)
def test_records_of_integers_are_exact(record: tuple) -> None:
    """Each has a row of the same length, and comes back equal, whatever it counts."""
    row = to_row(record)
    assert row.shape == (ROW,)
    assert from_row(type(record), row, region=0) == record


def test_a_record_of_another_kind_is_refused() -> None:
    """Regions that are out of step would otherwise take a step for a checksum."""
    with pytest.raises(LinkError, match="region 2 did not send the expected StepChecksum"):
        from_row(StepChecksum, to_row(Beginning(5, 7)), region=2)
    with pytest.raises(LinkError, match="region 2 did not send the expected StepChecksum"):
        from_row(StepChecksum, to_row(best.HeldBest(5, True)), region=2)  # it has as many numbers


def test_numbers_from_a_checkpoint_of_an_earlier_version_are_typed() -> None:
    """A checkpoint may have floats; a field that it does not know keeps its default."""
    found = from_numbers(Trailer, {"weight": 1.0, "fragment": 2.0, "inner_step": 8.0, "ending": 2.0})
    assert (found.fragment, found.inner_step, found.ending, found.saved_at) == (2, 8, Ending.INTERRUPTED, 0)
    assert isinstance(found.fragment, int)
