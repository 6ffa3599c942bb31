"""Findings about the other regions: their doctors exchange reports at the coordinator, and call each other."""

import contextlib
import dataclasses
import errno
import json
import platform
import shlex
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...coordinator.client import relay_at, told_by_doctors
from ...coordinator.hello import Difference, differences, may_differ
from ...errors import CocodcError, InputError, MeetingError, short
from ...net.addresses import listen_at, named
from ...net.keys import Keys
from ...net.large import MEND, SWALLOWED, Swallowed, echo, prove
from ...settings import RegionConfig
from ...settings.regions import address_parts
from .coordinator import gone
from .facts import OK, WARN, WRONG, Finding, parts_of
from .way import ANNOUNCE

_MAPPINGS = ("versions", "settings", "facts")
_TEXTS = ("host", "calls", "token", "data")
_LONGEST = 200
_MOST_REACHED = 1000

_REACH_S = 3.0
_AGAIN_S = 0.5
_LATE_S = 2.0
"""Clocks that differ by more seconds are a warning."""
_SAME_VERSIONS = ("hf-cocodc", "torch")
_SHOWN = 3
"""Differences between two recipes that a line names."""
_ALL_AT_ONCE = (
    "hf-cocodc doctor RECIPE --region N --coordinator HOST:PORT --wait 300    # in all regions at once"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """What a region's doctor tells the others.

    Attributes:
        calls: where it listens while it runs, as HOST:PORT separated by commas; empty if it does not.
        token: identifies this doctor.
        beats: grows while it runs.
        settings: by their names in a recipe; equal in all regions.
        facts: about the data, by their names in a recipe; equal in all regions unless regions.may_differ has the name.
        data: a description of the data; equal in two regions if the data is.
        reached, missed: tokens of the doctors that it could call, and of those that it could not.
    """

    host: str
    calls: str
    token: str
    beats: int
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    data: str
    reached: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()

    @classmethod
    def read(cls, region: int, content: Any) -> "Told":
        """The checked report of a region's doctor, each text safe to print on a line. Raises MeetingError if it is none."""
        names = {each.name for each in dataclasses.fields(cls)}
        if not isinstance(content, dict) or set(content) != names:
            raise _not_ours(region, content)
        kinds = {
            **dict.fromkeys(_TEXTS, str),
            **dict.fromkeys(_MAPPINGS, dict),
            "beats": int,
            "reached": list,
            "missed": list,
        }
        if not all(type(content[name]) is kind for name, kind in kinds.items()):
            raise _not_ours(region, content)
        if content["calls"]:
            try:
                places(content["calls"])
            except (InputError, ValueError):
                raise _not_ours(region, content["calls"]) from None
        return cls(
            **{name: short(content[name], _LONGEST) for name in _TEXTS},
            versions={short(name, 40): short(each, 40) for name, each in content["versions"].items()},
            settings=content["settings"],
            facts=content["facts"],
            beats=content["beats"],
            reached=tuple(map(str, content["reached"][:_MOST_REACHED])),
            missed=tuple(map(str, content["missed"][:_MOST_REACHED])),
        )


def places(calls: str) -> list[tuple[str, int]]:
    """Hosts and ports of `Told.calls`. Raises InputError or ValueError if one is malformed."""
    endpoints = []
    for each in calls.split(","):
        host, port = address_parts(each)
        if port is None:
            raise ValueError(f"{each!r} has no port")
        endpoints.append((host, port))
    return endpoints


def _not_ours(region: int, content: object) -> MeetingError:
    return MeetingError(
        f"what region {region} has told the coordinator is not what a doctor of this version tells ({short(content)}). Use the "
        "same version of hf-cocodc in every region."
    )


class Answering:
    """Listens where the run will, while a doctor waits for others; tells each caller the time here."""

    def __init__(self, address: str, regions: RegionConfig) -> None:
        self._listener = listen_at("" if regions.announced else address, regions.port or 0)
        port = self._listener.getsockname()[1]
        places = regions.addresses(port, lane=0) if regions.announced else ((address, port),)
        self.address = ",".join(named(*each) for each in places)
        threading.Thread(target=self._answer, name="hf_cocodc-doctor", daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(caller,), name="hf_cocodc-doctor", daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        with contextlib.suppress(OSError), caller:
            caller.settimeout(2 * _REACH_S)
            caller.sendall(f"{time.time():.6f}\n".encode())
            echo(caller)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()


def call(place: tuple[str, int]) -> tuple[float, float]:
    """Call another doctor: seconds of the round trip, and how far its clock is ahead of this one.

    Connecting takes one round trip; the answer, with the time there, leaves half of one later. Raises OSError if nothing
    answers, ValueError if something else does, and Swallowed if large packets do not pass.
    """
    began = time.perf_counter()
    with socket.create_connection(place, timeout=_REACH_S) as connection:
        took, at = time.perf_counter() - began, time.time()
        connection.settimeout(_REACH_S)
        ahead = float(connection.recv(64).decode("ascii")) - (at + took / 2)
        prove(connection)
    return took, ahead


@dataclasses.dataclass(frozen=True)
class Board:
    """The coordinator (HOST:PORT) at which the doctor of `region` exchanges reports with those of the run's other regions."""

    coordinator: str
    keys: Keys | None
    run: str
    region: int

    def tell(self, report: Mapping[str, Any]) -> dict[int, Any]:
        """Report what was found here, and return the reports of all regions. Raises like `told_by_doctors`."""
        return told_by_doctors(self.coordinator, self.keys, self.run, self.region, dict(report))

    def relay(self) -> str | None:
        """HOST:PORT of the coordinator's relay; None if there is none, or this machine does not reach it."""
        host = parts_of(self.coordinator)[0]
        try:
            port = relay_at(self.coordinator, self.keys)
            if port is None:
                return None
            socket.create_connection((host, port), _REACH_S).close()
        except (OSError, CocodcError):
            return None
        return named(host, port)


def compare(
    board: Board,
    count: int,
    mine: Mapping[str, Any],
    address: str,
    wait_s: float,
    tell: Callable[[str], None],
    regions: RegionConfig,
) -> Iterator[Finding]:
    """Exchange reports with the other regions, and yield findings as they become known.

    Args:
        mine: versions, settings, facts and data, as in `Told`; must be JSON-serializable.
        address: where the others reach this machine.
        wait_s: seconds to wait for the other regions' doctors, to call them; 0 calls none.
    """
    try:
        answering = Answering(address, regions)
    except OSError as error:
        where = named(address, regions.port or 0).removesuffix(":0")
        words = f"this machine cannot listen on {where}: {error.strerror or error}."
        if error.errno == errno.EADDRINUSE:
            words += " A region of this machine that waits or trains has its port already."
        command = "hf-cocodc train RECIPE --set regions.interface=NAME    # ip -brief address; or another regions.port"
        yield Finding("regions", WRONG, words, command)
        return
    with contextlib.closing(answering):
        known = json.loads(json.dumps(dict(mine)))  # as the others read it
        calls = answering.address if wait_s else ""
        own = Told(host=platform.node(), calls=calls, token=uuid.uuid4().hex, beats=0, **known)
        yield from _Talk(board, count, own).run(wait_s, tell)


class _Talk:
    """One doctor's talk with the others."""

    def __init__(self, board: Board, count: int, own: Told) -> None:
        self._board, self._own = board, own
        self._others = [other for other in range(count) if other != board.region]
        self._told: dict[int, Told] = {}
        self._first_beat: dict[str, int] = {}
        self._called: dict[str, tuple[float, float] | str] = {}
        self._swallowed: set[str] = set()
        self._foreign: dict[int, Finding] = {}

    def run(self, wait_s: float, tell: Callable[[str], None]) -> Iterator[Finding]:
        until = time.monotonic() + wait_s
        last_words, called = "", wait_s > 0
        open_ = list(self._others)  # regions about which nothing was said yet
        try:
            while True:
                self._hear(self._tell())
                if called:
                    self._call()
                for other in [each for each in open_ if self._is_done(each)]:
                    open_.remove(other)
                    yield from self._about(other, called)
                if not open_ or time.monotonic() >= until:
                    break
                words = f"waits for the doctor of region {', '.join(map(str, open_))}"
                if words != last_words:
                    tell(words)
                    last_words = words
                time.sleep(min(_AGAIN_S, max(until - time.monotonic(), 0)))
            if called:
                self._tell()  # those that wait hear that they were called
        except CocodcError as error:
            yield gone(self._board.coordinator, error)
            open_ = [other for other in open_ if other in self._told]
        except KeyboardInterrupt:
            for other in open_:
                yield from self._about(other, called)
            raise
        for other in open_:
            yield from self._about(other, called)

    def _tell(self) -> dict[int, Any]:
        """Report what is known here; returns the reports of all regions."""
        reached = tuple(token for token, each in self._called.items() if not isinstance(each, str))
        missed = tuple(token for token, each in self._called.items() if isinstance(each, str))
        self._own = dataclasses.replace(self._own, beats=self._own.beats + 1, reached=reached, missed=missed)
        return self._board.tell(dataclasses.asdict(self._own))

    def _hear(self, reports: Mapping[int, Any]) -> None:
        for other in self._others:
            self._foreign.pop(other, None)
            if other not in reports:
                continue
            try:
                self._told[other] = Told.read(other, reports[other])
            except MeetingError as error:
                command = "hf-cocodc --version    # in every region"
                self._foreign[other] = Finding(f"region {other}", WRONG, str(error), command)

    def _is_there(self, other: Told) -> bool:
        """Whether another doctor runs now: its report has changed while this one listens."""
        return other.beats > self._first_beat.setdefault(other.token, other.beats)

    def _call(self) -> None:
        for other in self._told.values():
            if (
                not self._is_there(other)
                or not other.calls
                or not isinstance(self._called.get(other.token, ""), str)
            ):
                continue
            for place in places(other.calls):
                try:
                    self._called[other.token] = call(place)
                    break
                except OSError as error:
                    self._called[other.token] = error.strerror or str(error)
                    if isinstance(error, Swallowed):
                        self._swallowed.add(other.token)
                except ValueError:
                    self._called[other.token] = "something else answers there"

    def _is_done(self, region: int) -> bool:
        """Whether both doctors have tried, and one has reached the other."""
        other = self._told.get(region)
        if other is None:
            return False
        called, token = self._called.get(other.token), self._own.token
        have_tried = called is not None and token in (*other.reached, *other.missed)
        is_known = not isinstance(called, str) or token in other.reached or other.token in self._swallowed
        return have_tried and is_known

    def _about(self, region: int, called: bool) -> list[Finding]:
        """The lines about another region."""
        topic, other = f"region {region}", self._told.get(region)
        if region in self._foreign:
            return [self._foreign[region]]
        if other is None:
            words = "its doctor has told nothing at this coordinator yet: nothing was compared."
            return [Finding(topic, WARN, words, _ALL_AT_ONCE)]
        findings = compared(topic, self._own, other)
        return findings + self._about_call(topic, other) if called else findings

    def _about_call(self, topic: str, other: Told) -> list[Finding]:
        result = self._called.get(other.token)
        if result is None:
            words = "its doctor no longer runs: it was not called. Start them at the same time."
            return [Finding(topic, WARN, words, _ALL_AT_ONCE)]
        calls_back = self._own.token in other.reached
        if isinstance(result, str) and other.token in self._swallowed:
            return [Finding(topic, WRONG, f"answers at {other.calls}, but {SWALLOWED}.", MEND)]
        if isinstance(result, str) and calls_back:
            return [
                Finding(topic, OK, f"does not answer at {other.calls} ({result}), but calls this machine")
            ]
        if isinstance(result, str) and (relay := self._board.relay()):
            words = f"neither of the two reaches the other one ({result}): the relay at {relay} carries what they send"
            return [Finding(topic, OK, words)]
        if isinstance(result, str):
            words = (
                f"does not answer at {other.calls} ({result}), and does not reach this machine at {self._own.calls}: firewalls, "
                "or NAT. One of the two must reach the other one: open a port of one in its firewall and its router; or start "
                "the coordinator with --relay."
            )
            return [Finding(topic, WRONG, words, ANNOUNCE)]
        took, ahead = result
        words = f"answers at {other.calls} in {1000 * took:.3g} ms"
        if not calls_back:
            words += "; it does not reach this machine, and one way is enough"
        if abs(ahead) > _LATE_S:
            words += f"; its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this one"
            return [Finding(topic, WARN, words, "timedatectl set-ntp true    # on both")]
        return [Finding(topic, OK, words)]


def compared(topic: str, own: Told, other: Told) -> list[Finding]:
    """Findings about what another region has: all that regions compare before step 1, and the data, must be equal."""
    allowed = [name for name in own.settings["regions.may_differ"].split(",") if name]
    findings, beside = [], []
    for name in _SAME_VERSIONS:
        theirs, ours = (each.versions.get(name, "none").split("+")[0] for each in (other, own))
        if theirs == ours:
            continue
        words = f"has {name} {theirs}, this machine {ours}"
        if may_differ(name, allowed):
            findings.append(Finding(topic, WARN, f"{words}: regions.may_differ allows it"))
        else:
            command = f"pip install {shlex.quote(f'{name}=={theirs}')}"
            findings.append(Finding(topic, WRONG, f"{words}. Regions need the same.", command))
    for name in sorted(own.versions.keys() - set(_SAME_VERSIONS)):
        theirs, ours = other.versions.get(name, "none"), own.versions[name]
        if theirs != ours:
            beside.append(Finding(topic, WARN, f"has {name} {theirs}, this machine {ours}"))
    named = differences({**own.settings, "facts": own.facts}, {**other.settings, "facts": other.facts})
    fine = [each for each in named if each.free and may_differ(each.field, allowed)]
    wrong = [each for each in named if each not in fine]
    if fine:
        findings.append(Finding(topic, WARN, f"{_in_words(fine)}: regions.may_differ allows it"))
    if wrong:
        command = "scp RECIPE HOST:    # one recipe for all regions"
        if all(each.free for each in wrong):
            names = ",".join([*allowed, *(short(each.field) for each in wrong)])
            command += f"; or in all: --set {shlex.quote(f'regions.may_differ={names}')}"
        findings.append(Finding(topic, WRONG, f"another recipe: {_in_words(wrong)}.", command))
    elif own.data != other.data:
        words = f"other data: {other.data} there, {own.data} here."
        if any(each.field.startswith("data.") for each in fine):
            words += " By regions.may_differ they may train on other data: look that this is meant."
            findings.append(Finding(topic, WARN, words))
        else:
            words += " Regions divide one dataset: it must be equal everywhere."
            findings.append(
                Finding(topic, WRONG, words, "rsync -a FOLDER/ HOST:FOLDER/    # that of data.path")
            )
    same = f"{other.host}: same versions of this package and torch, settings and data"
    return [*(findings or [Finding(topic, OK, same)]), *beside]


def _in_words(differing: Sequence[Difference]) -> str:
    """The first differences between two recipes, and how many more there are."""
    sentences = [
        f"{short(each.field)} is {short(each.theirs)} there, {short(each.mine)} here"
        for each in differing[:_SHOWN]
    ]
    more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return "; ".join(sentences) + more
