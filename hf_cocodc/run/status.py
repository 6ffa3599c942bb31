"""What a region is doing now, and the error that ended it, told to the command that started the region.

The command names a file in the environment (`ENV_STATUS`). The region replaces the file whenever it begins something else. The
file is no record: the journal is.
"""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENV_STATUS = "HF_COCODC_STATUS"


def tell(doing: str, **facts: Any) -> None:
    """Say what this region is doing. Only one rank of a machine speaks, and only if a command listens.

    Args:
        doing: words that follow the name of the region ("packing the text").
        facts: figures, as JSON can express them.
    """
    path = os.environ.get(ENV_STATUS)
    if path is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    half = Path(f"{path}.half")
    with contextlib.suppress(OSError):  # progress is not worth the end of a run
        half.write_text(json.dumps({"doing": doing, "since": time.time(), **facts}), encoding="utf-8")
        os.replace(half, path)


def tell_whom_we_await(regions: Sequence[int]) -> None:
    """Say that this region waits for others."""
    tell("waiting for " + " and ".join(f"region {region}" for region in regions))


def heard(path: Path) -> dict[str, Any]:
    """What a region has told last; empty if it has not told anything yet."""
    with contextlib.suppress(OSError, json.JSONDecodeError):
        return json.loads(path.read_text(encoding="utf-8"))
    return {}
