"""What a region may say with a transfer: everything received is checked before it is believed."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from hf_cocodc.errors import LinkError, RegionLostError
from hf_cocodc.link.calls import received
from hf_cocodc.link.records import ROW, Ending, Trailer, to_row

SOUND = Trailer(
    weight=0.5,
    fragment=3,
    inner_step=100,
    step_time_s=0.1,
    sync_time_s=2.0,
    loss=math.inf,
    digest=2**32 - 1,
    compression=0.5,
    ending=Ending.DONE,
    saved_at=90,
    round_lr=3e-4,
    knows=2**53 - 1,
    norm=1e300,
    trained_at=100,
)


def told(trailer: Trailer, **changed: float) -> Trailer:
    """What a region 4 believes that got these numbers from region 7."""
    row = to_row(trailer)
    for name, value in changed.items():
        row[1 + Trailer._fields.index(name)] = value
    return received((4, 7), [to_row(trailer), row])[1]


def test_sound_numbers_arrive_as_they_are() -> None:
    """Also those at the ends of their ranges, and any loss."""
    assert told(SOUND) == SOUND
    rest = Trailer(weight=0.0, loss=0.0)
    assert told(rest) == rest
    assert math.isnan(told(Trailer()).loss)


@pytest.mark.parametrize(
    ("sent", "counts"), [(1e6, 1), (-1, 0), (math.nan, 0), (math.inf, 1), (-math.inf, 0)]
)
def test_a_weight_lies_between_0_and_1(sent: float, counts: float, caplog: pytest.LogCaptureFixture) -> None:
    """And the run says who sent another."""
    with caplog.at_level(logging.WARNING):
        assert told(SOUND, weight=sent).weight == counts
    assert f"region 7 sent the weight {sent:g} with fragment 3 of step 100" in caplog.text


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("fragment", (math.nan, -2, 2**31, 0.5)),
        ("inner_step", (math.inf, -1, 2**53, 7.5)),
        ("step_time_s", (math.nan, math.inf, -5)),
        ("sync_time_s", (math.nan, math.inf, -1e-9)),
        ("digest", (math.nan, -2, 2**60)),
        ("compression", (0, math.nan, 1.5, -1)),
        ("ending", (77, -1, math.nan)),
        ("saved_at", (-1, -math.inf)),
        ("round_lr", (math.inf, math.nan, -1)),
        ("knows", (-3, math.nan)),
        ("norm", (-1, math.nan, math.inf)),
        ("trained_at", (-2, math.nan, 2**53)),
    ],
)
def test_a_number_that_no_region_sends_loses_its_region(name: str, wrong: tuple[float, ...]) -> None:
    """The error names the region and the number: an elastic run goes on without it, a fixed one ends with the reason."""
    for value in wrong:
        with pytest.raises(RegionLostError, match=f"region 7 sent .*{name}") as lost:
            told(SOUND, **{name: value})
        assert lost.value.region == 7


def test_regions_compress_alike() -> None:
    """Else payloads of other lengths would be taken for each other."""
    with pytest.raises(LinkError, match="out of step: they compress region 4: 0.5, region 7: 0.25"):
        told(SOUND, compression=0.25)


def test_a_row_has_room() -> None:
    """Of the mark and all fields."""
    assert to_row(SOUND).shape == (ROW,)
    assert len(SOUND) < ROW
    assert torch.isfinite(to_row(SOUND._replace(loss=0.0, norm=0.0))).all()
