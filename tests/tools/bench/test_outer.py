"""`tests.benchmarks.outer`: what its rows say, of whom."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hf_cocodc.engine.fragment import FragmentState
from hf_cocodc.engine.traffic import Traffic
from hf_cocodc.tools.bench.report import read
from tests.benchmarks import outer
from tests.benchmarks.timing import LANDINGS, llama_like


def test_every_part_of_an_outer_step_has_a_row() -> None:
    """Time, least traffic and the ratio to a copy for sends, landings and SGD; GB/s are these bytes over that time."""
    report = outer.measure(50_000, 2, threads=(1, 2))
    rows = {row["what"]: row for row in report.rows}
    assert {row["threads"] for row in report.rows} == {1, 2}
    assert list(rows) == [
        "copy",
        "idle step",
        "send",
        "land, replace (diloco)",
        "land, mix (streaming)",
        "land, compensate (cocodc)",
        "SGD, default",
        "SGD, foreach",
        "SGD, fused",
    ]
    assert rows["copy"]["times the copy"] == 1
    assert rows["idle step"]["bytes per param"] is None
    for row in report.rows:
        assert row["ms"] > 0
        if row["bytes per param"] is not None:
            traffic = row["bytes per param"] * report.setting["parameters"]
            assert row["GB/s"] == pytest.approx(traffic / row["ms"] * 1e-6)


@pytest.mark.parametrize("numel", [1, 10**6, 3 * 10**7, 10**9])
def test_the_model_is_about_as_large_as_asked_for(numel: int) -> None:
    """The shapes are a Llama's, with as many parameters as its width in steps of 16 allows."""
    shapes = llama_like(numel)
    assert sum(map(math.prod, shapes)) == pytest.approx(max(numel, 13_000), rel=0.15)
    assert {len(shape) for shape in shapes} == {1, 2}


def test_the_engine_itself_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each send and each landing is one of the engine's; sends move nothing, landings move the model."""
    calls: list[str] = []
    for name in ("send", "land"):
        original = getattr(Traffic, name)

        def called(self: Traffic, state: FragmentState, *rest: object, name=name, original=original) -> None:  # noqa: ANN001
            before = state.local.params[0].clone()
            original(self, state, *rest)
            moved = not torch.equal(before, state.local.params[0])
            assert moved == (name == "land")
            calls.append(name)

        monkeypatch.setattr(Traffic, name, called)
    outer.measure(20_000, 3, threads=(1,))
    assert calls == ["send", "land"] * len(LANDINGS) * (3 + 2)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table for people, JSON for programs."""
    assert outer.main(["--millions", "1", "--repeat", "1", "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("outer step: parameters=")
    [found] = read(tmp_path / "found.json")
    assert [row["what"] for row in found["rows"]][:2] == ["copy", "idle step"]
    assert len(found["samples"]) == len(found["rows"])
    assert all(found["samples"].values())
