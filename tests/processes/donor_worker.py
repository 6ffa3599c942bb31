"""An elastic run whose region 0 gives bases, but never tells a newcomer that it is in."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_cocodc.link.log import Item, Log, Marker
from tests.processes.coming_worker import loop


def silent(folder: str, *arguments: Any, **regions: Any) -> None:
    """Like `loop`, but region 0's log for a newcomer stops where it comes in: before that marker is sent."""
    whole = Log.items

    def until_it_is_in(log: Log, *quiet: float) -> Iterator[Item | None]:
        for item in whole(log, *quiet):
            if isinstance(item, Marker) and item.admitted:
                (Path(folder) / "admitted").touch()
                time.sleep(3600)
            yield item

    if os.environ["HF_COCODC_REGION"] == "0":
        Log.items = until_it_is_in  # type: ignore[method-assign]
    loop(folder, *arguments, **regions)
