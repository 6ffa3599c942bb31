import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hf_cocodc.coordinator.messages import (
    Bye,
    Change,
    Decided,
    Decision,
    Generation,
    Note,
    Noted,
    Terms,
    Welcome,
)
from hf_cocodc.coordinator.rules import Run, durable
from hf_cocodc.coordinator.runs import Runs
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.coordinator.state import StateFile, default_path
from hf_cocodc.errors import InputError
from hf_cocodc.net.members import Member
from tests.listening import lanes

from .regions import hello

A, B = Member(0, 1), Member(1, 2)
RUN = Run(
    name="run",
    run="run-1",
    generations=(Generation(2, "a"), Generation(3, "b")),
    earlier=("run-0",),
    terms=Terms(count=2, wait_s=60.0, grace_s=1.5),
    compared={"model": {"a": [1, 2]}},
    members=(A,),
    lanes={A: lanes("10.0.0.1")},
    tokens={A: "digest"},
    losses=1,
    lost=frozenset({2}),
    decisions=(
        Decided(
            generation=Generation(3, "b"),
            decision=Decision(number=0, members=(A,), lost=(B,), done=7),
            whys=("gone",),
        ),
    ),
    changes=2,
    applied=1,
    announced=(Change(number=2, kind="join", member=Member(2, 5)),),
    tickets=5,
)


def written(path: Path, *states: Run, key: str = "") -> None:
    file = StateFile(path)
    for state in states:
        file.write(key, state)
    file.close()


def read(path: Path) -> list[tuple[str, Run]]:
    file = StateFile(path)
    file.close()
    return file.runs


def test_all_that_is_durable_comes_back_with_a_higher_generation(tmp_path: Path) -> None:
    path = tmp_path / "state"
    written(path, RUN, key="abc")
    [(key, state)] = read(path)
    assert key == "abc" and state.compared == RUN.compared
    again = state.generation
    assert again.number == 4 and again.name != "b"
    assert durable(state) == durable(
        replace(RUN, generations=(*RUN.generations, again), tickets=RUN.tickets + 1000)
    )
    assert read(path)[0][1].generation.number == 5


def test_every_durable_field_is_in_the_file(tmp_path: Path) -> None:
    """A field that `durable` gets and `Saved` does not would be forgotten."""
    path = tmp_path / "state"
    default = Run(name="run")
    ended = Bye(how="stopped", step=9, place="out")
    written(path, replace(RUN, ended=ended))
    [(_, state)] = read(path)
    same = [each for each in durable(state) if each in durable(default)]
    assert same == ["run"], "a field of this state has its default, and nobody can see whether it was read"


def test_runs_that_have_ended_keep_their_generation(tmp_path: Path) -> None:
    path = tmp_path / "state"
    written(path, RUN, replace(RUN, ended=Bye(how="finished", step=100, place="out")))
    [(_, state)] = read(path)
    assert state.generation.number == 3 and state.ended == Bye(how="finished", step=100, place="out")


def test_what_regions_compare_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "state"
    written(path, RUN, replace(RUN, tickets=6), replace(RUN, tickets=7), replace(RUN, compared={"x": 1}))
    lines = [json.loads(line.partition(" ")[2]) for line in path.read_text().splitlines()[1:]]
    assert [line["compared"] for line in lines] == [{"model": {"a": [1, 2]}}, None, None, {"x": 1}]
    [(_, state)] = read(path)
    assert state.compared == {"x": 1} and len(path.read_text().splitlines()) == 2


def test_runs_with_one_name_and_two_secrets_are_two(tmp_path: Path) -> None:
    path = tmp_path / "state"
    file = StateFile(path)
    file.write("one", RUN)
    file.write("two", replace(RUN, tickets=9))
    file.close()
    assert [(key, state.tickets) for key, state in read(path)] == [("one", 1005), ("two", 1009)]


def test_a_file_that_has_grown_is_rewritten_and_stays_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_cocodc.coordinator.state._LEAST_FULL", 10_000)
    path = tmp_path / "state"
    file = StateFile(path)
    for number in range(200):
        file.write("", replace(RUN, tickets=number))
    assert path.stat().st_size < 15_000
    with pytest.raises(InputError, match="another coordinator"):
        StateFile(path)
    file.close()
    [(_, state)] = read(path)
    assert state.tickets == 1199 and state.compared == RUN.compared


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "state"
    written(path, RUN, replace(RUN, tickets=6))
    whole = path.read_bytes()
    for torn in range(1, len(whole.splitlines(keepends=True)[-1])):
        path.write_bytes(whole[:-torn])
        assert read(path)[0][1].tickets == 1005
    file = StateFile(path)
    file.write("", replace(RUN, tickets=8))
    file.close()
    assert read(path)[0][1].tickets == 1008


