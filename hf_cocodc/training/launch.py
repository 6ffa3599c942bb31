"""Start the regions of a recipe on this machine, one `accelerate launch` each, and wait until they end.

A region ends when the command that started all regions is gone, so that no process trains unwatched.
"""

import atexit
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from ..errors import InputError, RunStopped
from ..parts.tensors.pieces import REGIONS_HERE
from ..run.journal import earlier_name
from ..run.lock import hold, region_lock
from ..settings import ENV_COORDINATOR, ENV_REGION, ENV_REGIONS
from ..settings.recipe import Recipe
from ..status import ENV_STATUS, LEFT, forget, heard
from .building import output_dir

ENV_COMMAND = "HF_COCODC_COMMAND"
"""Number of the process to watch."""
ENV_OUTLIVES = "HF_COCODC_OUTLIVES_COMMAND"
"""1 for a region that was started on its own, otherwise 0."""
POLL_S = 1.0
PATIENCE_S = 600.0
"""Time for a last checkpoint: without a coordinator, regions learn of a signal only with a transfer, up to a round later."""

GRACE_S = 30.0
_SAY_AFTER_S = 5.0
_CHECK_S = 0.2
_ASKED = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


def end_with_command() -> None:
    """Watch the command, if any: when it is gone, this process gets SIGTERM, then SIGKILL, unless it may outlive it."""
    command = os.environ.get(ENV_COMMAND)
    if command is not None:
        threading.Thread(target=_watch, args=(int(command),), name="hf_cocodc-command", daemon=True).start()


def _watch(command: int) -> None:
    try:
        process = psutil.Process(command)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(POLL_S)
    except psutil.NoSuchProcess:
        pass
    forget()
    if os.environ.get(ENV_OUTLIVES) == "1":
        return
    os.kill(os.getpid(), signal.SIGTERM)
    with contextlib.suppress(OSError):  # the disk of the log may be full
        sys.stderr.write(
            f"the command that started this region (process {command}) is gone: the region stops.\n"
        )
    time.sleep(PATIENCE_S)
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class RegionProcess:
    """A region that this process has started: `process` is its launcher, and in its `log` come earlier runs first."""

    region: int
    folder: Path
    process: subprocess.Popen
    log: IO[bytes]
    log_begins_at: int
    status: Path

    @property
    def journal(self) -> Path:
        return self.folder / "cocodc" / "journal.jsonl"

    def last_lines(self, count: int) -> list[str]:
        """The last lines that the region printed."""
        text = Path(self.log.name).read_bytes()[self.log_begins_at :].decode("utf-8", errors="replace")
        return text.rstrip().splitlines()[-count:]

    def error(self) -> tuple[str, int] | None:
        """The error that ended the region and its exit code; None if the region told of no error."""
        status = heard(self.status)
        return (status["error"], status["exit_code"]) if "error" in status else None

    @property
    def has_stopped(self) -> bool:
        """Whether it has stopped with a checkpoint. Its launcher has another exit code than its ranks."""
        return (self.error() or ("", 0))[1] == RunStopped.exit_code

    @property
    def has_left(self) -> bool:
        """Whether it has left in good order, while others train on."""
        return heard(self.status).get("doing") == LEFT

    @property
    def has_trained(self) -> bool:
        """Whether the region has come as far as its training."""
        return "step" in heard(self.status)

    @property
    def has_ended(self) -> bool:
        """Whether its launcher has ended, and so have ranks that it left behind because a signal ended it."""
        # Slurm signals every process of a job: a launcher with one rank ends at once, while the rank takes its leave
        code = self.process.poll()
        return code is not None and not (code in _ASKED and self._left_behind())

    def _left_behind(self) -> list[psutil.Process]:
        """The living processes of the launcher's group."""
        living = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(each.pid) == self.process.pid and each.status() != psutil.STATUS_ZOMBIE:
                    living.append(each)
        return living

    def end(self, sig: signal.Signals) -> None:
        """Signal the launcher and every rank that it started: together they form a process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, sig)


def machine_of(launcher_args: Sequence[str]) -> int:
    """Which machine of its region this is, by accelerate's arguments or configuration; 0 if it is the only one.

    Machine 0 has the region's rank 0, which writes the journal. Only its command shows a summary and draws the picture.
    """
    if not launcher_args:
        return 0
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    given, _ = launch_command_parser().parse_known_args([*launcher_args, "-m", "hf_cocodc.train"])
    if given.machine_rank is not None:
        return given.machine_rank
    if given.config_file is not None or (Path(default_config_file).is_file() and not given.cpu):
        return load_config_from_file(given.config_file).machine_rank
    return 0


def log_name(machine: int) -> str:
    """The log of one machine of a region; machines may share the region's folder."""
    return f"log-machine-{machine}" if machine else "log"


