"""The process of one region: what it tells the command that has started it, how its errors become exit codes, and when it ends.

`python -m hf_cocodc.training.region SCRIPT [ARGS...]` (or `-m MODULE`) runs a user's script so; it need not know of it.
"""

import contextlib
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from ..errors import CocodcError, InputError, RunFinished, RunLeft, RunStopped, reason
from ..settings.environment import ENV_LAUNCH, ENV_REGION
from ..status import LEFT, TOO_LATE, forget, tell

ENV_COMMAND = "HF_COCODC_COMMAND"
"""Number of the process to watch."""
ENV_OUTLIVES = "HF_COCODC_OUTLIVES_COMMAND"
"""1 for a region that was started on its own, otherwise 0."""
POLL_S = 1.0
PATIENCE_S = 600.0
"""Time for a last checkpoint: without a coordinator, regions learn of a signal only with a transfer, up to a round later."""


def live(train: Callable[[], object], is_script: bool = False) -> int:
    """Call `train` in the process of a region, and return its exit code.

    An error of this package becomes one paragraph; in a script, a traceback shows where it was raised, too. The command that
    has started the region hears of it.
    """
    end_with_command()
    with contextlib.suppress(OSError):  # the name in lists of processes
        Path("/proc/self/comm").write_text(f"region-{os.environ.get(ENV_REGION, '0')}")
    try:
        train()
        tell(is_done=True)
        return 0
    except RunLeft as left:
        tell(LEFT)
        sys.stderr.write(f"{left}\n")
        return left.exit_code
    except RunFinished as late:
        tell(TOO_LATE, over=str(late))
        sys.stderr.write(f"{late}\n")
        return late.exit_code
    except CocodcError as error:
        if isinstance(error, RunStopped):
            tell(has_stopped=True)
        if is_script and not isinstance(error, RunStopped):
            traceback.print_exc()
            return _report(str(error), error.exit_code, said=True)
        return _report(str(error), error.exit_code)
    except KeyboardInterrupt:
        if is_script:
            traceback.print_exc()
        return _report("it was interrupted (KeyboardInterrupt)", 128 + signal.SIGINT, said=is_script)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not code:
            return 0
        if isinstance(end.code, str):
            return _report(end.code, code)
        tell(is_mute=True)  # the last lines of the log have to do
        return _report(f"its script has ended with exit code {code}", code, said=True)
    except Exception as error:
        traceback.print_exc()
        from ..snapshot.manifest import FULL

        if isinstance(error, OSError) and error.errno in FULL:
            full = f"the disk refuses: {error}. Make room, or change the output folder, then resume."
            return _report(full, InputError.exit_code)
        return _report(f"{type(error).__name__}: {reason(error)}", 1, said=True)


def _report(message: str, code: int, said: bool = False) -> int:
    """Report an error where people look, even if the log is on a disk that is full; returns the exit code."""
    tell("has ended with an error", error=message, exit_code=code)
    if not said:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"error: {message}\n")
    return code


def end(code: int) -> None:
    """End the process; after an error, at once: a broken gloo group would delay the exit until its operations time out."""
    if code:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        # the launcher of several regions would end the others, which may still write their checkpoints; the command knows
        is_known = code == RunStopped.exit_code and {ENV_LAUNCH, ENV_COMMAND} <= os.environ.keys()
        os._exit(0 if is_known else code)


def end_with_command() -> None:
    """Watch the command, if any: when it is gone, this process gets SIGTERM, then SIGKILL, unless it may outlive it."""
    command = os.environ.get(ENV_COMMAND)
    if command is not None:
        threading.Thread(target=_watch, args=(int(command),), name="hf_cocodc-command", daemon=True).start()


def _watch(command: int) -> None:
    try:
        process = psutil.Process(command)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(POLL_S)
    except psutil.NoSuchProcess:
        pass
    forget()
    if os.environ.get(ENV_OUTLIVES) == "1":
        return
    os.kill(os.getpid(), signal.SIGTERM)
    with contextlib.suppress(OSError):  # the disk of the log may be full
        sys.stderr.write(
            f"the command that started this region (process {command}) is gone: the region stops.\n"
        )
    time.sleep(PATIENCE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main(words: Sequence[str]) -> int:
    """Run a script or a module, with its arguments, as Python would."""
    name, *arguments = words[1:] if words[0] == "-m" else words

    def run() -> None:
        tell("starting the script")
        sys.argv = [name, *arguments]
        if words[0] == "-m":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(name))
            runpy.run_path(name, run_name="__main__")

    return live(run, is_script=True)


if __name__ == "__main__":
    end(main(sys.argv[1:]))
