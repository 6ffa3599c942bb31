"""`hf-cocodc plan`: which settings suit a link, and what to expect of them."""

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import InputError, nearest, short
from ..net.pacing import congestion_of
from ..settings.recipe import Recipe, add_recipe
from ..settings.regions import OF_GROUPS
from ..tools.plan import sizes
from ..tools.plan.money import Prices, list_price
from .checks import RATE, add_json, add_speeds, check, check_speeds, check_writable, recipe_of, write_json

TCP = Path("/proc/sys/net/ipv4/tcp_congestion_control")
CONGESTIONS = ("cubic", "reno", "bbr")
_BOUNDS = {
    **dict.fromkeys(("rtt_ms", "network_rtt_ms", "write_ms", "read_ms", "delete_ms"), (0, 60_000)),
    **dict.fromkeys(("rate_mbit", "up_mbit", "down_mbit"), (0.01, 1_000_000)),
    "is_near": (0, 1),
}
"""Of what a file of bench link says."""
_OF_NETWORKS = ("--rtt-ms", "--rate-mbit", "--down-mbit", "--loss", "--congestion")
_RANGES = {
    "--rtt-ms": _BOUNDS["rtt_ms"],
    "--rate-mbit": _BOUNDS["rate_mbit"],
    "--down-mbit": _BOUNDS["rate_mbit"],
    "--step-s": (1e-6, 1e6),
    "--regions": (2, 1000),
    "--steps": (1, 10**12),
    "--usd-per-gb": (0, 1e6),
    "--usd-per-gpu-hour": (0, 1e6),
    "--gpus": (1, 10**6),
    "--loss": (0, 0.5),
    "--target": (0.01, 0.999),
}


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        usage="%(prog)s [RECIPE] [OPTIONS] [-- ACCELERATE LAUNCH ARGS]",
        help="find settings that suit a link, and forecast a run",
        description="Forecast a recipe over a link, with every method and codec: utilization, waiting, bytes, staleness, memory, "
        "time and dollars. Find the settings that reach --target with the least staleness. In place of a recipe, --params gives "
        "the size of a model. Nothing is trained unless you give --measure; arguments after -- then go to accelerate launch.",
    )
    add_recipe(parser, is_needed=False)
    parser.add_argument(
        "--params", metavar="COUNT", help="parameters of the model, for example 1.2B, in place of a recipe"
    )
    parser.add_argument(
        "--steps", type=int, help="inner steps of the run (default: training.max_steps of the recipe)"
    )
    parser.add_argument("--rtt-ms", type=float, help="round trip of the link in ms")
    parser.add_argument("--rate-mbit", type=float, help=f"{RATE}; if regions differ, that of the slowest")
    parser.add_argument(
        "--down-mbit",
        type=float,
        help="rate at which a region receives, in Mbit/s, if that is lower than the rate at which the others send",
    )
    parser.add_argument(
        "--link",
        type=Path,
        metavar="FILE",
        help="the file of hf-cocodc bench link --json: round trip and rate of a network, or requests and rates of a storage",
    )
    parser.add_argument("--loss", type=float, help="probability that a packet is lost (default: 0)")
    parser.add_argument(
        "--congestion",
        help=f"TCP congestion control of the regions: {', '.join(CONGESTIONS)} (default: what regions would use on this machine)",
    )
    parser.add_argument("--step-s", type=float, metavar="S", help="seconds of an inner step of a region")
    add_speeds(parser, "speeds")
    parser.add_argument(
        "--measure", action="store_true", help="measure the inner step: train 30 steps here, as one region"
    )
    parser.add_argument(
        "--usd-per-gpu-hour", type=float, metavar="USD", help="price of a GPU: adds dollars to the table"
    )
    parser.add_argument("--gpus", type=int, help="GPUs of each region, for --usd-per-gpu-hour (default: 1)")
    parser.add_argument(
        "--usd-per-gb", type=float, metavar="USD", help="price of a GB that leaves a region: adds dollars"
    )
    parser.add_argument(
        "--prices",
        metavar="CLOUD[,CLOUD...]",
        help="cloud list prices in place of --usd-per-gb: one cloud for all regions, or one for each: aws, aws-regions "
        "(between its regions), azure, gcp, gcp-standard, gcp-regions, oracle",
    )
    parser.add_argument("--regions", type=int, help="number of regions (default: the recipe's, or 2)")
    parser.add_argument(
        "--target",
        type=float,
        default=0.95,
        help="share of the time to spend on inner steps (default: 0.95)",
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="write a recipe to this file that extends yours, with these settings",
    )
    parser.add_argument(
        "--all", action="store_true", help="show the table with all rows, not only the ten that matter"
    )
    add_json(parser, "the whole table")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    if options.write is not None:
        check_writable("--write", options.write)
        if options.write.exists():
            raise InputError(f"--write {short(options.write)} exists. Name a new file, or remove this one.")
    _check(options)
    steps = [] if options.steps is None else [f"training.max_steps={options.steps}"]
    recipe = (
        recipe_of(options, steps)
        if options.params is None
        else sizes.recipe_of(sizes.params_in(options.params), [*options.overrides, *steps])
    )
    regions = options.regions or max(recipe.regions.count or 2, 2)
    check_speeds(options.speeds, regions)
    prices = _prices(options, regions)
    from ..tools.bench.report import content
    from ..tools.plan import choice, speeds, table, written
    from ..tools.plan.forecast import Subject, codecs_of
    from ..tools.plan.unequal import paces_of
    from ..training.preflight import on_meta

    logging.getLogger("hf_cocodc.parts.schedules").setLevel(logging.ERROR)  # of settings that are only tried
    figures = {} if options.link is None else written.link_of(options.link)
    for name, value in figures.items():
        check(f"--link {short(options.link)}: {name}", value, *_BOUNDS[name])
    link = _link(options, figures, recipe)
    model = on_meta(recipe)
    step_s = options.step_s
    if step_s is None:
        print(
            f"measuring {speeds.STEPS} inner steps of the recipe. This takes a minute or two. Run nothing else here meanwhile.",
            flush=True,
        )
        step_s = speeds.step_seconds(options.recipe, options.overrides, options.launcher)
    configs = list(choice.variants(recipe.outer))
    machine = speeds.of_device(bool(recipe.training.get("use_cpu")))
    paces = paces_of(recipe, regions, options.speeds, step_s, options.gpus or 1)
    network_rtt_ms = figures.get("network_rtt_ms", 0.0) if options.rtt_ms is None else options.rtt_ms
    subject = Subject(recipe, model, link, paces.step_s, regions, machine, network_rtt_ms / 1e3)
    form = "planning: {n_fmt} of {total_fmt} methods and codecs"
    counted = tqdm(configs, bar_format=form, leave=False, disable=None)  # on a terminal only
    tried = [(config, choice.choose(subject, config, options.target)) for config in counted]
    forecasts = [each for _, each in tried if each is not None]
    failing = [f"{config.method} {codecs_of([config])[0]}" for config, each in tried if each is None]
    report = table.report(subject, forecasts, failing, options.target, prices)
    report.setting.update({"speeds": options.speeds, "deal": paces.dealt} if options.speeds else {})
    chosen = choice.best(forecasts, recipe.outer)
    words = table.in_words(subject, chosen, str(recipe.outer.method), options.target, prices)
    words += table.wrapped(paces.in_words())
    shown = report if options.all else table.short(report, forecasts, recipe.outer)
    print("\n".join([*shown.lines(), "", *words]))
    write_json(options, content([report]))
    if options.write is not None:
        if chosen is None:
            raise InputError(f"--write {short(options.write)}: there are no settings to write; see above.")
        options.write.write_text(
            written.recipe_of(
                options.recipe, [*options.overrides, *steps], chosen, subject, "\n".join(words), options.write
            ),
            encoding="utf-8",
        )
        print(f"written: {options.write}")
    return 0


