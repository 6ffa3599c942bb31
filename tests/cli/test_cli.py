"""The command line's own parsing; what the commands do is tested in tests/recipes and tests/processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hf_cocodc
from hf_cocodc import newer, settings
from hf_cocodc.cli import train
from hf_cocodc.cli.checks import check_writable
from hf_cocodc.cli.main import main, parse
from hf_cocodc.errors import CocodcError, InputError
from hf_cocodc.resolve import from_config
from hf_cocodc.settings.outer import CODECS
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.training.launch import Program

RECIPES = Path(__file__).parents[2] / "recipes" / "quickstart"
ARGS = ["--num_processes", "2", "--", "--multi_gpu"]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "recipe.yaml", "--region", "0", "--coordinator", "10.0.0.1:29650", "--resume"],
        ["train", "--region", "0", "--coordinator", "10.0.0.1:29650", "--resume", "recipe.yaml"],
    ],
)
def test_what_stands_behind_dashes_is_for_the_launcher(words: list[str]) -> None:
    """Wherever the recipe stands among the options, all behind the first -- goes on untouched."""
    options = parse([*words, "--", *ARGS])
    assert (options.run, options.recipe, options.region) == (train.run, "recipe.yaml", 0)
    assert options.launcher == ARGS
    assert parse(words).launcher == []


def test_only_train_starts_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    """Other commands refuse arguments that nobody would read."""
    with pytest.raises(SystemExit):
        parse(["coordinator", "--", *ARGS])
    assert "hf-cocodc train" in capsys.readouterr().err


def hf_cocodc_command(*words: str, **streams: Any) -> subprocess.CompletedProcess:
    """`python -m hf_cocodc`, which is `hf-cocodc`."""
    return subprocess.run([sys.executable, "-m", "hf_cocodc", *words], text=True, **streams)


def test_the_package_is_a_program_with_a_name() -> None:
    """`python -m hf_cocodc --version` says of what it is the version."""
    found = hf_cocodc_command("--version", capture_output=True)
    assert (found.returncode, found.stdout) == (0, f"hf-cocodc {hf_cocodc.__version__}\n")


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["train", "x.yaml", "--fast"], "usage: hf-cocodc train [RECIPE]"),
        (["simulate", "x.yaml", "--fast"], "usage: hf-cocodc simulate "),
        (["coordinator", "--fast", "5"], "usage: hf-cocodc coordinator "),
        (["bench", "link", "--fast"], "usage: hf-cocodc bench link "),
    ],
)
def test_an_unknown_option_prints_the_usage_of_its_command(
    words: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that of hf-cocodc, which lists no options."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith(usage)
    assert "unrecognized arguments: --fast" in errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["coordinator", "--port", "99999"], "--port 99999 must lie in 0 .. 65535."),
        (["coordinator", "--port", "-1"], "--port -1 must lie in 0 .. 65535."),
        (["coordinator", "--host", "a" * 70], "is not the name of a machine"),
        (["train", "diloco.yaml", "--region", "0", "--coordinator", "h:99999"], "with a port in 1 .. 65535"),
        (["train", "diloco.yaml", "--region", "0", "--coordinator", "h:0"], "with a port in 1 .. 65535"),
        (
            ["train", "diloco.yaml", "--region", "0", "--coordinator", "a..b:1"],
            "is not the name of a machine",
        ),
        (["train", "dilocox.yaml", "--set", "outer.codec=int8"], "Remove outer.rank (--set outer.rank=null)"),
        (
            ["train", "dilocox.yaml", "--set", "outer.method=co2", "--set", "outer.merge=mix"],
            "outer.merge=null",
        ),
        (["train", "diloco.yaml", "--set", "regions.timeout_s=1e300"], "must be positive, and at most 1e6"),
        (["train", "diloco.yaml", "--set", "data.path=x"], "--set data.builtin=null"),
        (["train", "diloco.yaml", "--set", "model.name_or_path=x"], "--set model.config=null"),
        (
            [
                *("train", "diloco.yaml", "--set", "tokenizer.builtin=null"),
                *("--set", "tokenizer.name_or_path=/nowhere/x"),
            ],
            "tokenizer.name_or_path='/nowhere/x': there is no such folder or file.",
        ),
        (["train", "diloco.yaml", "--run", ""], "regions.run='' must have 1 .. 100 characters"),
        (
            ["simulate", "diloco.yaml", "--regions", "10000000"],
            "regions.count=10000000 must lie in 1 .. 1024",
        ),
        (
            ["simulate", "diloco.yaml", "--away", "1:50-90"],
            "--away needs simulated time: give --step-s, --rtt-ms and --rate-mbit, too",
        ),
        (
            ["simulate", "diloco.yaml", "--step-s", "nan", "--rtt-ms", "0", "--rate-mbit", "1"],
            "--step-s nan",
        ),
        (
            ["simulate", "diloco.yaml", "--step-s", "1", "--rtt-ms", "inf", "--rate-mbit", "1"],
            "--rtt-ms inf",
        ),
        (
            ["simulate", "diloco.yaml", "--step-s", "1", "--rtt-ms", "0", "--rate-mbit", "0"],
            "--rate-mbit 0",
        ),
        (
            [
                *("simulate", "diloco.yaml", "--step-s", "1", "--rtt-ms", "0", "--rate-mbit", "1"),
                *("--regions", "2", "--speeds", "3,1,2"),
            ],
            "--speeds names 3 regions, and there are 2. Remove a speed, or give --regions 3.",
        ),
    ],
)
def test_what_cannot_work_is_one_paragraph(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the way out: a key that the recipe holds is removed with --set KEY=null."""
    monkeypatch.chdir(RECIPES)
    assert main(words) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1