@contextlib.contextmanager
def sole_writer(folders: Sequence[Path], machine: int = 0) -> Iterator[Callable[[Path], None]]:
    """Inside the block, no other command of this machine of a region starts it in one of these folders.

    It gets a function that gives one of the folders away: another command may bring a lost region back. Raises InputError if
    another command has started them, or they are training without one.
    """
    with contextlib.ExitStack() as locks:
        held = {}
        for folder in folders:
            held[folder] = locks.enter_context(contextlib.ExitStack())
            held[folder].enter_context(hold(folder / "cocodc" / f"{log_name(machine)}.lock"))
            if machine == 0:
                with hold(region_lock(folder)):
                    pass
        yield lambda folder: held[folder].close()


@dataclass(frozen=True)
class Launch:
    """How a region is started: the folder where it writes, what its environment adds to ours, and its command."""

    region: int
    folder: Path
    env: dict[str, str]
    command: list[str]


def launches(
    recipe: Recipe,
    recipe_path: str,
    overrides: Sequence[str],
    regions: Sequence[int],
    coordinator: str | None,
    launcher_args: Sequence[str] = (),
) -> list[Launch]:
    """How `accelerate launch` is started for each of `regions` here. Raises InputError if there are too few GPUs."""
    planned = []
    for place, region in enumerate(regions):
        env = {
            ENV_REGION: str(region),
            ENV_REGIONS: str(recipe.regions.count or 1),
            REGIONS_HERE: str(len(regions)),
            **({} if coordinator is None else {ENV_COORDINATOR: coordinator}),
        }
        arguments = list(launcher_args) or _launcher_arguments(place, len(regions), env)
        sets = [part for each in (*overrides, "training.disable_tqdm=true") for part in ("--set", each)]
        command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", *arguments]
        command += ["-m", "hf_cocodc.train", recipe_path, *sets]
        planned.append(Launch(region, output_dir(recipe) / f"region-{region}", env, command))
    return planned


def start(
    recipe: Recipe,
    recipe_path: str,
    overrides: Sequence[str],
    regions: Sequence[int],
    coordinator: str | None,
    launcher_args: Sequence[str] = (),
    resume: bool = False,
    outlive_us: bool = False,
    machine: int = 0,
) -> list[RegionProcess]:
    """Start what `launches` describes. The output of each region goes to `region-{r}/log.txt`.

    A region that resumes or joins a run continues its log. A new run leaves an earlier log under another name (log.1.txt). The
    regions end when this process is gone, unless they may `outlive_us`. `machine`: see `machine_of`.
    """
    planned = launches(recipe, recipe_path, overrides, regions, coordinator, launcher_args)
    statuses = Path(tempfile.mkdtemp(prefix="hf-cocodc-"))
    atexit.register(shutil.rmtree, statuses, ignore_errors=True)
    started: list[RegionProcess] = []
    with contextlib.ExitStack() as unless_all_start:
        unless_all_start.callback(stop, started)
        for each in planned:
            each.folder.mkdir(parents=True, exist_ok=True)
            status = statuses / f"region-{each.region}.json"
            env = {
                **os.environ,
                **each.env,
                ENV_STATUS: str(status),
                ENV_COMMAND: str(os.getpid()),
                ENV_OUTLIVES: str(int(outlive_us)),
            }
            log = _open_log(each.folder / f"{log_name(machine)}.txt", resume or bool(recipe.regions.join))
            log_begins_at = log.tell()
            process = subprocess.Popen(
                each.command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            started.append(RegionProcess(each.region, each.folder, process, log, log_begins_at, status))
        unless_all_start.pop_all()
    return started


def _open_log(path: Path, continues: bool) -> IO[bytes]:
    """A log to append to. The log of an earlier run keeps its lines, under another name."""
    if not continues and path.is_file():
        path.rename(earlier_name(path))
    return path.open("ab")


def _launcher_arguments(place: int, places: int, env: dict[str, str]) -> list[str]:
    """Default arguments for accelerate: an equal share of the GPUs, or one CPU process; `env` gets what they need."""
    import torch

    common = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    visible = {**os.environ, **env}.get("CUDA_VISIBLE_DEVICES")
    devices = (",".join(map(str, range(torch.cuda.device_count()))) if visible is None else visible).split(
        ","
    )
    share = len(devices) // places
    if torch.cuda.is_available() and share == 0:
        raise InputError(
            f"{places} regions on this machine, but it has {len(devices)} GPU(s); each region needs one. Start fewer regions "
            "here (regions.count, or --region for only one), or hide the GPUs to train on the CPU: "
            "CUDA_VISIBLE_DEVICES= hf-cocodc train ..."
        )
    if not torch.cuda.is_available():
        if "OMP_NUM_THREADS" not in os.environ:
            env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // places))
        return [*common, "--cpu", "--num_processes", "1"]
    env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[place * share : (place + 1) * share])
    return [
        *common,
        "--num_processes",
        str(share),
        "--main_process_port",
        "0",
        *(["--multi_gpu"] if share > 1 else []),
    ]


