"""`hf-cocodc train --join` without a recipe: the run gives it, as a file that counts once the user has named it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc import RegionConfig
from hf_cocodc.cli import joining, supervising
from hf_cocodc.cli.main import main
from hf_cocodc.coordinator.messages import Bye
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.net.keys import Keys
from hf_cocodc.settings.handed import handed_over
from hf_cocodc.settings.recipe import Recipe
from tests.coordinator.regions import Region, hello, meet, part
from tests.secret import secret

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart" / "diloco.yaml"
REGIONS = RegionConfig(region=0, count=2, min=1, max=4, coordinator="10.0.0.1:29650").resolved({})
CHANGES = ["training.use_cpu=true", "training.logging_steps=7"]


class Place:
    """A coordinator, the folder in which commands run, and what they would carry out."""

    def __init__(self, folder: Path, orders: list[supervising.Order], **given: Any) -> None:
        self.served = serve_in_thread(**given)
        self.folder, self.orders = folder, orders
        self.regions: list[Region] = []

    @property
    def address(self) -> str:
        return self.served.address

    def begin(self, *changes: str, name: str = "mine") -> None:
        """A run of the quickstart recipe with these changes, that trains."""
        self.begin_with(handed_over(Recipe.load(RECIPE, [*CHANGES, *changes]), REGIONS, name), name)

    def begin_with(self, handed: Any, name: str = "mine", keys: Keys | None = None) -> None:
        more = {} if handed is None else {"recipe": handed}
        hellos = [hello(region, elastic=True, **more) for region in (0, 1)]
        self.regions += meet(self.address, *hellos, run=name, keys=keys)

    def join(self, *words: str) -> int:
        return main(["train", "--join", "--coordinator", self.address, *words])


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[supervising.Order]:
    found: list[supervising.Order] = []

    def carry_out(order: supervising.Order) -> int:
        found.append(order)
        return 0

    monkeypatch.setattr("hf_cocodc.cli.train.carry_out", carry_out)
    return found


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orders: list[supervising.Order]
) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(joining, "AGAIN_S", 0.05)
    made = Place(tmp_path, orders)
    yield made
    part(*made.regions)
    made.served.close()


def test_the_recipe_of_the_run_is_trained_once_it_is_named(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it names as code has not run before."""
    (place.folder / "evil.py").write_text("open('was-run', 'w').close()\n")
    monkeypatch.syspath_prepend(str(place.folder))
    place.begin("outer.method=evil:method", "outer.sync_interval=null")
    assert [place.join(), place.join()] == [2, 2]
    named = f"hf-cocodc train runs/mine.yaml --join --coordinator {place.address}"
    said = capsys.readouterr().err
    assert "the recipe of run 'mine' is in runs/mine.yaml. Read it" in said and named in said
    kept = Recipe.load("runs/mine.yaml")
    assert kept.outer.method == "evil:method"
    assert kept.training == Recipe.load(RECIPE, [*CHANGES, "training.output_dir=runs/mine"]).training
    assert (kept.regions.count, kept.regions.min, kept.regions.max, kept.regions.run) == (2, 1, 4, "mine")
    assert not place.orders
    assert main(named.split()[1:]) == 0
    [order] = place.orders
    assert order.part.join and order.part.name == "mine"
    assert order.program.folder == Path("runs/mine")
    assert not (place.folder / "was-run").exists()


