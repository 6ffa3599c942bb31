"""`hf-cocodc pull` at a real coordinator, with regions that give what a test wants."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from msgspec import structs

from hf_cocodc.cli import status
from hf_cocodc.cli.main import main
from hf_cocodc.coordinator.caller import CoordinatorConnection
from hf_cocodc.coordinator.messages import Bye, Give, Given, Refuse, Sums, Wanted
from hf_cocodc.coordinator.server import Served, serve_in_thread
from hf_cocodc.settings.environment import ENV_SECRET
from hf_cocodc.snapshot.given import send
from tests.coordinator.regions import SECRET, THEIRS, Region, hello, meet, part, wait_until
from tests.secret import secret

CONTENT = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 3000}
PLACE = "machine0:/runs/mine"
Giver = Callable[[CoordinatorConnection, Given, dict[str, Path]], None]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(status, "PATIENCE_S", 1.0)
    made = serve_in_thread()
    yield made
    made.close()


@contextlib.contextmanager
def giving(address: str, regions: Sequence[Region], folder: Path, *givers: Giver) -> Iterator[None]:
    """While region 0 gives its model: with the first of `givers` to whoever wants it first, and so on."""
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    files = {name: folder / name for name in CONTENT}
    sizes = {name: len(content) for name, content in CONTENT.items()}
    said = Given(
        run="run", region=0, step=7, landings=2, fragments=1, regions=(0, 1), place=PLACE, files=sizes
    )

    def give() -> None:
        done: set[str] = set()
        for giver in givers:

            def new() -> list[str]:
                messages = [each for each in regions[0].heard if isinstance(each, Wanted)]
                return [name for name in (messages[-1].pulls if messages else ()) if name not in done]

            wait_until(lambda new=new: bool(new()), 20.0)  # type: ignore[misc]
            [name] = new()
            done.add(name)
            connection = CoordinatorConnection(address, "run", "command", None)
            try:
                connection.send(Give(pull=name))
                giver(connection, said, files)
            finally:
                connection.drop()

    thread = threading.Thread(target=give)
    thread.start()
    yield
    thread.join(20.0)
    assert not thread.is_alive()


def whole(connection: CoordinatorConnection, said: Given, files: dict[str, Path]) -> None:
    send(connection, said, files, None, lambda: None)


def half(connection: CoordinatorConnection, said: Given, files: dict[str, Path]) -> None:
    connection.send(said)
    connection.send_bytes(CONTENT["config.json"] + CONTENT["model.safetensors"][:1000], 5.0)
    connection.wait_for_end(0.3)  # it is on its way


def untrained(connection: CoordinatorConnection, said: Given, files: dict[str, Path]) -> None:
    whole(connection, structs.replace(said, landings=0), files)


def altered(connection: CoordinatorConnection, said: Given, files: dict[str, Path]) -> None:
    connection.send(said)
    connection.send_bytes(b"".join(reversed(CONTENT.values())), 5.0)
    connection.send(Sums(sha256={"config.json": "0"}))
    connection.wait_for_end(5.0)


def test_a_model_comes_whole_or_not_at_all(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that broke off, or was altered, is asked for once more with the same command."""
    regions = meet(served.address, hello(0), hello(1))
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is as good as none
    command = ["pull", "--coordinator", served.address, str(out)]
    with giving(served.address, regions, tmp_path / "model", half, altered, whole):
        for said in ("", "its hashes differ"):
            assert main(command) == 1
            error = capsys.readouterr().err
            assert (
                f"{said}: the model came only in part, and nothing was written. Start this command" in error
            )
            assert not [*out.iterdir()]
        assert main(command) == 0
    text = capsys.readouterr().out
    assert "inner step 7 (outer steps: 2) of 2 regions, from region 0: 768 kB in " in text
    assert {path.name: path.read_bytes() for path in out.iterdir()} == CONTENT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    part(*regions)


def test_weights_from_before_the_first_landing_are_called_so(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    regions = meet(served.address, hello(0), hello(1))
    with giving(served.address, regions, tmp_path / "model", untrained):
        assert main(["pull", "--coordinator", served.address, str(tmp_path / "out")]) == 0
    assert "none yet, so these are the weights from before training" in capsys.readouterr().out
    part(*regions)


def test_nothing_is_written_where_the_run_ends_and_its_model_is_named(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    regions = meet(served.address, hello(0), hello(1))

    def end(connection: CoordinatorConnection, said: Given, files: dict[str, Path]) -> None:
        half(connection, said, files)
        for each in regions:
            each.client.close(Bye(how="finished", step=40, place=PLACE))

    with giving(served.address, regions, tmp_path / "model", end):
        assert main(["pull", "--coordinator", served.address, str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "nothing was written" in error and f"If the run has ended, its model is below {PLACE}" in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_where_the_coordinator_ends_with_the_run_the_place_is_named(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    regions = meet(served.address, hello(0), hello(1))

    def end(connection: CoordinatorConnection, said: Given, files: dict[str, Path]) -> None:
        half(connection, said, files)
        served.close()

    with giving(served.address, regions, tmp_path / "model", end):
        assert main(["pull", "--coordinator", served.address, str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "nothing was written" in error and f"If the run has ended, its model is below {PLACE}" in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    part(*regions)


def test_a_region_says_why_it_cannot_give_its_model(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    regions = meet(served.address, hello(0), hello(1))

    def refuse(connection: CoordinatorConnection, said: Given, files: dict[str, Path]) -> None:
        connection.send(Refuse(error="InputError", why="region 0 cannot give its model: the disk is full"))
        connection.wait_for_end(5.0)

    with giving(served.address, regions, tmp_path / "model", refuse):
        assert main(["pull", "--coordinator", served.address, str(tmp_path / "out")]) == 2
    assert "the disk is full" in capsys.readouterr().err
    part(*regions)


def test_a_folder_that_is_not_new_is_refused_before_anybody_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for out, words in (
        (tmp_path / "full", "exists, and is not empty"),
        (tmp_path / "full" / "file", "exists, and is not empty"),
        (tmp_path / "none" / "out", "no folder can be made in"),
    ):
        assert main(["pull", "--coordinator", "127.0.0.1:1", str(out)]) == 2
        assert words in capsys.readouterr().err


def test_no_run_several_runs_and_another_secret_are_refused(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["pull", "--coordinator", served.address, str(tmp_path / "out")]
    assert main(command) == 2
    assert f"no run trains at {served.address}." in capsys.readouterr().err
    regions = [each for name in ("one", "two") for each in meet(served.address, hello(0), hello(1), run=name)]
    assert main(command) == 2
    assert "several runs train at" in capsys.readouterr().err
    assert main([*command, "--run", "three"]) == 2
    assert "no run named 'three' trains" in capsys.readouterr().err
    part(*regions)
    with contextlib.closing(serve_in_thread(secrets=[SECRET])) as other:
        monkeypatch.setenv(ENV_SECRET, secret(THEIRS))
        assert main(["pull", "--coordinator", other.address, str(tmp_path / "out")]) == 2
        assert "another secret than the coordinator" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
