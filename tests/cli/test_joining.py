"""`hf-cocodc train` in a run that goes on without a lost region: joining, losing, exit codes."""

from __future__ import annotations

import errno
import io
import os
import shlex
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_cocodc.cli import joining, supervising
from hf_cocodc.cli.joining import has_missed_the_end, loss_in_words, way_back
from hf_cocodc.cli.main import main
from hf_cocodc.cli.part import MachinePart
from hf_cocodc.coordinator.client import status as runs_at
from hf_cocodc.coordinator.messages import Bye
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.errors import InputError, MeetingError
from hf_cocodc.net import storage
from hf_cocodc.net.storage import StorageError
from hf_cocodc.settings import RegionConfig
from hf_cocodc.snapshot import folders
from hf_cocodc.training.launch import Launch, Program
from tests.coordinator.regions import Region, hello, meet, part, wait_until
from tests.listening import free_port
from tests.net.storages import folder_url

RECIPE = str(Path(__file__).parents[2] / "recipes" / "quickstart" / "diloco.yaml")
ELASTIC = ["--set", "regions.count=4", "--set", "regions.min=2"]


@pytest.fixture
def address() -> Iterator[str]:
    served = serve_in_thread()
    yield served.address
    served.close()


def a_part(name: str | None, **settings: Any) -> MachinePart:
    """The part of a region that joins."""
    return MachinePart(RegionConfig(count=2, **{"min": 1, **settings}), None, True, True, name)


def begun(address: str, name: str, count: int = 2) -> list[Region]:
    """A run that trains; two more regions may come in."""
    return meet(address, *(hello(region, count, elastic=True) for region in range(count)), run=name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*ELASTIC, "--join", "--resume", "--coordinator", "127.0.0.1:1"], "--join with --resume"),
        ([*ELASTIC, "--join", "--region", "1"], "--join needs the coordinator"),
        (
            ["--set", "regions.on_loss=stop", "--join", "--region", "1", "--coordinator", "127.0.0.1:1"],
            "Nobody can join such a run.",
        ),
        (
            [*ELASTIC, "--join", "--region", "4", "--coordinator", "127.0.0.1:1"],
            "--region 4 does not exist: with regions.count=4",
        ),
        (
            [*ELASTIC, "--set", "regions.max=6", "--join", "--region", "6", "--coordinator", "127.0.0.1:1"],
            "--region 6 does not exist: with regions.max=6, regions are numbered 0 .. 5",
        ),
        (
            [*ELASTIC, "--set", "regions.max=6", "--region", "5", "--coordinator", "127.0.0.1:1"],
            "with regions.count=4",
        ),
    ],
)
def test_a_region_that_cannot_join_is_refused_in_one_paragraph(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is loaded, with exit code 2."""
    assert main(["train", RECIPE, "--set", f"training.output_dir={tmp_path}", *words]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1


def test_a_coordinator_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a line that says so. What is away for too long may be there later: exit code 1, and a supervisor tries again."""
    monkeypatch.setattr(joining, "FIRST_S", 0.0)
    port = free_port()
    address = f"127.0.0.1:{port}"
    words = ["--set", f"training.output_dir={tmp_path}", "--set", "regions.start_timeout_s=0.3"]
    assert main(["train", RECIPE, *words, *ELASTIC, "--region", "1", "--coordinator", address]) == 1
    assert f"no coordinator answers at {address}" in capsys.readouterr().err
    served: list[Any] = []
    late = threading.Timer(0.5, lambda: served.append(serve_in_thread(port=port)))
    late.start()
    assert joining.run_at(a_part("mine"), address, None) is None
    late.join()
    served[0].close()
    assert f"waiting for the coordinator at {address}, 600 s more" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "is_waited_for"), [(errno.EIO, True), (errno.EACCES, False)])