def test_the_ways_out_work() -> None:
    """A key set to null is as if it were not there."""
    recipe = Recipe.load(RECIPES / "dilocox.yaml", ["outer.codec=int8", "outer.rank=null"])
    from_config(recipe.outer)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["recipe", "keys"]])
def test_output_that_cannot_be_written(words: list[str]) -> None:
    """A full disk behind the output is an error, said once."""
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        found = hf_cocodc_command(*words, stdout=full, stderr=subprocess.PIPE, env=buffered)
    assert found.returncode == 1
    assert found.stderr == "error: the output cannot be written: No space left on device.\n"


PLANNED = ["--rtt-ms", "40", "--rate-mbit", "40", "--step-s", "1"]
WRONG_SETTINGS = [
    ("diloco", "outer.method=dilcoo"),
    ("diloco", "outer.overlap_steps=30"),
    ("diloco", "outer.overlap_steps=3"),
    ("diloco", "outer.overlap_steps=auto"),
    ("diloco", "outer.num_fragments=2"),
    ("diloco", "outer.fragment_pattern=hole"),
    ("diloco", "outer.codec=int7"),
    ("diloco", "outer.codec=topk"),
    ("diloco", "outer.error_feedback=true"),
    ("diloco", "outer.rank=5"),
    ("diloco", "outer.mean=middle"),
    ("diloco", "outer.outer_lr=auto"),
    ("diloco", "outer.options={k: 3}"),
    ("streaming", "outer.sync_interval=3"),
    ("cocodc", "outer.compensation=adaptiv"),
    ("cocodc", "outer.sends_per_interval=1000"),
    ("co2", "outer.staleness_penalty=0.5"),
    ("co2", "outer.clip_momentum=off"),
    ("muloco", "training.optim=sgd"),
    ("diloco", "regions.timeout_s=-1"),
    ("diloco", "regions.min=5"),
]
"""Recipes, and a change that cannot work."""


