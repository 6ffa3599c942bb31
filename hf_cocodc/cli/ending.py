"""Report a run that has finished: its summary, and its picture."""

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def report(folders: Sequence[Path], output: Path) -> dict[str, Any] | None:
    """Print the summary of the regions that write to `folders`, and draw their picture into `output`.

    Of a run that goes on without a lost region, at least one region must have finished: else there is nothing to report but that
    those here have left it.

    Args:
        folders: one per region, region 0's first.
        output: the folder of the run. What other commands have trained of it there counts, too.

    Returns:
        The figures of the summary; None if there is none.
    """
    from ..tools.report.journals import NAME
    from ..tools.report.runs import read_run
    from ..tools.report.summary import summarise

    journals = [folder / "cocodc" / NAME for folder in folders]
    run = read_run(output.resolve().name, journals, beside=output)
    ended = {journal.path for journal in run.journals if journal.has_finished}
    finished = [folder for folder, path in zip(folders, journals, strict=True) if path in ended]
    if not finished:
        print(
            f"left the run before its end: {', '.join(folder.name for folder in folders)}. The others train on."
        )
        return None
    summary = summarise(run)
    print("\n".join(summary.lines(finished[0], journals)))
    if importlib.util.find_spec("matplotlib"):
        from ..tools.report.charts import plot_run

        plot_run(run, output / "run.png")
        print(f"picture               {output / 'run.png'}")
    else:
        print("picture               none; to get one, run: pip install 'hf-cocodc[plots]'")
    return dataclasses.asdict(summary)
