"""Starts the regions of a command, watches them, and says how they end: for a recipe and for a script alike."""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..coordinator.secret import secret_of
from ..errors import InputError, RunStopped
from ..net.addresses import is_url, named
from ..net.pacing import congestion_of
from ..settings import RegionConfig
from ..settings.environment import (
    AUTO_LOSS,
    ENV_COORDINATOR,
    ENV_JOIN,
    ENV_ON_LOSS,
    ENV_RESUME,
    ENV_RUN,
    ENV_SECRET_FILE,
    warn_alone,
)
from ..status import phase_in_words
from ..training import launch
from ..training.forks import SIGNALS, load_ahead, wait_until_loaded
from .checks import add_coordinator, add_secret
from .display import Display
from .ending import report
from .joining import (
    claim_number,
    free_number,
    has_missed_the_end,
    loss_in_words,
    over,
    refuse_to_join,
    run_at,
    trains,
    way_back,
)
from .part import MachinePart


class Interrupted(KeyboardInterrupt):
    """A signal asks the command to end. `exit_code` is 128 plus its number, as for a process that the signal has ended."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that starts regions."""
    parser.add_argument("--regions", type=int, help="number of regions with which the run begins")
    parser.add_argument("--region", type=int, help="run only this region on this machine (numbered from 0)")
    parser.add_argument(
        "--split",
        metavar="HOW",
        help="divide one accelerate launch, with this command on each of its machines: `machines` makes each machine a region, a "
        "number so many regions of equal size (default: HF_COCODC_SPLIT)",
    )
    add_coordinator(parser, "address of the coordinator of all regions (see hf-cocodc coordinator)")
    parser.add_argument(
        "--run",
        dest="run_name",
        metavar="NAME",
        help="name of the run, equal in all its regions, if its coordinator has several (default: name of the output folder)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint that is good in every region, or from the start if there is none; if the "
        "others have trained on without this region, join them instead",
    )
    parser.add_argument(
        "--join",
        action="store_true",
        help="join or rejoin a run that is training, as --region or else as the lowest free number; needs --coordinator, and "
        "no region with regions.on_loss=stop",
    )
    add_secret(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything and print what would be started, but start and write nothing",
    )


@dataclass(frozen=True)
class Order:
    """What a command is to start.

    Attributes:
        part: of the run, on this machine.
        program: what each region runs.
        words: of this command.
        resume: go on from a checkpoint.
        max_steps: inner steps of the run; None if only the script knows them.
        dry_run: shows what would be started, in place of starting it.
    """

    part: MachinePart
    program: launch.Program
    words: Sequence[str]
    resume: bool
    max_steps: int | None = None
    dry_run: Callable[[Sequence[launch.Launch], int, bool], None] | None = None

    @property
    def is_script(self) -> bool:
        return self.max_steps is None


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Handlers of signals are after the block what they were: the process may do something else then."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@_as_before()
def carry_out(order: Order) -> int:
    """Start the regions that an order names, show their progress, and report; returns the exit code of the command."""
    if order.dry_run is None:
        _on_signals(_interrupt)
    part, program = order.part, order.program
    address, region, join, split = part.regions.coordinator, part.region, part.join, part.split
    if join:
        refuse_to_join(order.resume, address)
    if program.launcher and region is None and part.count > 1 and not join and split is None:
        raise InputError(
            f"arguments after -- go to one accelerate launch, but this command starts {part.count}, which would use the same "
            "ports and GPUs. Start each region with its own command, and add --region and --coordinator to it."
        )
    part.check(join, order.is_script)
    regions = part.here
    keys = secret_of(part.regions) if part.has_company else None
    if part.has_company:
        congestion_of(part.regions.congestion)
    state = run_at(part, address, keys) if address is not None and part.has_company else None
    if region is not None and not join and not (order.is_script and order.resume):
        missed = has_missed_the_end(state, region, order.max_steps)
        if missed is not None:
            print(missed)
            return 0
    finished = over(state, join)
    if finished is not None and not order.resume:
        print(finished)
        if join:
            return 0
    join = join or (region is not None and trains(state, region))
    resume = order.resume and not join  # a region that joins takes the others' state
    if not part.is_told:
        warn_alone()
    if order.dry_run is None and program.may_be_forked:
        print(phase_in_words(1), flush=True)
        load_ahead()
    machine = launch.machine_of(program.launcher) if split is None else split.machine
    for words in (
        launch.configured(program.launcher),
        launch.sharing_here(program, 1 if join else len(regions)),
    ):
        if words is not None:
            print(words, flush=True)
    with contextlib.ExitStack() as at_end:
        if address is not None and is_url(address) and order.dry_run is None:
            from ..coordinator.standby import Standby

            at_end.callback(Standby(address, keys).close)
        is_host = split is None or split.has_rank_0
        if address is None and part.has_company and order.dry_run is None and is_host:
            from ..coordinator.server import serve_in_thread

            host = "127.0.0.1" if split is None or split.host is None else ""
            served = serve_in_thread(host, secrets=[] if keys is None else [keys])
            at_end.callback(served.close)
            address = served.address
            shown = address if split is None or split.host is None else named(split.host, served.port)
            print(f"coordinator of this run: {shown} (hf-cocodc status --coordinator {shown})", flush=True)
        if join and region is None:
            assert address is not None
            if order.dry_run is not None:
                regions = [free_number(part, address)]
            else:
                claim = claim_number(part, address)
                if claim is None:
                    return 0
                connection, number = claim
                at_end.callback(connection.close)
                regions = [number]
        if join and order.dry_run is None:
            print(f"joining run {(state or {}).get('name', part.name)!r} as region {regions[0]}", flush=True)
        env = {
            ENV_COORDINATOR: address,
            ENV_RUN: part.regions.run,
            ENV_SECRET_FILE: part.regions.secret_file,
            ENV_JOIN: "1" if join else None,
            ENV_RESUME: "1" if resume else None,
            # regions of one launch end together
            ENV_ON_LOSS: os.environ.get(ENV_ON_LOSS, AUTO_LOSS if split is None else None),
        }
        given = {name: value for name, value in env.items() if value is not None}
        planned = launch.launches(program, regions, part.count, given)
        if order.dry_run is not None:
            order.dry_run(planned, machine, join)
            return 0
        give_away = at_end.enter_context(launch.sole_writer([each.folder for each in planned], machine))
        return _train(order, planned, machine, address, join, resume, give_away)


