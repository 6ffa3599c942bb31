"""Report a run that has finished."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .display import fitting

_WEIGHTS = ("*.safetensors", "*model*.bin")
"""Files of a saved model."""


def report(folders: Sequence[Path], output: Path) -> dict[str, Any] | None:
    """Print the summary of the regions that write to `folders`, region 0's first; what other commands have trained of the run in
    its folder, `output`, counts, too.

    Returns the figures of the summary. It says so, and returns None, if no region has finished: those here have left a run that
    goes on without them.
    """
    from ..tools.report.journals import NAME
    from ..tools.report.runs import read_run
    from ..tools.report.summary import summarize

    journals = [folder / "cocodc" / NAME for folder in folders]
    run = read_run(output.resolve().name, journals, beside=output)
    ended = {journal.path for journal in run.journals if journal.has_finished}
    finished = [folder for folder, path in zip(folders, journals, strict=True) if path in ended]
    if not finished:
        print(
            f"left the run before its end: {', '.join(folder.name for folder in folders)}. The others train on."
        )
        return None
    summary = summarize(run)
    print("\n".join(fitting(line, indent=22) for line in summary.lines(_model(finished[0]), journals)))
    print(f"report                {shlex.join(['hf-cocodc', 'report', str(output)])}")
    return dataclasses.asdict(summary)


def _model(folder: Path) -> str:
    """Where the global model of a region is: in its folder, or where a script has saved it, which only the script knows."""
    from ..snapshot.folders import usable

    if any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        return str(folder)
    newest = max(usable(folder).items(), default=(0, None))[1]
    return "where the script has saved it" + ("" if newest is None else f"; its newest checkpoint: {newest}")
