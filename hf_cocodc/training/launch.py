"""Start the regions of a recipe on this machine, and wait until they end.

A region on CPUs is one process, forked from this one. With GPUs, or with arguments for it, each has an `accelerate launch`. If
there are fewer GPUs than regions, the regions share them. A region ends when the command that started all regions is gone, so
that no process trains unwatched.
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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from ..errors import RunStopped
from ..run.gpus import VISIBLE, shares, sharing, visible
from ..run.journal import earlier_name
from ..run.lock import hold, region_lock
from ..settings import ENV_COORDINATOR, ENV_REGION, ENV_REGIONS
from ..settings.recipe import Recipe
from ..status import ENV_STATUS, LEFT, heard
from .building import output_dir
from .command import ENV_COMMAND, ENV_OUTLIVES
from .forks import Fork
from .train import Job, train_forked

_ON_CPUS = {
    "ACCELERATE_USE_CPU": "True",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
}
"""What `accelerate launch --cpu --mixed_precision no --dynamo_backend no` tells its process."""
_LAUNCHER = ("-m", "accelerate.commands.launch", "--quiet")
GRACE_S = 30.0
_SAY_AFTER_S = 5.0
_CHECK_S = 0.2
_ASKED = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


@dataclass
class RegionProcess:
    """A region that this process has started: `process` is a launcher, or its only rank (`is_rank`). In its `log` come earlier
    runs first.
    """

    region: int
    folder: Path
    process: subprocess.Popen | Fork
    log: IO[bytes]
    log_begins_at: int
    status: Path
    is_rank: bool = False

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
        """Whether it has stopped with a checkpoint. A launcher has another exit code than its ranks."""
        return (self.error() or ("", 0))[1] == RunStopped.exit_code

    @property
    def has_left(self) -> bool:
        """Whether it has left in good order, while others train on."""
        return heard(self.status).get("doing") == LEFT

    @property
    def too_late(self) -> str:
        """How its run has finished without it, in a sentence; empty if it has not."""
        return str(heard(self.status).get("over", ""))

    @property
    def step(self) -> int | None:
        """The inner step that the region has told last; None before its training."""
        return heard(self.status).get("step")

    @property
    def has_trained(self) -> bool:
        """Whether the region has come as far as its training."""
        return self.step is not None

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended, and so have those that it left behind because a signal ended it."""
        # Slurm signals every process of a job: a launcher with one rank ends at once, while the rank takes its leave
        code = self.process.poll()
        return code is not None and not (code in _ASKED and self._left_behind())

    def _left_behind(self) -> list[psutil.Process]:
        """The living processes of its group."""
        living = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(each.pid) == self.process.pid and each.status() != psutil.STATUS_ZOMBIE:
                    living.append(each)
        return living

    def end(self, sig: signal.Signals) -> None:
        """Signal its process and all that it has started: together they form a process group."""
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
    """How each of `regions` is started here."""
    gpus = _gpus(recipe)
    planned = []
    for place, region in enumerate(regions):
        env = {
            ENV_REGION: str(region),
            ENV_REGIONS: str(recipe.regions.count or 1),
            **({} if coordinator is None else {ENV_COORDINATOR: coordinator}),
        }
        command = [sys.executable]
        if launcher_args:
            command += [*_LAUNCHER, *launcher_args]
        elif gpus:
            own = shares(gpus, len(regions))[place]
            env[VISIBLE] = ",".join(own)
            command += [*_LAUNCHER, *_launcher_arguments(len(own))]
        else:
            env |= _ON_CPUS
            if recipe.training.get("use_cpu"):
                env[VISIBLE] = ""  # a loader that pins memory would start CUDA
            if "OMP_NUM_THREADS" not in os.environ:
                env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(regions)))
        command += ["-m", "hf_cocodc.train", recipe_path]
        command += [part for each in (*overrides, "training.disable_tqdm=true") for part in ("--set", each)]
        planned.append(Launch(region, output_dir(recipe) / f"region-{region}", env, command))
    return planned


def _gpus(recipe: Recipe) -> list[str]:
    """The GPUs here for the regions of a recipe. With use_cpu there are none, and CUDA is not asked: regions may be forks."""
    import torch

    return [] if recipe.training.get("use_cpu") or not torch.cuda.is_available() else visible()


