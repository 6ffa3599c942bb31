"""Start the regions of a recipe or a script on this machine, and wait until they end.

A region on CPUs is one process. With GPUs, or with arguments for it, each has an `accelerate launch`. If there are fewer GPUs
than regions, the regions share them. A region ends when the command that started all regions is gone, so that no process trains
unwatched.
"""

import argparse
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from ..errors import InputError
from ..run.gpus import VISIBLE, shares, sharing, visible
from ..run.journal import earlier_name
from ..run.lock import hold, region_lock
from ..settings import RegionConfig
from ..settings.environment import ENV_REGION, ENV_REGIONS, ENV_SPLIT
from ..status import ENV_LOG, ENV_STATUS, LEFT, heard
from .forks import Fork, can_load_ahead
from .region import ENV_COMMAND, ENV_OUTLIVES

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
    """A region that this process has started: `process` is a launcher, or its only rank (`is_rank`); a split launch has one
    for all its regions. In its `log` come earlier
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
    def told(self) -> dict[str, Any]:
        """What the region has told last (`status.tell`)."""
        return heard(self.status)

    @property
    def home(self) -> Path:
        """Where it writes its journal and its model: beside its log, or where a script says."""
        return Path(self.told.get("folder") or self.folder)

    @property
    def has_journal(self) -> bool:
        """Whether it writes a journal into its `home`: a loop of a user's own need not."""
        told = self.told
        return "step" not in told or told.get("folder") is not None

    @property
    def rules(self) -> RegionConfig | None:
        """What the region has said of its run; None before it has met the others."""
        told = self.told.get("rules")
        return None if told is None else RegionConfig(**told)

    def last_lines(self, count: int) -> list[str]:
        """The last lines that the region printed."""
        text = Path(self.log.name).read_bytes()[self.log_begins_at :].decode("utf-8", errors="replace")
        return text.rstrip().splitlines()[-count:]

    @property
    def has_failed(self) -> bool:
        """Whether it has ended otherwise than well. Regions of a split launch share its exit code, and tell of their own ends."""
        return bool(self.process.returncode) or self.error() is not None

    @property
    def blame(self) -> tuple:
        """Sorts regions that have failed at once, as those of a split launch do: what will not pass comes first, then who was
        killed, then who told of an error first; last, who has stopped with a checkpoint, or ended well.
        """
        told, error = self.told, self.error()
        is_refused = error is not None and error[1] == InputError.exit_code
        return (
            told.get("is_done", False),
            self.has_stopped,
            not is_refused,
            error is not None,
            told.get("since", 0.0),
        )

    def error(self) -> tuple[str, int] | None:
        """The error that ended the region and its exit code; None if the region told of no error."""
        told = self.told
        return (told["error"], told["exit_code"]) if "error" in told else None

    @property
    def end_in_words(self) -> str:
        """How it ended, if it told of no error."""
        code = self.process.returncode
        if code in _ASKED:
            return f"interrupted ({signal.Signals(-code).name})"
        return "killed, or ended without an error message"

    @property
    def has_stopped(self) -> bool:
        """Whether it has stopped with a checkpoint. Exit codes do not tell: launchers and scripts have their own."""
        return self.told.get("has_stopped", False)

    @property
    def has_left(self) -> bool:
        """Whether it has left in good order, while others train on."""
        return self.told.get("doing") == LEFT

    @property
    def too_late(self) -> str:
        """How its run has finished without it, in a sentence; empty if it has not."""
        return str(self.told.get("over", ""))

    @property
    def step(self) -> int | None:
        """The inner step that the region has told last; None before its training."""
        return self.told.get("step")

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
        try:
            os.killpg(self.process.pid, sig)
        except ProcessLookupError:
            with contextlib.suppress(ProcessLookupError):
                if self.process.poll() is None:  # it has yet to make its group
                    os.kill(self.process.pid, sig)


