"""Numbers that are wrong, and strangers, in runs of this package and of torchft: `python -m tests.benchmarks.faults`.

Each fault has a run of its own, in real processes on the loopback of this machine; a whole command writes its table into the two
documentation. torchft's column needs `pip install torchft==0.2.0`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from hf_cocodc.coordinator.caller import ConnectionEnded, CoordinatorConnection
from hf_cocodc.coordinator.client import status
from hf_cocodc.coordinator.messages import NO_GENERATION, Alive, Back
from hf_cocodc.net.addresses import parts_of
from hf_cocodc.net.channel import line_of
from hf_cocodc.net.keys import Keys
from hf_cocodc.net.members import Member
from hf_cocodc.parts.guard import WARM_UP
from hf_cocodc.tools.bench.report import BenchReport, write
from tests.processes.strangers import ports_of, strangers
from tests.secret import secret

from . import workload
from .damages import GREETINGS
from .elastic import LEAST, RESULTS, Contestant, Event, Run, diaries, say

ROOT = Path(__file__).parents[2]
MARKS = ("faults", "faults in full")
"""In comments around the two tables of `DOCUMENT`."""
DOCUMENT = ROOT / "docs" / "evidence" / "faults.md"
BROKEN = WARM_UP + 3
"""The round in which something breaks once: the norm guard has its history by then."""
H = 10
"""Inner steps of a round."""
SYNC = BROKEN * H
MIDDLE = SYNC - H // 2
EARLY = H
SLOW = 0.2
LAST = 2
"""The region that breaks, of three."""
SECRET, OTHER = secret("ours"), secret("guessed")
WITH_SECRET = {"HF_COCODC_SECRET": SECRET}
NONE, NOT_MADE = "no API", "-"
Beside = Callable[[Run], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        damage: what breaks in region LAST, see `damages`.
        at: the last inner step before it.
        settings: of RegionConfig; `outer`: of OuterConfig.
        secret: whether regions and coordinator have a secret.
        events: what happens to processes, or beside them.
        torchft: whether torchft lets us do the same.
        sees: words that the other regions print or write to their journals (a regular expression); empty: none are expected.
        told: what a region that wants to come in prints.
        pace: seconds of an inner step at least: a region that comes back needs some time.
        shift: see `Place`.
    """

    name: str
    damage: str = ""
    at: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    secret: bool = False
    events: tuple[Event, ...] = ()
    torchft: bool = False
    sees: str = ""
    told: str = ""
    pace: float = 0.0
    shift: int = 0

    def contestant(self, by: str) -> Contestant:
        more: dict[str, Any] = {
            "interval": H,
            "shift": self.shift,
            "overheard": any(e.what == "calls" for e in self.events),
        }
        if self.damage:
            more |= {"damage": self.damage, "damaged": LAST, "damaged_at": self.at}
        return Contestant(by, by, {"min": LEAST, **self.settings}, more, WITH_SECRET if self.secret else {})


def garbage(run: Run) -> contextlib.AbstractContextManager[Any]:
    """At every port of every process."""
    return strangers([*ports_of(*run.pids), parts_of(run.meeting_point)[1]])


def comes_with(theirs: str | None) -> Beside:
    """A process that wants to be a region of the run, with this secret."""

    @contextlib.contextmanager
    def beside(run: Run) -> Iterator[None]:
        folder = _of_strangers(run)
        process = run.begin(LAST, folder, {"HF_COCODC_SECRET": theirs}, join=True)
        try:
            yield
            process.wait(60.0)
        finally:
            process.kill()
            process.wait()

    return beside


@contextlib.contextmanager
def replays(run: Run) -> Iterator[None]:
    """Each greeting that was heard on the network, once more."""
    for line in (run.folder / GREETINGS).read_bytes().splitlines(keepends=True):
        with socket.create_connection(parts_of(run.meeting_point), timeout=10.0) as connection:
            connection.sendall(line)
            heard = b""
            with contextlib.suppress(TimeoutError):
                while chunk := connection.recv(1 << 16):
                    heard += chunk
        _note(run, heard.decode())
    yield


