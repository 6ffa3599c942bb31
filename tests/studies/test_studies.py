"""The program of studies: results survive a kill and damage, the sweep's best is chosen, tables say what was measured."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.errors import InputError
from tests.studies import conduct, spec, tables
from tests.studies.lines import Lines
from tests.studies.statistics import interval, paired, steps_to, tail_loss
from tests.studies.toys import Inline, result, settings, study, write_spec

MADE = {"text": "t"}
ROOT = Path(__file__).parents[2]
SPECS = sorted((Path(__file__).parent / "specs").glob("*.yaml"))


def losses(given: dict[str, Any]) -> float:
    """A loss that depends on the settings: best at outer_lr 1.0 in the first arm, at 0.5 in the second."""
    rate, is_second = given["outer"]["outer_lr"], given["outer"].get("codec") == "int8"
    return abs(rate - (0.5 if is_second else 1.0)) + 1 + 0.001 * given["seed"] + is_second


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Runs take no time and are noted."""
    runs: list[dict[str, Any]] = []

    def run(given: dict[str, Any]) -> dict[str, Any]:
        runs.append(given)
        return result(losses(given), weights=f"w{given['seed']}")

    monkeypatch.setattr(conduct, "_run", run)
    monkeypatch.setattr(conduct, "_processes", lambda jobs: Inline())
    return runs


def carry_out(path: Path, said: list[str], wanted: spec.Study | None = None) -> conduct.Found:
    lines = Lines(path, said.append)
    found = conduct.conduct(wanted or study(), lines, MADE, 2, float("inf"), said.append)
    lines.close()
    return found


KILLED = """
import os, signal, sys
from tests.studies import conduct, test_studies, toys
from tests.studies.lines import Lines

def run(given):
    if len(made) == 2:
        with open(sys.argv[1], "ab") as file:
            file.write(b'{"crc": "0", "run": {"key"')
        os.kill(os.getpid(), signal.SIGKILL)
    made.append(given)
    return toys.result(test_studies.losses(given), weights=f"w{given['seed']}")

made = []
conduct._run, conduct._processes = run, lambda jobs: toys.Inline()
conduct.conduct(toys.study(), Lines(__import__("pathlib").Path(sys.argv[1]), print), test_studies.MADE, 1, float("inf"), print)
"""


