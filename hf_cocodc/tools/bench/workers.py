"""Start one process per region for a measurement, read their results, and end them."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import IO, Any

from ...coordinator.caller import CoordinatorConnection, error_of
from ...coordinator.messages import Hello, Post, Posted, Refuse, Terms, Welcome
from ...coordinator.server import serve_in_thread
from ...errors import CocodcError, LinkError
from ...net.keys import Keys

TIMEOUT_S = 120.0
PORT = 29650
"""Of the coordinator that a measurement starts itself."""
POLL_S = 0.05
LAST_LINES = 6

Start = Callable[..., subprocess.Popen]
"""start(region, command, env, **options of Popen), for example `Wan.popen`."""


def start_here(
    region: int, command: Sequence[str], env: Mapping[str, str], **options: Any
) -> subprocess.Popen:
    """Start a region's process in this machine's normal network."""
    return subprocess.Popen(command, env={**os.environ, **env}, **options)


def run(
    module: str, specs: Sequence[Mapping[str, Any]], start: Start, num_threads: int
) -> Iterator[dict[str, Any]]:
    """Run `python -m module SPEC` in every region; yield region 0's results as they come.

    `module` must call `serve` when it runs as a program; `specs`, one per region, must be JSON-serializable.

    Raises:
        LinkError: a process failed; the message names its region and has its error or its last lines.
    """
    with ExitStack() as undo:
        outputs = [undo.enter_context(tempfile.TemporaryFile("w+b")) for _ in specs]
        words = [undo.enter_context(tempfile.TemporaryFile("w+b")) for _ in specs]
        # Threads that spin would take the cores from the other regions.
        env = {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": "0"}
        processes = []
        for region, spec in enumerate(specs):
            command = [sys.executable, "-m", module, json.dumps(spec)]
            streams = {"stdin": subprocess.DEVNULL, "stdout": outputs[region], "stderr": words[region]}
            processes.append(start(region, command, env, **streams))
            undo.callback(_end, processes[-1])
        position = 0
        while True:
            codes = [process.poll() for process in processes]
            for region, code in enumerate(codes):
                if code:
                    raise LinkError(
                        f"region {region} of the measurement failed: {_last_words(words[region])}"
                    )
            # `codes` was read before the results: a process that had ended by then has written all of them.
            new_lines, position = _new_lines(outputs[0], position)
            yield from map(json.loads, new_lines)
            if None not in codes:
                return
            time.sleep(POLL_S)


def serve(measure: Callable[[dict[str, Any]], Iterator[dict[str, Any]]]) -> None:
    """Run the measurement that the command line specifies, write its results, and end this process."""
    code = 0
    try:
        for result in measure(json.loads(sys.argv[1])):
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()
    except CocodcError as error:
        sys.stderr.write(f"{error}\n")
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # whatever thread still waits for another region


def hello_of(region: int, regions: int, host: str, compared: Mapping[str, Any]) -> Hello:
    """What a region of a measurement says of itself: others reach it at `host`, and the run ends when a region is lost."""
    return Hello(
        region=region,
        join=False,
        host=host,
        machine=platform.node(),
        token=uuid.uuid4().hex,
        terms=Terms(count=regions, timeout_s=TIMEOUT_S),
        compared=dict(compared),
    )


class OtherRegions:
    """The regions of a measurement, which exchange values over the coordinator, beside the link that they measure.

    Waits until the coordinator (HOST:PORT) and all regions are there. Raises LinkError if one does not come.
    """

    def __init__(self, address: str, region: int, regions: int, keys: Keys | None = None) -> None:
        self.region = region
        self._told: dict[tuple[str, int], Any] = {}
        self._exchanges = 0
        self._connection = CoordinatorConnection(address, "measurement", "region", keys, timeout_s=TIMEOUT_S)
        self._connection.send(hello_of(region, regions, "", {}))
        welcome = self._next(Welcome, "the other regions")
        self._others = [place.member for place in welcome.members if place.member.region != region]

    def exchange(self, mine: Any) -> list[Any]:
        """Exchange a value with all regions; returns the values by region. All regions must call in the same order."""
        self._exchanges += 1
        topic = f"exchange {self._exchanges}"
        for other in self._others:
            self._connection.send(Post(to=other, topic=topic, content={"value": mine}))
        received = {each.region: self._told_by(each.region, topic) for each in self._others}
        return [value for _, value in sorted({**received, self.region: mine}.items())]

    def leave(self) -> None:
        """Leave in good order: region 0 last, because the coordinator ends with it."""
        for other in self._others:
            if self.region == 0:
                self._told_by(other.region, "left")
            elif other.region == 0:
                self._connection.send(Post(to=other, topic="left", content={"value": None}))

    def close(self) -> None:
        self._connection.close()

    def _told_by(self, region: int, topic: str) -> Any:
        """The value that a region has sent on this topic; waits for it."""
        while (topic, region) not in self._told:
            message = self._next(Posted, f"region {region}")
            self._told[message.topic, message.sender.region] = message.content["value"]
        return self._told.pop((topic, region))

    def _next(self, kind: type, whom: str) -> Any:
        """The next message of this kind."""
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            message = self._connection.receive(1.0)
            if isinstance(message, kind):
                return message
            if isinstance(message, Refuse):
                raise error_of(message)
        raise LinkError(f"region {self.region} has heard nothing of {whom} for {TIMEOUT_S:g} s.")


@contextmanager
def coordinator_in_region_0(
    address: str, region: int, regions: int, keys: Keys | None = None
) -> Iterator[OtherRegions]:
    """Region 0 serves the coordinator inside the block, because only regions reach each other, and leaves it last."""
    with ExitStack() as undo:
        if region == 0:
            secrets = [] if keys is None else [keys]
            served = serve_in_thread("0.0.0.0", int(address.rpartition(":")[2]), secrets)
            undo.callback(served.close)
        others = undo.enter_context(closing(OtherRegions(address, region, regions, keys)))
        yield others
        others.leave()


def _new_lines(output: IO[bytes], position: int) -> tuple[list[bytes], int]:
    """The complete lines after `position`, and the position after them. It does not move the writer's position."""
    data = os.pread(output.fileno(), os.fstat(output.fileno()).st_size - position, position)
    whole = data[: data.rfind(b"\n") + 1]
    return whole.splitlines(), position + len(whole)


def _last_words(words: IO[bytes]) -> str:
    text = os.pread(words.fileno(), os.fstat(words.fileno()).st_size, 0).decode(errors="replace")
    return "\n".join(text.strip().splitlines()[-LAST_LINES:]) or "it ended without a message."


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
