"""Carries out a study: `python -m tests.studies SPEC [--quick]`. Writes its runs, its tables and its picture.

SPEC is the name of a file in `tests/studies/specs`, or a path. A study that is stopped goes on with the same command.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spec import Study

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "docs" / "evidence" / "studies"
QUICK = Path("runs/studies")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.studies", description=__doc__, allow_abbrev=False)
    parser.add_argument("spec", metavar="SPEC")
    parser.add_argument(
        "--quick", action="store_true", help="the reduced size of the spec: minutes instead of hours"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes, one thread each"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="N", help="start no run after so long"
    )
    parser.add_argument("--cells", nargs="+", metavar="CELL", help="only these cells of the study")
    parser.add_argument(
        "--tables", action="store_true", help="only write the tables of the runs that are there"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help=f"default: {RESULTS.name}; with --quick {QUICK}"
    )
    options = parser.parse_args(arguments)
    output = options.output or (QUICK if options.quick else RESULTS)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the processes
    from hf_cocodc.errors import InputError

    try:
        return _study(options, output)
    except InputError as error:
        say(f"error: {error}")
        return error.exit_code


def _study(options: argparse.Namespace, output: Path) -> int:
    import torch

    from . import spec
    from .conduct import conduct, found_in, made_by
    from .lines import Lines
    from .pictures import draw
    from .tables import page

    torch.set_num_threads(1)
    path = next(
        (each for each in (HERE / "specs" / f"{options.spec}.yaml", Path(options.spec)) if each.is_file()),
        None,
    )
    if path is None:
        known = ", ".join(
            sorted(each.stem for each in (HERE / "specs").glob("*.yaml") if each.stem != "base")
        )
        say(f"error: SPEC {options.spec!r} is not a file. Known: {known}.")
        return 2
    study = spec.read(path, options.quick)
    chosen = spec.only(study, options.cells)
    made = made_by(study)
    lines = Lines(output / "runs.jsonl", say)
    if not options.tables:
        _announce(path, chosen, options.quick)
        until = time.monotonic() + 60 * options.minutes
        conduct(chosen, lines, made, options.jobs, until, say)
    found = found_in(study, lines, made)  # of all cells: those of earlier commands, too
    lines.close()
    if not any(found.compare.values()):
        say("no run of the comparison is there yet: no table.")
        return 0
    command = f"python -m tests.studies {path.stem}{' --quick' if options.quick else ''}"
    text = page(study, found, command)
    (output / f"{study.name}.md").write_text(text, encoding="utf-8")
    draw(study, found, output / f"{study.name}.png")
    say(f"\n{text}\nwritten: {output / study.name}.md and .png")
    return 0


def _announce(path: Path, study: "Study", quick: bool) -> None:
    from . import cost, spec

    full = spec.read(path)
    runs, all_of_it = cost.all_runs(study), cost.all_runs(full)
    hours, full_hours = cost.core_hours(runs), cost.core_hours(all_of_it)
    say(
        f"{study.title}: {len(runs)} runs, about {hours:.1f} core hours (full size: {len(all_of_it)}, {full_hours:.1f})."
    )


if __name__ == "__main__":
    sys.exit(main())