def _has_launcher(recipe: Recipe, arguments: Sequence[str]) -> bool:
    """Whether regions here have an `accelerate launch`: without GPUs and arguments there is nothing for it to do."""
    return bool(arguments or _gpus(recipe))


def sharing_here(recipe: Recipe, regions: int, launcher_args: Sequence[str]) -> str | None:
    """A sentence, if that many regions share the GPUs of this machine. Arguments for it leave the GPUs to the launcher."""
    return None if launcher_args else sharing(len(_gpus(recipe)), regions)


def fork_ahead(recipe: Recipe, regions: int, launcher_args: Sequence[str]) -> list[Fork]:
    """Processes for `start`, which wait for it; none if regions have a launcher. To be called before this one holds anything."""
    return [] if _has_launcher(recipe, launcher_args) else [Fork(train_forked) for _ in range(regions)]


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
    forked: Sequence[Fork] = (),
) -> list[RegionProcess]:
    """Start what `launches` describes. The output of each region goes to `region-{r}/log.txt`.

    `forked`: processes of `fork_ahead`, one for each region; without them, new ones are started.

    A region that resumes or joins a run continues its log. A new run leaves an earlier log under another name (log.1.txt). The
    regions end when this process is gone, unless they may `outlive_us`. `machine`: see `machine_of`.
    """
    planned = launches(recipe, recipe_path, overrides, regions, coordinator, launcher_args)
    is_rank = not _has_launcher(recipe, launcher_args)
    statuses = Path(tempfile.mkdtemp(prefix="hf-cocodc-"))
    atexit.register(shutil.rmtree, statuses, ignore_errors=True)
    started: list[RegionProcess] = []
    with contextlib.ExitStack() as unless_all_start:
        unless_all_start.callback(stop, started)
        processes: Sequence[Fork | None] = forked or [None] * len(planned)
        for each, waiting in zip(planned, processes, strict=True):
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
            process: Fork | subprocess.Popen
            if waiting is None:
                process = subprocess.Popen(
                    each.command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            else:
                process = waiting
                waiting.begin(Job(env, log.name, each.command[3:]))
            region = RegionProcess(each.region, each.folder, process, log, log_begins_at, status, is_rank)
            started.append(region)
        unless_all_start.pop_all()
    return started


def _open_log(path: Path, continues: bool) -> IO[bytes]:
    """A log to append to. The log of an earlier run keeps its lines, under another name."""
    if not continues and path.is_file():
        path.rename(earlier_name(path))
    return path.open("ab")


def _launcher_arguments(gpus: int) -> list[str]:
    """Default arguments for accelerate: one process for each GPU of a region."""
    return [
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--num_processes", str(gpus), "--main_process_port", "0"),
        *(["--multi_gpu"] if gpus > 1 else []),
    ]


def watch(
    processes: Sequence[RegionProcess],
    show: Callable[[], None],
    timeout_s: float,
    lose: Callable[[RegionProcess], None] | None = None,
    tell: Callable[[RegionProcess, float], None] = lambda failed, left_s: None,
) -> list[RegionProcess]:
    """Wait for all regions and call `show` meanwhile; return the regions that failed, in the order in which they did.

    After a failure the others train up to the transfer in which they notice it. Once none makes a step, they have time to notice
    it (`timeout_s`) and to save, before they are ended. If they can go on without a lost region, `lose` is called with it. Before
    they train they cannot: they wait for all. If they then have not ended after a while, `tell` is called with the first that
    failed, and the seconds without a step after which they are ended.
    """
    failed: list[RegionProcess] = []
    lost: list[RegionProcess] = []
    deadline = math.inf
    steps: list[int | None] = []
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
            now, before, steps = time.monotonic(), steps, [each.step for each in others]
            deadline = min(deadline if steps == before else math.inf, now + timeout_s + GRACE_S)
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

    A rank without a launcher gets the signal alone, without what it has started. A launcher that has not started its ranks yet
    gets the signal itself. One that is about to may have another child, which asks about the machine. So call this again and
    again with one set `asked`, empty at first: each process gets one signal.
    """
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(each.process.pid)
            children = [] if each.is_rank else launcher.children()
            for child in [launcher] if each.is_rank else children:
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
