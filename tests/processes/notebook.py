"""Runs the notebook of the recipes as a kernel does: all cells in one namespace, in the main thread, inside a running event loop.

Like IPython, it gives lines that begin with ! to a shell. It installs nothing, and shows nothing. Once it has logged, it trains
slowly until the file HURRY exists.

    python -m tests.processes.notebook FILE REGION HURRY
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import TrainerCallback, trainer

NUMBER = "REGION = 0  # 1 in the other notebook\n"
"""The line in which the two notebooks differ."""


def cells(notebook: Path, region: int) -> list[str]:
    """The code cells of a region's notebook, as Python."""
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]
    assert sum(text.count(NUMBER) for text in texts) == 1
    texts = [text.replace(NUMBER, NUMBER.replace("0", str(region), 1)) for text in texts]
    return [
        re.sub(r"^[!%].*$", lambda line: f"_line({line[0]!r})", text, flags=re.MULTILINE) for text in texts
    ]


def line(text: str) -> None:
    """Do what IPython does with a line that is no Python."""
    if text.startswith("!"):
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        subprocess.run(text[1:], shell=True, check=True, env={**os.environ, "PATH": path})
    else:
        assert text.startswith("%pip install "), text


class Page:
    """What IPython would show."""

    def __init__(self, filename: str) -> None:
        assert "</html>" in Path(filename).read_text(encoding="utf-8")


class Pause(TrainerCallback):
    """A pause at each inner step, which takes no processor from others as more steps would."""

    def __init__(self, hurry: str) -> None:
        self._hurry = Path(hurry)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.log_history and not self._hurry.exists():
            time.sleep(0.4)


async def run(texts: list[str]) -> None:
    """Run the cells one after the other."""
    namespace: dict[str, Any] = {"__name__": "__main__", "_line": line}
    for text in texts:
        exec(compile(text, "cell", "exec"), namespace)
        await asyncio.sleep(0)


if __name__ == "__main__":
    display = ModuleType("IPython.display")
    display.HTML = Page  # type: ignore[attr-defined]
    sys.modules |= {"IPython": ModuleType("IPython"), "IPython.display": display}
    trainer.DEFAULT_CALLBACKS.append(Pause(sys.argv[3]))
    asyncio.run(run(cells(Path(sys.argv[1]), int(sys.argv[2]))))
