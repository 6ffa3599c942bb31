"""What the coordinator does for callers that pull a model: whom it asks, what it passes on, and what that may cost."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_cocodc.coordinator import pulls
from hf_cocodc.coordinator.caller import ConnectionEnded, CoordinatorConnection, error_of
from hf_cocodc.coordinator.client import status
from hf_cocodc.coordinator.messages import (
    Alive,
    Bye,
    Give,
    Given,
    Pull,
    Refuse,
    Waiting,
    Wanted,
)
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.errors import CheckpointError, LinkError, MeetingError, RunOver
from hf_cocodc.net.keys import Keys
from hf_cocodc.snapshot.given import receive, send
from tests.coordinator.regions import SECRET, Region, hello, meet, part, wait_until

GIVEN = Given(run="run", region=0, step=7, landings=2, fragments=1, regions=(0, 1), files={})


@pytest.fixture(params=[None, SECRET], ids=["plain", "secret"])
def keys(request: pytest.FixtureRequest) -> Keys | None:
    return request.param


@pytest.fixture
def address(keys: Keys | None) -> Iterator[str]:
    served = serve_in_thread(secrets=[] if keys is None else [keys])
    yield served.address
    served.close()


@contextlib.contextmanager
def calling(address: str, message: Pull | Give, keys: Keys | None = None) -> Iterator[CoordinatorConnection]:
    connection = CoordinatorConnection(address, "run", "command", keys)
    try:
        connection.send(message)
        yield connection
    finally:
        connection.drop()


def wanted(region: Region) -> tuple[str, ...]:
    """The callers that wait for a region, as it has heard last."""
    return next((each.pulls for each in reversed(region.heard) if isinstance(each, Wanted)), ())


def heard(connection: CoordinatorConnection) -> Waiting | Refuse | Given:
    """The next message that says something."""
    while isinstance(message := connection.receive(5.0), Alive):
        pass
    assert message is not None
    return message


def files_in(folder: Path, **contents: bytes) -> dict[str, Path]:
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.json").write_bytes(content)
    return {f"{name}.json": folder / f"{name}.json" for name in contents}


def given(files: dict[str, Path]) -> Given:
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return Given(run="run", region=0, step=7, landings=2, fragments=1, regions=(0, 1), files=sizes)


def test_files_come_whole_from_the_lowest_region_and_nobody_is_a_member_more(
    address: str, keys: Keys | None, tmp_path: Path
) -> None:
    regions = meet(address, hello(0), hello(1), keys=keys)
    files = files_in(tmp_path / "model", config=b"{}", weights=bytes(range(256)) * 10_000, empty=b"")
    members = status(address, keys)[0]["members"]
    with calling(address, Pull(), keys) as puller:
        assert heard(puller) == Waiting(why="region 0 gives it after its next landing, or before")
        wait_until(lambda: len(wanted(regions[0])) == 1)
        with calling(address, Give(pull=wanted(regions[0])[0]), keys) as donor:
            sending = threading.Thread(target=send, args=(donor, given(files), files, None, lambda: None))
            sending.start()
            message = heard(puller)
            assert isinstance(message, Given)
            (tmp_path / "out").mkdir()
            assert receive(puller, message, tmp_path / "out") == 2_560_002
            puller.drop()
            sending.join(5.0)
            assert not sending.is_alive()  # it has heard that the caller has all
    for name, path in files.items():
        assert (tmp_path / "out" / name).read_bytes() == path.read_bytes()
    wait_until(lambda: wanted(regions[0]) == ())
    assert not any(isinstance(each, Wanted) for each in regions[1].heard)
    [after] = status(address, keys)
    assert [each["ticket"] for each in after["members"]] == [each["ticket"] for each in members]
    assert after["epoch"] == 0 and not after["newcomers"]
    part(*regions)


def test_four_are_served_at_once_and_the_fifth_follows() -> None:
    with contextlib.closing(serve_in_thread()) as served, contextlib.ExitStack() as open_calls:
        regions = meet(served.address, hello(0), hello(1))
        callers = []
        for place in range(5):
            callers.append(open_calls.enter_context(calling(served.address, Pull())))
            why = heard(callers[-1]).why  # type: ignore[union-attr]
            assert why.startswith("region 0 gives it" if place < 4 else "4 others pull it now")
        first, *_, last = callers
        wait_until(lambda: len(wanted(regions[0])) == 4)
        before = set(wanted(regions[0]))
        first.drop()
        assert heard(last).why.startswith("region 0 gives it")  # type: ignore[union-attr]
        wait_until(lambda: len(wanted(regions[0])) == 4 and set(wanted(regions[0])) != before)
        part(*regions)


def test_a_caller_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "MOST_WAITING", 1)
    with contextlib.closing(serve_in_thread()) as served:
        regions = meet(served.address, hello(0), hello(1))
        with calling(served.address, Pull()) as first, calling(served.address, Pull()) as second:
            refusal = next(each for each in map(heard, (first, second) * 2) if isinstance(each, Refuse))
            assert isinstance(error_of(refusal), MeetingError) and "1 others pull it already" in refusal.why
        part(*regions)


def test_another_region_is_asked_where_the_donor_is_lost_and_a_region_that_comes_back_hears_it_again() -> (
    None
):
    with contextlib.closing(serve_in_thread()) as served:
        regions = meet(served.address, hello(0, 3, True), hello(1, 3, True), hello(2, 3, True))
        with calling(served.address, Pull()) as puller:
            assert heard(puller).why.startswith("region 0 gives it")  # type: ignore[union-attr]
            wait_until(lambda: len(wanted(regions[0])) == 1)
            name = wanted(regions[0])
            regions[0].client._thread.loop.call_soon_threadsafe(  # type: ignore[union-attr]
                regions[0].client.hang_up, "a test"
            )
            wait_until(lambda: sum(each == Wanted(pulls=name) for each in regions[0].heard) == 2)
            regions[0].client.close()
            wait_until(lambda: wanted(regions[1]) == name)
        wait_until(lambda: wanted(regions[1]) == ())
        part(*regions)


def test_the_end_of_the_run_is_told_with_the_place_of_its_model() -> None:
    with contextlib.closing(serve_in_thread()) as served:
        regions = meet(served.address, hello(0), hello(1))
        with calling(served.address, Pull()) as puller:
            heard(puller)
            for each in regions:
                each.client.close(Bye(how="finished", step=40, place="machine0:/runs/mine"))
            refusal = heard(puller)
            while isinstance(refusal, Waiting):
                refusal = heard(puller)
            assert isinstance(refusal, Refuse)
        error = error_of(refusal)
        assert type(error) is RunOver and error.exit_code == 1  # nothing was written
        assert "has finished at step 40" in str(error) and "machine0:/runs/mine" in str(error)


def test_nobody_waits_for_ever_for_a_run_without_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "NOBODY_S", 0.5)
    with contextlib.closing(serve_in_thread()) as served, calling(served.address, Pull()) as puller:
        assert heard(puller) == Waiting(why="no region that trains is connected to the coordinator yet")
        refusal = heard(puller)
        assert isinstance(refusal, Refuse) and "no region that trains has been connected" in refusal.why


def test_a_donor_that_breaks_off_ends_the_caller_and_one_that_nobody_waits_for_is_ended(
    address: str, keys: Keys | None, tmp_path: Path
) -> None:
    regions = meet(address, hello(0), hello(1), keys=keys)
    files = files_in(tmp_path / "model", weights=b"x" * 1000)
    with calling(address, Pull(), keys) as puller:
        wait_until(lambda: len(wanted(regions[0])) == 1)
        [name] = wanted(regions[0])
        with calling(address, Give(pull=name), keys) as donor:
            donor.send(given(files))
            donor.send_bytes(b"x" * 999, 5.0)
            message = heard(puller)
            while isinstance(message, Waiting):
                message = heard(puller)
            assert isinstance(message, Given)
            with calling(address, Give(pull=name), keys) as second, pytest.raises(ConnectionEnded):
                second.receive_bytes(1, 5.0)
        (tmp_path / "out").mkdir()
        with pytest.raises(ConnectionEnded):
            receive(puller, message, tmp_path / "out")
    with calling(address, Give(pull="unknown"), keys) as donor, pytest.raises(ConnectionEnded):
        donor.receive_bytes(1, 5.0)
    part(*regions)


def test_a_caller_that_takes_nothing_is_ended_and_little_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pulls, "STALLED_S", 1.0)
    with contextlib.closing(serve_in_thread()) as served:
        regions = meet(served.address, hello(0), hello(1))
        with calling(served.address, Pull()) as puller:
            wait_until(lambda: len(wanted(regions[0])) == 1)
            puller._thread.loop.call_soon_threadsafe(puller.call.writer.transport.pause_reading)  # type: ignore[attr-defined]
            taken = 0
            with (
                calling(served.address, Give(pull=wanted(regions[0])[0])) as donor,
                contextlib.suppress(ConnectionEnded),
            ):
                while taken < 1 << 10:
                    donor.send_bytes(bytes(1 << 20), 10.0)
                    taken += 1
            assert taken < 128  # buffers of the two sockets, and of the reader
        assert [each["region"] for each in status(served.address, None)[0]["members"]] == [0, 1]
        part(*regions)


def test_bytes_that_were_altered_and_names_that_no_model_has_are_refused(tmp_path: Path) -> None:
    with contextlib.closing(serve_in_thread()) as served:
        regions = meet(served.address, hello(0), hello(1))
        for said, error in (
            (given(files_in(tmp_path / "model", config=b"ab")), LinkError),
            (
                Given(
                    run="run", region=0, step=1, landings=0, fragments=1, regions=(0,), files={"../a.json": 2}
                ),
                CheckpointError,
            ),
        ):
            with calling(served.address, Pull()) as puller:
                wait_until(lambda: len(wanted(regions[0])) == 1)
                with calling(served.address, Give(pull=wanted(regions[0])[0])) as donor:
                    donor.send(said)
                    donor.send_bytes(b"ab", 5.0)
                    donor.send_bytes(b'{"kind":"Sums","sha256":{"config.json":"0"}}\n', 5.0)
                    while isinstance(message := heard(puller), Waiting):
                        pass
                    assert isinstance(message, Given)
                    (tmp_path / "out").mkdir(exist_ok=True)
                    with pytest.raises(error):
                        receive(puller, message, tmp_path / "out")
            wait_until(lambda: wanted(regions[0]) == ())
        part(*regions)
