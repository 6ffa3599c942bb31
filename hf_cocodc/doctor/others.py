"""Lines about the store, and about the other regions: their doctors tell each other there what they have found."""

import contextlib
import dataclasses
import json
import platform
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import torch.distributed as dist

from ..errors import CocodcError, InputError, MeetingError
from ..meeting.addresses import is_loopback
from ..meeting.cipher import check_encryption
from ..meeting.heard import host_and_port
from ..meeting.sealed import check
from ..meeting.secret import Keys
from ..meeting.store import connect_store, peek
from ..meeting.values import read_json
from ..settings import RegionConfig
from .facts import parts_of
from .findings import OK, WARN, WRONG, Finding

_REACH_S = 3.0
_AGAIN_S = 0.5
_LATE_S = 2.0
"""Seconds between two clocks from which on it is a warning."""
_SAME_VERSIONS = ("hf-cocodc", "torch")


def reach(
    store: str, regions: RegionConfig, keys: Keys | None, timeout_s: float = 10.0
) -> tuple[list[Finding], dist.Store | None]:
    """Whether the store answers and has the same secret; the lines, and the store if so."""
    found = [secret(store, regions, keys)]
    try:
        there = connect_store(store, timeout_s, keys)
        check(there)
    except (InputError, MeetingError) as error:
        return [*found, Finding("store", WRONG, str(error))], None
    return [*found, Finding("store", OK, f"answers at {store}")], there


def secret(store: str, regions: RegionConfig, keys: Keys | None) -> Finding:
    """Whether there is a secret where one is needed, and what encrypting needs."""
    if regions.encrypt:
        try:
            check_encryption(keys)
        except CocodcError as error:
            return Finding("secret", WRONG, str(error), "pip install 'hf-cocodc[encrypt]'" if keys else None)
    if keys is None and not is_loopback(parts_of(store)[0]):
        return Finding(
            "secret",
            WARN,
            "none: whoever reaches the store can end or change the run. Give every region and the store the same.",
            "openssl rand -hex 32 > secret; chmod 600 secret; export HF_COCODC_SECRET=$(cat secret)",
        )
    words = "none, and the store is on this machine" if keys is None else "given"
    return Finding("secret", OK, words + (", and regions encrypt" if regions.encrypt else ""))


@dataclasses.dataclass(frozen=True)
class Told:
    """What a region's doctor tells the others.

    Attributes:
        host: name of its machine.
        calls: HOST:PORT where it answers while it runs; empty if it does not.
        token: of this doctor.
        beats: grows while it runs.
        versions: of packages.
        settings: digest of the settings and of what the recipe says of the data.
        data: what the data is, in words that are equal where it is.
        reached: tokens of the doctors that it could call.
    """

    host: str
    calls: str
    token: str
    beats: int
    versions: Mapping[str, str]
    settings: str
    data: str
    reached: tuple[str, ...] = ()

    @classmethod
    def read(cls, value: bytes, key: str) -> "Told":
        """Raises MeetingError if no doctor has written it."""
        content = read_json(value, key)
        names = {each.name for each in dataclasses.fields(cls)}
        if (
            not isinstance(content, dict)
            or set(content) != names
            or not isinstance(content["versions"], dict)
        ):
            raise MeetingError(f"the store holds something else than a doctor's words under {key}.")
        versions = {str(name)[:40]: str(each)[:40] for name, each in content["versions"].items()}
        texts = {name: str(content[name])[:200] for name in ("host", "calls", "token", "settings", "data")}
        reached = content["reached"] if isinstance(content["reached"], list) else []
        beats = content["beats"] if isinstance(content["beats"], int) else 0
        return cls(**texts, versions=versions, beats=beats, reached=tuple(map(str, reached[:1000])))