def machine_of(launcher_args: Sequence[str]) -> int:
    """Which machine of its region this is, by accelerate's arguments or configuration; 0 if it is the only one.

    Machine 0 has the region's rank 0, which writes the journal. Only its command shows a summary.
    """
    return (told_accelerate(launcher_args).machine_rank or 0) if launcher_args else 0


def told_accelerate(launcher_args: Sequence[str]) -> argparse.Namespace:
    """What accelerate launch is told: by its arguments, and where they say nothing, by its configuration, if there is one."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    given, _ = launch_command_parser().parse_known_args([*launcher_args, "-m", "hf_cocodc.train"])
    if given.config_file is not None or (Path(default_config_file).is_file() and not given.cpu):
        for name, value in vars(load_config_from_file(given.config_file)).items():
            if getattr(given, name, None) is None:
                setattr(given, name, value)
    return given


def configured(launcher_args: Sequence[str]) -> str | None:
    """A sentence, if accelerate adds the user's own configuration to arguments of theirs."""
    if not launcher_args:
        return None
    from accelerate.commands.config.config_args import default_config_file

    if {"--config_file", "--cpu"}.intersection(launcher_args) or not Path(default_config_file).is_file():
        return None
    return f"accelerate launch reads {default_config_file}, too: it completes the arguments after --"


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
class Program:
    """What a command lets its regions run.

    Attributes:
        words: what follows the interpreter: "-m", a module of ours and its arguments.
        launcher: arguments for the accelerate launch of a region; with none, we choose them.
        folder: where each region has a folder for its log.
        use_cpu: it trains on the CPU, whatever this machine has.
        split: one accelerate launch is divided so into regions (HF_COCODC_SPLIT); None gives each region its own.
    """

    words: Sequence[str]
    launcher: Sequence[str]
    folder: Path
    use_cpu: bool = False
    split: str | None = None

    @property
    def may_be_forked(self) -> bool:
        """Whether its libraries may be loaded ahead. A script may have settings for them, which it makes before it loads them."""
        return list(self.words[:2]) == OF_RECIPES and not self.has_launcher and can_load_ahead()

    @property
    def has_launcher(self) -> bool:
        """Whether an accelerate launch of the user's own arguments or configuration starts its ranks."""
        return bool(self.launcher) or self.split is not None


OF_RECIPES = ["-m", "hf_cocodc.train"]
"""What runs a recipe."""


@dataclass(frozen=True)
class Launch:
    """How a region is started: the folder for its log, what its environment adds to ours, and its command."""

    region: int
    folder: Path
    env: dict[str, str]
    command: list[str]
    is_rank: bool


def launches(program: Program, regions: Sequence[int], count: int, env: Mapping[str, str]) -> list[Launch]:
    """How each of `regions` is started here, in a run of `count`; `env` is the same for all. A split launch starts all in one."""
    gpus = _gpus(program)
    planned = []
    for place, region in enumerate(regions):
        numbers = {ENV_REGION: str(region), ENV_REGIONS: str(count)}
        own_env = numbers if program.split is None else {ENV_SPLIT: program.split}
        own_env |= env
        command = [sys.executable]
        if program.has_launcher:
            command += [*_LAUNCHER, *program.launcher]
        elif gpus:
            own = shares(gpus, len(regions))[place]
            own_env[VISIBLE] = ",".join(own)
            command += [*_LAUNCHER, *_launcher_arguments(len(own))]
        else:
            own_env |= _ON_CPUS
            if program.use_cpu:
                own_env[VISIBLE] = ""  # a loader that pins memory would start CUDA
            if "OMP_NUM_THREADS" not in os.environ:
                own_env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(regions)))
        is_rank = not program.has_launcher and not gpus
        command += program.words
        planned.append(Launch(region, program.folder / f"region-{region}", own_env, command, is_rank))
    return planned


