"""Regions as tests need them: a client, and what it has heard."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hf_cocodc.coordinator.caller import CoordinatorConnection, error_of
from hf_cocodc.coordinator.client import Client
from hf_cocodc.coordinator.messages import Back, Beat, FromCommand, Hello, Refuse, Terms, Welcome
from hf_cocodc.errors import MeetingError
from hf_cocodc.net.keys import Keys
from tests.listening import lanes
from tests.secret import secret

OURS, THEIRS = "a secret of the run", "another secret"
SECRET, OTHER = (Keys.from_secret(secret(name)) for name in (OURS, THEIRS))
COMPARED = {"method": "diloco", "model": {"layers": 2}}


def hello(region: int, count: int = 2, elastic: bool = False, join: bool = False, **compared: Any) -> Hello:
    return Hello(
        region=region,
        join=join,
        lanes=lanes(f"10.0.0.{region + 1}"),
        machine=f"machine{region}",
        token=f"token{region}",
        terms=Terms(count=count, most=count + 2, wait_s=3600.0 * elastic),
        compared={**COMPARED, **compared},
    )


@dataclass
class Region:
    """A process of a region.

    Attributes:
        heard: messages of the coordinator, in order.
        losses, changes: what it says in its heartbeats, and when it comes back.
        shows: more that it says in its heartbeats.
    """

    client: Client
    hello: Hello
    welcome: Welcome
    heard: list[Any] = field(default_factory=list)
    heard_at: list[float] = field(default_factory=list)
    losses: int = 0
    changes: int = 0
    step: int = 0
    waits_for: int | None = None
    shows: dict[str, Any] = field(default_factory=dict)
    beats: int = 0
    aways: int = 0

    def start(self) -> None:
        self.client.start(self._on, self._beat, self._back, self._away)

    def _away(self) -> None:
        self.aways += 1

    def wait_for(self, kind: type, timeout_s: float = 5.0) -> Any:
        """The first message of this kind."""
        wait_until(lambda: any(isinstance(each, kind) for each in self.heard), timeout_s)
        return next(each for each in self.heard if isinstance(each, kind))

    def _on(self, message: Any) -> None:
        self.heard.append(message)
        self.heard_at.append(time.monotonic())

    def _beat(self) -> Beat:
        self.beats += 1
        members = tuple(place.member for place in self.welcome.members)
        return Beat(
            step=self.step,
            changes=self.changes,
            losses=self.losses,
            members=() if self.welcome.joins else members,
            awaits=self.waits_for,
            op=1,
            **self.shows,
        )

    def _back(self) -> Back:
        return Back(
            run=self.welcome.run,
            member=self.client.me,
            token=self.welcome.token,
            generation=self.welcome.generation,
            losses=self.losses,
            changes=self.changes,
        )


def meet(
    address: str,
    *hellos: Hello,
    run: str = "run",
    keys: Keys | None = None,
    wait_s: float = 10.0,
    period_s: float = 0.2,
) -> list[Region]:
    """Let regions meet, each in a thread, and start their clients. An error of the first that fails is raised."""
    results = try_to_meet(address, *hellos, run=run, keys=keys, wait_s=wait_s, period_s=period_s)
    for each in results:
        if isinstance(each, BaseException):
            raise each
    regions = [each for each in results if isinstance(each, Region)]
    for region in regions:
        region.start()
    return regions


def try_to_meet(
    address: str,
    *hellos: Hello,
    run: str = "run",
    keys: Keys | None = None,
    wait_s: float = 10.0,
    period_s: float = 0.2,
) -> list[Region | BaseException]:
    """The regions that have met, not started yet; or their errors."""
    results: list[Region | BaseException] = [RuntimeError("no result")] * len(hellos)

    def work(place: int, said: Hello) -> None:
        client = Client(address, run, keys, period_s)
        try:
            results[place] = Region(client, said, client.meet(said, wait_s))
        except BaseException as error:
            client.close()
            results[place] = error

    threads = [threading.Thread(target=work, args=each) for each in enumerate(hellos)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def socket_of(region: Region) -> socket.socket:
    """Of its connection to the coordinator."""
    call = region.client._call
    assert call is not None
    found = call.writer.get_extra_info("socket")._sock
    assert isinstance(found, socket.socket)
    return found


def ask(
    address: str, run: str, message: FromCommand, timeout_s: float = 5.0, keys: Keys | None = None
) -> Any:
    """The coordinator's answer to one message of a command. Raises the error that its refusal names."""
    with contextlib.closing(CoordinatorConnection(address, run, "command", keys)) as connection:
        connection.send(message)
        answer = connection.receive(timeout_s)
    if answer is None:
        raise MeetingError("the coordinator does not answer")
    if isinstance(answer, Refuse):
        raise error_of(answer)
    return answer


def part(*regions: Region) -> None:
    for region in regions:
        region.client.close()


def wait_until(is_so: Callable[[], bool], timeout_s: float = 5.0) -> None:
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until, "it has not come to be so"
        time.sleep(0.01)
