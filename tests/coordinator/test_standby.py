"""Of all that stand by in a storage one serves; another one goes on with its state, and the first never decides again."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hf_cocodc.coordinator import in_storage, standby, state
from hf_cocodc.coordinator.client import status
from hf_cocodc.coordinator.in_storage import SERVING, call_in_storage, serving_in
from hf_cocodc.coordinator.standby import Standby
from hf_cocodc.coordinator.state import StateInStorage, StateTaken
from hf_cocodc.errors import InputError
from hf_cocodc.net import mailbox
from hf_cocodc.net.storage import Storage, StorageError
from tests.link.memory import at_once, wait_until
from tests.net.storages import Faulty, folder_url

from .regions import OTHER, SECRET
from .test_state import RUN


def test_a_state_goes_on_in_one_place(tmp_path: Path) -> None:
    """It is read with all runs; whoever has it in hand no more cannot write."""
    url = folder_url(tmp_path)
    first = StateInStorage(Storage(url), SECRET)
    first.write("key", RUN)
    second = StateInStorage(Storage(url), SECRET)
    [(key, run)] = second.runs
    assert key == "key" and run.generation.number == RUN.generation.number + 1
    assert (run.members, run.decisions, run.compared) == (RUN.members, RUN.decisions, RUN.compared)
    with pytest.raises(OSError, match="another coordinator has taken over"):
        first.write("key", RUN)
    second.write("key", run)
    assert b"token" not in b"".join(path.read_bytes() for path in (tmp_path / "state").iterdir()), (
        "it is sealed"
    )


def test_a_state_of_another_secret_is_refused(tmp_path: Path) -> None:
    StateInStorage(Storage(folder_url(tmp_path)), SECRET).write("key", RUN)
    with pytest.raises(InputError, match="another secret"):
        StateInStorage(Storage(folder_url(tmp_path)), OTHER)


def test_one_that_stood_still_while_more_was_decided_than_is_kept_decides_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number that it would write next was written, and deleted again."""
    monkeypatch.setattr(state, "_KEPT_STATES", 3)
    monkeypatch.setattr(state, "_KEPT_S", 0.0)
    monkeypatch.setattr(state, "_AGAIN_S", 0.0)
    url = folder_url(tmp_path)
    first = StateInStorage(Storage(url), SECRET)
    first.write("key", RUN)
    second = StateInStorage(Storage(url), SECRET)
    for changes in range(10):
        second.write("key", replace(RUN, changes=changes))
    assert not (tmp_path / "state" / "000000000003").exists()
    assert first.is_taken and not second.is_taken
    with pytest.raises(StateTaken):
        first.write("key", RUN)


