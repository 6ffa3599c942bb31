"""One region of an elastic run that stands still at the beginning of a given call, until the test wakes it up."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_cocodc.engine.traffic import Traffic


def pausing(
    body: Callable[..., None], call: str, number: int, folder: str, *rest: Any, **regions: Any
) -> None:
    """Like `body`, but region 2 stops itself as it makes this call of its `Traffic` for the `number`-th time."""
    whole, left = getattr(Traffic, call), [number]

    @functools.wraps(whole)
    def paused(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            Path(folder, "paused").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return whole(*args, **kwargs)

    if os.environ["HF_COCODC_REGION"] == "2":
        setattr(Traffic, call, paused)
    body(folder, *rest, **regions)
