"""Runs the command in this process on one wrong input, up to the point where something would be started."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

MOST_WORDS = 2500
"""Longest paragraph: messages cut values that are long."""
PATIENCE_S = 120
"""A case that takes longer hangs: the slowest known one builds a model of very many layers."""

STARTS = (
    "hf_cocodc.training.launch.sole_writer",
    "hf_cocodc.cli.dry.show",
    "hf_cocodc.tools.plan.choice.choose",
    "hf_cocodc.training.simulation.run_in_lockstep",
    "hf_cocodc.tools.doctor.examine.examine",
    "hf_cocodc.coordinator.server.serve",
    "hf_cocodc.coordinator.client.CoordinatorConnection",
    "hf_cocodc.coordinator.caller.CoordinatorConnection",
    "hf_cocodc.tools.bench.link.take_part",
    "hf_cocodc.tools.bench.link.measure_here",
)
"""What runs, writes or listens: everything before it is validation."""


class Started(BaseException):
    """The input was accepted."""


class Hung(BaseException):
    """The input kept the command busy for too long."""


@contextlib.contextmanager
def stubbed() -> Iterator[None]:
    """Inside the block nothing is started and nothing is downloaded; the working directory is an empty folder."""

    def start(*args: Any, **kwargs: Any) -> None:
        raise Started

    def hang(number: int, frame: Any) -> None:
        raise Hung

    here, logger = Path.cwd(), logging.getLogger("hf_cocodc")
    listener = logging.NullHandler()  # a warning is not an error: a paragraph may follow it
    with contextlib.ExitStack() as undo:
        for name in STARTS:
            undo.enter_context(mock.patch(name, start))
        logger.addHandler(listener)
        undo.callback(logger.removeHandler, listener)
        undo.enter_context(mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True))
        undo.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, hang))
        os.chdir(undo.enter_context(tempfile.TemporaryDirectory()))
        undo.callback(os.chdir, here)
        yield


def fault(words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Why the command broke its word on these arguments; None if it did not. Call it inside `stubbed`.

    Its word: the input is accepted, or refused with exit code 2 and one paragraph, within seconds.
    """
    from hf_cocodc.cli.main import main

    out, errors = io.StringIO(), io.StringIO()
    code: Any = None
    signal.alarm(PATIENCE_S)
    try:
        with (
            mock.patch.dict(os.environ, environment),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(errors),
        ):
            code = main(words)
    except Started:
        return None
    except SystemExit as end:  # argparse's own errors, and --help
        if end.code not in (0, 2):
            return f"exit code {end.code}"
        *_, said = errors.getvalue().splitlines() or [""]  # behind the usage
        return f"argparse said {len(said)} characters" if len(said) > MOST_WORDS else None
    except Hung:
        return f"it took more than {PATIENCE_S} s"
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    said = errors.getvalue()
    if code != 2:
        return f"exit code {code}, and it said: {said}"
    if not said.startswith("error: ") or len(said.splitlines()) != 1 or "Exception ignored" in said:
        return f"it did not say one paragraph: {said}"
    return f"it said {len(said)} characters" if len(said) > MOST_WORDS else None


def run(cases: Callable[[int], tuple[list[str], dict[str, str]]], numbers: Sequence[int]) -> dict[int, str]:
    """The faults of these cases by their numbers. cases(number) makes the arguments and the environment of one."""
    faults = {}
    with stubbed():
        for number in numbers:
            found = fault(*cases(number))
            if found is not None:
                faults[number] = found
    return faults
