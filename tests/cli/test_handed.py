"""`hf-cocodc train --join` without a recipe: the run gives it, and what is not for this machine is refused with a way out."""

from __future__ import annotations

import dataclasses
import json
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
CHANGES = ["training.use_cpu=true", "training.per_device_train_batch_size=4"]


class Place:
    """A coordinator, the folder in which commands run, and what they would carry out."""

    def __init__(self, folder: Path, orders: list[supervising.Order], **given: Any) -> None:
        self.served = serve_in_thread(**given)
        self.folder, self.orders = folder, orders
        self.regions: list[Region] = []

    @property
    def address(self) -> str:
        return self.served.address

    def begin(self, *changes: str, name: str = "mine", **told: Any) -> None:
        """A run of the quickstart recipe with these changes, that trains. `told`: of what it hands over."""
        recipe = Recipe.load(RECIPE, [*CHANGES, *changes])
        regions = dataclasses.replace(REGIONS, rate_limit=recipe.regions.rate_limit)
        handed = handed_over(recipe, regions, 4)
        self.begin_with({**handed, **told}, name)

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


def test_the_recipe_of_the_run_is_trained_and_kept(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the run's folder: --resume later names that file."""
    place.begin("regions.rate_limit=40")
    assert place.join("--set", "training.logging_steps=7") == 0
    said = capsys.readouterr().out
    assert "recipe of run 'mine', written to runs/mine.yaml\n" in said
    [order] = place.orders
    kept = Recipe.load(place.folder / "runs" / "mine.yaml")
    wanted = Recipe.load(RECIPE, [*CHANGES, "training.logging_steps=7", "training.output_dir=runs/mine"])
    assert kept.training == wanted.training
    assert (kept.regions.count, kept.regions.min, kept.regions.max, kept.regions.run) == (2, 1, 4, "mine")
    assert (kept.model, kept.data, kept.outer) == (wanted.model, wanted.data, wanted.outer)
    assert order.part.join and order.part.name == "mine"
    assert order.program.folder == Path("runs/mine")
    assert order.program.words[2] == "runs/mine.yaml"


def test_a_file_that_is_there_never_changes(place: Place) -> None:
    """A region that comes back gets the file that it had. One that is started with other changes, perhaps at the same time, gets
    one of its own: the first may be about to read it.
    """
    place.begin()
    other = ("--set", "training.logging_steps=9")
    assert [place.join(), place.join(*other), place.join(), place.join(*other)] == [0] * 4
    files = ["runs/mine.yaml", "runs/mine.1.yaml"] * 2
    assert [order.program.words[2] for order in place.orders] == files
    assert [Recipe.load(file).training.get("logging_steps") == 9 for file in files[:2]] == [False, True]
    first = place.folder / "runs" / "mine.yaml"
    first.write_text("mine: alone\n")
    assert place.join() == 0
    assert place.orders[-1].program.words[2] == "runs/mine.2.yaml"
    assert first.read_text() == "mine: alone\n"


def test_a_dry_run_writes_no_recipe(place: Place) -> None:
    place.begin()
    assert place.join("--dry-run") == 0
    assert place.orders[0].dry_run is not None
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


def test_no_run_and_several_runs(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The name decides. A run that has ended is none of several."""
    assert place.join("--set", "regions.start_timeout_s=0.2") == 1
    assert f"no region of a run trains at {place.address}" in capsys.readouterr().err
    place.begin(name="mine")
    place.begin(name="other")
    assert place.join() == 2
    assert "several runs" in capsys.readouterr().err
    assert place.join("--run", "other") == 0
    assert place.join("--run", "none", "--set", "regions.start_timeout_s=0.2") == 1
    place.regions[0].client.close(Bye(how="finished", step=80, place="/out"))
    assert place.join() == 0
    assert [each.part.name for each in place.orders] == ["other", "other"]
    assert place.join("--run", "mine") == 0
    assert "run 'mine' has finished at step 80: there is nothing to join. Its model is at /out" in (
        capsys.readouterr().out
    )
    assert len(place.orders) == 2


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
        place.begin_with(handed_over(recipe, REGIONS, 4), keys=keys)
        assert place.join() == 2
        assert "the coordinator has a secret, and the caller has none" in capsys.readouterr().err
        assert place.join("--secret-file", str(other)) == 2
        assert "the caller has another secret" in capsys.readouterr().err
        assert not (tmp_path / "runs").exists()
        assert place.join("--secret-file", str(ours)) == 0
        [order] = orders
        assert order.part.regions.secret_file == str(ours)
        assert str(ours) not in (tmp_path / "runs" / "mine.yaml").read_text()
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
        ({"text": 3}, "the coordinator gives what is no recipe of this version"),
        ({"text": "model: ["}, "not valid JSON"),
        ({"text": '{"a": 1}'}, "as the coordinator at"),
    ],
)
def test_a_run_without_a_recipe_says_what_to_do(
    handed: Any, said: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.begin_with(handed)
    assert place.join() == 2
    assert said in capsys.readouterr().err
    assert not place.orders and not list(place.folder.iterdir())


def test_a_recipe_that_lies_runs_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module that it names is not imported before the user has named the file; it is there to be read."""
    (place.folder / "evil.py").write_text("open('was-run', 'w').close()\n")
    monkeypatch.syspath_prepend(str(place.folder))
    recipe = Recipe.load(RECIPE, [*CHANGES, "outer.method=evil:method", "training.deepspeed=/tmp/x.json"])
    handed = handed_over(recipe, REGIONS, 4)
    place.begin_with(handed)
    assert place.join() == 2
    said = capsys.readouterr()
    assert "outer.method='evil:method', training.deepspeed='/tmp/x.json'. They do not count" in said.err
    assert f"hf-cocodc train runs/mine.yaml --join --coordinator {place.address}" in said.err
    assert Recipe.load("runs/mine.yaml").outer.method == "evil:method"
    mine = ["--set", "outer.method=diloco", "--set", "training.deepspeed=mine.json"]
    assert place.join(*mine) == 0
    assert main(["train", "runs/mine.yaml", "--join", "--coordinator", place.address]) == 0
    assert len(place.orders) == 2
    assert not (place.folder / "was-run").exists()


@pytest.mark.parametrize("name", ["../up", ".hidden", "/root/x", "~x", "a\nb"])
def test_the_name_of_a_run_chooses_no_folder(
    name: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.begin(name=name)
    assert place.join() == 2
    assert "is no name for a folder. Choose one: --set training.output_dir=FOLDER" in capsys.readouterr().err
    assert not list(place.folder.iterdir())
    assert place.join("--set", "training.output_dir=here/out") == 0
    assert (place.folder / "here" / "out.yaml").exists()
    assert place.orders[0].part.name == name


def test_a_folder_that_is_not_here_is_named_with_the_way_out(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A relative one, too: the library would look for it on the Hub. Elsewhere it may be on this machine."""
    for folder in ("there/qwen", "there/texts"):
        (place.folder / folder).mkdir(parents=True)
    monkeypatch.chdir(place.folder / "there")
    changes = [
        *("model.config=null", "model.name_or_path=qwen"),
        *("tokenizer.builtin=null", "tokenizer.name_or_path=qwen"),
        *("data.builtin=null", f"data.path={place.folder}/there/texts"),
    ]
    place.begin(*changes)
    (place.folder / "here").mkdir()
    monkeypatch.chdir(place.folder / "here")
    (place.folder / "there" / "texts").rename(place.folder / "here" / "texts")
    assert place.join() == 2
    said = capsys.readouterr().err
    assert "data.path='/" in said and ", and there is no such folder or file here" in said
    way_out = ("model.name_or_path", "tokenizer.name_or_path", "data.path")
    assert " ".join(f"--set {key}=FOLDER" for key in way_out) in said
    assert "Its last part must be 'qwen' and 'texts' there, too" in said
    assert not place.orders and not (place.folder / "here" / "runs").exists()
    folders = {
        "data.path": "texts",
        **{f"{each}.name_or_path": "../there/qwen" for each in ("model", "tokenizer")},
    }
    sets = [word for key, value in folders.items() for word in ("--set", f"{key}={value}")]
    assert place.join(*sets) == 0
    assert Recipe.load("runs/mine.yaml").data.path == "texts"


@pytest.mark.parametrize(
    ("batch", "way_out"),
    [(8, "--set training.gradient_accumulation_steps=2"), (6, "per_device_train_batch_size=N --set")],
)
def test_a_batch_that_differs_is_refused_with_the_way_out(
    batch: int, way_out: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """The region that opened the run may have more GPUs. Less memory takes more, smaller batches."""
    place.begin(batch=batch)
    assert place.join() == 2
    said = capsys.readouterr().err
    assert "4 x 1 = 4 sequences in an inner step" in said
    assert f"train on {batch}" in said and way_out in said
    sets = ["training.per_device_train_batch_size=1", f"training.gradient_accumulation_steps={batch}"]
    assert place.join(*(word for each in sets for word in ("--set", each))) == 0
    assert place.orders


def test_gpus_count_in_the_batch_and_none_is_started(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A region that is forked later could not use CUDA if this command did. Arguments for accelerate say themselves how many."""
    monkeypatch.setattr("hf_cocodc.run.gpus.visible", lambda: ["0", "1"])
    for name in ("is_initialized", "init", "get_device_name"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *given: pytest.fail("it starts CUDA"))
    place.begin("training.use_cpu=null", batch=16)
    assert place.join() == 2
    said = capsys.readouterr().err
    assert "4 x 1 x 2 GPUs = 8 sequences" in said and "--set training.gradient_accumulation_steps=2" in said
    assert place.join("--set", "training.gradient_accumulation_steps=2") == 0
    assert place.join("--", "--num_processes", "4") == 0


@pytest.mark.parametrize("folder", [".", "sub/..", "/"])
def test_the_output_folder_may_have_no_name(folder: str, place: Place) -> None:
    place.begin()
    assert place.join("--dry-run", "--set", f"training.output_dir={folder}") == 0
    assert place.orders[0].program.folder == Path(folder)


def test_a_batch_that_may_differ_is_left_alone(place: Place) -> None:
    recipe = Recipe.load(RECIPE, CHANGES)
    regions = RegionConfig(
        region=0, count=2, min=1, coordinator="10.0.0.1:29650", may_differ="batch"
    ).resolved({})
    place.begin_with(handed_over(recipe, regions, 99))
    assert place.join() == 0


def test_the_environment_can_say_all(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a scheduler does."""
    for name, value in (("JOIN", "1"), ("COORDINATOR", place.address), ("RUN", "mine"), ("REGION", "3")):
        monkeypatch.setenv(f"HF_COCODC_{name}", value)
    place.begin()
    place.begin(name="other")
    assert main(["train"]) == 0
    [order] = place.orders
    assert (order.part.join, order.part.name, order.part.region) == (True, "mine", 3)


def test_a_hand_made_recipe_keeps_its_own_folder_out(place: Place) -> None:
    """The folder of the machine that opened the run is no folder here, whoever says so."""
    content = {
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": {"builtin": "bytes"},
        "data": {"builtin": "python-stdlib"},
        "training": {"max_steps": 5, "use_cpu": True, "output_dir": "/root/.ssh"},
        "regions": {"count": 2, "min": 1, "run": "theirs", "secret_file": "/etc/passwd"},
    }
    place.begin_with({"text": json.dumps(content)})
    assert place.join() == 0
    kept = Recipe.load("runs/mine.yaml")
    assert kept.training["output_dir"] == "runs/mine"
    assert (kept.regions.run, kept.regions.secret_file) == ("mine", None)
