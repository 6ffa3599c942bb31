"""What the launch of regions does to the folders of a run, without launching any."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hf_cocodc.errors import RunFinished, RunStopped
from hf_cocodc.run.gpus import VISIBLE
from hf_cocodc.settings.environment import ENV_LAUNCH
from hf_cocodc.status import ENV_STATUS, tell
from hf_cocodc.training import launch
from hf_cocodc.training import region as region_process

SCRIPT = launch.Program(["script.py"], [], Path("nowhere"))


class Launcher:
    """A launcher that starts nothing and has ended."""

    pid = returncode = 0

    def __init__(self, command: list[str], *, env: dict[str, str], stdout: Any, **options: Any) -> None:
        self.command, self.env = command, env
        stdout.write(b"a line of the new run\n")
        stdout.flush()

    def poll(self) -> int:
        return 0


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Starts all regions of the quickstart."""
    monkeypatch.setattr(subprocess, "Popen", Launcher)

    def begin(resume: bool = False, regions: int = 2, use_cpu: bool = False) -> list[launch.RegionProcess]:
        program = dataclasses.replace(SCRIPT, folder=tmp_path, use_cpu=use_cpu)
        planned = launch.launches(program, range(regions), regions, {})
        started = launch.start(program, planned, continues=resume)
        for each in started:
            each.log.close()
        return started

    return begin


