"""`tests.benchmarks.codec`: a row for every codec, figures that do not depend on the clock, helpful errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_cocodc.errors import InputError
from hf_cocodc.settings.outer import CODECS
from hf_cocodc.tools.bench.report import read
from tests.benchmarks import codec

PARTS = ("copy", "encode", "decode", "CPU")


def test_every_codec_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A million values: exact bytes, the errors of the codecs' docstrings, positive speeds."""
    file = tmp_path / "codecs.json"
    assert codec.main(["--millions", "1", "--repeat", "1", "--json", str(file)]) == 0
    [report] = read(file)
    rows = {row["codec"]: row for row in report["rows"]}
    assert list(report["samples"]) == [f"{name}, {what} s" for name in rows for what in PARTS]
    assert {len(each) for each in report["samples"].values()} == {1}
    assert list(rows) == [*CODECS]
    shown = capsys.readouterr().out
    assert "codecs: values=1000000, repeat=1" in shown and all(name in shown for name in rows)
    bits = {
        "fp32": 32,
        "bf16": 16,
        "int8": 8 + 32 / 256,
        "int4": 4 + 32 / 256,
        "fp4": 4 + 32 / 64,
        "codebook_2bit": 2.25,
    }
    errors = {"fp32": 0, "bf16": 0.0017, "int8": 0.0070, "int4": 0.126, "fp4": 0.19, "codebook_2bit": 0.352}
    for name, row in rows.items():
        assert row["times smaller"] == pytest.approx(32 / row["bits per value"])
        assert row["bits per value"] == pytest.approx(bits.get(name, row["bits per value"]), rel=1e-3)
        assert row["relative error"] == pytest.approx(errors.get(name, row["relative error"]), rel=0.03)
        assert all(value > 0 for title, value in row.items() if title not in ("codec", "relative error"))


def test_only_some() -> None:
    """--only measures the named codecs in that order; the error for an unknown name lists the codecs."""
    report = codec.measure(1000, 1, ["int4", "lowrank"])
    assert [row["codec"] for row in report.rows] == ["int4", "lowrank"]
    assert report.rows[1]["bits per value"] == report.rows[0]["bits per value"], "no matrix to make smaller"
    with pytest.raises(
        InputError, match="--only 'in8' is not a codec. Did you mean 'int8'.*Known: bf16, codebook_2bit"
    ):
        codec.measure(1000, 1, ["int4", "in8"])
