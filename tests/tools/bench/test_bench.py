"""Benchmarks: reports, and errors of the commands."""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc import __version__
from hf_cocodc.cli.main import main
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.errors import HandshakeError, LinkError, RegionLostError
from hf_cocodc.net.keys import Keys
from hf_cocodc.tools.bench import link
from hf_cocodc.tools.bench.report import BenchReport, read, write
from hf_cocodc.tools.plan.written import link_of
from tests.benchmarks import gpu, interpreter, side_by_side, workers
from tests.benchmarks.contestants import CONTESTANTS
from tests.benchmarks.emulation import privileges
from tests.processes.launching import ROOT
from tests.secret import secret

HAS_TORCHFT = importlib.util.find_spec("torchft") is not None


def test_a_report_is_a_table_and_json(tmp_path: Path) -> None:
    """Numbers align right, texts left; a missing value is a dash; JSON has all figures and the machine."""
    rows = [{"what": "a", "seconds": 0.01234, "MB": 3}, {"what": "longer", "seconds": None, "MB": 12345.6}]
    samples = {"seconds": [0.012, 0.013]}
    report = BenchReport("a title", {"rate": 1e3, "loss": 0.0001}, rows, ["A note."], {"MB": ".1f"}, samples)
    assert report.lines() == [
        "a title: rate=1000, loss=0.0001",
        "",
        "what    seconds       MB",
        "------------------------",
        "a        0.0123      3.0",
        "longer        -  12345.6",
        "",
        "A note.",
    ]
    write(tmp_path / "one.json", [report])
    write(tmp_path / "two.json", [report, report])
    for name, count in (("one", 1), ("two", 2)):
        content = json.loads((tmp_path / f"{name}.json").read_text())
        assert list(content) == ["hf_cocodc", "date", "machine", "reports"]
        assert (content["hf_cocodc"], content["machine"]["system"]) == (__version__, os.uname().sysname)
        assert datetime.datetime.fromisoformat(content["date"]).utcoffset() == datetime.timedelta(0)
        found = read(tmp_path / f"{name}.json")
        assert found == count * [{**content["reports"][0], "machine": content["machine"]}]
        assert (found[0]["rows"], found[0]["notes"], found[0]["samples"]) == (rows, ["A note."], samples)
    for wrong in ("[]", "{}", "nonsense"):
        (tmp_path / "wrong.json").write_text(wrong)
        with pytest.raises(ValueError):
            read(tmp_path / "wrong.json")


def test_kept_results_are_of_this_form() -> None:
    """Those of tests/benchmarks: their version, date and machine are known."""
    results = sorted((ROOT / "docs" / "evidence" / "benchmarks").glob("*.json"))
    assert len(results) >= 7
    for path in results:
        assert read(path)[0]["rows"], path.name