def test_no_command_imports_torch_before_it_needs_it(tmp_path: Path) -> None:
    """Help and most mistakes come at once: torch and transformers take seconds to import."""
    (tmp_path / "typo.yaml").write_text("modell: 5\n")
    (tmp_path / "picture.yaml").write_bytes(b"\x89PNG\r\n\x1a\n")
    words = [
        *(["--help"], ["--version"], ["train", "--help"], ["bench", "link", "--help"], [], ["nonsense"]),
        *(
            ["train", "missing.yaml"],
            ["simulate", "missing.yaml"],
            ["train", "typo.yaml"],
            ["train", "picture.yaml"],
        ),
        *(["simulate", "typo.yaml"], ["simulate", "picture.yaml", "--step-s", "nan"]),
        *(["train", str(RECIPES / "co2.yaml"), "--region", "7"], ["coordinator", "--port", "99999"]),
        *(["bench", "outer", "--millions", "1"], ["bench", "link", "--json", "no/such/file"]),
        ["bench", "link", "--regions", "0"],
        *(["train", str(RECIPES / f"{name}.yaml"), "--set", override] for name, override in WRONG_SETTINGS),
        *([name, "quickstart/diloco", "--set", "outer.merge=mixx"] for name in ("train", "simulate")),
        ["plan", "quickstart/co2", *PLANNED, "--set", "outer.staleness_penalty=0.5"],
    ]
    script = f"""
import sys
from hf_cocodc.cli.main import main
for words in {words!r}:
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    assert code == (0 if {{"--help", "--version"}} & set(words) else 2), (words, code)
    heavy = {{"torch", "transformers", "datasets", "accelerate", "peft"}} & set(sys.modules)
    assert not heavy, (words, heavy)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train", "diloco.yaml", "--set", "outer.sync_interval", "10"],
            "--set outer.sync_interval 10 must be one argument: --set outer.sync_interval=10",
        ),
        (
            ["doctor", "--set", "outer.rank", "10", "diloco.yaml"],
            "must be one argument: --set outer.rank=10",
        ),
    ],
)
def test_a_wrong_spelling_is_told_the_right_one(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that people try."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["train", "diloco.yaml", "--region", "9" * 60_000],
        ["train", "diloco.yaml", "--" + "a" * 60_000],
        ["train", "diloco.yaml", "--set", "a" * 60_000, "b" * 60_000],
        ["a" * 60_000],
        ["train", "muloco.yaml", "--set", f"training.optim={'a' * 60_000}"],
        ["train", "diloco.yaml", "--set", f"training.optim={'a' * 60_000}"],
        ["train", "diloco.yaml", "--set", f"outer.codec={'a' * 60_000}"],
        ["train", "diloco.yaml", "--set", f"model.config.model_type={'a' * 60_000}"],
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_a_refusal_is_short(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long the value is that it names."""
    monkeypatch.chdir(RECIPES)
    try:
        code: Any = main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert len(capsys.readouterr().err) < 2500


def test_help_lists_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """All that an error of this package can have; that of a command says where they are."""

    def of(kind: type[CocodcError]) -> set[int]:
        return {kind.exit_code}.union(*map(of, kind.__subclasses__()))

    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert capsys.readouterr().out.endswith("\nExit codes: see hf-cocodc --help.\n")
    with pytest.raises(SystemExit):
        main(["--help"])
    _, _, listed = capsys.readouterr().out.partition("exit codes:\n")
    codes = {int(line.split()[0]) for line in listed.splitlines() if line[:3].strip()}
    assert codes == of(CocodcError) | {129, 130}


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (["bench", "link", "--help"], CODECS),
        (["recipe", "new", "--help"], newer.known()),
    ],
)
def test_help_lists_the_choices(words: list[str], known: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an option that takes some names only."""
    with pytest.raises(SystemExit):
        main(words)
    assert ", ".join(known) in " ".join(capsys.readouterr().out.split())


def test_a_name_of_the_run_that_the_environment_contradicts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before a region is started."""
    monkeypatch.setenv("HF_COCODC_RUN", "other")
    assert main(["train", str(RECIPES / "diloco.yaml"), "--run", "mine"]) == 2
    assert "regions.run='mine' but the environment says HF_COCODC_RUN='other'" in capsys.readouterr().err


def test_what_cannot_work_is_said_without_a_warning_about_a_single_region(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing tells of other regions here; but a run that does not begin does not train alone either."""
    settings.environment.warn_alone.cache_clear()
    words = ["--set", "regions.count=null", "--set", "outer.codec=nonsense"]
    assert main(["train", str(RECIPES / "diloco.yaml"), *words]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert not caplog.records


def test_an_ipv6_address_reaches_the_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As text: in YAML it would be the beginning of a list."""
    given: list[str] = []

    def start(program: Program, *args: object, **kwargs: object) -> None:
        given.extend(program.words[4::2])
        raise InputError("that is all")

    monkeypatch.setattr("hf_cocodc.coordinator.client.status", lambda *args: [])
    monkeypatch.setattr("hf_cocodc.training.launch.start", start)
    assert main(["train", str(RECIPES / "diloco.yaml"), "--region", "1", "--coordinator", "[::1]:29650"]) == 2
    assert Recipe.load(RECIPES / "diloco.yaml", given).regions.coordinator == "[::1]:29650"


def test_a_check_of_a_file_leaves_a_link(tmp_path: Path) -> None:
    """Its target may not be there yet."""
    link = tmp_path / "latest.json"
    link.symlink_to(tmp_path / "today.json")
    check_writable("--json", link)
    assert link.is_symlink()
    check_writable("--json", tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()
