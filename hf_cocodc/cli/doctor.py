"""`hf-cocodc doctor`: look at this machine before a run."""

import argparse
import dataclasses
import sys
import time
from typing import Any

from .. import __version__
from ..errors import InputError
from ..settings.recipe import Recipe, add_recipe
from .checks import add_coordinator, add_json, add_secret, check, write_json
from .joining import name_of
from .part import part_of

WRONG_EXIT = 2
_WAIT_S = 60.0


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine before a run",
        description="Check this machine before a run, with the options of hf-cocodc train: packages, devices, memory, disk, "
        "data, network, coordinator. Each line is ok, warn or wrong, with a command that fixes the problem ('-': not known "
        "here). With --region and --coordinator, the doctors of all regions meet: they compare settings, model and data, and "
        "connect as the run would; a run that trains is not disturbed. Nothing is trained. The exit code is 2 if something is "
        "wrong.",
    )
    add_recipe(parser)
    parser.add_argument(
        "--region", type=int, help="the region that this machine will train (numbered from 0)"
    )
    add_coordinator(parser, "address of the run's coordinator")
    parser.add_argument(
        "--run", dest="run_name", metavar="NAME", help="name of the run, as for hf-cocodc train"
    )
    parser.add_argument(
        "--wait",
        type=float,
        metavar="S",
        help=f"seconds to wait for the doctors of the other regions (default: {_WAIT_S:g}; 0: meet nobody)",
    )
    add_secret(parser)
    add_json(parser, "what was found")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    if options.wait is not None:
        check("--wait", options.wait, 0, 86_400)
    recipe = Recipe.load(options.recipe, options.overrides)
    part = part_of(recipe.regions, options, name_of(recipe))
    recipe = dataclasses.replace(recipe, regions=part.regions)
    part.check(may_join=True)
    if options.wait and (part.region is None or part.regions.coordinator is None):
        raise InputError(
            "--wait waits for the doctors of other regions: it needs --region and --coordinator."
        )
    wait_s = _WAIT_S if options.wait is None else options.wait
    from ..tools.doctor.examine import Patient, examine
    from ..tools.doctor.facts import WRONG, lines

    def tell(words: str) -> None:
        if sys.stderr.isatty():
            print(f"... {words}", file=sys.stderr, flush=True)

    findings = []
    for each in examine(Patient(recipe, part.region, name_of(recipe), wait_s), tell):
        print("\n".join(lines(each)), flush=True)
        findings.append(each)
    write_json(
        options,
        {
            "hf_cocodc": __version__,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "region": part.region,
            "findings": [dataclasses.asdict(each) for each in findings],
        },
    )
    wrong = [each.topic for each in findings if each.level == WRONG]
    if wrong:
        print(f"wrong: {', '.join(dict.fromkeys(wrong))}", file=sys.stderr)
    return WRONG_EXIT if wrong else 0