def test_a_link_is_held_against_its_rate_and_round_trip() -> None:
    """The floor is a region's payload at the rate plus one round trip; without a rate, the best transfer."""
    found = link.Figures(
        regions=3, connections=2, bytes_sent=10**6, seconds=[3.0, 1.0, 2.0], round_trip_s=0.1
    )
    rows = link.report(link.Trial(), found, {}, rate=8e6).rows
    assert [row["transfer"] for row in rows] == ["first", "median of 2 more", "best"]
    assert [row["seconds"] for row in rows] == [3.0, 1.5, 1.0]
    assert {row["floor s"] for row in rows} == {1.1}
    assert [row["Mbit/s"] for row in rows] == [8 / 3, 8 / 1.5, 8.0]
    assert [row["ratio"] for row in link.report(link.Trial(), found, {}).rows] == [3.0, 1.5, 1.0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["link", "--link", "gloo", "--connections", "4"],
            "regions.link=gloo with regions.connections=4: this setting is for connections of our own",
        ),
        (
            ["link", "--link", "gloo", "--rate-limit", "9.5"],
            "regions.link=gloo with regions.rate_limit=9.5: this setting is for connections of our own",
        ),
        (["link", "--connections", "many"], "regions.connections='many' must lie in 1 .. 64, or be auto."),
        (["link", "--rate-limit", "0"], "regions.rate_limit=0.0 must be positive."),
        (["link", "--regions", "1"], "--regions 1 must lie in 2 .. 100."),
        (["link", "--megabytes", "inf"], "--megabytes inf must be at least 0.001 and finite."),
        (["link", "--megabytes", "0"], "--megabytes 0 must be at least 0.001."),
        (["link", "--json", "."], "--json . cannot be written: Is a directory."),
        (
            ["link", "--encrypt", "--region", "0", "--coordinator", "localhost:1"],
            "--encrypt between machines needs a secret",
        ),
        (["link", "--rate-mbit", "0"], "--rate-mbit 0 must be at least 0.01."),
        (
            ["link", "--region", "0"],
            "--coordinator and --region need each other, and --interface, --run and --secret-file need both. Give",
        ),
        (["link", "--interface", "wg0"], "--interface, --run and --secret-file need both"),
        (["link", "--run", "mine"], "--interface, --run and --secret-file need both"),
        (["link", "--coordinator", "nowhere"], "must be HOST:PORT"),
        (
            ["link", "--coordinator", "file:///tmp/run7", "--region", "0"],
            "is a storage, and is measured from one end: --region does not count there",
        ),
        (
            ["link", "--coordinator", "s3://bucket/run7", "--codec", "fp4"],
            "--codec does not count there. Remove it",
        ),
        (["link", "--coordinator", "file:///tmp/run7", "--repeat", "0"], "--repeat 0 must be at least 1."),
        (["link", "--coordinator", "file://host/run7"], "three slashes"),
        (["link", "--repeat", "0"], "--repeat 0 must be at least 1."),
        (["link", "--json", "no/such/folder/x.json"], "x.json cannot be written: No such file or directory."),
        (["link", "--megabytes", "1e9"], "GB of memory are free. Lower --megabytes."),
        (["link", "--rate-mbit", "inf"], "--rate-mbit inf must be at least 0.01 and finite."),
        (["link", "--regions", "9999"], "--regions 9999 must lie in 2 .. 100."),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One paragraph that names the value and the rule, and exit code 2."""
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_link_is_measured_between_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bench link` starts the regions itself and reports the time of one mean."""
    words = ["bench", "link", "--megabytes", "1", "--repeat", "1", "--rate-mbit", "1e6"]
    assert main([*words, "--json", str(tmp_path / "link.json")]) == 0
    assert "one mean over a link: regions=2, megabytes=1, codec=fp32" in capsys.readouterr().out
    [found] = read(tmp_path / "link.json")
    [row] = found["rows"]
    assert found["samples"] == {"seconds": [row["seconds"]]}
    assert (row["transfer"], row["MB sent"]) == ("first", 1.0)
    assert row["floor s"] == pytest.approx(1e6 * 8 / 1e12 + row["RTT ms"] / 1e3)


@pytest.mark.slow
@pytest.mark.skipif(privileges.obstacle() is not None, reason=str(privileges.obstacle()))
def test_contestants_are_measured_side_by_side(tmp_path: Path) -> None:
    """The program of tests/benchmarks with one row: table and JSON."""
    rows = ["--profiles", "fast", "--only", "DiLoCo int8", "--skip", "one-sync"]
    short = ["--seconds", "1", "--steps", "20", "--pace", "0", "--output", str(tmp_path)]
    command = [sys.executable, "-m", "tests.benchmarks.side_by_side", *rows, *short]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    alone, ours = read(tmp_path / "training-2-regions.json")[0]["rows"]
    assert (alone["contestant"], ours["contestant"]) == ("no link", "DiLoCo int8 (ours)")
    assert alone["share"] == 1 and ours["share"] > 0
    assert alone["MB sent"] < 0.1 < ours["MB sent"]


def test_a_library_that_is_not_installed_is_left_out_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of others stay; the sentence names the rows that go, and what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nvflare" else name)
    chosen, [note] = side_by_side.installed(CONTESTANTS)
    assert [each for each in CONTESTANTS if each not in chosen] == [
        each for each in CONTESTANTS if each.by == "NVFlare"
    ]
    assert note == "Left out: FedOpt, Nesterov, mTLS (NVFlare). This needs `pip install nvflare==2.9.0`."
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert side_by_side.installed(CONTESTANTS) == (CONTESTANTS, [])


@pytest.mark.slow
@pytest.mark.skipif(privileges.obstacle() is not None, reason=str(privileges.obstacle()))
@pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="NVFlare is not installed")
def test_nvflare_trains_beside_us(tmp_path: Path) -> None:
    """Server and sites with kits of their own: at equal tokens its FedOpt has our loss, up to rounding."""
    rows = ["--profiles", "near", "--only", "Nesterov", "--skip", "one-sync"]
    short = ["--seconds", "1", "--steps", "40", "--pace", "0", "--output", str(tmp_path)]
    command = [sys.executable, "-m", "tests.benchmarks.side_by_side", *rows, *short]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    _, theirs, ours = read(tmp_path / "training-2-regions-near.json")[0]["rows"]
    assert (theirs["contestant"], ours["contestant"]) == (
        "FedOpt, Nesterov, mTLS (NVFlare)",
        "DiLoCo, Nesterov, encrypted (ours)",
    )
    assert theirs["loss at tokens"] == pytest.approx(ours["loss at tokens"], abs=0.002)


