"""The command that has started this region: no process trains unwatched."""

import contextlib
import os
import signal
import sys
import threading
import time

import psutil

from ..status import forget

ENV_COMMAND = "HF_COCODC_COMMAND"
"""Number of the process to watch."""
ENV_OUTLIVES = "HF_COCODC_OUTLIVES_COMMAND"
"""1 for a region that was started on its own, otherwise 0."""
POLL_S = 1.0
PATIENCE_S = 600.0
"""Time for a last checkpoint: without a coordinator, regions learn of a signal only with a transfer, up to a round later."""


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