@pytest.mark.parametrize("number", [0, 2])
def test_nobody_goes_on_from_a_state_that_is_old(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list was late, or it is long ago that it came: what follows has been deleted meanwhile."""
    monkeypatch.setattr(state, "_KEPT_STATES", 3)
    monkeypatch.setattr(state, "_KEPT_S", 0.0)
    objects, late, listed = Storage(folder_url(tmp_path)), Storage(folder_url(tmp_path)), list[int]()
    kept = StateInStorage(objects, SECRET)
    for changes in range(10):
        kept.write("key", replace(RUN, changes=changes))
    old, names = objects.get("state/000000000011"), late.names
    assert old is not None
    if number:
        objects.put(f"state/{number:012d}", old)

    def first_late(folder: str) -> list[str]:
        listed.append(1)
        return names(folder) if len(listed) > 1 else [str(number)] * (number > 0)

    monkeypatch.setattr(late, "names", first_late)
    with pytest.raises(StateTaken):
        StateInStorage(late, SECRET)


def test_states_are_kept_by_age_and_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_KEPT_STATES", 3)
    objects = Storage(folder_url(tmp_path))
    kept = StateInStorage(objects, SECRET)
    for _ in range(9):
        kept.write("key", RUN)
    assert len(objects.names("state")) == 10, "they are young"
    monkeypatch.setattr(state, "_KEPT_S", 0.0)
    for _ in range(9):
        kept.write("key", RUN)
    numbers = [int(name) for name in objects.names("state")]
    assert numbers == [17, 18, 19]


@pytest.mark.parametrize("seed", range(4))
def test_of_many_that_write_one_decides_each_number(seed: int, tmp_path: Path) -> None:
    """Storages fail and show old lists meanwhile. Whoever goes on has read all that was decided before."""
    url, decided = folder_url(tmp_path), list[int]()
    lock = threading.Lock()

    def stand_by(place: int) -> None:
        for attempt in range(6):
            objects = Storage(url)
            Faulty(objects, 100 * seed + 10 * place + attempt, 0.05)
            try:
                kept = StateInStorage(objects, None)
                [known] = [run.changes for _, run in kept.runs] or [0]
                for number in range(known + 1, known + 4):
                    kept.write("key", replace(RUN, changes=number))
                    with lock:
                        decided.append(number)
            except (StorageError, OSError):
                continue

    at_once(*(partial(stand_by, place) for place in range(3)))
    assert len(decided) == len(set(decided)), "no number was decided twice"
    [(_, run)] = StateInStorage(Storage(url), None).runs
    assert run.changes >= max(decided)


def test_another_one_serves_when_the_first_ends_or_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "LOOK_S", 0.05)
    monkeypatch.setattr(mailbox, "_MEET_S", 0.5)
    monkeypatch.setattr(in_storage, "_ANSWER_S", 0.5)
    url, objects = folder_url(tmp_path), Storage(folder_url(tmp_path))
    one = Standby(url, SECRET)
    wait_until(lambda: serving_in(Storage(url)))
    other = Standby(url, SECRET)
    assert status(url, SECRET, timeout_s=30.0) == []
    one.close()
    wait_until(lambda: objects.get("state/000000000002") is not None)
    assert status(url, SECRET, timeout_s=30.0) == []
    other.close()
    assert not serving_in(Storage(url))
    objects.put(SERVING, b"of a machine without power")
    third = Standby(url, SECRET)
    assert status(url, SECRET, timeout_s=60.0) == []
    third.close()


def test_nobody_takes_over_from_one_that_has_just_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has written its state, and shows itself after a moment."""
    monkeypatch.setattr(standby, "LOOK_S", 0.2)
    url, objects = folder_url(tmp_path), Storage(folder_url(tmp_path))
    StateInStorage(Storage(url), SECRET)
    other = Standby(url, SECRET)
    wait_until(lambda: mailbox.mailbox(url).storage.requests["list"] >= 1)
    objects.put(SERVING, b"another")
    wait_until(lambda: mailbox.mailbox(url).storage.requests["read"] >= 6)
    assert not other.serves and objects.get("state/000000000002") is None
    other.close()


def test_nobody_goes_on_from_a_state_that_was_written_after_it_was_found_to_be_the_newest(
    tmp_path: Path,
) -> None:
    objects = Storage(folder_url(tmp_path))
    StateInStorage(objects, None, 0).write("key", RUN)
    with pytest.raises(StateTaken):
        StateInStorage(objects, None, 1)
    member, place = next(iter(RUN.lanes.items()))
    run = replace(RUN, lanes={member: (place[0]._replace(process="of region 0"),)})
    StateInStorage(objects, None, 2, {"of region 0": 10.0}).write("key", run)
    kept = StateInStorage(objects, None, None, {"of region 0": 10.0, "": 20.0})
    assert kept.silent(kept.runs[0][1]) == {member: 10.0} and kept.silent(RUN) == {}


def test_a_call_ends_once_it_is_known_that_nobody_will_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that serves has died, or another one serves by now."""
    url, objects = folder_url(tmp_path), Storage(folder_url(tmp_path))
    here = mailbox.mailbox(url).process
    dead = here.replace(here.partition("-")[0], str(2**22 + 1), 1)
    objects.put(SERVING, dead.encode())
    with pytest.raises(ConnectionRefusedError, match="has died"):
        call_in_storage(url, 60.0)
    objects.put(SERVING, b"one")

    def another_one_serves() -> None:
        wait_until(lambda: bool(objects.names("calls/one")))
        objects.put(SERVING, b"another")

    with pytest.raises(ConnectionRefusedError, match="another one serves"):
        at_once(another_one_serves, partial(call_in_storage, url, 60.0))


def test_a_process_hears_that_another_one_serves_than_it_has_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection may break only seconds later."""
    monkeypatch.setattr(standby, "LOOK_S", 0.05)
    url, objects = folder_url(tmp_path), Storage(folder_url(tmp_path))
    objects.put(SERVING, b"first")
    mailbox.mailbox(url).called = "first"
    heard: list[bool] = []
    one = Standby(url, SECRET, lambda: heard.append(True))
    time.sleep(0.5)
    assert not heard
    objects.put(SERVING, b"second")
    wait_until(lambda: bool(heard))
    one.close()


def test_a_process_calls_itself_without_the_storage(tmp_path: Path) -> None:
    url = folder_url(tmp_path)
    one = Standby(url, SECRET)
    wait_until(lambda: serving_in(Storage(url)))
    assert status(url, SECRET, timeout_s=30.0) == []
    assert not Storage(url).names("cards") and not Storage(url).names("calls")
    one.close()


def test_whoever_serves_is_named_again_after_one_that_stood_still_has_named_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would take over from that one, which lives, and serves no more."""
    monkeypatch.setattr(standby, "SURE_S", 0.0)
    objects = Storage(folder_url(tmp_path))
    one = Standby(folder_url(tmp_path), SECRET)
    wait_until(lambda: serving_in(objects) != "")
    serving = serving_in(objects)
    objects.put(SERVING, b"another")
    wait_until(lambda: serving_in(objects) == serving)
    assert one.serves
    one.close()


def test_one_that_stood_still_while_another_took_over_serves_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows itself no more, although it has nothing to write."""
    monkeypatch.setattr(standby, "SURE_S", 0.0)
    url, objects = folder_url(tmp_path), Storage(folder_url(tmp_path))
    one = Standby(url, SECRET)
    wait_until(lambda: objects.get(SERVING) is not None)
    StateInStorage(Storage(url), SECRET)
    objects.put(SERVING, b"another")
    wait_until(lambda: not one.serves)
    assert objects.get(SERVING) == b"another"
    one.close()
