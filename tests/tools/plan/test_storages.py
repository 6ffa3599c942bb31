"""The closed form of a transfer through a storage, and its forecasts against what was measured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.net.mailbox import PIECE, PIECES
from hf_cocodc.settings import OuterConfig
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.tools.bench.report import read
from hf_cocodc.tools.plan.course import Cargo
from hf_cocodc.tools.plan.forecast import Subject
from hf_cocodc.tools.plan.speeds import Speeds
from hf_cocodc.tools.plan.storages import StorageFigures, StorageLine, gap_s, requests_an_hour
from hf_cocodc.tools.plan.transfers import OVERHEAD_S, Codes
from tests.benchmarks.storage import METHODS, STEP_S
from tests.toys import llama

RESULTS = Path(__file__).parents[3] / "docs" / "evidence" / "benchmarks" / "storage.json"
CELLS = [(report["title"], row) for report in read(RESULTS) for row in report["rows"] if row["way"] != "TCP"]
FOLDER = StorageFigures(1e-4, 1e-4, 1e-4, 1e10, 1e10, is_near=True)
BUCKET = StorageFigures(0.3, 0.3, 0.3, 1e9, 1e9)
WAYS = {"a folder": FOLDER, "requests of 300 ms": BUCKET}


def subject(link: StorageFigures, **regions: Any) -> Subject:
    recipe = Recipe.from_dict(
        {
            "model": {"config": {"model_type": "llama"}},
            "tokenizer": {"builtin": "bytes"},
            "data": {"builtin": "python-stdlib"},
            "training": {},
            "regions": regions,
        }
    )
    return Subject(recipe, llama(layers=2), link, STEP_S, 2, Speeds())


@pytest.mark.parametrize(("method", "row"), CELLS, ids=lambda each: str(each)[:30])
def test_a_forecast_is_within_a_tenth_of_what_was_measured(method: str, row: dict[str, Any]) -> None:
    """No constant of the forecast is fitted to these trainings. The next test shows that it is not blind."""
    planned = subject(WAYS[row["way"]])
    assert planned.course(OuterConfig(**METHODS[method])).utilization == pytest.approx(row["trains"], rel=0.1)


@pytest.mark.parametrize(("method", "row"), CELLS, ids=lambda each: str(each)[:30])
def test_requests_are_forecast_within_a_tenth_of_those_counted(method: str, row: dict[str, Any]) -> None:
    counted = row["requests/h"], row["of who serves"]
    asked = subject(WAYS[row["way"]]).requests(OuterConfig(**METHODS[method]))
    assert [sum(each.values()) for each in asked] == pytest.approx(counted, rel=0.1)


def test_more_regions_larger_payloads_and_quicker_requests_are_more_requests() -> None:
    config = OuterConfig(**METHODS["diloco, H = 100"])
    course = subject(BUCKET).course(config)

    def asked(link: StorageFigures = BUCKET, regions: int = 2, num_bytes: float = 0.0) -> Counter[str]:
        return requests_an_hour(link, regions, course._replace(bytes_per_s=num_bytes), 1, serves=False)

    few, sends = asked(), 3600 * course.sends_per_s
    assert asked(regions=3)["read"] > 1.3 * few["read"]
    assert asked(StorageFigures(0.1, 0.1, 0.1, 1e9, 1e9))["read"] > few["read"]
    ten = asked(num_bytes=10 * PIECE * course.sends_per_s)
    assert {kind: ten[kind] - few[kind] for kind in ("write", "read", "delete")} == pytest.approx(
        dict.fromkeys(("write", "read", "delete"), 9 * sends), rel=0.01
    )


def test_slow_requests_are_hidden_by_an_overlap_alone() -> None:
    """Diloco waits for each message; with too short an overlap, streaming does, too."""
    diloco, streaming = (OuterConfig(**METHODS[name]) for name in METHODS)
    short = OuterConfig(**{**METHODS[list(METHODS)[1]], "overlap_steps": 5})
    slow = StorageFigures(1.0, 1.0, 1.0, 1e9, 1e9)
    used = {link: subject(link).course(diloco).utilization for link in (FOLDER, BUCKET, slow)}
    assert used[FOLDER] > used[BUCKET] > used[slow]
    planned = subject(BUCKET)
    assert planned.course(streaming).utilization > 0.99 > 0.85 > planned.course(short).utilization
    limited = subject(StorageFigures(0.3, 0.3, 0.3, 1e6, 1e9)).course(diloco).utilization
    assert subject(BUCKET, rate_limit=1.0).course(diloco).utilization == limited < used[BUCKET]


def seconds(
    link: StorageFigures, num_bytes: int, at: tuple[float, ...] = (0.0,), regions: int = 2
) -> list[float]:
    line = StorageLine(link, regions, link.up / 8, {num_bytes: Codes()})
    return [line.carry(Cargo(num_bytes), sent).link_s - OVERHEAD_S for sent in at]


def test_a_transfer_takes_two_messages_and_their_looks() -> None:
    """One after another: a payload, and the word that it has come; after a pause, looks are rare."""
    share = 4 / 5  # two sockets and two regions: the mean of the last of four looks
    again, rested = seconds(BUCKET, 8, at=(0.0, 100.0))
    assert again == pytest.approx(2 * (0.3 + share * 0.5))
    assert rested == pytest.approx(2 * 0.3 + share * (2.3 + 0.5))
    assert seconds(BUCKET, 8, regions=8)[0] > again, "the last of many looks comes later"


def test_large_payloads_take_turns() -> None:
    """Four pieces are written side by side; earlier ones are read meanwhile, and those before deleted."""
    full = PIECES * PIECE
    fast_read = StorageFigures(0.3, 0.01, 0.0, 1e9, 1e12)
    one, ten = seconds(fast_read, full)[0], seconds(fast_read, 10 * full)[0]
    assert ten - one == pytest.approx(9 * (0.3 + full * 8 / 1e9), rel=0.01), "writes decide"
    for read_s, delete_s in ((0.3, 0.1), (0.1, 0.3)):
        fast_write = StorageFigures(0.01, read_s, delete_s, 1e12, 1e9)
        one, ten = seconds(fast_write, full)[0], seconds(fast_write, 10 * full)[0]
        assert ten - one == pytest.approx(9 * (0.3 + full * 8 / 1e9), rel=0.01), "reads, or deletions"


def test_the_longer_nothing_comes_the_rarer_are_looks() -> None:
    """From 0.2 s to 2 s, in a folder from 10 ms to 0.25 s, with the time of a look."""
    assert (gap_s(0, 0.1, False), gap_s(1e9, 0.1, False)) == pytest.approx((0.3, 2.1))
    assert (gap_s(0, 0, True), gap_s(1e9, 0, True)) == pytest.approx((0.01, 0.25))
    # looks at 0.2, 0.5 (0.3 later) and 0.95 (0.45 later)
    assert [gap_s(rest, 0, False) for rest in (0.1, 0.3, 0.6)] == pytest.approx([0.2, 0.3, 0.45])
