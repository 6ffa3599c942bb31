"""Report a run that has finished: its summary, and its picture."""

import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path


def report(folders: Sequence[Path], output: Path, json_file: Path | None = None) -> None:
    """Print the summary of the regions that write to `folders`, and draw their picture into `output`.

    Of a run that goes on without a lost region, at least one region must have finished: else there is nothing to report but that
    those here have left it.

    Args:
        folders: one per region, region 0's first.
        output: the folder of the run.
        json_file: also write the figures of the summary to this file.
    """
    from ..views.journals import NAME, read_journal
    from ..views.summary import summarise

    journals = [folder / "cocodc" / NAME for folder in folders]
    found = [(folder, read_journal(path)) for folder, path in zip(folders, journals, strict=True)]
    finished = [folder for folder, journal in found if journal is not None and journal.has_finished]
    if not finished:
        print(
            f"left the run before its end: {', '.join(folder.name for folder in folders)}. The others train on."
        )
        return
    summary = summarise(journals)
    print("\n".join(summary.lines(finished[0], journals)))
    if importlib.util.find_spec("matplotlib"):
        from ..views.pictures import plot_run

        plot_run(journals, output / "run.png")
        print(f"picture               {output / 'run.png'}")
    else:
        print("picture               none; to get one, run: pip install 'hf-cocodc[plots]'")
    if json_file is not None:
        json_file.write_text(json.dumps(dataclasses.asdict(summary), indent=1) + "\n", encoding="utf-8")