def _gpus(program: Program) -> list[str]:
    """The GPUs here for the regions of a program."""
    if program.use_cpu:
        return []
    import torch

    return visible() if torch.cuda.is_available() else []


def sharing_here(program: Program, regions: int) -> str | None:
    """A sentence, if that many regions share the GPUs of this machine. Arguments for it leave the GPUs to the launcher."""
    return None if program.has_launcher else sharing(len(_gpus(program)), regions)


def start(
    program: Program, planned: Sequence[Launch], continues: bool, outlive_us: bool = False, machine: int = 0
) -> list[RegionProcess]:
    """Start what `launches` has planned. The output of each region goes to `region-{r}/log.txt`.

    With `continues`, a region continues its log; otherwise an earlier log gets another name (log.1.txt). The regions end when
    this process is gone, unless they may `outlive_us`. `machine`: see `machine_of`.
    """
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
            path = each.folder / f"{log_name(machine)}.txt"
            if not continues and path.is_file():
                path.rename(earlier_name(path))
            log = path.open("ab")
            log_begins_at = log.tell()
            process: Fork | subprocess.Popen
            if program.split is not None and started:
                process = started[0].process
            elif each.is_rank and program.may_be_forked:
                process = Fork(env, log.name, each.command[3:])
            else:
                process = subprocess.Popen(
                    each.command,
                    env=env if program.split is None else {**env, ENV_LOG: log.name},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            region = RegionProcess(
                each.region, each.folder, process, log, log_begins_at, status, each.is_rank
            )
            started.append(region)
        unless_all_start.pop_all()
    return started


def _launcher_arguments(gpus: int) -> list[str]:
    """Default arguments for accelerate: one process for each GPU of a region, whatever the user has configured."""
    return [
        *("--config_file", str(Path(__file__).with_name("accelerate.yaml"))),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--num_processes", str(gpus), "--main_process_port", "0"),
        *(["--multi_gpu"] if gpus > 1 else []),
    ]


def rules_of(processes: Sequence[RegionProcess]) -> RegionConfig:
    """What the regions have said of their run; the defaults before one has met the others."""
    rules = [each.rules for each in processes]
    return next((each for each in rules if each is not None), RegionConfig())


def watch(
    processes: Sequence[RegionProcess],
    show: Callable[[], None],
    lose: Callable[[RegionProcess], None] = lambda lost: None,
    tell: Callable[[RegionProcess, float], None] = lambda failed, left_s: None,
) -> list[RegionProcess]:
    """Wait for all regions and call `show` meanwhile; return the regions that failed, in the order in which they did.

    After a failure the others train up to the transfer in which they notice it. Once none makes a step, they have time to notice
    it (`regions.timeout_s`) and to save, before they are ended. If they can go on without a lost region, `lose` is called with
    it. Before they train they cannot: they would wait for all, with nothing to save. If they then have not ended after a while,
    `tell` is called with the first that failed, and the seconds without a step after which they are ended.
    """
    failed: list[RegionProcess] = []
    lost: list[RegionProcess] = []
    deadline = math.inf
    steps: list[int | None] = []
    say_at: float | None = None
    while True:
        ended = [each for each in processes if each.has_ended]
        show()
        new = [each for each in ended if each.has_failed and each not in failed]
        failed += sorted(new, key=lambda each: each.blame)
        if len(ended) == len(processes):
            break
        others = [each for each in processes if each not in failed]
        rules = rules_of(processes) if failed else RegionConfig()
        if rules.elastic and any(each.has_trained for each in others):
            for each in failed:
                if each not in lost:
                    each.end(signal.SIGKILL)  # what a launcher that was killed has left
                    lost.append(each)
                    lose(each)
            deadline = math.inf
        elif failed:
            now, before, steps = time.monotonic(), steps, [each.step for each in others]
            notice_s = rules.timeout_s if any(each.has_trained for each in others) else 0.0
            deadline = min(deadline if steps == before else math.inf, now + notice_s + GRACE_S)
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