@contextlib.contextmanager
def calls_again(run: Run) -> Iterator[None]:
    """The process that region LAST was in an earlier epoch calls the coordinator, with the secret and all that it knew."""
    keys = Keys.from_secret(SECRET)
    [state] = status(run.meeting_point, keys)
    back = Back(
        run=state["run"],
        member=Member(LAST, LAST + 1),
        token="",
        generation=NO_GENERATION,
        losses=0,
        changes=0,
    )
    with contextlib.closing(
        CoordinatorConnection(run.meeting_point, state["name"], "region", keys)
    ) as connection:
        connection.send(back)
        with contextlib.suppress(ConnectionEnded):  # the coordinator has told it what it has to know
            while (message := connection.receive(2.0)) is not None and not isinstance(message, Alive):
                _note(run, line_of(message).decode().strip())
    yield


def _note(run: Run, heard: str) -> None:
    with (_of_strangers(run) / "log.txt").open("a") as log:
        log.write(heard + "\n")


def _of_strangers(run: Run) -> Path:
    folder = run.folder / "strangers"
    folder.mkdir(exist_ok=True)
    return folder


def once(what: str, step: int, beside: Beside) -> tuple[Event, ...]:
    return (Event(step, what, beside=beside),)


DROPS = rf"outer\.guard has dropped(?= the outer gradient of region {LAST})"
SAT_OUT = rf"region {LAST} sat out fragment 0"
VOID = "is not finite, or far larger(?= than what the regions sent)"
BACK = Event(EARLY + H // 2, "kill", LAST, 5.0)
UNDISTURBED = [Fault("nothing", shift=shift, torchft=True) for shift in range(LAST + 1)]
"""In three orders of the sums over regions: what a rounding error makes of a loss."""
FAULTS = [
    Fault("a weight of a region is NaN, once", "NaN", MIDDLE, torchft=True, sees=SAT_OUT),
    Fault("a weight of a region is Inf, once", "Inf", MIDDLE, torchft=True, sees=SAT_OUT),
    Fault("all weights times 1e4, once", "weights", MIDDLE, torchft=True, sees=SAT_OUT),
    Fault("an outer gradient times 1e6, once", "gradient", SYNC, torchft=True, sees=DROPS),
    Fault("a learning rate times 1000, always", "learning rate", torchft=True, sees=DROPS),
    Fault("a value of 1e6, fp16 on the wire", "fp16", SYNC, {"outer": {"codec": "fp16"}}, sees=DROPS),
    Fault(
        "a trailer claims the weight 1e6",
        "trailer",
        SYNC,
        sees="Weights lie between 0 and 1(?=: it counts as 1)",
    ),
    Fault("a bit of an outer gradient flips", "flip", SYNC, sees=VOID),
    Fault(
        "a bit of a mean flips",
        "flip back",
        SYNC,
        sees="differ between regions(?=: all regions take region 0's)",
    ),
    Fault(
        "a bit flips, with a secret",
        "flip sealed",
        SYNC,
        {},
        True,
        sees="altered on its way",
    ),
    Fault("every hello replayed, with a secret", secret=True, events=once("calls", EARLY, replays)),
    Fault(
        "a process of an earlier epoch calls",
        secret=True,
        events=(BACK, *once("calls", 5 * H, calls_again)),
        pace=SLOW,
        told="the others have gone on without it",
    ),
    Fault(
        "a region comes with another secret",
        secret=True,
        events=once("comes", EARLY, comes_with(OTHER)),
        told="has another secret",
    ),
    Fault(
        "a region comes without a secret",
        secret=True,
        events=once("comes", EARLY, comes_with(None)),
        told="the caller has none",
    ),
    Fault(
        "garbage at every port",
        events=once("garbage", EARLY, garbage),
        torchft=True,
    ),
    Fault(
        "garbage at every port, with a secret",
        secret=True,
        events=once("garbage", EARLY, garbage),
    ),
    Fault(
        "a region is killed, and back after 5 s",
        events=(BACK,),
        torchft=True,
        pace=SLOW,
        sees=f"region {LAST} is lost",
    ),
]
NAMES = {"ours": "hf_cocodc", "torchft": "torchft"}


def outcome(
    fault: Fault, by: str, folder: Path, options: argparse.Namespace, undisturbed: Path
) -> dict[str, Any]:
    """Make a run; what came of it, beside what a run to which nothing happened has left in `undisturbed`."""
    folder.mkdir(parents=True)
    workload.write_text(folder)
    paced = argparse.Namespace(**{**vars(options), "pace": max(options.pace, fault.pace)})
    run = Run(fault.contestant(by), list(fault.events), folder, paced)
    wrong = run()
    ends: dict[int, dict[str, Any]] = {}
    with contextlib.suppress(ValueError, IndexError):
        for region, lives in diaries(folder).items():
            last = lives[-1][-1]
            ends |= {region: last} if last["what"] == "end" else {}
    found: dict[str, Any] = {
        "contestant": NAMES[by],
        "fault": fault.name,
        "loss": None,
        "ends": "the run ends",
    }
    if None in run.codes.values():
        found["ends"] = "not ended in time"
    if not wrong:
        loss = ends[0]["loss"]
        found |= {"loss": loss, "ends": ""} if math.isfinite(loss) else {"ends": "NaN"}
    found["exit codes"] = " ".join("-" if code is None else str(code) for code in run.codes.values())
    found["digest"] = " ".join(sorted({event["digest"] for event in ends.values()}))
    found["equal"] = len(ends) == options.regions and " " not in found["digest"]
    logs = [
        folder / name.format(region) for name in ("log-{}.txt", "journal-{}.jsonl") for region in range(LAST)
    ]
    expected = fault.sees if by == "ours" else r"(?<=WARN\] ).+|(?<=ERROR\] ).+"
    found["others"] = words(logs, expected) if expected else unusual(logs[:LAST], undisturbed)
    found["stranger"] = words(list(folder.glob("strangers/log*.txt")), fault.told) if fault.told else ""
    found["failed"] = wrong
    return found


def words(logs: Iterable[Path], pattern: str) -> str:
    """What these logs say: the first match."""
    text = "\n".join(path.read_text(errors="replace") for path in logs if path.is_file())
    found = re.search(pattern, text)
    return found[0] if found else ""


def unusual(logs: list[Path], undisturbed: Path) -> str:
    """The first line of these logs that an undisturbed run does not print."""
    usual = words(undisturbed.glob("log-*.txt"), r"(?s).*").splitlines()
    return next((line for line in words(logs, r"(?s).*").splitlines() if line and line not in usual), "")


def against(found: dict[str, Any], undisturbed: list[dict[str, Any]]) -> str:
    """A loss beside those of the runs to which nothing happened."""
    if found["loss"] is None:
        return str(found["ends"])
    if found["digest"] == undisturbed[0]["digest"]:
        return "0, the same bits"
    return f"{100 * (found['loss'] / mean(each['loss'] for each in undisturbed) - 1):+.1f} %"


def tables(
    rows: dict[tuple[str, str], dict[str, Any]], undisturbed: dict[str, list[dict[str, Any]]]
) -> list[list[str]]:
    """The lines of the two tables: what the others see, beside torchft; and both sides' losses, exit codes and digests."""
    short = [["fault", "what the others see", "loss against undisturbed", "torchft"]]
    long = [["", "fault", "loss", "against undisturbed", "exit codes", "all equal"]]
    noise = [
        ", ".join(against({**each, "digest": ""}, undisturbed[by]) for each in undisturbed[by])
        for by in NAMES
    ]
    orders = len(next(filter(None, undisturbed.values())))
    short.append([f"nothing (orders of sums: {orders})", "", *(each or NOT_MADE for each in noise)])
    for fault in FAULTS:
        ours, theirs = (rows.get((by, fault.name)) for by in NAMES)
        if ours is not None:
            other = NOT_MADE if fault.torchft else NONE
            other = against(theirs, undisturbed["torchft"]) if theirs is not None else other
            short.append([fault.name, seen(ours), against(ours, undisturbed["ours"]), other])
    for by, name in NAMES.items():
        each = [*undisturbed[by], *(rows[by, fault.name] for fault in FAULTS if (by, fault.name) in rows)]
        for row in each:
            loss = row["ends"] or f"{row['loss']:.3f}"
            facts = [loss, against(row, undisturbed[by]), row["exit codes"], "yes" if row["equal"] else "no"]
            long.append([name, row["fault"], *facts])
    return [_as_markdown(short), _as_markdown(long)]


def seen(row: dict[str, Any]) -> str:
    """The words of the other regions, or, where these say nothing, what the stranger is told."""
    said = row["others"] or row["failed"]
    if said:
        return f"`{said}`"
    return f"told: `{row['stranger']}`" if row["stranger"] else "nothing"


def _as_markdown(cells: list[list[str]]) -> list[str]:
    first, *others = ["| " + " | ".join(each) + " |" for each in cells]
    return [first, "|" + "---|" * len(cells[0]), *others]


def put(lines: list[str], mark: str) -> None:
    """Put a table between its comments in `DOCUMENT`."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, found, rest = DOCUMENT.read_text(encoding="utf-8").partition(begin)
    assert found, f"{DOCUMENT} has no {begin}"
    text = "\n".join([f"{before}{begin}", *lines, f"{end}{rest.partition(end)[2]}"])
    DOCUMENT.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=2 * BROKEN, help=f"outer steps of {H} inner steps")
    parser.add_argument("--pace", type=float, default=0.06, help="seconds of an inner step (default: 0.06)")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for one run (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the data (default: 0)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="faults whose names contain one of these")
    parser.add_argument("--quick", action="store_true", help="one undisturbed run, and fewer rounds")
    parser.add_argument("--by", choices=list(NAMES), nargs="+", default=list(NAMES), help="one side alone")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and diaries there")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    if options.quick:
        options.rounds = min(options.rounds, BROKEN + 1)
    options.regions, options.after, options.join_timeout_ms = LAST + 1, 60.0, 10_000
    if options.rounds <= BROKEN:
        parser.error(
            f"--rounds={options.rounds} must be larger than {BROKEN}, the round in which something breaks"
        )
    sides = list(options.by)
    if "torchft" in sides and importlib.util.find_spec("torchft") is None:
        sides.remove("torchft")
        say("Left out: torchft. Its column needs `pip install torchft==0.2.0`.")
    chosen = [f for f in FAULTS if not options.only or any(text in f.name for text in options.only)]
    orders = UNDISTURBED[:1] if options.quick else UNDISTURBED
    undisturbed: dict[str, list[dict[str, Any]]] = {by: [] for by in NAMES}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        base = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for by in sides:
            for number, fault in enumerate([*orders, *chosen]):
                if by == "ours" or fault.torchft:
                    row = outcome(fault, by, base / f"{by}-{number}", options, base / f"{by}-0")
                    say(json.dumps(row))
                    if fault in orders:
                        undisturbed[by].append(row)
                    else:
                        rows[by, fault.name] = row
    found = tables(rows, undisturbed)
    say("\n".join(["", *found[0]]))
    setting = {"regions": options.regions, "H": H, "rounds": options.rounds, "broken in round": BROKEN}
    every = [*(row for each in undisturbed.values() for row in each), *rows.values()]
    options.output.mkdir(parents=True, exist_ok=True)
    write(options.output / "faults.json", [BenchReport("wrong numbers and strangers", setting, every)])
    if len(chosen) == len(FAULTS) and len(sides) == len(NAMES) and not options.quick:
        for mark, lines in zip(MARKS, found, strict=True):
            put(lines, mark)
    of_ours = [(fault, rows["ours", fault.name]) for fault in chosen if ("ours", fault.name) in rows]
    unseen = [
        fault.name
        for fault, row in of_ours
        if (fault.sees and not row["others"]) or (fault.told and not row["stranger"])
    ]
    for name in unseen:
        say(f"The logs do not say what they should: {name}.")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