def test_a_training_is_held_against_the_one_without_us() -> None:
    """Time and GPU memory beyond Trainer alone, beside the forecast; a batch shrinks until all regions fit."""
    alone = {
        "parameters": 2_000_000,
        "step_s": 0.1,
        "longest_s": 0.2,
        "held_s": 0.0,
        "counted_s": 0.0,
        "sent": 0,
    }
    memory = {"peak": 20 * 10**9, "event_peak": 4 * 10**9, "resting": 3 * 10**9, "forecast": None}
    alone |= memory
    ours = {
        **alone,
        "step_s": 0.15,
        "held_s": 3.0,
        "counted_s": 1.5,
        "sent": 6 * 10**6,
        "forecast": 4 * 10**9,
    }
    ours |= {"peak": 22 * 10**9, "event_peak": 8 * 10**9}
    job = gpu.Training("diloco", {"method": "diloco"}, interval=20)
    row = gpu.figures(job, 16, 20, ours, alone)
    assert (row["parameters"], row["H"], row["batch"]) == ("2M", 20, 16)
    assert row["over alone"] == pytest.approx(1.5) and row["lost s a round"] == pytest.approx(1.0)
    assert (row["held s a round"], row["counted / held"], row["MB sent"]) == (1.0, 0.5, 2.0)
    # in training 2 GB more; at an event, when activations are gone, 5 GB more than rests then without us
    assert (row["peak GB"], row["more GB"], row["forecast GB"], row["more / forecast"]) == (22, 5, 4, 1.25)
    base = gpu.figures(gpu.Training(gpu.ALONE), 16, 20, alone, alone)
    assert (base["over alone"], base["more GB"], base["held s a round"]) == (1, None, None)
    size = gpu.Size({}, 16, parameters=1e9, state_bytes=24, block_bytes=1e9)
    assert [size.fitting(2, free) for free in (None, 80e9, 79e9, 50e9, 49e9)] == [16, 16, 8, 1, 0]


@pytest.mark.slow
def test_the_program_for_a_gpu_rehearses_on_cpus(tmp_path: Path) -> None:
    """Every kind of row that it measures on a GPU, tiny: it is there, and every figure is finite. Each method trains one size."""
    kinds = [
        gpu.CODECS,
        gpu.OUTER,
        gpu.TESTS,
        "one region, H = 20",
        "0.2B, 2 regions, H = 20",
        "1.2B, one region, H = 100",
    ]
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--tiny", "--json", str(tmp_path / "gpu.json")]
    command += ["--only", *kinds]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = {report["title"].partition(",")[0]: report["rows"] for report in read(tmp_path / "gpu.json")}
    titled = [(each, each if isinstance(each, str) else each.title) for each in gpu.plan()]
    asked = [each for each, title in titled if any(kind in title for kind in kinds)]
    here = [each for each in asked if HAS_TORCHFT or isinstance(each, str) or each.torchft is None]
    trained = [each for each in here if not isinstance(each, str)]
    rows = reports.pop("training on one GPU")
    assert [(row["what"], row["regions"]) for row in rows] == [(each.name, each.regions) for each in trained]
    for row, each in zip(rows, trained, strict=True):
        assert (row["held s a round"] is not None) == (each.outer is not None)
        assert row["over alone"] > 0
    peers = reports.pop("not run", [])
    assert len(peers) == len(asked) - len(here)
    assert all("torchft is not installed" in row["why"] for row in peers)
    assert sorted(reports) == sorted(each for each in here if isinstance(each, str))
    figures = [value for table in [rows, *reports.values()] for row in table for value in row.values()]
    assert all(math.isfinite(value) for value in figures if isinstance(value, float))


@pytest.mark.slow
def test_the_interpreters_lock_is_measured(tmp_path: Path) -> None:
    """The program of tests/benchmarks with a small model: a transfer in each of the three cases."""
    small = ["--codecs", "int8", "--millions", "0.1", "--repeats", "1", "--round-s", "0.3"]
    command = [sys.executable, "-m", "tests.benchmarks.interpreter", *small]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "lock.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [report] = read(tmp_path / "lock.json")
    [row] = report["rows"]
    assert row["codec"] == "int8"
    assert all(row[f"{does}, s"] > 0 for does in interpreter.DOING)
    assert row["holds / sleeps"] > 0 and row["holds / computes"] > 0


