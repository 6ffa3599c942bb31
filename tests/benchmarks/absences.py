"""What absent regions cost: the quickstart in four regions, undisturbed and disturbed: `python -m tests.benchmarks.absences`.

In the disturbed run region 3 is killed twice and started again at once, with the same command, and region 2 stands still for a
while. Both runs have the same seed. Everything stays on the loopback of this machine. Takes about ten minutes for each seed.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.tools.bench.report import BenchReport, write

RESULTS = Path(__file__).parents[2] / "docs" / "evidence" / "benchmarks"
REGIONS, LEAST = 4, 2
KILLED, FROZEN = 3, 2
KILLS, FREEZE = (150, 450), 300
"""Inner steps of region 0 at which it happens."""
PATIENCE_S = 1800.0


class Run:
    """The commands of one run.

    Args:
        folder: of the run's files.
        seed: of weights and data.
        steps: inner steps.
    """

    def __init__(self, folder: Path, seed: int, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self._served = serve_in_thread()
        settings = {
            "regions.count": REGIONS,
            "regions.min": LEAST,
            "training.output_dir": folder / "run",
            "training.max_steps": steps,
            "training.seed": seed,
        }
        sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        place = ["--coordinator", self._served.address]
        self._command = [sys.executable, "-m", "hf_cocodc", "train", "quickstart/diloco", *sets, *place]
        self._commands = {region: self._start(region) for region in range(REGIONS)}

    def watch(self, kills: Sequence[int], freeze: int | None, freeze_s: float) -> None:
        """Let the run come to its end, and disturb it at these inner steps of region 0."""
        kills, thaw_at = list(kills), float("inf")
        deadline = time.monotonic() + PATIENCE_S
        try:
            while any(command.poll() is None for command in self._commands.values()):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the run has not ended after {PATIENCE_S:g} s: see {self._folder}")
                step = max((event.get("step", 0) for event in self.journal(0)), default=0)
                if kills and step >= kills[0]:
                    kills.pop(0)
                    self._signal(KILLED, signal.SIGKILL)
                    self._commands[KILLED].wait()
                    self._commands[KILLED] = self._start(KILLED)
                if freeze is not None and step >= freeze:
                    freeze, thaw_at = None, time.monotonic() + freeze_s
                    self._signal(FROZEN, signal.SIGSTOP)
                if time.monotonic() >= thaw_at:
                    thaw_at = float("inf")
                    self._signal(FROZEN, signal.SIGCONT)
                time.sleep(0.2)
        finally:
            for region in self._commands:
                self._signal(region, signal.SIGKILL)

    def figures(self) -> dict[str, Any]:
        """Loss, what was trained, and whether all regions agree.

        Raises:
            AssertionError: a command has failed, or not all regions have come to the end.
        """
        codes = {region: command.returncode for region, command in self._commands.items()}
        assert not any(codes.values()), f"exit codes {codes}: see {self._folder}"
        journals = [self.journal(region) for region in range(REGIONS)]
        ends = [next(e for e in reversed(journal) if e["kind"] == "finish") for journal in journals]
        evaluated = next(e for e in reversed(journals[0]) if e["kind"] == "evaluate")
        assert {end["step"] for end in ends} == {evaluated["step"]} == {self._steps}
        epochs = [(e["step"], len(e["members"])) for e in journals[0] if e["kind"] == "epoch"]
        absent = 0
        for (step, members), (until, _) in zip(epochs, [*epochs[1:], (self._steps, 0)], strict=True):
            absent += (until - step) * (REGIONS - members)
        return {
            "loss": evaluated["eval_loss"],
            "absent": absent / (REGIONS * self._steps),
            "equal": len({json.dumps(end["digest"]) for end in ends}) == 1,
        }

    def journal(self, region: int) -> list[dict[str, Any]]:
        """The whole lines of a region's journal."""
        path = self._folder / "run" / f"region-{region}" / "cocodc" / "journal.jsonl"
        if not path.is_file():
            return []
        return [
            json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")
        ]

    def _start(self, region: int) -> subprocess.Popen:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with (self._folder / f"command-{region}.txt").open("ab") as log:
            command = [*self._command, "--region", str(region)]
            return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def _signal(self, region: int, number: int) -> None:
        """To the command of a region and all that it has started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            command = psutil.Process(self._commands[region].pid)
            for process in [*command.children(recursive=True), command]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="(default: 0 1 2)"
    )
    parser.add_argument("--steps", type=int, default=800, help="inner steps (default: 800)")
    parser.add_argument("--freeze", type=float, default=30.0, help="seconds of the freeze (default: 30)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the folders of the runs there")
    parser.add_argument("--output", type=Path, default=RESULTS / "absences.json", metavar="FILE")
    options = parser.parse_args()
    kills, freeze = [step * options.steps // 800 for step in KILLS], FREEZE * options.steps // 800
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in options.seeds:
            found = []
            for name, kills_at, freeze_at in (("undisturbed", [], None), ("disturbed", kills, freeze)):
                folder = (options.keep or Path(temporary)) / f"{name}-{seed}"
                folder.mkdir(parents=True)
                run = Run(folder, seed, options.steps)
                run.watch(kills_at, freeze_at, options.freeze)
                found.append(run.figures())
            undisturbed, disturbed = found
            rows.append(
                {
                    "seed": seed,
                    "undisturbed": undisturbed["loss"],
                    "disturbed": disturbed["loss"],
                    "difference": disturbed["loss"] / undisturbed["loss"] - 1,
                    "steps absent": disturbed["absent"],
                    "equal": undisturbed["equal"] and disturbed["equal"],
                }
            )
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
    notes = ["steps absent: share of the inner steps of all regions in which a region was not a member."]
    formats = {"undisturbed": ".4f", "disturbed": ".4f", "difference": "+.2%", "steps absent": ".1%"}
    setting = {"regions": REGIONS, "steps": options.steps, "kills at": str(kills), "freeze s": options.freeze}
    report = BenchReport("held-out loss where regions are absent for a while", setting, rows, notes, formats)
    sys.stdout.write("\n" + "\n".join(report.lines()) + "\n")
    write(options.output, [report])
    return 0


if __name__ == "__main__":
    sys.exit(main())