def test_a_storage_that_is_away_is_waited_for(
    number: int,
    is_waited_for: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the same line. One that refuses this machine is not."""
    monkeypatch.setattr(joining, "FIRST_S", 0.0)
    monkeypatch.setattr(storage, "_FIRST_WAIT_S", 0.001)
    read, failures = storage._Folder.read, iter(range(9))

    def away(folder: storage._Folder, name: str) -> bytes:
        if next(failures, None) is not None:
            raise OSError(number, os.strerror(number))
        return read(folder, name)

    monkeypatch.setattr(storage._Folder, "read", away)
    url = folder_url(tmp_path)
    with nullcontext() if is_waited_for else pytest.raises(StorageError, match="Permission denied"):
        assert joining.run_at(replace(a_part("mine"), join=False), url, None) is None
    line = f"waiting for the coordinator at {url}, 600 s more (regions.start_timeout_s)"
    assert (line in capsys.readouterr().out) == is_waited_for


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[supervising.Order]:
    """What commands would carry out."""
    found: list[supervising.Order] = []

    def carry_out(order: supervising.Order) -> int:
        found.append(order)
        return 0

    for command in ("train", "launch"):
        monkeypatch.setattr(f"hf_cocodc.cli.{command}.carry_out", carry_out)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["train", RECIPE, "--set", "data.name=a b", *ELASTIC, "--run", "a b", "--", "--cpu"],
        [
            *("launch", "--regions", "4", "--run", "a b", "--logs", "x y", "--", "--cpu", "--"),
            *("-m", "hf_cocodc", "--run", "c"),
        ],
    ],
)
def test_the_command_that_brings_a_lost_region_back_can_be_pasted(
    words: list[str], orders: list[supervising.Order]
) -> None:
    """With the same recipe or script, changes and launcher arguments, and the coordinator that the command has started."""
    assert main(words) == 0
    again = way_back(orders[0].words, orders[0].resume, 3, "127.0.0.1:29650")
    assert again.startswith(f"hf-cocodc {words[0]}")
    assert main(shlex.split(again)[1:]) == 0
    first, second = orders
    assert (second.part.join, second.part.region, second.part.name) == (True, 3, "a b")
    assert second.part.regions.coordinator == "127.0.0.1:29650"
    assert second.program.launcher == first.program.launcher == ["--cpu"]
    assert second.program.folder == first.program.folder


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["launch", "--regions", "2", "-m", "hf_cocodc", "--resume"], "-m hf_cocodc --resume"),
        (["launch", "--regions", "2", "--resume", "-m", "hf_cocodc", "--resume"], "-m hf_cocodc --resume"),
        (["launch", "--regions", "2", "--resume", "-m", "hf_cocodc"], "-m hf_cocodc"),
    ],
)
def test_a_region_that_comes_back_has_its_script_s_own_resume_and_not_the_command_s(
    words: list[str], program: str, orders: list[supervising.Order]
) -> None:
    """The coordinator hands a region its state: only what the command itself resumed is left out."""
    assert main(words) == 0
    again = way_back(orders[0].words, orders[0].resume, 1, None)
    assert again == f"hf-cocodc launch --join --region 1 --coordinator HOST:PORT --regions 2 {program}"


def a_region(region: int, error: tuple[str, int] | None) -> Any:
    log = io.BytesIO()
    log.name = f"region-{region}/log.txt"  # type: ignore[attr-defined]
    has_stopped = error is not None and error[1] == 3
    return SimpleNamespace(
        region=region,
        error=lambda: error,
        last_lines=lambda count: ["the end"],
        log=log,
        told={},
        end_in_words="killed, or ended without an error message",
        has_stopped=has_stopped,
    )


def test_a_run_that_stopped_below_its_least_number_has_exit_code_3(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Although the region that was lost first had another; a run that ends with a lost region has that one's."""
    killed, stopped, lost = (
        a_region(0, None),
        a_region(1, ("too few regions", 3)),
        a_region(2, ("region 0 is gone", 1)),
    )
    assert supervising.report_failure([killed, stopped], [killed, stopped], elastic=True) == 3
    assert capsys.readouterr().err.startswith("error: [region 1] too few regions\nfull output: region-1")
    assert supervising.report_failure([killed, stopped], [killed, stopped], elastic=False) == 1
    assert "[region 0] was killed" in capsys.readouterr().err
    assert supervising.report_failure([killed, lost], [killed, lost], elastic=True) == 1


def test_a_loss_has_a_reason() -> None:
    """The region's own error, or where its output is."""
    assert loss_in_words(a_region(0, ("the disk refuses", 2))) == "the disk refuses"
    assert loss_in_words(a_region(0, None)).endswith("see region-0/log.txt")


def test_a_newcomer_without_a_number_takes_the_lowest_that_is_free(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the run that is named after its output folder; it waits for the run to begin, and holds it until it has ended."""
    monkeypatch.setattr(joining, "AGAIN_S", 0.1)
    mine = a_part("mine", min=1, max=4, start_timeout_s=60)
    regions: list[Region] = []
    run = threading.Timer(0.5, lambda: regions.extend(begun(address, "mine")))
    run.start()
    first, second = joining.claim_number(mine, address), joining.claim_number(mine, address)
    run.join()
    assert first is not None and second is not None
    assert (first[1], second[1]) == (2, 3)
    assert f"waiting for run 'mine' at {address}" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"as many regions as it may have \(regions.max=4\)"):
        joining.claim_number(mine, address)
    first[0].close()
    third = joining.claim_number(mine, address)
    assert third is not None and third[1] == 2
    for connection, _ in (second, third):
        connection.close()
    part(*regions)


def test_a_run_that_has_not_begun_cannot_be_joined(address: str, tmp_path: Path) -> None:
    for name, said in (("mine", "run 'mine'"), (None, "a run")):
        with pytest.raises(MeetingError, match=f"no region of {said} trains .* there is nothing to join"):
            joining.claim_number(a_part(name, start_timeout_s=0.1), address)


def test_a_script_joins_the_only_run_that_there_is(address: str) -> None:
    """It alone knows the name of its run. If there are several, somebody has to say which."""
    regions = begun(address, "mine", count=1)
    claimed = joining.claim_number(a_part(None), address)
    assert claimed is not None and claimed[1] == 1
    claimed[0].close()
    regions += begun(address, "other")
    with pytest.raises(InputError, match=r"has several runs \((mine, other|other, mine)\).*--run NAME"):
        joining.claim_number(a_part(None), address)
    part(*regions)


@pytest.mark.parametrize("region", [[], ["--region", "1"]])
@pytest.mark.parametrize(("how", "code"), [("finished", 0), ("stopped", 1)])
def test_who_comes_too_late_hears_it_at_once(
    region: list[str],
    how: str,
    code: int,
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The place of the model and exit code 0, or how to go on; before anything is loaded."""
    monkeypatch.setattr("hf_cocodc.cli.supervising.load_ahead", lambda: pytest.fail("it loads"))
    first, other = begun(address, tmp_path.name)
    first.client.close(Bye(how=how, step=800, place="/out/region-0"))
    part(other)
    words = ["--set", f"training.output_dir={tmp_path}", *ELASTIC, "--join", "--coordinator", address]
    assert main(["train", RECIPE, *words, *region]) == code
    said = capsys.readouterr()
    if how == "finished":
        assert "has finished at step 800: there is nothing to join. Its model is at /out/reg" in said.out
    else:
        assert "has stopped at step 800: there is nothing to join. Start all its regions with" in said.err
    assert not list(tmp_path.iterdir())


def test_a_run_that_ends_while_a_number_is_claimed(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newcomer does not wait for it: nothing is left to do, and that is no mistake."""
    first, other = begun(address, "mine")
    first.client.close(Bye(how="finished", step=800))
    part(other)
    assert joining.claim_number(a_part("mine"), address) is None
    assert "run 'mine' has finished at step 800: there is nothing to join" in capsys.readouterr().out


def test_a_run_of_the_same_name_may_begin_after_one_that_has_finished(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A region that is started again after the end hears for what it waits."""

    def stop(*given: Any, **facts: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_cocodc.training.launch.start", stop)
    first, other = begun(address, tmp_path.name)
    first.client.close(Bye(how="finished", step=800))
    part(other)
    words = ["--set", f"training.output_dir={tmp_path}", *ELASTIC, "--region", "1", "--coordinator", address]
    assert main(["train", RECIPE, *words]) == 130
    assert "a new run of this name begins once all regions are here." in capsys.readouterr().out


def test_a_lost_region_that_is_started_again_after_the_end_hears_it_at_once() -> None:
    """Its supervisor starts it, with --resume. It would wait for the others. If they are to make more steps, it is needed."""
    ended = {"how": "finished", "step": 800, "place": "/out/region-0"}
    state = {"name": "mine", "phase": "ended", "ended": ended, "lost": [{"region": 1}]}
    said = has_missed_the_end(state, 1, 800)
    assert said is not None and said == has_missed_the_end(state, 1, None)
    assert said.startswith(
        "run 'mine' has finished at step 800 without region 1, which was lost. The others have the"
    )
    assert "/out/region-0" in said
    for region, max_steps, other in (
        *((0, 800, state), (1, 900, state), (1, -1, state), (1, 800, None), (0, None, state)),
        *(
            (1, 800, {**state, "phase": "gathering"}),
            (1, 800, {**state, "ended": {**ended, "how": "stopped"}}),
        ),
    ):
        assert has_missed_the_end(other, region, max_steps) is None


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_a_region_that_its_scheduler_starts_again_comes_back(
    trains: bool, resume: bool, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command that started it: if the run trains, the region joins it, and its log goes on; with --resume too."""
    regions = begun(address, tmp_path.name) if trains else []
    wait_until(lambda: not trains or bool(runs_at(address, None, None, 5.0)))
    given: list[Any] = []

    def start(program: Program, planned: list[Launch], continues: bool, **facts: Any) -> None:
        [each] = planned
        given.extend(
            [each.env.get("HF_COCODC_JOIN"), each.region, each.env.get("HF_COCODC_RESUME"), continues]
        )
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_cocodc.training.launch.start", start)
    words = ["--set", f"training.output_dir={tmp_path}", *ELASTIC, "--region", "1", "--coordinator", address]
    assert main(["train", RECIPE, *words, *(["--resume"] if resume else [])]) == 130
    assert given == ["1" if trains else None, 1, "1" if resume and not trains else None, trains or resume]
    part(*regions)


def test_an_interrupted_run_names_the_checkpoint_of_those_that_were_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region that had left before has an older one, or none."""
    monkeypatch.setattr("hf_cocodc.snapshot.folders.usable", folders.checkpoints)
    for region, step in ((0, 200), (1, 400), (2, 400)):
        (tmp_path / f"region-{region}" / f"checkpoint-{step}").mkdir(parents=True)
    for rules, said in (
        (RegionConfig(min=1), "checkpoint-400 is complete in every region that was left"),
        (RegionConfig(), "no checkpoint is complete in every region"),
    ):
        ended: Any = [
            SimpleNamespace(
                region=region,
                home=tmp_path / f"region-{region}",
                has_stopped=has_stopped,
                rules=rules,
                told={"members": [1, 2]} if rules.elastic else {},
            )
            for region, has_stopped in ((0, False), (1, True), (2, True))
        ]
        assert supervising.saved(ended, 3).startswith(said)
