"""Carries a study out: the sweep, the choice of its best, the comparison; in several processes, and on from where it stopped."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from statistics import mean
from typing import Any, NamedTuple

from .lines import Lines, Result, key_of
from .spec import Changes, Settings, Study
from .statistics import tail_loss

Say = Callable[[str], object]
Made = dict[str, Any]


class Found(NamedTuple):
    """The results of a study so far.

    Attributes:
        sweep: by cell and arm: each combination with the results of all sweep seeds that are there.
        best: by cell and arm: the combination that the comparison uses, as far as its sweep is complete.
        compare: by cell and arm: the results by seed.
    """

    sweep: dict[tuple[str, str], list[tuple[Changes, list[Result]]]]
    best: dict[tuple[str, str], Changes]
    compare: dict[tuple[str, str], dict[int, Result]]


def made_by(study: Study) -> Made:
    """What decides the results of a study beside its settings."""
    import torch

    import hf_cocodc

    from .text import digest_of
    from .training import recipe_of

    text = digest_of(recipe_of(study.base))
    return {"hf_cocodc": hf_cocodc.__version__, "torch": torch.__version__, "text": text}


def sweep_runs(study: Study) -> list[Settings]:
    """All runs of the sweep: seed by seed, so that a sweep that was stopped compares all combinations."""
    return [
        study.settings(cell, arm, chosen, seed)
        for seed in study.sweep_seeds
        for cell in study.cells
        if cell not in study.sweep_in
        for arm in study.arms
        if arm not in study.like and len(study.combinations(arm)) > 1
        for chosen in study.combinations(arm)
    ]


def best_of(tried: Sequence[tuple[Changes, Sequence[Result]]]) -> Changes:
    """The combination with the lowest mean loss over the seeds; one that diverged in a seed is the worst.

    >>> def result(loss): return {"curve": [(1, loss), (1, loss)]}
    >>> best_of([({"lr": 1}, [result(2.0), result(None)]), ({"lr": 2}, [result(2.0), result(2.2)])])
    {'lr': 2}
    """
    return min(tried, key=lambda each: mean(tail_loss(result["curve"]) for result in each[1]))[0]


def found_in(study: Study, lines: Lines, made: Made) -> Found:
    """What the lines hold of a study."""
    found = Found({}, {}, {})

    def results(cell: str, arm: str, chosen: Changes, seeds: Iterable[int]) -> dict[int, Result]:
        keys = {seed: key_of(study.settings(cell, arm, chosen, seed), made) for seed in seeds}
        return {seed: lines[key] for seed, key in keys.items() if key in lines}

    for cell in study.cells:
        for arm in study.arms:
            combinations = study.combinations(arm)
            if len(combinations) == 1:
                found.best[cell, arm] = combinations[0]
            elif arm not in study.like and cell not in study.sweep_in:
                tried = [
                    (each, list(results(cell, arm, each, study.sweep_seeds).values()))
                    for each in combinations
                ]
                begun = [each for each in tried if each[1]]
                if begun:
                    found.sweep[cell, arm] = begun
                if all(len(made_so_far) == len(study.sweep_seeds) for _, made_so_far in tried):
                    found.best[cell, arm] = best_of(tried)
    for cell in study.cells:
        for arm in study.arms:
            source = study.sweep_in.get(cell, cell), study.like.get(arm, arm)
            if (cell, arm) not in found.best and source in found.best:
                found.best[cell, arm] = found.best[source]
    for place, chosen in found.best.items():
        found.compare[place] = results(*place, chosen, study.seeds)
    return found


def compare_runs(study: Study, best: dict[tuple[str, str], Changes]) -> list[Settings]:
    """All runs of the comparison whose sweep is complete: seed by seed, so that all arms have the same seeds."""
    return [
        study.settings(cell, arm, best[cell, arm], seed)
        for seed in study.seeds
        for cell in study.cells
        for arm in study.arms
        if (cell, arm) in best
    ]


def conduct(study: Study, lines: Lines, made: Made, jobs: int, until: float, say: Say) -> Found:
    """Make all runs of a study that are not there yet.

    Args:
        study: says which.
        lines: the results so far; takes the new ones.
        made: from `made_by`.
        jobs: processes, each with one thread.
        until: no run starts after this moment of `time.monotonic`.
        say: takes a line for every run.

    Returns:
        All that is there now.
    """
    with _processes(jobs) as pool:
        _make(pool, sweep_runs(study), lines, made, jobs, until, say)
        best = found_in(study, lines, made).best
        _make(pool, compare_runs(study, best), lines, made, jobs, until, say)
    return found_in(study, lines, made)


def _processes(jobs: int) -> ProcessPoolExecutor:
    # spawn: a process that was forked after torch had started its threads can hang
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (os.nice(0),))


def _begin(niceness: int) -> None:
    import torch

    torch.set_num_threads(1)
    os.nice(niceness - os.nice(0))


def _run(settings: Settings) -> Result:
    from .training import run

    return run(settings)


def _make(
    pool: ProcessPoolExecutor,
    wanted: Sequence[Settings],
    lines: Lines,
    made: Made,
    jobs: int,
    until: float,
    say: Say,
) -> None:
    """Make the runs that are missing; the next one starts when a process is free."""
    missing = {key_of(each, made): each for each in wanted}
    waiting = [each for key, each in missing.items() if key not in lines]
    total, running = len(waiting), dict[Future[Result], Settings]()
    for number in range(1, total + 1):
        while waiting and len(running) < jobs and time.monotonic() < until:
            settings = waiting.pop(0)
            running[pool.submit(_run, settings)] = settings
        if not running:
            say(f"stopped: {len(waiting)} runs are still to be made. The same command goes on.")
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        future = done.pop()
        settings, result = running.pop(future), future.result()
        lines.add(settings, made, result)
        loss = tail_loss(result["curve"])
        said = f"{loss:.4f}" if math.isfinite(loss) else "diverged"
        say(
            f"{number}/{total} seed {settings['seed']} {_told(settings)}: {said}, {result['seconds']:.0f} s of processor time"
        )


def _told(settings: Settings) -> str:
    """A run's settings in a few words."""
    if settings["study"].get("data_parallel"):
        return f"data-parallel lr {settings['training']['learning_rate']}"
    outer = {
        name: value for name, value in settings["outer"].items() if name not in ("sync_interval", "method")
    }
    return " ".join([outer_name(settings), *(f"{name}={value}" for name, value in outer.items())])


def outer_name(settings: Settings) -> str:
    """The method of a run."""
    return str(settings["outer"].get("method", "diloco"))
