"""`hf-cocodc plan`: what it refuses, what it prints and writes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from hf_cocodc.cli.main import main
from hf_cocodc.methods import METHODS
from hf_cocodc.settings.reading import read_yaml
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.tools.bench.report import BenchReport, read, write
from hf_cocodc.tools.plan import choice, money, sizes, table, written
from hf_cocodc.tools.plan.transfers import MSS, MTU
from tests.processes.launching import flags, little_text

LINK = ["--rtt-ms", "50", "--rate-mbit", "60"]
PLAN = ["plan", "quickstart/diloco", *LINK, "--step-s", "0.1"]


def figures(seconds: list[float]) -> BenchReport:
    """What bench link reports: here of a megabyte."""
    rows = [{"transfer": "x", "seconds": each, "MB sent": 1.0, "RTT ms": 50.0} for each in seconds]
    return BenchReport("one mean over a link", {"regions": 2}, rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*LINK], "either --step-s or --measure"),
        ([*LINK, "--step-s", "1", "--measure"], "either --step-s or --measure"),
        (["--step-s", "1", "--rtt-ms", "5"], "plan needs the link"),
        ([*LINK, "--step-s", "0"], "--step-s 0 must"),
        ([*LINK, "--step-s", "nan"], "--step-s nan must"),
        (["--rtt-ms", "-1", "--rate-mbit", "1", "--step-s", "1"], "--rtt-ms -1 must"),
        (["--rtt-ms", "1", "--rate-mbit", "inf", "--step-s", "1"], "--rate-mbit inf must"),
        ([*LINK, "--step-s", "1", "--target", "1"], "--target 1 must"),
        ([*LINK, "--step-s", "1", "--loss", "0.9"], "--loss 0.9 must"),
        ([*LINK, "--step-s", "1", "--regions", "1"], "--regions 1 must"),
        ([*LINK, "--step-s", "1", "--congestion", "turbo"], "--congestion turbo"),
        ([*LINK, "--step-s", "1", "--link", "/nowhere.json"], "--link /nowhere.json cannot be read"),
        (
            [*LINK, "--step-s", "1", "--write", "/nowhere/out.yaml"],
            "--write /nowhere/out.yaml cannot be written",
        ),
        ([*LINK, "--step-s", "1", "--", "--multi_gpu"], "are for the short run of --measure"),
        ([*LINK, "--step-s", "1", "--set", "outer.method=nope"], "outer.method='nope' is not known"),
        ([*LINK, "--step-s", "1", "--params", "1B"], "--params is of a plan without a recipe: "),
        ([*LINK, "--step-s", "1", "--steps", "0"], "--steps 0 must"),
        ([*LINK, "--step-s", "1", "--down-mbit", "0"], "--down-mbit 0 must"),
        ([*LINK, "--step-s", "1", "--usd-per-gb", "-1"], "--usd-per-gb -1 must"),
        ([*LINK, "--step-s", "1", "--usd-per-gpu-hour", "nan"], "--usd-per-gpu-hour nan must"),
        ([*LINK, "--step-s", "1", "--gpus", "8"], "--gpus counts for the price alone"),
        ([*LINK, "--step-s", "1", "--prices", "aws", "--usd-per-gb", "1"], "give one of them"),
        ([*LINK, "--step-s", "1", "--prices", "asw"], "--prices asw is not known. Did you mean 'aws'?"),
        ([*LINK, "--step-s", "1", "--prices", "aws,gcp,azure"], "names 3 clouds for 2 regions"),
        ([*LINK, "--step-s", "1", "--speeds", "3,1,1"], "--speeds names 3 regions, and there are 2. Remove"),
    ],
)
def test_wrong_numbers_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One paragraph that names the option, and exit code 2."""
    assert main(["plan", "quickstart/diloco", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_plan_is_a_table_settings_and_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe loads with the settings that are printed; JSON has the table; a file that exists stays."""
    out, table = tmp_path / "out.yaml", tmp_path / "plan.json"
    words = [*PLAN, "--target", "0.8", "--regions", "3", "--write", str(out), "--json", str(table)]
    assert main(words) == 0
    said = capsys.readouterr().out
    recipe = Recipe.load(out)
    assert f"settings: OuterConfig(method='diloco', sync_interval={recipe.outer.sync_interval}," in said
    assert "scaling law" in " ".join(said.split())
    assert (recipe.regions.count, recipe.regions.rate_limit) == (3, 54.0)
    [report] = read(table)
    rows = report["rows"]
    assert {row["method"] for row in rows} >= {"diloco", "streaming", "co2", "cocodc", "DDP"}
    assert all(row["used"] >= 0.8 for row in rows[:-1])
    assert rows[0]["time"] == pytest.approx(0.1 * 800 / rows[0]["used"])
    assert rows[-1]["vs DDP"] == 1
    kept = out.read_text()
    assert main(words) == 2
    assert "exists" in capsys.readouterr().err
    assert out.read_text() == kept


def test_ten_rows_are_shown_and_all_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """The settings that are chosen, the best of each method, and data-parallel training; times in words."""

    def shown(*flags: str) -> tuple[list[str], str]:
        assert main([*PLAN, "--target", "0.8", *flags]) == 0
        said = capsys.readouterr().out
        lines = said.split("\n\n")[1].splitlines()
        assert " time " in lines[0] and re.search(r" \d+\.\d s  ", lines[2]), lines
        return [" ".join(line.split()[:3]) for line in lines[2:]], " ".join(said.split())

    (ten, said), (rows, all_said) = shown(), shown("--all")
    assert len(ten) == 10 and [row for row in rows if row in ten] == ten
    assert f"{len(rows) - 10} more combinations of a method and a codec reach the target: --all shows" in said
    assert "--all shows" not in all_said
    assert {row.split()[0] for row in ten} == {row.split()[0] for row in rows} == {*METHODS, "DDP"}
    codec, interval = (re.search(f"{name}='?([a-z0-9]+)'?,", said) for name in ("codec", "sync_interval"))
    assert codec and interval and f"diloco {codec[1]} {interval[1]}" in ten
    assert re.search(r"The run takes \d+\.\d s\.", said)


def test_a_plan_extends_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written holds the changes alone, from wherever it is read; a plan may be planned again."""
    monkeypatch.setattr(choice, "variants", lambda outer: [outer])
    folder, out, again = tmp_path / "mine", tmp_path / "plans" / "out.yaml", tmp_path / "again.yaml"
    folder.mkdir()
    out.parent.mkdir()
    mine = folder / "mine.yaml"
    mine.write_text(
        "extends: quickstart/streaming\nouter: {mixing_alpha: 0.0}\n"
        "model: {config: {attention_dropout: .inf, pad_token_id: null}}\n"
    )
    monkeypatch.chdir(folder)
    words = [
        *PLAN[2:],
        "--target",
        "0.5",
        "--set",
        "model.config.attention_dropout=null",
        "--set",
        "training.seed=7",
    ]
    assert main(["plan", "mine.yaml", *words, "--write", str(out)]) == 0
    monkeypatch.chdir(tmp_path)
    changes = read_yaml(out.read_text(), "")
    assert changes.keys() == {"extends", "model", "outer", "regions", "training"}
    assert changes["extends"] == "../mine/mine.yaml" and changes["model"] == {
        "config": {"attention_dropout": None}
    }
    assert changes["training"] == {"seed": 7} and "method" not in changes["outer"]
    recipe = Recipe.load(out)
    assert recipe.model.config is not None and "attention_dropout" not in recipe.model.config
    assert (recipe.training["seed"], recipe.regions.rate_limit) == (7, 54.0)
    assert main(["plan", str(out), *PLAN[2:], "--target", "0.5", "--write", str(again)]) == 0
    assert Recipe.load(again) == recipe


def test_a_target_out_of_reach_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The method has no settings: no recipe is written, and the exit code says so."""
    words = [*PLAN, "--set", "training.max_steps=20", "--target", "0.99", "--write", str(tmp_path / "o.yaml")]
    assert main(words) == 2
    said = capsys.readouterr()
    assert "With method diloco no settings use 99% of the time" in said.out
    assert "there are no settings to write" in said.err
    assert not (tmp_path / "o.yaml").exists()


def test_a_measured_link_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of bench link, whose first report is of the link; anything else is refused."""
    path = tmp_path / "link.json"
    for reports in ([figures([0.95, 0.45])], [figures([0.45]), BenchReport("training over a link", {}, [])]):
        write(path, reports)
        found = written.link_of(path)
        assert found["rtt_ms"] == pytest.approx(50)
        assert found["rate_mbit"] == pytest.approx(8 / 0.4 * MTU / MSS)
    assert main(["plan", "quickstart/diloco", "--link", str(path), "--step-s", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "rtt_ms=50" in said and "link=tcp" in said
    near = figures([0.95])
    near.setting["network_rtt_ms"] = 0.2  # the rest is what the processes of bench link took
    write(path, [near])
    assert main(["plan", "quickstart/diloco", "--link", str(path), "--step-s", "0.1"]) == 0
    assert "link: gloo (round trips take 0.2 ms)" in capsys.readouterr().out
    for took, said in ((-1.0, "rate_mbit -"), (math.nan, "rate_mbit nan"), (1e9, "rate_mbit")):
        write(path, [figures([took])])
        assert main(["plan", "quickstart/diloco", "--link", str(path), "--step-s", "0.1"]) == 2
        complaint = capsys.readouterr().err
        assert f"--link {path}: {said}" in complaint and "must lie in" in complaint
    write(path, [figures([0.0])])
    assert main(["plan", "quickstart/diloco", "--link", str(path), "--step-s", "0.1"]) == 2
    assert "holds no measurement of a link" in capsys.readouterr().err
    for content in ("{}", "[]", "nonsense", "3", json.dumps({"title": "one mean over a link", "rows": []})):
        path.write_text(content)
        assert main(["plan", "quickstart/diloco", "--link", str(path), "--step-s", "0.1"]) == 2
        assert "holds no measurement of a link" in capsys.readouterr().err


def in_a_bucket(write_ms: float = 300.0, up_mbit: float = 100.0) -> BenchReport:
    """What bench link reports of a storage: a payload of 10 MB takes one turn of requests."""
    took = {"write": write_ms, "read": 300.0, "list": 300.0, "delete": 300.0}
    took |= {"write a payload": write_ms + 80e3 / up_mbit, "read a payload": 300.0 + 160.0}
    rows = [{"what": what, "median ms": each, "p95 ms": each, "Mbit/s": None} for what, each in took.items()]
    return BenchReport("a storage as a link", {"megabytes": 10.0, "is_near": False}, rows)


def test_a_measured_storage_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of bench link with a URL: the plan is for requests, and the recipe that it writes has no settings of TCP."""
    path, out = tmp_path / "link.json", tmp_path / "out.yaml"
    write(path, [in_a_bucket()])
    figures = written.link_of(path)
    assert (figures["up_mbit"], figures["down_mbit"]) == (pytest.approx(100), pytest.approx(500))
    there = ["--set", "regions.coordinator=s3://bucket/run7"]
    words = ["plan", "quickstart/streaming", "--link", str(path), "--step-s", "0.5", "--write", str(out)]
    assert main([*words, *there, "--target", "0.5"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "link=storage, write_ms=300, read_ms=300, delete_ms=300, up_mbit=100, down_mbit=500" in said
    assert "link: a storage. After a pause, a region finds within 2.3 s what" in said
    assert re.search(
        r"requests: [0-9,]{6} an hour from a region, [0-9,]{6} from the one that serves as coordinator: ",
        said,
    )
    assert re.search(r"\$0\.\d+ and \$0\.\d+ an hour \(S3 Standard, list price of November 2026\)", said)
    assert "RegionConfig(" not in said
    regions = Recipe.load(out).regions
    assert (regions.coordinator, regions.rate_limit, regions.connections) == (there[1][20:], None, "auto")
    write(path, [in_a_bucket(write_ms=-1)])
    assert main([*words[:-2], *there]) == 2
    assert "write_ms -1 must lie in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "is_storage", "more", "said"),
    [
        ("s3://bucket/run7", False, (), "is of a network. Measure the link of the run, and give --link FILE"),
        ("10.0.0.1:29650", True, (), "is of a storage. Measure the link of the run, and give --link FILE"),
        ("s3://bucket/run7", True, ("--loss", "0.1"), "is of a storage, where --loss does not count"),
        ("s3://bucket/run7", True, ("--rtt-ms", "50"), "is of a storage, where --rtt-ms does not count"),
    ],
)
def test_a_forecast_for_another_link_is_refused(
    where: str,
    is_storage: bool,
    more: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "link.json"
    write(path, [in_a_bucket() if is_storage else figures([0.45])])
    words = ["plan", "quickstart/diloco", "--step-s", "0.1", "--set", f"regions.coordinator={where}"]
    assert main([*words, "--link", str(path), *more]) == 2
    assert said in capsys.readouterr().err
    if not is_storage:
        assert main([*words, *LINK]) == 2
        assert "--rtt-ms is of a network" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_with_a_measured_step_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--measure trains a few steps and leaves nothing; the recipe that is written is trained by two regions."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    recipe = tmp_path / "mine.yaml"
    more: dict[str, Any] = {
        "max_steps": 20,
        "save_steps": 20,
        "eval_strategy": '"no"',
        "eval_on_start": "false",
    }
    lines = "".join(f"  {key}: {value}\n" for key, value in more.items())
    small = "model:\n  config: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4}\n"
    recipe.write_text(
        f"extends: quickstart/diloco\n{small}training:\n  output_dir: {tmp_path / 'runs'}\n{lines}"
    )
    out = tmp_path / "out.yaml"
    text = flags(little_text(tmp_path / "text"))
    words = ["plan", str(recipe), *LINK, "--measure", "--target", "0.5", "--write", str(out), *text]
    assert main(words) == 0
    assert not (tmp_path / "runs").exists()
    assert main(["train", str(out), *text]) == 0
    assert "inner steps           20 in each of 2 region(s)" in capsys.readouterr().out


def test_a_plan_over_a_lossy_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses bound what a connection carries: there are more of them, and the link carries less."""
    monkeypatch.setattr(choice, "variants", lambda outer: [outer])
    out, used = tmp_path / "plan.json", {}
    for loss in ("0", "1e-2"):
        link = ["--rtt-ms", "100", "--rate-mbit", "60", "--loss", loss, "--congestion", "cubic"]
        words = ["plan", "quickstart/diloco", *link, "--step-s", "0.1", "--target", "0.3"]
        assert main([*words, "--json", str(out)]) == 0
        [report] = read(out)
        used[loss] = report["rows"][0]["used"]
    assert used["1e-2"] < used["0"] - 0.02


@pytest.mark.slow
def test_a_measurement_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """The reason of the short run becomes the reason of the command."""
    words = ["plan", "quickstart/diloco", *LINK, "--measure", "--set", "data.split=nope"]
    assert main(words) == 2
    assert "--measure: the recipe cannot be trained here" in capsys.readouterr().err


def test_money_is_what_traffic_and_gpus_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all regions, with the headers of packets; beside data-parallel training, and in a sentence."""
    monkeypatch.setattr(choice, "variants", lambda outer: [outer])
    out, regions = tmp_path / "plan.json", 3
    words = [
        *PLAN,
        "--regions",
        str(regions),
        "--usd-per-gb",
        "0.5",
        "--usd-per-gpu-hour",
        "2",
        "--gpus",
        "8",
    ]
    assert main([*words, "--json", str(out)]) == 0
    [report] = read(out)
    for row in report["rows"]:
        hours = row["time"] / 3600
        assert row["net $"] == pytest.approx(regions * row["GB/h"] * hours * MTU / MSS * 0.5)
        assert row["$"] == pytest.approx(row["net $"] + 2 * 8 * regions * hours)
    shown = " ".join(capsys.readouterr().out.split())
    chosen, parallel = (table.dollars(row["net $"]) for row in report["rows"])
    assert f"cost: diloco {report['rows'][0]['codec']} over 3 regions: ${chosen} of traffic and $" in shown
    assert f"Data-parallel: ${parallel} of traffic and $" in shown


def test_prices_of_clouds_are_dated_and_have_pages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clouds: each pays for what leaves it. The help names all that are known."""
    monkeypatch.setattr(choice, "variants", lambda outer: [outer])
    content = YAML(typ="safe").load(money.FILE)
    for name, entry in content["prices"].items():
        assert entry["page"].startswith("https://") and entry["read"] and 0 < entry["usd_per_gb"] < 1, name
    assert money.list_price(["aws"], 3)[0] == content["prices"]["aws"]["usd_per_gb"]
    assert main([*PLAN, "--prices", "aws,gcp"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "at $0.105 a GB." in shown and f"List prices of {content['checked']}" in shown
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    help_of = "".join(capsys.readouterr().out.split())
    assert all(name in help_of for name in content["prices"])


def test_the_slower_way_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer brings a region as much as it sends."""
    monkeypatch.setattr(choice, "variants", lambda outer: [outer])
    out, rates = tmp_path / "plan.json", {}
    for down in ("20", "60", "600"):
        assert main([*PLAN, "--target", "0.1", "--down-mbit", down, "--json", str(out)]) == 0
        [report] = read(out)
        rates[down] = report["setting"]["rate_mbit"], report["rows"][0]["used"]
    assert rates["20"][0] == 20 and rates["60"] == rates["600"] and rates["20"][1] < rates["60"][1]


def test_the_steps_of_a_plan_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "variants", lambda outer: [outer])
    out = tmp_path / "out.yaml"
    assert main([*PLAN, "--target", "0.1", "--steps", "1234", "--write", str(out)]) == 0
    assert Recipe.load(out).training["max_steps"] == 1234


def test_a_plan_without_prices_has_no_dollars(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PLAN) == 0
    assert "$" not in capsys.readouterr().out


def test_a_plan_knows_that_regions_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slowest sets the pace of equal batches; dealt ones take half as long. JSON has the deal."""
    monkeypatch.setattr(choice, "variants", lambda outer: [outer])
    out = tmp_path / "plan.json"
    words = [*PLAN, "--speeds", "1,0.5,0.5,2", "--regions", "4", "--json", str(out)]
    times = []
    for balance in ("equal", "auto"):
        more = ["training.gradient_accumulation_steps=4", f"regions.balance={balance}"]
        assert main([*words, *(part for each in more for part in ("--set", each))]) == 0
        [report] = read(out)
        assert report["setting"]["deal"] == {"0": 4, "1": 2, "2": 2, "3": 8}
        said = " ".join(capsys.readouterr().out.split())
        assert "region 0: 4, region 1: 2, region 2: 2, region 3: 8" in said and "2.00 times as many" in said
        times.append(report["setting"]["step_s"])
    assert times == pytest.approx([0.2, 0.1])


@pytest.mark.parametrize("params", ["100k", "1.2B"])
def test_a_plan_without_a_recipe(
    params: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of which only the size is known; without its steps, dollars are those of a thousand."""
    monkeypatch.setattr(choice, "variants", lambda outer: [outer])
    out = tmp_path / "plan.json"
    words = ["plan", "--params", params, "--step-s", "10", *LINK, "--json", str(out), "--usd-per-gb", "0.1"]
    assert main(words) == 0
    [report] = read(out)
    assert report["setting"]["parameters"] == pytest.approx(sizes.params_in(params), rel=0.01)
    assert report["rows"][0]["method"] == "streaming" and report["rows"][0]["time"] is None
    assert report["rows"][0]["$/1k"] > 0 and "1,000 inner steps: $" in capsys.readouterr().out
    assert main([*words, "--steps", "2000", "--set", "outer.sync_interval=1000"]) == 0
    [report] = read(out)
    assert report["rows"][0]["H"] == 1000 and report["rows"][0]["time"] > 2000 * 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "plan needs a model: give a recipe, or --params"),
        (["--params", "many"], "--params many must be a number of parameters"),
        (["--params", "9" * 400], "must be a number of parameters"),
        (["--params", "10"], "--params 10 must be a number of parameters"),
        (["--params", "1B", "--write", "out.yaml"], "--write needs a recipe"),
    ],
)
def test_a_size_that_is_none_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words, *LINK, "--step-s", "1"]) == 2
    assert said in capsys.readouterr().err


def test_a_plan_is_for_a_gpu_unless_the_recipe_says_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is made: outer steps of a core would take a tenth of the time here."""
    monkeypatch.setattr(choice, "variants", lambda outer: [outer])
    out, used = tmp_path / "plan.json", []
    size = [
        "--params",
        "1.2B",
        "--rtt-ms",
        "1",
        "--rate-mbit",
        "100000",
        "--step-s",
        "0.5",
        "--target",
        "0.5",
    ]
    for use_cpu in ("false", "true"):
        assert main(["plan", *size, "--set", f"training.use_cpu={use_cpu}", "--json", str(out)]) == 0
        used.append(read(out)[0]["rows"][0]["used"])
    assert used[0] > 0.99 and used[1] < 0.95