@pytest.mark.parametrize(
    "damage", [b"{}", b"\0\0\0", b'{"kind": "SavedRun"}', b"[1]", b'"x"', b"{" * 100_000, b"[" * 100_000]
)
def test_a_damaged_line_is_refused_with_its_number_and_a_way_out(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "state"
    written(path, RUN, replace(RUN, tickets=6))
    lines = path.read_bytes().splitlines()
    lines[1] = damage
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(InputError, match="line 2 of --state .* is damaged .* Move the file away"):
        StateFile(path)
    assert path.read_bytes().splitlines()[1] == damage, "the file stays as it was"


def test_a_bit_that_flips_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    written(path, RUN)
    content = path.read_bytes()
    start = content.index(b"\n") + 1
    for place in range(start, len(content) - 1, 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 7]) + content[place + 1 :])
        with pytest.raises(InputError, match="line 2 of --state .* is damaged"):
            StateFile(path)


def test_a_file_of_something_else_or_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    for content in ('{"a": 1}\n', "text\n"):
        path.write_text(content)
        with pytest.raises(InputError, match="not a state of a coordinator"):
            StateFile(path)
        assert path.read_text() == content
    path.write_text('{"hf_cocodc state": 2, "protocol": 2}\n')
    with pytest.raises(InputError, match="another version"):
        StateFile(path)
    with pytest.raises(InputError, match="cannot be used"):
        StateFile(tmp_path / "nowhere" / "state")


def test_a_second_coordinator_with_the_same_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    served = serve_in_thread(state=path)
    with pytest.raises(InputError, match="another coordinator uses --state"):
        serve_in_thread(state=path)
    served.close()
    serve_in_thread(state=path).close()


def _at_once(work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
    try:
        work()
    except OSError as error:
        done(error)
    else:
        done(None)


def _nothing(*about: Any) -> None:
    pass


def runs_of(
    send: Any = _nothing,
    fail: Any = _nothing,
    close: Any = _nothing,
    later: Any = _at_once,
    file: StateFile | None = None,
) -> Runs:
    return Runs(send, _nothing, fail, close, later, file)


def test_nothing_is_sent_once_the_file_cannot_be_written() -> None:
    sent: list[object] = []
    errors: list[OSError] = []

    class Full(StateFile):
        def __init__(self) -> None:
            self.runs = []

        def write(self, key: str, state: Run) -> None:
            raise OSError(28, "No space left on device")

    runs = runs_of(lambda to, message: sent.append(message), fail=errors.append, file=Full())
    hosted = runs.come_in("", "run", 1)
    runs.come_in("", "run", 2)
    runs.came(hosted, 1, hello(0))
    sent.clear()
    runs.came(hosted, 2, hello(1))
    assert not sent and errors[0].errno == 28


def test_a_line_that_cannot_be_written_holds_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it end the coordinator: regions meet all the same."""
    monkeypatch.setattr("hf_cocodc.coordinator.runs.lines", lambda *args: 1 / 0)
    sent: list[object] = []
    runs = runs_of(lambda to, message: sent.append(message))
    for who in (0, 1):
        hosted = runs.come_in("", "run", who)
        runs.came(hosted, who, hello(who))
    assert hosted.state.trains and sent
    assert "no line can be written about run 'run'" in caplog.text


def test_runs_of_a_process_that_stood_still_begin_as_after_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("hf_cocodc.net.awake.time.monotonic", lambda: now)
    closed: list[int] = []
    runs = runs_of(close=closed.append)
    for who in (0, 1):
        hosted = runs.come_in("", "run", who)
        runs.came(hosted, who, hello(who))
    now += 9.0
    runs.tick()
    assert not closed
    now += 11.0
    runs.tick()
    assert sorted(closed) == [0, 1] and hosted.state.uncalled == set(hosted.state.members)


def test_a_slow_disk_holds_what_a_run_says_and_no_other_run() -> None:
    sent: list[tuple[int, object]] = []
    waiting: list[tuple[Callable[[], None], Callable[[Exception | None], None]]] = []

    class File(StateFile):
        def __init__(self) -> None:
            self.runs, self.written = [], []

        def write(self, key: str, state: Run) -> None:
            self.written.append(state.run)

    file = File()
    runs = runs_of(
        lambda to, message: sent.append((to, message)),
        file=file,
        later=lambda work, done: waiting.append((work, done)),
    )
    slow, other = runs.come_in("", "slow", 0), runs.come_in("", "other", 2)
    runs.came(other, 2, hello(0))
    told = len(sent)
    for who in (0, 1):
        runs.came(slow, who, hello(who))
    said = [to for to, message in sent if isinstance(message, Welcome)]
    assert slow.state.trains and not said, "no region hears of a run that is not on the disk"
    runs.came(slow, 0, Note(text="x"))
    assert not [to for to, message in sent if isinstance(message, Noted)], "nor of what follows"
    runs.came(other, 3, structs.replace(hello(0), token="another"))
    assert len(sent) > told and sent[-1][0] == 3
    while waiting:
        work, done = waiting.pop(0)
        work()
        done(None)
    kinds = [type(message) for to, message in sent if to == 1]
    assert kinds[-2:] == [Welcome, Noted] and file.written


def test_a_coordinator_has_a_file_also_if_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "made"))
    path = default_path(29650)
    assert path == tmp_path / "made" / "hf_cocodc" / "coordinator-29650.state"
    written(path, RUN)
    assert read(path)[0][1].run == RUN.run