class Answering:
    """Listens while a doctor waits for others, and tells who calls what time it is here.

    Args:
        address: of this machine, which the others reach.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family)
        self._listener.bind((address, 0))
        self._listener.listen(64)
        port = self._listener.getsockname()[1]
        self.address = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        threading.Thread(target=self._answer, name="hf_cocodc-doctor", daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), caller:
                caller.sendall(f"{time.time():.6f}\n".encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()


def call(address: str) -> tuple[float, float]:
    """Call another doctor: seconds of the round trip, and how far its clock is ahead of this one.

    Raises:
        OSError: it does not answer.
        ValueError: something else answers.
    """
    began, at = time.perf_counter(), time.time()
    with socket.create_connection(host_and_port(address), timeout=_REACH_S) as connection:
        connection.settimeout(_REACH_S)
        said = connection.recv(64)
    took = time.perf_counter() - began
    return took, float(said.decode("ascii")) - (at + took / 2)


def compare(
    store: dist.Store,
    run: str,
    region: int,
    count: int,
    mine: Mapping[str, Any],
    address: str,
    wait_s: float,
    tell: Callable[[str], None],
) -> list[Finding]:
    """Tell the others what was found here, and compare it with what they tell.

    Args:
        store: of the run.
        run: its name.
        region: this one.
        count: number of regions.
        mine: versions, settings and data, as in `Told`.
        address: of this machine, which the others reach.
        wait_s: seconds for which to wait for doctors of the other regions, to call them.
        tell: called with a line while it waits.
    """
    key = f"hf_cocodc/doctor/{quote(run, safe='')}"
    try:
        with contextlib.closing(Answering(address)) as answering:
            own = Told(platform.node(), answering.address if wait_s else "", uuid.uuid4().hex, 0, **mine)
            return _Round(store, key, region, count, own).run(wait_s, tell)
    except OSError as error:
        words = (
            f"this machine cannot listen on {address}, which it would announce: {error.strerror or error}."
        )
        return [Finding("regions", WRONG, words)]


class _Round:
    """One doctor's talk with the others."""

    def __init__(self, store: dist.Store, key: str, region: int, count: int, own: Told) -> None:
        self._store, self._key, self._region, self._own = store, key, region, own
        self._others = [other for other in range(count) if other != region]
        self._told: dict[int, Told] = {}
        self._first_beat: dict[str, int] = {}
        self._called: dict[str, tuple[float, float] | str] = {}
        self._foreign: list[Finding] = []

    def run(self, wait_s: float, tell: Callable[[str], None]) -> list[Finding]:
        until = time.monotonic() + wait_s
        said = ""
        while True:
            self._tell()
            self._hear()
            if wait_s:
                self._call()
            missing = [other for other in self._others if not self._is_done(other)]
            if not missing or time.monotonic() >= until:
                break
            words = f"waits for the doctor of region {', '.join(map(str, missing))}"
            if words != said:
                tell(words)
                said = words
            time.sleep(min(_AGAIN_S, max(until - time.monotonic(), 0)))
        if wait_s:
            self._tell()  # those that wait hear that they were called
        return self._findings(called=wait_s > 0)

    def _tell(self) -> None:
        reached = tuple(token for token, each in self._called.items() if not isinstance(each, str))
        self._own = dataclasses.replace(self._own, beats=self._own.beats + 1, reached=reached)
        self._store.set(f"{self._key}/{self._region}", json.dumps(dataclasses.asdict(self._own)))

    def _hear(self) -> None:
        self._foreign = []
        for other in self._others:
            name = f"{self._key}/{other}"
            found = peek(self._store, name)
            if not found:
                continue
            try:
                self._told[other] = Told.read(found, name)
            except MeetingError as error:
                self._foreign.append(Finding(f"region {other}", WRONG, str(error)))

    def _is_there(self, other: Told) -> bool:
        """Whether another doctor runs now: its words have changed while this one listens."""
        return other.beats > self._first_beat.setdefault(other.token, other.beats)

    def _call(self) -> None:
        for other in self._told.values():
            if (
                not self._is_there(other)
                or not other.calls
                or not isinstance(self._called.get(other.token, ""), str)
            ):
                continue
            try:
                self._called[other.token] = call(other.calls)
            except OSError as error:
                self._called[other.token] = error.strerror or str(error)
            except ValueError:
                self._called[other.token] = "something else answers there"

    def _is_done(self, region: int) -> bool:
        other = self._told.get(region)
        if other is None:
            return False
        called = self._called.get(other.token)
        return called is not None and not isinstance(called, str) and self._own.token in other.reached

    def _findings(self, called: bool) -> list[Finding]:
        found = list(self._foreign)
        for region in self._others:
            if region in self._told:
                found += self._about(region, self._told[region], called)
            elif f"region {region}" not in [each.topic for each in self._foreign]:
                words = "its doctor has told nothing at this store yet"
                more = "hf-cocodc doctor RECIPE --region N --store HOST:PORT --wait 300    # in all regions at once"
                found.append(Finding(f"region {region}", WARN, f"{words}: nothing was compared.", more))
        return found

    def _about(self, region: int, other: Told, called: bool) -> list[Finding]:
        topic, own, found = f"region {region}", self._own, []
        for name in _SAME_VERSIONS:
            ours, theirs = (each.get(name, "none").split("+")[0] for each in (own.versions, other.versions))
            if ours != theirs:
                words = f"has {name} {theirs}, this machine {ours}. Regions need the same."
                found.append(Finding(topic, WRONG, words, f"pip install {name}=={theirs}"))
        for name in sorted(own.versions.keys() - set(_SAME_VERSIONS)):
            if own.versions[name] != other.versions.get(name):
                words = f"has {name} {other.versions.get(name)}, this machine {own.versions[name]}"
                found.append(Finding(topic, WARN, words))
        if own.settings != other.settings:
            words = "another recipe: its settings of outer and data differ from those here. Copy one recipe to all."
            found.append(Finding(topic, WRONG, words))
        elif own.data != other.data:
            words = f"other data: {other.data} there, {own.data} here. Regions divide one dataset: it must be equal everywhere."
            found.append(Finding(topic, WRONG, words))
        if called:
            found += self._about_call(topic, other)
        if not any(each.level == WRONG for each in found):
            found.insert(
                0,
                Finding(
                    topic, OK, f"{other.host}: same versions of this package and torch, settings and data"
                ),
            )
        return found

    def _about_call(self, topic: str, other: Told) -> list[Finding]:
        result = self._called.get(other.token)
        if result is None:
            words = (
                "its doctor no longer runs: it was not called. Start them at the same time, with --wait 300."
            )
            return [Finding(topic, WARN, words)]
        if isinstance(result, str):
            words = f"does not answer at {other.calls} ({result}): a firewall, or NAT. Open its ports, or put a VPN between."
            return [Finding(topic, WRONG, words)]
        took, ahead = result
        words = f"answers at {parts_of(other.calls)[0]} in {1000 * took:.3g} ms"
        if self._own.token not in other.reached:
            words += "; it could not call back, or has not yet"
            return [Finding(topic, WARN, words)]
        if abs(ahead) > _LATE_S:
            words += f"; its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this one"
            return [Finding(topic, WARN, words, "timedatectl set-ntp true    # on both")]
        return [Finding(topic, OK, words)]
