"""Regions in one process: their folder, their lines, and their time."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc import simulate
from hf_cocodc.cli.main import main
from hf_cocodc.cli.simulate import OfRegion0
from hf_cocodc.errors import InputError, RunFinished
from hf_cocodc.link.lockstep import VirtualLink, run_in_lockstep
from hf_cocodc.run.journal import read
from hf_cocodc.tools.report.runs import read_run
from hf_cocodc.tools.report.summary import summarize

RECIPE = str(Path(__file__).parents[2] / "recipes" / "quickstart" / "diloco.yaml")
STEPS, STEP_S = 4, 0.5
TINY = [
    *("model.config.hidden_size=32", "model.config.intermediate_size=64", "model.config.num_hidden_layers=2"),
    *("data.builtin=null", "data.block_size=32", "training.eval_strategy=no", "training.eval_on_start=false"),
    *(f"training.max_steps={STEPS}", "training.logging_steps=1", "training.save_strategy=no"),
    *("training.warmup_steps=0", "outer.sync_interval=2"),
]
TIMES = ["--step-s", str(STEP_S), "--rtt-ms", "2000", "--rate-mbit", "1"]


def test_a_simulation_tells_simulated_time_under_names_and_in_a_folder_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run of `train` in the same output_dir is not touched; waiting never exceeds the time of the run."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "train.txt").write_text(Path(threading.__file__).read_text()[:9000])
    real = tmp_path / "run" / "region-0" / "cocodc" / "journal.jsonl"
    real.parent.mkdir(parents=True)
    real.write_text("of a real run\n")
    sets = [*TINY, f"data.path={text}", f"training.output_dir={tmp_path / 'run'}"]
    arguments = [RECIPE, *TIMES, *(part for each in sets for part in ("--set", each))]
    assert main(["simulate", *arguments, "--json", str(tmp_path / "summary.json")]) == 0
    printed = capsys.readouterr().out
    assert real.read_text() == "of a real run\n"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["region-0", "simulated"]
    losses = [line for line in printed.splitlines() if "'loss'" in line]
    assert len(losses) == STEPS
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["timing"] == "simulated"
    assert found["training_s"] == pytest.approx(STEPS * STEP_S + found["blocked_s"])
    assert found["blocked_s"] > 2, "two round trips of a second each way, at least"
    share = 100 * found["blocked_s"] / found["training_s"]
    said = f"{found['blocked_s']:.2f} s of {found['training_s']:.1f} s of simulated time ({share:.0f} %)"
    assert f"training blocked      {said}\n" in printed
    events = read(tmp_path / "run" / "simulated" / "region-0" / "cocodc" / "journal.jsonl")
    for landing in [event for event in events if event["kind"] == "land"]:
        assert landing["rested_s"] == 0 < landing["blocked_s"] == landing["took_s"], (
            "it landed when it was here"
        )
        assert len(landing["norms"]) == 2 and all(landing["norms"])
    assert {"versions", "training"} < events[0].keys()
    assert "at" not in events[0], "simulated time has no date"
    [*_, last] = [event for event in events if event["kind"] == "log"]
    assert 0 < last["outer/compute_utilization"] < 1


def test_a_round_trip_is_twice_the_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has the units of `plan`: ms and Mbit/s."""
    links = []

    def simulated(recipe: object, link: VirtualLink) -> None:
        links.append(link)
        raise InputError("that is all")

    monkeypatch.setattr("hf_cocodc.training.simulation.simulate", simulated)
    assert main(["simulate", RECIPE, "--step-s", "0.1", "--rtt-ms", "100", "--rate-mbit", "50"]) == 2
    assert links == [VirtualLink(step_time_s=0.1, latency_s=0.05, bandwidth=50e6 / 8)]


def test_a_file_that_cannot_be_written_is_refused_before_the_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after it."""
    assert main(["simulate", "no-such-recipe.yaml", "--json", str(tmp_path / "no" / "x.json")]) == 2
    assert "x.json cannot be written" in capsys.readouterr().err


def test_time_that_no_one_simulates_stands_still() -> None:
    """A region's clock does not count the time in which other regions have their turn."""
    assert run_in_lockstep(2, lambda region, link: (link.timing, link.clock())) == [("none", 0.0)] * 2
    virtual = VirtualLink(step_time_s=2.0, latency_s=0.0, bandwidth=1.0)

    def step(region: int, link) -> tuple[str, float]:
        link.tick(1)
        return link.timing, link.clock()

    assert run_in_lockstep(1, step, virtual) == [("simulated", 2.0)]


def test_a_summary_without_time_says_so(tmp_path: Path) -> None:
    """A journal that does not say where its times come from counts as measured."""
    sizes = {"num_regions": 2, "num_params": 1, "num_fragments": 1}
    start = {
        "kind": "start",
        "time_s": 0.0,
        "step": 0,
        "region": 0,
        **sizes,
        "outer": {"method": "x"},
        "run": "a",
    }
    finish = {"kind": "finish", "step": 1, "blocked_s": 0.5, "time_s": 2.0, "bytes_sent": 1}
    path = tmp_path / "journal.jsonl"
    for timing, said in (
        ({"timing": "none"}, "unknown (time was not simulated)"),
        ({}, "0.50 s of 2.0 s (25 %)"),
    ):
        path.write_text("\n".join(json.dumps(event) for event in (start | timing, finish)))
        assert summarize(read_run("run", [path])).blocked() == said


def test_region_0_speaks_for_all() -> None:
    stream = io.StringIO()
    out = OfRegion0(stream)
    for region in (1, 0, 10):
        thread = threading.Thread(target=out.write, args=(f"loss {region}\n",), name=f"region {region}")
        thread.start()
        thread.join()
    out.write("of no region\n")
    assert stream.getvalue() == "loss 0\nof no region\n"


def test_a_run_that_has_finished_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Resumed, it changes no file of the model, and says where the weights with which it has finished lie."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "train.txt").write_text(Path(threading.__file__).read_text()[:9000])
    own = [f"data.path={text}", f"training.output_dir={tmp_path / 'run'}"]
    sets = [*TINY, *own, "training.save_strategy=steps", "training.save_steps=2"]
    simulate(RECIPE, overrides=[*sets, "training.enable_jit_checkpoint=true"])
    assert "enable_jit_checkpoint is off in a simulation" in caplog.text
    folder = tmp_path / "run" / "simulated" / "region-0"
    names = [path.name for path in folder.iterdir() if path.is_file()]
    assert {"model.safetensors", "config.json", "README.md"} <= set(names)
    times = {name: (folder / name).stat().st_mtime_ns for name in names}
    last = folder / f"checkpoint-{STEPS}"
    with pytest.raises(RunFinished, match=rf"Its model is in {last}\. To train on, raise max_steps") as over:
        simulate(RECIPE, overrides=[*sets, "training.resume_from_checkpoint=true"])
    assert over.value.exit_code == 0
    assert {name: (folder / name).stat().st_mtime_ns for name in names} == times
    assert (folder / "model.safetensors").read_bytes() == (last / "model.safetensors").read_bytes()


@pytest.mark.parametrize("what", [RECIPE, lambda region: region], ids=["a recipe", "a function"])
def test_no_regions_are_refused(what: Any) -> None:
    """And not taken for the number of the recipe."""
    with pytest.raises(InputError, match=r"regions=0\): the number of regions must be at least 1"):
        simulate(what, regions=0)