def _link(options: argparse.Namespace, figures: Mapping[str, float], recipe: Recipe) -> Any:
    """The link by the options, and by the figures of --link: a network, or a storage. Raises InputError if they conflict."""
    from ..tools.plan.storages import StorageFigures
    from ..tools.plan.transfers import LinkFigures

    is_storage, where = "write_ms" in figures, recipe.regions.coordinator
    if where is not None and recipe.regions.in_storage != is_storage:
        kind = "storage" if is_storage else "network"
        given = f"--link {short(options.link)} is of a {kind}" if figures else "--rtt-ms is of a network"
        raise InputError(
            f"regions.coordinator={short(where)}, but {given}. Measure the link of the run, and give --link FILE: hf-cocodc "
            f"bench link --coordinator {short(where)} --json FILE{'' if recipe.regions.in_storage else ' --region R'}."
        )
    if is_storage:
        for flag in _OF_NETWORKS:
            if getattr(options, flag.removeprefix("--").replace("-", "_")) is not None:
                raise InputError(
                    f"--link {short(options.link)} is of a storage, where {flag} does not count. Remove one of the two."
                )
        write_s, read_s, delete_s = (figures[f"{what}_ms"] / 1e3 for what in ("write", "read", "delete"))
        up, down = figures["up_mbit"] * 1e6, figures["down_mbit"] * 1e6
        return StorageFigures(write_s, read_s, delete_s, up, down, is_near=bool(figures["is_near"]))
    rate_mbit = figures["rate_mbit"] if options.rate_mbit is None else options.rate_mbit
    return LinkFigures(
        rtt_s=(figures["rtt_ms"] if options.rtt_ms is None else options.rtt_ms) / 1e3,
        rate=min(rate_mbit, options.down_mbit or rate_mbit) * 1e6,  # a transfer brings as much as it sends
        loss=options.loss or 0.0,
        congestion=options.congestion or _congestion(recipe.regions.link),
    )


