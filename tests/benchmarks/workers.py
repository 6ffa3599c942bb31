"""Start one process per region for a measurement, read their results, and end them."""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any

from hf_cocodc.errors import CocodcError, LinkError

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
