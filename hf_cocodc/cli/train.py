"""`hf-cocodc train`: train all regions of a recipe on this machine, or only one of them."""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..coordinator.secret import secret_of
from ..errors import InputError
from ..interrupt import ends_at_once
from ..net.pacing import congestion_of
from ..settings import RegionConfig, check_split, warn_alone
from ..settings.recipe import Recipe, add_recipe
from ..status import phase_in_words
from ..training.forks import SIGNALS
from . import dry
from .checks import add_coordinator, add_secret, recipe_of
from .display import Display
from .ending import report
from .joining import (
    claim_number,
    has_missed_the_end,
    loss_in_words,
    name_of,
    over,
    refuse_to_join,
    run_at,
    trains,
    way_back,
)
from .part import part_of


class Interrupted(KeyboardInterrupt):
    """A signal asks the command to end. `exit_code` is 128 plus its number, as for a process that the signal has ended."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        usage="%(prog)s RECIPE [OPTIONS] [-- ACCELERATE LAUNCH ARGS]",
        help="train a recipe across regions",
        description="Train a recipe. Without --region, this machine runs all regions. With --region and --coordinator, it runs "
        "only one. With GPUs, or with arguments after --, which go to it, a region has an accelerate launch of its own; without "
        "GPUs, or with training.use_cpu, it is one process. Where there are fewer GPUs than regions, the regions share them.",
    )
    add_recipe(parser)
    parser.add_argument("--region", type=int, help="run only this region on this machine (numbered from 0)")
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
        "regions.min or regions.on_loss=continue in every region",
    )
    add_secret(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything and print what would be started, but start and write nothing",
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    check_split(os.environ)
    overrides = list(options.overrides)
    recipe = recipe_of(options)
    part = part_of(recipe, options, options.join)
    recipe, region, count, has_company = part.recipe, part.region, part.count, part.has_company
    address, join = recipe.regions.coordinator, bool(recipe.regions.join)
    if address is not None:
        overrides.append(f"regions.coordinator={json.dumps(address)}")  # [::1]:29650 is no text in YAML
    for key, given in (("run", options.run_name), ("secret_file", options.secret_file)):
        if given is not None:
            overrides.append(f"regions.{key}={json.dumps(given)}")
    if join:
        refuse_to_join(options.resume, address)
    if options.launcher and region is None and count > 1 and not join:
        raise InputError(
            f"arguments after -- go to one accelerate launch, but this command starts {count}, which would use the same ports "
            "and GPUs. Start each region with its own command, and add --region and --coordinator to it."
        )
    part.check(may_join=join)
    regions: Sequence[int] = range(count) if region is None else [region]
    keys = secret_of(recipe.regions) if has_company else None
    if has_company:
        congestion_of(recipe.regions.congestion)
    state = run_at(recipe, address, keys) if address is not None and has_company else None
    if region is not None and not join:
        missed = has_missed_the_end(state, region, int(recipe.training.get("max_steps", -1)))
        if missed is not None:
            print(missed)
            return 0
    finished = over(state, join)
    if finished is not None and not options.resume:
        print(finished)
        if join:
            return 0
    comes_back = region is not None and recipe.regions.elastic and trains(state, region)
    may_fork = not _has_libraries()
    print(phase_in_words(1), flush=True)
    with ends_at_once():
        from ..coordinator.server import serve_in_thread
        from ..training import launch
        from ..training.building import output_dir
        from ..training.forks import call, load_libraries
        from ..training.preflight import preflight

        load_libraries()
    if not comes_back or options.dry_run:  # one that comes back is missed: its own process checks the recipe
        print(phase_in_words(2), flush=True)
        link = recipe.regions.link if has_company else "tcp"
        here = 1 if join else len(regions)
        num_params = call(partial(preflight, recipe, here, link, tries=options.dry_run))
    if not part.is_told:
        warn_alone()
    join = join or comes_back
    if join:
        options.resume = False  # a region that joins takes the others' state
        overrides.append("regions.join=true")
        recipe = dataclasses.replace(recipe, regions=dataclasses.replace(recipe.regions, join=True))
    if options.resume:
        overrides.append("training.resume_from_checkpoint=true")
    machine = launch.machine_of(options.launcher)
    shared = launch.sharing_here(recipe, 1 if join else len(regions), options.launcher)
    if shared is not None:
        print(shared, flush=True)
    if options.dry_run:
        if join and region is None:
            assert address is not None
            regions = [dry.free_number(recipe, address)]
        planned = launch.launches(recipe, options.recipe, overrides, regions, address, options.launcher)
        dry.show(recipe, planned, machine, options.resume, num_params)
        return 0
    forked = launch.fork_ahead(recipe, 1 if join else len(regions), options.launcher) if may_fork else []
    with contextlib.ExitStack() as at_end:
        if address is None and has_company:
            served = serve_in_thread(secrets=[] if keys is None else [keys])
            at_end.callback(served.close)
            address = served.address
            if recipe.regions.elastic:
                words = f"coordinator of this run: {address} (hf-cocodc status --coordinator {address})"
                print(words, flush=True)
        if join and region is None:
            assert address is not None
            claim = claim_number(recipe, address)
            if claim is None:
                return 0
            at_end.callback(claim.close)
            regions = [claim.region]
        if join:
            print(f"joining run {name_of(recipe)!r} as region {regions[0]}", flush=True)
        folders = [output_dir(recipe) / f"region-{each}" for each in regions]
        give_away = at_end.enter_context(launch.sole_writer(folders, machine))
        return _train(options, recipe, overrides, regions, address, machine, give_away, forked)


def _train(
    options: argparse.Namespace,
    recipe: Recipe,
    overrides: Sequence[str],
    regions: Sequence[int],
    address: str | None,
    machine: int,
    give_away: Callable[[Path], None],
    forked: Sequence[Any],
) -> int:
    """Start `regions`, or this machine's part of one, show their progress, and report. The folder of a lost region is given
    away, because another command may bring it back.
    """
    from ..training import launch
    from ..training.building import output_dir

    timeout_s, elastic = recipe.regions.timeout_s, recipe.regions.elastic
    early: list[int] = []
    # a signal must not interrupt the start: a process that has just started would be lost
    _on_signals(lambda number, frame: early.append(number))
    processes = launch.start(
        recipe,
        options.recipe,
        overrides,
        regions,
        address,
        options.launcher,
        options.resume,
        outlive_us=options.region is not None or bool(recipe.regions.join),
        machine=machine,
        forked=forked,
    )
    display = Display(
        [each.region for each in processes],
        [each.status for each in processes],
        int(recipe.training.get("max_steps", -1)),
    )

    def lose(lost: launch.RegionProcess) -> None:
        """Say what the others go on without; nothing of a region that all stop with."""
        give_away(lost.folder)
        if not lost.has_stopped:
            line = (
                f"region {lost.region} is lost ({loss_in_words(lost)}); the others go on. To bring it back:"
            )
            display.lose(lost.region, f"{line}\n    {way_back(options, lost.region, address)}")

    def tell(failed: launch.RegionProcess, left_s: float) -> None:
        """Say why nothing trains."""
        display.say(
            f"region {failed.region} has ended ({loss_in_words(failed)}). The others cannot go on without it: at their next "
            f"transfer they save a checkpoint, and end. Without a step for {left_s:.0f} s, they are ended."
        )

    try:
        _on_signals(_interrupt)
        for number in early:
            _interrupt(number, None)
        failed = launch.watch(processes, display.update, timeout_s, lose if elastic else None, tell)
    except Interrupted as interrupted:
        is_in = any(each.has_trained for each in processes)
        ended = _in_words(recipe.regions, regions, is_in)
        print(f"\n{ended} Press Ctrl-C again to end at once.", file=sys.stderr)
        _stop(processes, display, timeout_s, elastic)
        if recipe.regions.join and not is_in:
            return interrupted.exit_code
        if all(each.has_left for each in processes):
            report([each.folder for each in processes], output_dir(recipe))
            return 0
        print(f"interrupted at step {display.step}; all regions have ended.", file=sys.stderr)
        if machine == 0:
            print(_saved(output_dir(recipe), processes if elastic else []), file=sys.stderr)
        return interrupted.exit_code
    display.close()
    if failed and not (elastic and any(each not in failed for each in processes)):
        return _report_failure(failed, processes, elastic)
    if machine:
        print(
            f"machine {machine} of region {regions[0]} has ended. The summary is at the region's machine 0."
        )
        return 0
    for each in processes:
        if each.too_late:
            print(each.too_late)
    if all(each.too_late for each in processes):
        return 0
    folders = [each.folder for each in processes]
    # commands that run one region each may share a folder: each draws a picture of its own
    report(folders, output_dir(recipe) if len(regions) == recipe.regions.count else folders[0])
    return 0


def _has_libraries() -> bool:
    """Whether a program that runs this command in its own process may have used the libraries: no fork could use them then."""
    return "torch" in sys.modules


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


def _in_words(settings: RegionConfig, regions: Sequence[int], is_in: bool = True) -> str:
    """What an interrupt makes the regions of this command do, and the others; `is_in`: they have begun to train."""
    if settings.join and not is_in:
        return f"stopping: region {regions[0]} is not in the run yet. The others train on."
    if settings.leaves_alone:
        they = "the regions of this command send what they have trained, and end"
        does = f"region {regions[0]} sends what it has trained, and ends" if len(regions) == 1 else they
        return f"leaving: {does}; other regions train on. If there are none, the run stops with a checkpoint."
    if settings.elastic:
        return (
            "stopping: all regions hear of it with the next transfer, and save a checkpoint where it lands."
        )
    return "stopping: all regions agree on an inner step, train to it, and save a checkpoint there."


def _stop(processes: Sequence[Any], display: Display, timeout_s: float, elastic: bool) -> None:
    """Stop all regions with a checkpoint; end them at once after another interrupt."""
    from ..training import launch

    asked: set[Any] = set()

    def ask_and_show() -> None:
        launch.ask_to_stop(processes, asked)
        display.update()

    try:
        launch.watch(processes, ask_and_show, timeout_s, (lambda lost: None) if elastic else None)
    except KeyboardInterrupt:
        launch.stop(processes)
        display.update()
    display.close()


def _saved(folder: Path, processes: Sequence[Any]) -> str:
    """Say which checkpoint an interrupted run has left; of `processes`, those that have stopped count, and not those before."""
    from ..snapshot.folders import usable

    stopped = [each.folder for each in processes if each.has_stopped]
    complete = [set(usable(region)) for region in stopped or folder.glob("region-*")]
    common = set.intersection(*complete) if complete else set()
    if not common:
        return f"no checkpoint is complete in every region; the journals and logs are in {folder}"
    where = "every region that was left" if stopped else "every region"
    return f"checkpoint-{max(common)} is complete in {where} under {folder}; to continue, add --resume to the same command"


def _report_failure(failed: Sequence[Any], processes: Sequence[Any], elastic: bool) -> int:
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
        elif each is first:
            print(
                f"error: [region {each.region}] was killed or ended without an error message; its last lines:",
                file=sys.stderr,
            )
            for line in each.last_lines(6):
                print(f"[region {each.region}] {line}", file=sys.stderr)
    for message, regions in regions_by_error.items():
        who = "all regions" if len(regions) == len(processes) > 1 else f"region {regions[0]}"
        print(f"error: [{who}] {message}", file=sys.stderr)
    print(f"full output: {first.log.name}", file=sys.stderr)
    return exit_code