def _prices(options: argparse.Namespace, regions: int) -> Prices:
    """Raises InputError if `--prices` does not fit."""
    per_gb, source = options.usd_per_gb, ""
    if options.prices is not None:
        per_gb, source = list_price(options.prices.split(","), regions)
    return Prices(per_gb, options.usd_per_gpu_hour, regions * (options.gpus or 1), source)


def _congestion(link: str) -> str:
    """The congestion control that regions would have here; cubic, Linux's default, where another one is not modeled."""
    if link not in OF_GROUPS and (chosen := congestion_of("auto")) is not None:
        return chosen
    current = TCP.read_text().strip() if TCP.is_file() else "cubic"
    return current if current in CONGESTIONS else "cubic"


def _check(options: argparse.Namespace) -> None:
    if options.recipe is None and options.params is None:
        raise InputError("plan needs a model: give a recipe, or --params with the number of its parameters.")
    if options.recipe is not None and options.params is not None:
        raise InputError(
            f"--params is of a plan without a recipe: {options.recipe} has a model. Remove one of the two."
        )
    if options.params is not None and (options.measure or options.write is not None):
        flag = "--measure" if options.measure else "--write"
        raise InputError(f"{flag} needs a recipe: --params says only how large the model is.")
    if options.link is None and None in (options.rtt_ms, options.rate_mbit):
        raise InputError(
            "plan needs the link: give --rtt-ms and --rate-mbit, or --link with the file of hf-cocodc bench link --json."
        )
    if (options.step_s is None) != options.measure:
        raise InputError("plan needs the time of an inner step: give either --step-s or --measure.")
    if options.launcher and not options.measure:
        raise InputError(
            "arguments after -- are for the short run of --measure. Add --measure, or remove them."
        )
    for flag, (least, most) in _RANGES.items():
        value = getattr(options, flag.removeprefix("--").replace("-", "_"))
        if value is not None:
            check(flag, value, least, most)
    if options.gpus is not None and options.usd_per_gpu_hour is None:
        raise InputError("--gpus counts for the price alone: give --usd-per-gpu-hour, too.")
    if options.prices is not None and options.usd_per_gb is not None:
        raise InputError("--prices and --usd-per-gb both say what traffic costs: give one of them.")
    if options.congestion not in (None, *CONGESTIONS):
        raise InputError(
            f"--congestion {short(options.congestion)} is not modeled.{nearest(options.congestion, CONGESTIONS)}"
        )