def test_a_study_that_was_killed_goes_on(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    """A process is killed in its third run, while a line is half written: the next one makes the others, each once."""
    path = tmp_path / "runs.jsonl"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    said: list[str] = []
    found = carry_out(path, said)
    assert "line 3 is damaged or not whole: dropped" in said[0]
    assert len(made) == 4 + 4 - 2  # the sweep and the comparison, less what the killed one had made
    made.clear()
    assert carry_out(path, said) == found
    assert not made


def test_a_damaged_line_is_dropped_and_made_again(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    """A changed digit in a result does not go unnoticed: its run is made again, the others are not."""
    path, said = tmp_path / "runs.jsonl", list[str]()
    found = carry_out(path, said)
    content = path.read_text().splitlines()
    content[1] = content[1].replace("5.0", "5.5")
    path.write_text("\n".join(content) + "\n")
    made.clear()
    said.clear()
    assert carry_out(path, said) == found
    assert "line 2 is damaged" in said[0]
    assert len(made) == 1


def test_two_studies_do_not_write_one_file(tmp_path: Path) -> None:
    """A second program is told that the file is in use."""
    lines = Lines(tmp_path / "runs.jsonl", print)
    with pytest.raises(InputError, match="another study writes this file"):
        Lines(tmp_path / "runs.jsonl", print)
    lines.close()


def test_settings_seed_and_versions_name_a_run(tmp_path: Path) -> None:
    """A result counts only for what decided it."""
    lines = Lines(tmp_path / "runs.jsonl", print)
    lines.add(settings(), MADE, result(1.0))
    keys = [
        conduct.key_of(given, by)
        for given, by in [
            (settings(), MADE),
            (settings(seed=2), MADE),
            (settings(outer__rank=3), MADE),
            (settings(), {"text": "u"}),
        ]
    ]
    assert [key in lines for key in keys] == [True, False, False, False]
    lines.close()


def test_the_comparison_takes_the_best_of_the_sweep(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    """Each arm has its own best, from seeds that the comparison does not use; an arm can take another's."""
    found = carry_out(tmp_path / "a.jsonl", [])
    assert found.best == {("", "first"): {"outer.outer_lr": 1.0}, ("", "second"): {"outer.outer_lr": 0.5}}
    rates = {
        (run["seed"], run["outer"].get("codec"), run["outer"]["outer_lr"])
        for run in made
        if run["seed"] < 100
    }
    assert rates == {(1, None, 1.0), (2, None, 1.0), (1, "int8", 0.5), (2, "int8", 0.5)}
    found = carry_out(tmp_path / "b.jsonl", [], study(like={"second": "first"}))
    assert found.best["", "second"] == {"outer.outer_lr": 1.0}
    assert conduct.best_of([({"a": 1}, [result(None)]), ({"a": 2}, [result(9.0)])]) == {"a": 2}


def test_cells_can_share_a_sweep(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    """With sweep.in, the other cells take its best and sweep nothing."""
    cells = {"one": {}, "two": {"outer.rank": 3}}
    found = carry_out(tmp_path / "a.jsonl", [], study(cells=cells, sweep_in={"one": "two"}))
    assert {place for place, _ in found.sweep.items()} == {("two", "first"), ("two", "second")}
    assert found.best["one", "second"] == {"outer.outer_lr": 0.5}
    assert len(made) == 4 + 8


def test_some_cells_can_be_made_alone(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    """The tables are of all cells that have runs; a cell that has none is left out, and an unknown one refused."""
    whole = study(cells={"one": {}, "two": {"outer.rank": 3}})
    lines = Lines(tmp_path / "a.jsonl", print)
    conduct.conduct(spec.only(whole, ["two"]), lines, MADE, 1, float("inf"), lambda text: None)
    assert all(run["outer"]["rank"] == 3 for run in made)
    text = tables.page(whole, conduct.found_in(whole, lines, MADE), "command")
    assert "## two" in text
    assert "## one" not in text
    assert "| two first | 1.601 | **1.101** |" in text
    with pytest.raises(InputError, match="--cells 'three' is not known"):
        spec.only(whole, ["three"])
    with pytest.raises(InputError, match="the sweep for 'one' is made in 'two'"):
        spec.only(replace(whole, sweep_in={"one": "two"}), ["one"])
    lines.close()


def test_intervals_are_those_of_a_table() -> None:
    """Student's t by hand: 2.776 for four degrees of freedom and 95 %, 4.303 for two, 12.706 for one."""
    assert interval([1, 2, 3, 4, 5], 0.95) == pytest.approx((3, 2.776445 * 2.5**0.5 / 5**0.5, 5))
    assert paired([2, 4, 6], [1, 2, 3], 0.95) == pytest.approx((2, 4.302653 / 3**0.5, 3))
    assert not paired([2, 4, 6], [1, 2, 3], 0.95).decides
    assert paired([2, 4, 6], [1, 2, 3], 0.9).decides  # 2.920 / sqrt(3) = 1.686
    assert interval([1.0, 3.0], 0.95).half == pytest.approx(12.7062)
    assert interval([1.0], 0.95).half is None


def test_the_loss_of_a_run_is_that_of_its_last_sixth() -> None:
    """Twelve evaluations: the mean of the last two, without the finished model; of five, the last one."""
    curve = [(step, float(20 - step)) for step in range(1, 13)]
    assert tail_loss([*curve, (12, 1.0)]) == 8.5
    assert tail_loss([*curve[:5], (5, 1.0)]) == 15
    assert tail_loss([*curve[:5], (6, None), (6, 1.0)]) == float("inf")


def test_steps_to_a_loss_are_interpolated() -> None:
    """From 4.0 at step 10 to 3.0 at step 20, the loss 3.25 is at step 17.5."""
    curve = [(10, 4.0), (20, 3.0), (30, 2.0)]
    assert steps_to(curve, 3.25) == 17.5
    assert steps_to(curve, 4.5) == 10
    assert steps_to(curve, 1.0) is None


def test_tables_have_intervals_and_refuse_runs_that_are_not_paired(
    tmp_path: Path, made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second arm is worse by 1 in both seeds; where it began with other weights, there is no table."""
    found = carry_out(tmp_path / "a.jsonl", [])
    text = tables.page(study(), found, "command")
    assert "| second | lr 0.5 | 2 | 2.0015 ± 0.0064 | **+1.0000 ± 0.0000** |" in text
    found.compare["", "second"][2] = result(2.0, weights="others")
    with pytest.raises(InputError, match="differ in first weights"):
        tables.page(study(), found, "command")


def test_the_reference_has_one_column_also_if_it_is_data_parallel_training() -> None:
    arms = {"first": {"study.data_parallel": True}, "second": {}}
    for reference, count in (("first", 1), ("second", 2)):
        each = replace(study(), arms=arms, reference=reference)
        [head, *_] = tables._comparison(each, [], None)
        assert head.count("| less ") == count
        assert f"| less {reference} |" in head


@pytest.mark.parametrize("path", [path for path in SPECS if path.stem != "base"], ids=lambda path: path.stem)
def test_the_studies_of_this_folder_can_begin(path: Path) -> None:
    """Every arm of every study, at full and at reduced size, has settings that work, and data-parallel training beside it.

    Studies of variants of one method need none: its distance from data-parallel training is known from the others.
    """
    full, quick = spec.read(path), spec.read(path, quick=True)
    for each in (full, quick):
        assert tables.parallel_of(each) or path.stem.startswith(("muloco", "sparseloco"))
        assert not set(each.seeds) & set(each.sweep_seeds)
    assert len(full.seeds) >= 8
    assert (
        len(conduct.compare_runs(quick, dict.fromkeys(((c, a) for c in quick.cells for a in quick.arms), {})))
        <= 60
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds: [1]\nsweep: {seeds: [1]}", "in the sweep and in the comparison"),
        ("seeds: [1]\nreference: thrid", "Did you mean 'third'"),
        ("seeds: [1]\nsweep: {grid: {outer.rank: [1, 2]}}", "sweep.seeds is empty"),
        ("seeds: [1]\nsweeps: {}", "Did you mean 'sweep'"),
        ("seeds: [1]\ncells: {one: {}}\nsweep: {in: {one: two}}", "'two' is no cell"),
        (
            "seeds: [1]\ncells: {a: {}, b: {}}\nsweep: {in: {a: b, b: a}}",
            "'b', which has no sweep of its own",
        ),
        ("seeds: [1]\nchanges: {outer.codec: fp33}", "fp33"),
        ("seeds: [1]\nchanges: {study.probes: true}", "study.probes is not known"),
    ],
)
def test_a_study_that_cannot_work_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """Before the first run, with the name of what is wrong."""
    head = "title: t\nrecipe: base.yaml\narms: {third: {}}\n" + (
        "" if "reference" in text else "reference: third\n"
    )
    with pytest.raises(InputError, match=message):
        spec.read(write_spec(tmp_path, head + text + "\n"))
