"""The record of a run, and the records of earlier runs in the same folder."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from hf_cocodc.errors import InputError
from hf_cocodc.run.journal import Journal, Mark, earlier_name, read


def steps(path: Path) -> list[int]:
    return [event["step"] for event in read(path)]


def test_a_new_run_keeps_the_journals_of_earlier_runs(tmp_path: Path) -> None:
    """Each keeps its bytes under a number of its own, and none moves before the new run has something to tell."""
    path = tmp_path / "cocodc" / "journal.jsonl"
    told = []
    for run in range(3):
        journal = Journal(path)
        if run:
            assert path.read_bytes() == told[-1]
        journal.write("start", step=run)
        journal.write("send", step=run + 10)
        told.append(path.read_bytes())
    assert [path.with_name(f"journal.{run}.jsonl").read_bytes() for run in (1, 2)] == told[:2]
    assert steps(path) == [2, 12]
    assert len(list(path.parent.iterdir())) == 3


def test_a_resumed_run_keeps_the_lines_behind_its_checkpoint(tmp_path: Path) -> None:
    """They leave the journal, because the run makes these steps again, but they are not lost."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for step in range(1, 8):
        journal.write("send", step=step)
        if step == 3:
            mark = journal.mark()
    resumed = Journal(path, mark)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    resumed.write("resume", step=3)
    assert steps(path) == [1, 2, 3, 3]
    assert steps(tmp_path / "journal.1.jsonl") == [4, 5, 6, 7]
    again = Journal(path, resumed.mark())
    again.write("resume", step=3)
    assert steps(path) == [1, 2, 3, 3, 3]
    assert not (tmp_path / "journal.2.jsonl").exists(), "nothing was behind the checkpoint"


def test_a_journal_counts_seconds_by_its_clock(tmp_path: Path) -> None:
    """From its beginning; after a resume, from the last event before it."""
    path, now = tmp_path / "journal.jsonl", [100.0]
    journal = Journal(path, clock=lambda: now[0])
    journal.write("start", step=0)
    now[0] = 107.5
    journal.write("send", step=1)
    now[0] = 5.0
    resumed = Journal(path, journal.mark(), clock=lambda: now[0])
    now[0] = 6.0
    resumed.write("resume", step=1)
    assert [event["time_s"] for event in read(path)] == [0.0, 7.5, 8.5]


def test_an_event_that_is_told_later_has_its_own_time(tmp_path: Path) -> None:
    """It comes before the next one, and is not behind a checkpoint that is saved meanwhile; without a next one it never comes."""
    path, now = tmp_path / "journal.jsonl", [0.0]
    journal = Journal(path, clock=lambda: now[0])
    journal.write("send", step=1)
    now[0] = 2.0
    journal.write_later("save", step=1)
    mark = journal.mark()
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
    Journal(path, mark).write("resume", step=1)
    assert [event["kind"] for event in read(tmp_path / "journal.1.jsonl")] == ["save", "land"]


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


@pytest.mark.parametrize("known", [True, False], ids=["hash", "older version"])
def test_a_run_that_is_resumed_after_another_begins_a_new_journal(known: bool, tmp_path: Path) -> None:
    """Another run has written to the folder meanwhile: its lines are neither cut nor kept as the first run's."""
    path = tmp_path / "journal.jsonl"
    first = Journal(path)
    for step in range(1, 4):
        first.write("send", step=step)
    mark = first.mark()._replace(step=3)
    second = Journal(path)
    for step in range(1, 9):
        second.write("log", step=step, loss=2.5)
    theirs = path.read_bytes()
    again = Journal(path, mark if known else mark._replace(sha256=""))
    again.write("resume", step=3)
    assert steps(path) == [3]
    assert path.with_name("journal.2.jsonl").read_bytes() == theirs


def test_an_older_checkpoint_does_not_keep_events_of_later_steps(tmp_path: Path) -> None:
    """Where the lines of another run happen to end at the same byte."""
    path = tmp_path / "journal.jsonl"
    other = Journal(path)
    other.write("send", step=5)
    mark = other.mark()._replace(step=3, sha256="")
    Journal(path, mark).write("resume", step=3)
    assert steps(path) == [3]


def test_a_journal_that_is_missing_begins_anew(tmp_path: Path) -> None:
    """As in a checkpoint that was copied without it."""
    first = Journal(tmp_path / "first.jsonl")
    first.write("send", step=3)
    Journal(tmp_path / "second.jsonl", first.mark()).write("resume", step=3)
    assert steps(tmp_path / "second.jsonl") == [3]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_mark_is_of_what_was_written(tmp_path: Path) -> None:
    """The hash of the run's own lines, in a new journal and in a resumed one; nothing is read to find it."""
    path = tmp_path / "journal.jsonl"
    path.write_text('{"kind": "start", "step": 99}\n')
    journal = Journal(path)
    assert journal.mark() == Mark(), "what lies there is of another run"
    for step in range(3):
        journal.write("send", step=step, loss=float("nan"), message="\u00e9")
        assert journal.mark() == Mark(len(path.read_bytes()), sha256(path.read_bytes()).hexdigest())
    resumed = Journal(path, journal.mark())
    assert resumed.mark() == journal.mark()
    resumed.write("resume", step=3)
    assert resumed.mark() == Mark(len(path.read_bytes()), sha256(path.read_bytes()).hexdigest())
    assert Journal(None).mark() == Mark()


def test_a_region_that_comes_back_appends(tmp_path: Path) -> None:
    """All whole lines stay, also behind its last checkpoint; a line that a crash cut off does not."""
    path = tmp_path / "journal.jsonl"
    assert Mark.of(path, "a") == Mark()
    first = Journal(path)
    first.write("start", step=0, run="a")
    first.write("send", step=5)
    told = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"kind": "la')
    back = Journal(path, Mark.of(path, "a"))
    back.write("resume", step=9, run="a")
    assert path.read_bytes().startswith(told)
    assert steps(path) == [0, 5, 9]
    assert (tmp_path / "journal.1.jsonl").read_bytes() == b'{"kind": "la'


@pytest.mark.parametrize("run", ["b", None])
def test_a_region_that_enters_another_run_begins_a_journal(run: str | None, tmp_path: Path) -> None:
    """Lines of another run, or of one of unknown name, move away."""
    path = tmp_path / "journal.jsonl"
    Journal(path).write("start", step=0, run="a" if run else None)
    assert Mark.of(path, "b") == Mark()
    Journal(path, Mark.of(path, "b")).write("start", step=3, run="b")
    assert steps(path) == [3]
    assert steps(tmp_path / "journal.1.jsonl") == [0]
