"""A region ends when the command that started all regions is gone: no process trains on that no one watches.

A region that was started on its own trains on. Both remove what the command would have removed.
"""

import contextlib
import os
import signal
import sys
import threading
import time

import psutil

from ..run.status import forget

ENV_COMMAND = "HF_COCODC_COMMAND"
"""Number of the process to watch."""
ENV_OUTLIVES = "HF_COCODC_OUTLIVES_COMMAND"
"""1 for a region that was started on its own, otherwise 0."""
POLL_S = 1.0
PATIENCE_S = 600.0
"""Time for a last checkpoint. Without the command there is no coordinator, and regions hear of a signal only with a
transfer: that may be a round away."""


def end_with_command() -> None:
    """Watch the command, if there is one. When it is gone, this process gets SIGTERM, and SIGKILL if it goes on.

    A process that may outlive the command gets no signal.
    """
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
