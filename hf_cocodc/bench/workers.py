"""Processes that measure something together, one a region: how they are started, heard and ended."""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Any

from ..errors import CocodcError, LinkError
from ..meeting.store import connect_store, serve_store

TIMEOUT_S = 120.0
STORE_PORT = 29650
POLL_S = 0.05
LAST_LINES = 6

Start = Callable[..., subprocess.Popen]
"""start(region, command, env, **options of Popen), such as `Wan.popen`."""


def start_here(
    region: int, command: Sequence[str], env: Mapping[str, str], **options: Any
) -> subprocess.Popen:
    """Start a region's process on this machine's own network."""
    return subprocess.Popen(command, env={**os.environ, **env}, **options)


def run(
    module: str, specs: Sequence[Mapping[str, Any]], start: Start, num_threads: int
) -> Iterator[dict[str, Any]]:
    """Run `python -m module SPEC` in every region, and give what region 0 finds, piece by piece.

    Args:
        module: ends with `serve`.
        specs: one a region, in their order; JSON-able.
        start: of the processes.
        num_threads: that each of them may compute with.

    Raises:
        LinkError: one of them failed; names the region, with its error or its last lines.
    """
    with ExitStack() as undo:
        outputs = [undo.enter_context(tempfile.TemporaryFile("w+b")) for _ in specs]
        words = [undo.enter_context(tempfile.TemporaryFile("w+b")) for _ in specs]
        # spinning threads would take the cores from the other regions
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
            # looked at before the answers are read: a process that has ended has said all
            found, position = _new_lines(outputs[0], position)
            yield from map(json.loads, found)
            if None not in codes:
                return
            time.sleep(POLL_S)


def serve(measure: Callable[[dict[str, Any]], Iterator[dict[str, Any]]]) -> None:
    """Measure what the command line says, tell what is found, and end this process."""
    code = 0
    try:
        for found in measure(json.loads(sys.argv[1])):
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
    except CocodcError as error:
        sys.stderr.write(f"{error}\n")
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    # a gloo group that has failed would hold the interpreter's end until its operations time out
    os._exit(code)


@contextmanager
def store_in_region_0(address: str, region: int, regions: int) -> Iterator[None]:
    """Where only regions reach each other, region 0 keeps the store inside the block, and is the last to leave it."""
    server = None
    if region == 0:
        server = serve_store(port=int(address.rpartition(":")[2]))
    yield
    store = server or connect_store(address, TIMEOUT_S)
    store.set(f"left/{region}", "")
    if server is not None:
        server.wait([f"left/{each}" for each in range(regions)])


def _new_lines(output: IO[bytes], position: int) -> tuple[list[bytes], int]:
    """Complete lines behind `position`, and the position behind them; leaves the writer's own position alone."""
    data = os.pread(output.fileno(), os.fstat(output.fileno()).st_size - position, position)
    whole = data[: data.rfind(b"\n") + 1]
    return whole.splitlines(), position + len(whole)


def _last_words(words: IO[bytes]) -> str:
    text = os.pread(words.fileno(), os.fstat(words.fileno()).st_size, 0).decode(errors="replace")
    return "\n".join(text.strip().splitlines()[-LAST_LINES:]) or "it ended without a word."


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