def has_gpus(count: int, visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, torch counts so many GPUs among the `visible` ones."""
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("gpus", "hidden", "regions", "each"),
    [
        (1, None, 2, ["0", "0"]),
        (2, None, 2, ["0", "1"]),
        (8, None, 2, ["0,1,2,3", "4,5,6,7"]),
        (5, None, 2, ["0,1", "2,3"]),
        (2, None, 5, ["0", "1", "0", "1", "0"]),
        (2, "4,6", 2, ["4", "6"]),
        (2, "GPU-5fb2,GPU-99ab,-1,GPU-0e0e", 3, ["GPU-5fb2", "GPU-99ab", "GPU-5fb2"]),
    ],
)
def test_regions_divide_the_gpus_of_a_machine_or_share_them(
    gpus: int,
    hidden: str | None,
    regions: int,
    each: list[str],
    start: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """README's first command starts a launcher for each region, with a process for each GPU that the region sees."""
    has_gpus(gpus, hidden, monkeypatch)
    started = [region.process for region in start(regions=regions)]
    assert [process.env[VISIBLE] for process in started] == each
    for process, own in zip(started, each, strict=True):
        assert process.command[1:3] == ["-m", "accelerate.commands.launch"]
        given = process.command[3 : process.command.index("script.py")]
        count = own.count(",") + 1
        assert given[given.index("--num_processes") + 1] == str(count)
        assert ("--multi_gpu" in given) == (count > 1)
        assert "ACCELERATE_USE_CPU" not in process.env


@pytest.mark.parametrize(("gpus", "use_cpu"), [(0, False), (0, True), (1, True), (8, True)])
def test_a_region_on_the_cpu_is_one_process(
    gpus: int, use_cpu: bool, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the recipe's choice it sees no GPU, and torch is not loaded to ask for them."""
    has_gpus(gpus, None, monkeypatch)
    if use_cpu:
        for name in ("is_available", "device_count", "init"):
            monkeypatch.setattr(torch.cuda, name, lambda: pytest.fail("CUDA was asked"))
    assert launch.sharing_here(dataclasses.replace(SCRIPT, use_cpu=use_cpu), 2) is None
    for region in start(use_cpu=use_cpu):
        assert region.is_rank
        assert region.process.command[1:] == SCRIPT.words
        assert region.process.env["ACCELERATE_USE_CPU"] == "True"
        assert region.process.env.get(VISIBLE) == ("" if use_cpu else None)


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_users_accelerate_config_is_not_for_regions(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gpu_ids would put all regions on one GPU, its distributed_type shard each of them. It counts with arguments of theirs,
    which is said.
    """
    from accelerate.commands import launch as accelerate
    from accelerate.commands.config import config_args

    config = tmp_path / "default_config.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nuse_cpu: false\ndebug: false\n"
        "gpu_ids: '0'\nnum_machines: 1\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
    )
    for module in (accelerate, config_args):
        monkeypatch.setattr(module, "default_config_file", str(config))
    with monkeypatch.context() as here:
        has_gpus(2 * gpus, None, here)
        [planned, _] = launch.launches(SCRIPT, [0, 1], 2, {})
    words = planned.command[planned.command.index("--quiet") :]
    given, _, _ = accelerate._validate_launch_command(accelerate.launch_command_parser().parse_args(words))
    assert (given.use_fsdp, given.multi_gpu, given.gpu_ids) == (False, gpus > 1, "all")
    assert (given.num_processes, given.mixed_precision, given.main_process_port) == (gpus, "no", 0)
    assert launch.configured([]) is launch.configured(["--cpu"]) is None
    assert str(config) in str(launch.configured(["--multi_gpu"]))


def test_arguments_for_a_launcher_leave_the_gpus_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(1, None, monkeypatch)
    program = dataclasses.replace(SCRIPT, launcher=["--cpu"])
    [planned] = launch.launches(program, [1], 2, {})
    assert VISIBLE not in planned.env
    assert planned.command[1:6] == ["-m", "accelerate.commands.launch", "--quiet", "--cpu", "script.py"]
    assert not planned.is_rank
    assert launch.sharing_here(program, 2) is None


@pytest.mark.parametrize(
    ("gpus", "regions", "said"),
    [
        (0, 2, None),
        (1, 1, None),
        (1, 2, "2 regions share 1 GPU(s): an inner step takes up to 2 times as long"),
        (2, 5, "5 regions share 2 GPU(s): an inner step takes up to 3 times as long"),
        (8, 2, None),
    ],
)
def test_it_is_said_that_regions_share(
    gpus: int, regions: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_gpus(gpus, None, monkeypatch)
    found = launch.sharing_here(SCRIPT, regions)
    assert found is None if said is None else str(found).startswith(said)


@pytest.mark.parametrize("resume", [False, True])
def test_a_launch_destroys_no_record(start: Any, resume: bool, tmp_path: Path) -> None:
    """The journal stays as it is until the region writes it; the log is continued, or keeps its lines as log.1.txt."""
    folder = tmp_path / "region-1"
    journal = folder / "cocodc" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text(json.dumps({"kind": "error", "message": "an old one", "exit_code": 2}) + "\n")
    before = journal.read_bytes()
    (folder / "log.txt").write_text("a line of the old run\n")
    for each in start(resume):
        assert each.last_lines(9) == ["a line of the new run"]
        assert each.error() is None
    assert journal.read_bytes() == before
    old = folder / ("log.txt" if resume else "log.1.txt")
    assert old.read_text().startswith("a line of the old run\n")
    assert (folder / "log.txt").read_text().endswith("a line of the new run\n")


CHILD = "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"


def test_ranks_that_a_launcher_starts_later_are_asked_to_stop_too(tmp_path: Path) -> None:
    """At the first signal the launcher has a child that is no rank. Each child gets one signal, and the launcher none."""
    with (tmp_path / "log.txt").open("wb") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-c", f"import subprocess, sys; {CHILD}; {CHILD}"], start_new_session=True
        )
        region = launch.RegionProcess(0, tmp_path, launcher, log, 0, tmp_path / "status")
        try:
            deadline = time.monotonic() + 60
            while not psutil.Process(launcher.pid).children() and time.monotonic() < deadline:
                time.sleep(0.01)
            asked: set[psutil.Process] = set()
            while launcher.poll() is None and time.monotonic() < deadline:
                launch.ask_to_stop([region], asked)
                time.sleep(0.05)
            assert launcher.returncode == 0
            assert len(asked) == 3
        finally:
            region.end(signal.SIGKILL)


def test_a_rank_without_a_launcher_is_asked_itself(tmp_path: Path) -> None:
    """And not the processes that load its data."""
    ready = tmp_path / "ready"
    code = f"""
import pathlib, signal, subprocess, sys
worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
def stop(number, frame):
    assert worker.poll() is None
    worker.kill()
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
pathlib.Path({str(ready)!r}).touch()
worker.wait()
"""
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    with (tmp_path / "log.txt").open("wb") as log:
        region = launch.RegionProcess(0, tmp_path, process, log, 0, tmp_path / "status", is_rank=True)
        deadline, asked = time.monotonic() + 60, set[psutil.Process]()
        try:
            while not ready.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            launch.ask_to_stop([region], asked)
            assert process.wait(30) == 3
            assert len(asked) == 1
        finally:
            region.end(signal.SIGKILL)


def test_a_region_tells_its_command_of_an_error(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a file of the command, which is no part of the run's record. One rank of a machine speaks."""
    first, second = start()
    monkeypatch.setenv(ENV_STATUS, second.process.env[ENV_STATUS])
    tell("has ended with an error", error="it broke", exit_code=2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    tell("has ended with an error", error="not to be heard", exit_code=9)
    assert first.error() is None
    assert second.error() == ("it broke", 2)


def test_a_region_whose_run_has_finished_without_it_ends_well(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command says where the model is: a supervisor starts it no more."""
    first, second = start()
    monkeypatch.setenv(ENV_STATUS, second.process.env[ENV_STATUS])

    def run() -> None:
        raise RunFinished("run 'mine' has finished at step 800: there is nothing to join.")

    monkeypatch.setattr(region_process, "end_with_command", lambda: None)
    assert region_process.live(run) == 0
    assert second.error() is None and not first.too_late
    assert second.too_late == "run 'mine' has finished at step 800: there is nothing to join."


def test_the_launchers_arguments_say_which_machine_this_is(tmp_path: Path) -> None:
    """Or the configuration that they name."""
    config = tmp_path / "accelerate.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmachine_rank: 3\nnum_machines: 4\nnum_processes: 8\n"
        "mixed_precision: 'no'\nuse_cpu: false\ndebug: false\n"
    )
    for arguments, machine in (
        ([], 0),
        (["--cpu", "--num_processes", "1"], 0),
        (["--multi_gpu", "--num_machines", "2", "--machine_rank", "1"], 1),
        (["--machine_rank=1"], 1),
        (["--config_file", str(config)], 3),
        (["--config_file", str(config), "--machine_rank", "0"], 0),
    ):
        assert launch.machine_of(arguments) == machine


def a_region(folder: Path, region: int, code: str, trains: bool = True, **rules: Any) -> launch.RegionProcess:
    """A process in place of a region's launcher; `rules` are those of its run."""
    status = folder / f"{region}.json"
    told = {"doing": "training", "step": 3} if trains else {"doing": "loading the model"}
    status.write_text(json.dumps({**told, "rules": {"timeout_s": 0.1, **rules}}))
    log = (folder / f"{region}.txt").open("wb")
    process = subprocess.Popen([sys.executable, "-c", f"import time, sys; {code}"], start_new_session=True)
    return launch.RegionProcess(region, folder, process, log, 0, status)


def test_the_others_go_on_without_a_lost_region(tmp_path: Path) -> None:
    """It is told once, at once, while they train."""
    go = tmp_path / "go"
    wait = f"import pathlib\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)"
    rules = {"min": 1, "timeout_s": 1e6}
    regions = [
        a_region(tmp_path, 0, wait, **rules),
        a_region(tmp_path, 1, "sys.exit(5)", **rules),
        a_region(tmp_path, 2, wait, **rules),
    ]
    told: list[int] = []

    def lose(lost: launch.RegionProcess) -> None:
        told.append(lost.region)
        assert [each.process.poll() for each in regions] == [None, 5, None]
        go.touch()

    assert launch.watch(regions, lambda: None, lose) == [regions[1]]
    assert told == [1]
    assert [each.process.returncode for each in regions] == [0, 5, 0]


@pytest.mark.parametrize("trains", [False, True])
def test_regions_that_cannot_go_on_are_ended(
    trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one is lost before the others train; and in a run that ends with a lost region."""
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    monkeypatch.setattr(launch, "_SAY_AFTER_S", 0.1)
    told: list[int] = []
    # those that do not train yet have nothing to save, and no transfer in which they would notice it
    rules = {"on_loss": "stop", "timeout_s": 0.1} if trains else {"on_loss": "continue", "timeout_s": 1e6}
    regions = [
        a_region(tmp_path, 0, "time.sleep(600)", trains, **rules),
        a_region(tmp_path, 1, "sys.exit(2)", trains, **rules),
    ]

    def lose(lost: launch.RegionProcess) -> None:
        pytest.fail("nobody goes on")

    failed = launch.watch(regions, lambda: None, lose, lambda each, left_s: told.append(each.region))
    assert failed == [regions[1], regions[0]]
    assert told == [1]  # a person who looks at the terminal must not wait for the end to know
    assert regions[0].process.returncode < 0


TRAINS = """
import pathlib
for step in range(4, 16):
    pathlib.Path({status!r}).write_text(f'{{{{"step": {{step}}, "rules": {{{{"timeout_s": 0.1}}}}}}}}')
    time.sleep(0.1)
"""


def test_regions_have_time_until_the_transfer_in_which_they_notice_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round may take longer than all time-outs. They save a checkpoint at its end."""
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    monkeypatch.setattr(launch, "_CHECK_S", 0.05)
    regions = [
        a_region(tmp_path, 0, TRAINS.format(status=str(tmp_path / "0.json"))),
        a_region(tmp_path, 1, "sys.exit(2)"),
    ]
    assert launch.watch(regions, lambda: None) == [regions[1]]
    assert regions[0].process.returncode == 0


LEAVES = """
import signal, subprocess
rank = subprocess.Popen([sys.executable, "-c", '''
import pathlib, signal, time
signal.signal(signal.SIGTERM, lambda number, frame: (time.sleep(0.5), pathlib.Path({saved!r}).touch(), exit()))
pathlib.Path({ready!r}).touch()
time.sleep(600)
'''])
rank.wait()
"""


def test_a_region_whose_processes_are_all_signaled_ends_with_its_last_rank(tmp_path: Path) -> None:
    """Slurm signals every process of a job: the launcher ends at once, and its rank saves first."""
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    region = a_region(tmp_path, 0, LEAVES.format(ready=str(ready), saved=str(saved)))
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    region.end(signal.SIGTERM)
    assert launch.watch([region], lambda: None) == [region]
    assert region.process.returncode == -signal.SIGTERM
    assert saved.exists()


def test_the_folder_of_a_lost_region_is_given_away(tmp_path: Path) -> None:
    """Another command can start it there; the others stay in use."""

    def is_free(folder: Path) -> bool:
        with (folder / "cocodc" / "log.lock").open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    folders = [tmp_path / "region-0", tmp_path / "region-1"]
    with launch.sole_writer(folders) as give_away:
        assert [is_free(folder) for folder in folders] == [False, False]
        give_away(folders[1])
        assert [is_free(folder) for folder in folders] == [False, True]
    assert all(is_free(folder) for folder in folders)


def test_a_rank_of_a_split_launch_that_has_stopped_ends_no_other_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher would end the other regions, which may still save: it hears of no failure, and the command does."""
    stopped = a_region(tmp_path, 0, "pass")
    monkeypatch.setenv(ENV_STATUS, str(stopped.status))
    monkeypatch.setattr(region_process, "end_with_command", lambda: None)

    def stop() -> None:
        raise RunStopped("all regions stopped")

    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    code = region_process.live(stop)
    region_process.end(code)
    monkeypatch.setenv(ENV_LAUNCH, "a launch")
    region_process.end(code)
    monkeypatch.setenv(region_process.ENV_COMMAND, "1")
    for each in (code, 1, 2):
        region_process.end(each)
    assert codes == [3, 3, 0, 1, 2]
    assert launch.watch([stopped], lambda: None) == [stopped]
    assert stopped.has_stopped