def test_a_file_that_is_there_never_changes(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The user may have changed it, or a region may be about to read it."""
    place.begin()
    mine = place.folder / "runs" / "mine.yaml"
    mine.parent.mkdir()
    mine.write_text("mine: alone\n")
    assert place.join() == 2
    assert "runs/mine.yaml is there already" in capsys.readouterr().err
    assert mine.read_text() == "mine: alone\n"


def test_a_dry_run_writes_no_recipe(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.begin()
    assert place.join("--dry-run") == 2
    assert "would be in runs/mine.yaml" in capsys.readouterr().err
    assert not list(place.folder.iterdir())


@pytest.mark.parametrize("words", [[], ["--region", "1", "--coordinator", "127.0.0.1:1"]])
def test_who_starts_a_run_names_a_recipe(
    words: list[str], orders: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    assert "name a recipe: hf-cocodc train RECIPE. Only to join" in capsys.readouterr().err
    assert main(["train", "--join", *words[:2]]) == 2
    assert "--join needs the coordinator of the run" in capsys.readouterr().err
    assert not orders


def test_several_runs(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The name decides. A run that has ended is none of several."""
    place.begin(name="mine")
    place.begin(name="other")
    assert place.join() == 2
    assert "several runs" in capsys.readouterr().err
    assert place.join("--run", "other") == 2
    assert "recipe of run 'other' is in" in capsys.readouterr().err
    place.regions[0].client.close(Bye(how="finished", step=80, place="/out"))
    assert place.join() == 2
    assert "recipe of run 'other' is in" in capsys.readouterr().err
    assert place.join("--run", "mine") == 0
    assert "run 'mine' has finished at step 80: there is nothing to join. Its model is at /out" in (
        capsys.readouterr().out
    )


def test_only_a_caller_with_the_secret_gets_a_recipe(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    orders: list[supervising.Order],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    ours, other = tmp_path / "ours", tmp_path / "other"
    for file in (ours, other):
        file.write_text(secret(file.name))
        file.chmod(0o600)
    keys = Keys.from_secret(secret("ours"))
    place = Place(tmp_path, orders, secrets=[keys])
    try:
        recipe = Recipe.load(RECIPE, CHANGES)
        place.begin_with(handed_over(recipe, REGIONS, "mine"), keys=keys)
        assert place.join() == 2
        assert "the coordinator has a secret, and the caller has none" in capsys.readouterr().err
        assert place.join("--secret-file", str(other)) == 2
        assert "the caller has another secret" in capsys.readouterr().err
        assert not (tmp_path / "runs").exists()
        assert place.join("--secret-file", str(ours)) == 2
        assert (tmp_path / "runs" / "mine.yaml").is_file()
    finally:
        part(*place.regions)
        place.served.close()


def test_a_coordinator_of_another_version_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "hf_cocodc.coordinator.caller.versions", lambda: {"hf_cocodc": 13, "version": "0.0.9"}
    )
    assert place.join() == 2
    assert "hf-cocodc 0.0.9 (protocol 13)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("handed", "said"),
    [
        (None, "run 'mine' was started by a script, which has no recipe. Start the same script here"),
        ({"why": "it has 99999 bytes"}, "does not hand over its recipe: it has 99999 bytes. Get the file"),
        ({"text": 3}, "does not hand over its recipe"),
    ],
)
def test_a_run_without_a_recipe_says_what_to_do(
    handed: Any, said: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.begin_with(handed)
    assert place.join() == 2
    assert said in capsys.readouterr().err
    assert not place.orders and not list(place.folder.iterdir())


@pytest.mark.parametrize(
    ("name", "file"),
    [("../up", "__up"), (".hidden", "_hidden"), ("/root/x", "_root_x"), ("~x", "_x"), ("a\nb", "a_b")],
)
def test_the_name_of_a_run_chooses_no_folder(name: str, file: str, place: Place) -> None:
    place.begin(name=name)
    assert place.join() == 2
    assert [str(each.relative_to(place.folder)) for each in place.folder.rglob("*.yaml")] == [
        f"runs/{file}.yaml"
    ]


def test_the_environment_can_say_all(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a scheduler does."""
    for name, value in (("JOIN", "1"), ("COORDINATOR", place.address), ("RUN", "mine"), ("REGION", "3")):
        monkeypatch.setenv(f"HF_COCODC_{name}", value)
    place.begin()
    place.begin(name="other")
    assert main(["train"]) == 2
    assert "the recipe of run 'mine' is in runs/mine.yaml" in capsys.readouterr().err