def _train(
    order: Order,
    planned: Sequence[launch.Launch],
    machine: int,
    address: str | None,
    join: bool,
    resume: bool,
    give_away: Callable[[Path], None],
) -> int:
    """Start regions, or this machine's part of one, show their progress, and report. The folder of a lost region is given away,
    because another command may bring it back.
    """
    if order.program.may_be_forked and any(each.is_rank for each in planned):
        wait_until_loaded()
    early: list[int] = []
    # a signal must not interrupt the start: a process that has just started would be lost
    _on_signals(lambda number, frame: early.append(number))
    processes = launch.start(
        order.program,
        planned,
        continues=resume or join,
        outlive_us=order.part.region is not None or join,
        machine=machine,
    )
    regions = [each.region for each in processes]
    display = Display(regions, [each.status for each in processes], order.max_steps or 0)

    def lose(lost: launch.RegionProcess) -> None:
        """Say what the others go on without; nothing of a region that all stop with."""
        give_away(lost.folder)
        if not lost.has_stopped:
            line = (
                f"region {lost.region} is lost ({loss_in_words(lost)}); the others go on. To bring it back:"
            )
            again = way_back(order.words, order.resume, lost.region, address)
            display.lose(lost.region, f"{line}\n    {again}")

    def tell(failed: launch.RegionProcess, left_s: float) -> None:
        """Say why nothing trains."""
        display.say(cannot_go_on(failed, left_s, any(each.has_trained for each in processes)))

    try:
        _on_signals(_interrupt)
        for number in early:
            _interrupt(number, None)
        failed = launch.watch(processes, display.update, lose, tell)
    except Interrupted as interrupted:
        is_in = any(each.has_trained for each in processes)
        ended = in_words(launch.rules_of(processes), regions, join, is_in)
        print(f"\n{ended} Press Ctrl-C again to end at once.", file=sys.stderr)
        _stop(processes, display)
        is_in = any(each.has_trained for each in processes)
        if join and not is_in:
            return interrupted.exit_code
        if all(each.has_left for each in processes):
            report([each.home for each in processes], order.program.folder)
            return 0
        when = f"at step {display.step}" if is_in else "before training"
        print(f"interrupted {when}; all regions have ended.", file=sys.stderr)
        if machine == 0:
            print(saved(processes, order.part.count, order.is_script), file=sys.stderr)
        return interrupted.exit_code
    display.close()
    is_elastic = launch.rules_of(processes).elastic
    if failed and not (is_elastic and any(each not in failed for each in processes)):
        return report_failure(failed, processes, is_elastic)
    if machine:
        print(
            f"machine {machine} of region {processes[0].region} has ended. The summary is at the region's machine 0."
        )
        return 0
    for each in processes:
        if each.too_late:
            print(each.too_late)
    if all(each.too_late for each in processes):
        return 0
    if any(each.has_stopped for each in processes):  # its script has caught it
        print(saved(processes, order.part.count, order.is_script))
        return RunStopped.exit_code
    if order.is_script and not any(each.has_trained for each in processes):
        raise InputError(
            "the script has ended, and no region has trained with the others: if it trains, each region did so on its own. Give "
            "Trainer a CoCoDCCallback (trainer.add_callback), or your loop an OuterOptimizer (docs/start/launch.md). Full "
            f"output: {processes[0].log.name}"
        )
    homes = [each.home for each in processes if each.has_journal]
    if not homes:
        steps = max(each.step or 0 for each in processes)
        print(
            f"finished at inner step {steps}. The script keeps no journal: OuterOptimizer(journal=FILE) makes a summary."
        )
        return 0
    report(homes, homes[0].parent)
    return 0


