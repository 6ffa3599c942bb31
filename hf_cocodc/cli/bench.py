"""`hf-cocodc bench link`: measure a mean over a link, compared with the best that the link can do."""

import argparse
from typing import Any

from ..coordinator.secret import secret_of
from ..errors import InputError, short
from ..settings import RegionConfig
from ..settings.outer import CODECS
from .checks import (
    RATE,
    add_coordinator,
    add_json,
    add_secret,
    check,
    check_memory,
    write_json,
)

# bytes of memory for each value, measured
_LINK_BYTES = 16
_OF_STORAGE = ("coordinator", "megabytes", "repeat", "json")
"""What counts for a storage."""


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure a link before you rent GPUs",
        description="Measure your own links, compared with the best that they can do.",
    )
    benches = parser.add_subparsers(required=True, metavar="WHAT")
    _add_link(benches)


def _add_link(benches: Any) -> None:
    what = "one mean over a link, compared with the link's rate and round trip"
    link = benches.add_parser(
        "link",
        help=what,
        description=f"Measure {what}. Without --coordinator, all regions run on this machine, over loopback. With --coordinator "
        "and --region, this command is one end of a real link: run it at every end, each time with another --region. With the "
        "URL of a storage it measures the storage's requests, without another end: run it in each region by itself.",
    )
    add_json(link, "the results")
    link.set_defaults(run=_report, parser=link)
    link.add_argument(
        "--megabytes", type=float, default=64, help="size of the fp32 tensor, in 10^6 bytes (default: 64)"
    )
    link.add_argument(
        "--codec",
        default="fp32",
        choices=CODECS,
        metavar="CODEC",
        help=f"codec of the transfer: {', '.join(CODECS)} (default: fp32)",
    )
    link.add_argument(
        "--link",
        default="tcp",
        choices=("tcp", "gloo"),
        help="what carries the payloads, like regions.link: tcp, or gloo (default: tcp)",
    )
    link.add_argument(
        "--connections",
        default="auto",
        help="TCP connections to each other region; auto chooses the number from the round trip (default: auto)",
    )
    link.add_argument("--regions", type=int, default=2, help="number of regions (default: 2)")
    link.add_argument("--repeat", type=int, default=5, help="number of transfers (default: 5)")
    link.add_argument("--rate-mbit", type=float, help=f"{RATE}, if you know it")
    link.add_argument(
        "--rate-limit",
        type=float,
        help="highest rate at which a region sends, in Mbit/s, like regions.rate_limit (default: no limit)",
    )
    add_coordinator(link, "address of the coordinator of both ends (see hf-cocodc coordinator)")
    add_secret(link)
    link.add_argument(
        "--encrypt",
        action="store_true",
        help="encrypt what regions send, with a secret made for this measurement; between machines, it is encrypted "
        "whenever you give a secret",
    )
    link.add_argument("--region", type=int, help="number of this region (from 0)")
    link.add_argument("--interface", help="network interface of the link, for example wg0")
    link.add_argument(
        "--run", dest="run_name", help="name of this measurement, if the coordinator has several at once"
    )


def _report(options: argparse.Namespace) -> int:
    from ..tools.bench.report import content

    report = _link(options)
    print("\n".join(report.lines()))
    write_json(options, content([report]))
    return 0


def _storage(options: argparse.Namespace) -> Any:
    """Measure the requests of a storage."""
    from ..tools.bench import storage

    for action in options.parser._actions:
        given = getattr(options, action.dest, action.default) != action.default
        if given and action.dest not in _OF_STORAGE:
            raise InputError(
                f"--coordinator {short(options.coordinator)} is a storage, and is measured from one end: "
                f"{action.option_strings[-1]} does not count there. Remove it; --megabytes, --repeat and --json count."
            )
    check_memory("--megabytes", options.megabytes, 2e6 * options.megabytes)
    return storage.report(
        options.coordinator, storage.measure(options.coordinator, options.megabytes, options.repeat)
    )


def _link(options: argparse.Namespace) -> Any:
    check("--megabytes", options.megabytes, 0.001)
    check("--repeat", options.repeat, 1)
    if options.coordinator is not None and RegionConfig(coordinator=options.coordinator).in_storage:
        return _storage(options)
    check("--regions", options.regions, 2, 100)
    ends = RegionConfig(  # makes the same checks as a run
        region=options.region,
        count=options.regions,
        coordinator=options.coordinator,
        interface=options.interface,
        run=options.run_name,
        secret_file=options.secret_file,
        link=options.link,
        connections=options.connections,
        rate_limit=options.rate_limit,
    )
    extras = ends.interface or ends.run or ends.secret_file
    if (ends.coordinator is None) != (ends.region is None) or (extras and not ends.coordinator):
        raise InputError(
            "--coordinator and --region need each other, and --interface, --run and --secret-file need both. Give --coordinator "
            "and --region to measure one end of a real link. Give none of the five to measure between regions on this machine."
        )
    if ends.region is not None and ends.region >= options.regions:
        raise InputError(
            f"--region {ends.region} of --regions {options.regions} does not exist: regions are numbered from 0. Lower --region."
        )
    if options.rate_mbit is not None:
        check("--rate-mbit", options.rate_mbit, 0.01)
    from ..tools.bench import link

    keys = None if ends.coordinator is None else secret_of(ends)
    if options.encrypt and ends.coordinator is not None and keys is None:
        raise InputError(
            "--encrypt between machines needs a secret: --secret-file FILE (hf-cocodc secret new FILE)."
        )
    trial = link.Trial(
        megabytes=options.megabytes,
        codec=options.codec,
        connections=ends.connections if isinstance(ends.connections, int) else None,
        repeat=options.repeat,
        rate_limit=ends.rate_limit,
        encrypt=options.encrypt if ends.coordinator is None else keys is not None,
        link=options.link,
    )
    here = options.regions if ends.coordinator is None else 1
    check_memory("--megabytes", options.megabytes, here * options.megabytes * 1e6 / 4 * _LINK_BYTES)
    if ends.coordinator is not None and ends.region is not None:
        measured = link.take_part(
            trial, ends.coordinator, ends.region, options.regions, ends.interface, ends.run, keys
        )
        setting = {"over": ends.interface or ends.coordinator}
    else:
        measured = link.measure_here(trial, options.regions)
        setting = {"over": "loopback"}
    return link.report(
        trial, measured, setting, None if options.rate_mbit is None else options.rate_mbit * 1e6
    )