def watch(
    processes: Sequence[RegionProcess],
    show: Callable[[], None],
    timeout_s: float,
    lose: Callable[[RegionProcess], None] | None = None,
    tell: Callable[[RegionProcess, float], None] = lambda failed, left_s: None,
) -> list[RegionProcess]:
    """Wait for all regions and call `show` meanwhile; return the regions that failed, in the order in which they did.

    After a failure the others have time to notice it (`timeout_s`) and to save, before they are ended. If they can go on
    without a lost region, `lose` is called with it. Before they train they cannot: they wait for all. If they then have not
    ended after a while, `tell` is called with the first that failed, and the seconds until they are ended.
    """
    failed: list[RegionProcess] = []
    lost: list[RegionProcess] = []
    deadline = math.inf
    say_at: float | None = None
    while True:
        ended = [each for each in processes if each.has_ended]
        show()
        failed += [each for each in ended if each.process.returncode and each not in failed]
        if len(ended) == len(processes):
            break
        others = [each for each in processes if each not in failed]
        if lose is not None and any(each.has_trained for each in others):
            for each in failed:
                if each not in lost:
                    each.end(signal.SIGKILL)  # what a launcher that was killed has left
                    lost.append(each)
                    lose(each)
            deadline = math.inf
        elif failed:
            now = time.monotonic()
            deadline = min(deadline, now + timeout_s + GRACE_S)
            if say_at is None:
                say_at = now + _SAY_AFTER_S
            if say_at <= now:
                tell(failed[0], deadline - now)
                say_at = math.inf
        if time.monotonic() > deadline:
            stop(processes)
        time.sleep(_CHECK_S)
    for each in processes:
        each.log.close()
    return failed


def ask_to_stop(processes: Sequence[RegionProcess], asked: set[psutil.Process]) -> None:
    """Signal the ranks: they stop together, with a checkpoint. A signaled launcher would not wait for its ranks.

    A launcher that has not started its ranks yet gets the signal itself. One that is about to may have another child, which
    asks about the machine. So call this again and again with one set `asked`, empty at first: each process gets one signal.
    """
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(each.process.pid)
            children = launcher.children()
            for child in children:
                if child not in asked:
                    asked.add(child)
                    child.send_signal(signal.SIGTERM)
            if not children and launcher not in asked:
                each.end(signal.SIGTERM)
            asked.add(launcher)


def stop(processes: Sequence[RegionProcess], patience_s: float = 5.0) -> None:
    """End all regions: send SIGTERM, then SIGKILL after `patience_s`."""
    for each in processes:
        if each.process.poll() is None:
            each.end(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and any(each.process.poll() is None for each in processes):
        time.sleep(0.05)
    for each in processes:
        each.end(signal.SIGKILL)
        each.process.wait()