def test_the_ends_of_a_real_link_find_each_other() -> None:
    """Every end gets the same figures, encrypted or not; ends with different options fail and say so."""
    keys = Keys.from_secret(secret("a long secret of ours"))
    served, sealed = serve_in_thread(), serve_in_thread(secrets=[keys])

    def meet(region: int, codec: str) -> link.Figures:
        return link.take_part(link.Trial(megabytes=0.1, codec=codec, repeat=2), served.address, region, 2)

    def encrypt(region: int) -> link.Figures:
        trial = link.Trial(megabytes=0.1, codec="int8", repeat=1, encrypt=True)
        return link.take_part(trial, sealed.address, region, 2, keys=keys)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(meet, (0, 1), ("int8", "int8"))
        assert [each.bytes_sent for each in pool.map(encrypt, (0, 1))] == [one.bytes_sent] * 2
        assert one == other
        assert len(one.seconds) == 2
        assert one.bytes_sent < 0.03e6
        ends = [pool.submit(meet, region, codec) for region, codec in enumerate(("int8", "fp32"))]
        for end in ends:
            with pytest.raises(HandshakeError, match="disagree on codec"):
                end.result()
    served.close()
    sealed.close()


def test_gloo_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every end of the link. The planner reads the rate of gloo from the same file."""
    served = serve_in_thread()

    def here(trial: link.Trial, regions: int) -> link.Figures:
        with ThreadPoolExecutor(regions) as pool:
            ends = [
                pool.submit(link.take_part, trial, served.address, region, regions)
                for region in range(regions)
            ]
            one, *others = [end.result() for end in ends]
        assert all(each.seconds == one.seconds for each in others)
        return one

    monkeypatch.setattr(link, "measure_here", here)
    file = tmp_path / "link.json"
    words = ["bench", "link", "--link", "gloo", "--megabytes", "0.1", "--repeat", "3", "--regions", "3"]
    assert main([*words, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "one mean over a link: regions=3, megabytes=0.1, codec=fp32, link=gloo, connections=1" in said
    [own] = read(file)
    assert len(own["samples"]["seconds"]) == 3 and min(own["samples"]["seconds"]) > 0
    found = link_of(file)
    assert found["rtt_ms"] == own["rows"][0]["RTT ms"]
    assert 0 < found["network_rtt_ms"] == pytest.approx(own["setting"]["network_rtt_ms"])
    served.close()


def test_a_process_that_fails_is_named_with_its_last_words() -> None:
    """The other processes are ended, and the error message is the failed process's own."""
    started = []

    def start(
        region: int, command: Sequence[str], env: Mapping[str, str], **streams: Any
    ) -> subprocess.Popen:
        does = "echo it broke >&2; exit 3" if region else "echo '{}'; exec sleep 600"
        started.append(subprocess.Popen(["sh", "-c", does], **streams))
        return started[-1]

    found = workers.run("no.module", [{}, {}], start, num_threads=1)
    with pytest.raises(LinkError, match="region 1 of the measurement failed: it broke"):
        list(found)
    assert started[0].returncode == -signal.SIGKILL


def killed(*_: Any) -> None:
    os._exit(9)


def test_a_region_of_a_measurement_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error comes from its process whole, of whatever class; one that is killed says nothing, and ends the others."""

    def fail(*_: Any, **__: Any) -> None:
        raise RegionLostError(1, "region 1 is silent.")

    monkeypatch.setattr(link, "take_part", fail)
    with pytest.raises(LinkError, match="region 1 is silent") as caught:
        link._one_end(0, link.Trial(), "127.0.0.1:1", 2, None)
    assert str(pickle.loads(pickle.dumps(caught.value))) == "region 1 is silent."
    monkeypatch.setattr(link, "_one_end", killed)
    with pytest.raises(LinkError, match="a process of the measurement was killed"):
        link.measure_here(link.Trial(megabytes=0.1), 2)


@pytest.mark.parametrize("count", ["9" * 5000, "0", "65", "four"])
def test_a_number_of_connections_that_is_none(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 5,000 digits, too: a traceback before."""
    assert main(["bench", "link", "--connections", count]) == 2
    said = capsys.readouterr().err
    assert "must lie in 1 .. 64, or be auto" in said and len(said) < 300
