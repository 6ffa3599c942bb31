"""The record of a run, and the records of earlier runs in the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_cocodc.errors import InputError
from hf_cocodc.run.journal import Journal, earlier_name, name_of, of_newest, read


def steps(path: Path) -> list[int]:
    return [event["step"] for event in read(path)]


def all_of(path: Path) -> list[int]:
    """The steps of every line, whatever it belongs to."""
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_new_run_appends_to_the_journals_of_earlier_runs(tmp_path: Path) -> None:
    """No line is touched; readers take those of the newest run."""
    path = tmp_path / "cocodc" / "journal.jsonl"
    told = b""
    for run in range(3):
        journal = Journal(path)
        if run:
            assert path.read_bytes() == told, "nothing is written before the new run has something to tell"
        journal.write("start", step=run)
        journal.write("send", step=run + 10)
        assert path.read_bytes().startswith(told)
        told = path.read_bytes()
        assert steps(path) == [run, run + 10]
    assert all_of(path) == [0, 10, 1, 11, 2, 12]
    assert len(list(path.parent.iterdir())) == 1


def test_lines_behind_the_checkpoint_of_a_resume_are_given_up(tmp_path: Path) -> None:
    """They stay in the file, but the run makes these steps again."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write("start", step=0)
    for step in range(1, 8):
        journal.write("send", step=step)
    resumed = Journal(path, journal.name)
    assert steps(path) == [0, 1, 2, 3, 4, 5, 6, 7]
    resumed.write("resume", step=3)
    assert steps(path) == [0, 1, 2, 3, 3]
    resumed.write("send", step=4)
    Journal(path, journal.name).write("resume", step=3)
    record = of_newest(map(json.loads, path.read_text().splitlines()))
    assert [event["step"] for event in record.events] == steps(path) == [0, 1, 2, 3, 3, 3]
    assert [[event["step"] for event in each] for each in record.given_up] == [[4, 5, 6, 7], [4]]
    assert all_of(path) == [*range(8), 3, 4, 3]


def test_a_journal_counts_seconds_by_its_clock(tmp_path: Path) -> None:
    """From its beginning; after a resume, from the last event before it."""
    path, now = tmp_path / "journal.jsonl", [100.0]
    journal = Journal(path, clock=lambda: now[0])
    journal.write("start", step=0)
    now[0] = 107.5
    journal.write("send", step=1)
    now[0] = 5.0
    resumed = Journal(path, journal.name, clock=lambda: now[0])
    now[0] = 6.0
    resumed.write("resume", step=1)
    assert [event["time_s"] for event in read(path)] == [0.0, 7.5, 8.5]


def test_an_event_that_is_told_later_has_its_own_time(tmp_path: Path) -> None:
    """It comes before the next one; without a next one it never comes."""
    path, now = tmp_path / "journal.jsonl", [0.0]
    journal = Journal(path, clock=lambda: now[0])
    journal.write("send", step=1)
    now[0] = 2.0
    journal.write_later("save", step=1)
    journal.write_earlier()
    assert [event["kind"] for event in read(path)] == ["send"]
    now[0] = 3.0
    journal.write("land", step=2)
    journal.write_later("save", step=2)
    assert [(event["kind"], event["time_s"]) for event in read(path)] == [
        ("send", 0),
        ("save", 2),
        ("land", 3),
    ]


def test_names_of_earlier_files_count_upwards(tmp_path: Path) -> None:
    """Also past a gap, and whatever else lies in the folder."""
    for name in ("run[1].txt", "run[1].2.txt", "run[1].x.txt", "run1.7.txt"):
        (tmp_path / name).touch()
    assert earlier_name(tmp_path / "run[1].txt").name == "run[1].3.txt"
    assert earlier_name(tmp_path / "log.txt").name == "log.1.txt"


def test_a_run_that_ends_with_an_error_says_so(tmp_path: Path) -> None:
    """With its exit code; and a disk that refuses to keep that does not hide the error."""
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write_error(3, InputError("no"))
    [said] = read(tmp_path / "journal.jsonl")
    assert (said["kind"], said["step"], said["message"], said["exit_code"]) == ("error", 3, "no", 2)
    (tmp_path / "file").touch()
    Journal(tmp_path / "file" / "journal.jsonl").write_error(3, InputError("no"))


def test_a_run_that_is_resumed_after_another_finds_its_own_lines(tmp_path: Path) -> None:
    """Another run has written to the folder meanwhile, or the journal lies elsewhere."""
    path = tmp_path / "journal.jsonl"
    first = Journal(path)
    first.write("start", step=0)
    for step in range(1, 6):
        first.write("send", step=step)
    second = Journal(path)
    second.write("start", step=0)
    second.write("log", step=8, loss=2.5)
    Journal(path, first.name).write("resume", step=3)
    assert [(event["kind"], event["step"]) for event in read(path)][-2:] == [("send", 3), ("resume", 3)]
    assert steps(path) == [0, 1, 2, 3, 3]
    Journal(tmp_path / "copied.jsonl", first.name).write("resume", step=3)
    assert steps(tmp_path / "copied.jsonl") == [3]


def test_a_loop_that_loads_in_the_middle_goes_on_with_what_it_has_loaded(tmp_path: Path) -> None:
    """Of another process, which it begins beside a new record, or of its own; seconds go on from the last event kept."""
    path, now = tmp_path / "journal.jsonl", [0.0]
    first = Journal(path, clock=lambda: now[0])
    first.write("start", step=0)
    for step in range(1, 6):
        now[0] = step
        first.write("send", step=step)
    later = Journal(path, clock=lambda: now[0])
    later.write("start", step=0)
    later.go_on(first.name)
    now[0] += 0.5
    later.write("resume", step=2)
    now[0] += 1
    later.write("send", step=3)
    assert [(event["step"], event["time_s"]) for event in read(path)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (2, 2.5),
        (3, 3.5),
    ]


def test_a_region_that_comes_back_gives_nothing_up(tmp_path: Path) -> None:
    """All whole lines stay, also behind its last checkpoint; a line that a crash cut off does not."""
    path = tmp_path / "journal.jsonl"
    assert not name_of(path, "a")
    first = Journal(path)
    first.write("start", step=0, run="a")
    first.write("send", step=15)
    told = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"kind": "la')
    back = Journal(path, name_of(path, "a"))
    back.write("resume", step=9, run="a", from_region=1)
    assert path.read_bytes().startswith(told)
    assert steps(path) == all_of(path) == [0, 15, 9]


@pytest.mark.parametrize("run", ["b", None])
def test_a_region_that_enters_another_run_begins_a_record(run: str | None, tmp_path: Path) -> None:
    """After lines of another run, or of one of unknown name."""
    path = tmp_path / "journal.jsonl"
    Journal(path).write("start", step=0, run="a" if run else None)
    assert not name_of(path, "b")
    Journal(path, name_of(path, "b")).write("resume", step=3, run="b", from_region=0)
    assert steps(path) == [3]


def test_a_record_whose_first_line_is_damaged_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"kind": "sta\n{"kind": "send", "step": 2}\n{"kind": "send", "step": 4}\n')
    Journal(path, "a name").write("resume", step=3)
    assert steps(path) == [2, 3]


def test_the_writer_takes_what_the_schema_has() -> None:
    """A misspelled kind or field is an error of ours, which every test finds, not a line that no reader knows."""
    journal = Journal()
    journal.write("log", step=1, loss=2.0, grad_norm=1.0)
    for kind, facts in (("lend", {}), ("send", {"fragmnt": 0})):
        with pytest.raises(TypeError, match="schema of journals"):
            journal.write(kind, step=1, **facts)