def _on_signals(handle: Callable[[int, Any], None]) -> None:
    """Handle Ctrl-C, SIGTERM (from a scheduler) and SIGHUP (from a terminal) alike. The exit code tells them apart."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, handle)


def _interrupt(number: int, frame: Any) -> None:
    if number == signal.SIGHUP:  # the terminal is closed: writing to it would fail
        with open(os.devnull, "wb") as nowhere:
            for stream in (sys.stdout, sys.stderr):
                if stream.isatty():
                    os.dup2(nowhere.fileno(), stream.fileno())
    raise Interrupted(number)


def in_words(rules: RegionConfig, regions: Sequence[int], join: bool, is_in: bool = True) -> str:
    """What an interrupt makes the regions of this command do, and the others; `is_in`: they have begun to train."""
    if join and not is_in:
        return f"stopping: region {regions[0]} is not in the run yet. The others train on."
    if not is_in:
        return "stopping: no region of this command trains yet. Each ends, or stops with a checkpoint if it has just begun."
    if rules.leaves_alone:
        they = "the regions of this command send what they have trained, and end"
        does = f"region {regions[0]} sends what it has trained, and ends" if len(regions) == 1 else they
        return f"leaving: {does}; other regions train on. If there are none, the run stops with a checkpoint."
    return "stopping: all regions agree on an inner step, train to it, and save a checkpoint there."


def _stop(processes: Sequence[launch.RegionProcess], display: Display) -> None:
    """Stop all regions with a checkpoint; end them at once after another interrupt."""
    asked: set[Any] = set()

    def ask_and_show() -> None:
        launch.ask_to_stop(processes, asked)
        display.update()

    try:
        launch.watch(processes, ask_and_show)
    except KeyboardInterrupt:
        launch.stop(processes)
        display.update()
    display.close()


def saved(processes: Sequence[launch.RegionProcess], count: int, is_script: bool = False) -> str:
    """Say which checkpoint the regions of this command have, in a run that began with `count`. Where regions come and go, those
    count that have stopped. What stands behind a script is the script's own.
    """
    from ..snapshot.folders import usable

    folder = processes[0].home.parent
    is_elastic = launch.rules_of(processes).elastic
    known = [each for each in processes if each.has_stopped and is_elastic] or processes
    newest = max((each.told for each in processes), key=lambda told: told.get("epoch", -1))
    ours = {each.region for each in known}
    others = set(newest.get("members", range(count))) - ours
    where = "every region" if len(known) == len(processes) else "every region that was left"
    if others:
        where = f"region {min(ours)}" if len(ours) == 1 else f"regions {', '.join(map(str, sorted(ours)))}"
    common = set.intersection(*(set(usable(each.home)) for each in known))
    if not common:
        return f"no checkpoint is complete in {where}; the journals and logs are in {folder}"
    place = ", before the script" if is_script else ""
    again = f"to continue, add --resume to the same command{place}"
    if others:
        again = (
            f"the commands of the others know theirs. To continue, add --resume to each command{place}: all go on from the "
            "newest checkpoint that all have"
        )
    return f"checkpoint-{max(common)} is complete in {where} under {folder}; {again}"


def cannot_go_on(failed: launch.RegionProcess, left_s: float, has_trained: bool) -> str:
    """What becomes of the others where they cannot train without a region that has failed. `has_trained`: any of them has."""
    end = f"region {failed.region} has ended ({loss_in_words(failed)}). The others cannot "
    if not has_trained:
        return f"{end}begin without it: they are ended in {left_s:.0f} s."
    return (
        f"{end}go on without it: at their next transfer they save a checkpoint, and end. Without a step for {left_s:.0f} s, they "
        "are ended."
    )


def report_failure(
    failed: Sequence[launch.RegionProcess], processes: Sequence[launch.RegionProcess], elastic: bool
) -> int:
    """Print which region failed first and why, then the errors of the others, each message once; returns the first one's exit
    code. In an elastic run that is one that stopped with the others: the command has told of lost ones before.
    """
    stopped = [each for each in failed if each.has_stopped]
    first = (stopped if elastic and stopped else failed)[0]
    regions_by_error: dict[str, list[int]] = {}
    exit_code = 1
    for each in (first, *(other for other in processes if other is not first)):
        error = each.error()
        if error is not None:
            regions_by_error.setdefault(error[0], []).append(each.region)
            exit_code = error[1] if each is first else exit_code
            if exit_code == RunStopped.exit_code and not first.has_stopped:
                exit_code = 1  # a script has ended itself with our number
        elif each is first:
            print(f"error: [region {each.region}] was {each.end_in_words}; its last lines:", file=sys.stderr)
        if each is first and (error is None or first.told.get("is_mute")):
            for line in each.last_lines(6):
                print(f"[region {each.region}] {line}", file=sys.stderr)
    for message, regions in regions_by_error.items():
        who = "all regions" if len(regions) == len(processes) > 1 else f"region {regions[0]}"
        print(f"error: [{who}] {message}", file=sys.stderr)
    print(f"full output: {first.log.name}", file=sys.stderr)
    return exit_code
