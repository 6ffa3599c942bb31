"""`accelerator.load_state` before and after the outer optimizer is made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import Tensor
from torch.utils.data import DataLoader

from hf_cocodc import OuterConfig, OuterOptimizer, simulate
from hf_cocodc.errors import CheckpointError, CocodcError, InputError, LinkError
from hf_cocodc.link.base import Link
from hf_cocodc.run.about import of_loop
from hf_cocodc.run.journal import read
from hf_cocodc.run.resuming import in_all
from hf_cocodc.snapshot.resume import CanResume
from tests.processes.launching import environment
from tests.processes.worker import Tokens
from tests.run.test_resuming import STEPS, config
from tests.toys import llama, params_of

SAVED = 6


class Loop:
    """A plain loop of one region, with dropout; what it is given happens at its inner steps."""

    def __init__(self, link: Link, journal: Path | None = None, **naming: Any) -> None:
        loaders = DataLoaderConfiguration(use_seedable_sampler=True)
        project = ProjectConfiguration(**naming)
        self.accelerator = Accelerator(cpu=True, dataloader_config=loaders, project_config=project)
        torch.manual_seed(link.region)
        model = llama(link.region, dropout=0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rows = Tokens(2 * STEPS, seed=link.region)
        loader = DataLoader(
            rows, batch_size=2, generator=torch.Generator()
        )  # it takes none of dropout's numbers
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.link, self.journal = link, journal
        self.outer: OuterOptimizer

    def begin(self, **more: Any) -> None:
        given = {"max_steps": STEPS, "link": self.link, "journal": self.journal, **more}
        self.outer = OuterOptimizer(self.accelerator, self.model, self.optimizer, config(), **given)

    def train(self, until: int = STEPS, then: Callable[[int], None] = lambda step: None) -> Tensor:
        for batch in self.accelerator.skip_first_batches(self.loader, self.outer.inner_step):
            self.accelerator.backward(self.model(**batch).loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.outer.step()
            then(self.outer.inner_step)
            if self.outer.inner_step == until:
                break
        if until == STEPS:
            self.outer.finish()
        return params_of(self.accelerator.unwrap_model(self.model))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    """Checkpoints of steps 3 and 6, with the names that Accelerate gives and a transfer in flight, and the end of the run."""
    folder = tmp_path_factory.mktemp("saved")

    def body(region: int, link: Link) -> Tensor:
        home = folder / f"region-{region}"
        loop = Loop(link, home / "journal.jsonl", project_dir=str(home), automatic_checkpoint_naming=True)
        loop.begin()
        return loop.train(then=lambda step: step in (3, SAVED) and loop.accelerator.save_state())

    return folder, simulate(body, regions=2)


def of_step(folder: Path, region: int, step: int) -> str:
    return str(folder / f"region-{region}" / "checkpoints" / f"checkpoint_{(3, SAVED).index(step)}")


ORDERS = {
    "before": lambda loop, load: loop.begin(loaded=load(SAVED)),
    "after": lambda loop, load: (loop.begin(), load(SAVED)),
    "before, twice": lambda loop, load: (load(3), loop.begin(loaded=load(SAVED))),
    "before and after": lambda loop, load: (loop.begin(loaded=load(3)), load(SAVED)),
    "before, and trained on": lambda loop, load: (
        loop.begin(loaded=load(3)),
        loop.train(STEPS - 1),
        load(SAVED),
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_whatever_the_order_the_run_goes_on_bit_for_bit(
    order: str, saved: tuple[Path, list[Tensor]], tmp_path: Path
) -> None:
    """From the checkpoint that was loaded last; the journal goes on, too."""
    folder = shutil.copytree(saved[0], tmp_path / "run")

    def body(region: int, link: Link) -> tuple[Tensor, list[dict]]:
        home = folder / f"region-{region}"
        loop = Loop(link, home / "journal.jsonl", project_dir=str(home), automatic_checkpoint_naming=True)

        def load(step: int) -> str:
            loop.accelerator.load_state(of_step(folder, region, step))
            return of_step(folder, region, step)

        ORDERS[order](loop, load)
        assert loop.outer.inner_step == SAVED
        return loop.train(), read(home / "journal.jsonl")

    for (end, journal), whole in zip(simulate(body, regions=2), saved[1], strict=True):
        assert torch.equal(end, whole)
        if order == "before":
            assert [event["step"] for event in journal if event["kind"] == "resume"] == [SAVED]
            sends = [event["step"] for event in journal if event["kind"] == "send"]
            assert sends == sorted(sends)


def test_a_loop_that_says_more_of_itself_goes_on_from_what_it_has_loaded(
    saved: tuple[Path, list[Tensor]],
) -> None:
    """Trainer's callback, which also gives `about`, has agreed on the beginning; a loop has not."""

    def body(region: int, link: Link) -> int:
        loop, path = Loop(link), of_step(saved[0], region, SAVED)
        loop.accelerator.load_state(path)
        loop.begin(loaded=path, about=of_loop(loop.accelerator, loop.model, loop.optimizer))
        return loop.outer.inner_step

    assert simulate(body, regions=2) == [SAVED, SAVED]


def test_a_rank_that_cannot_read_its_leaders_error_keeps_nobody_waiting() -> None:
    """It hears of an error of an unknown kind as a LinkError; the leader waits for it all the same."""
    asked: list[int] = []

    class Alone:
        parties = (0,)

        def gather(self, own: CanResume, what: str) -> list[CanResume]:
            asked.append(own.is_good)
            return [own]

    def fail() -> None:
        raise LinkError("region 0: KeyError")

    with pytest.raises(LinkError, match="KeyError"):
        in_all(Alone(), SimpleNamespace(num_processes=1), fail, "what regions load")  # type: ignore[arg-type]
    assert asked == [False]


def test_a_beginning_that_fails_leaves_no_trace(saved: tuple[Path, list[Tensor]]) -> None:
    """The model can be trained by the next outer optimizer, and save_state is Accelerate's own again."""

    def body(region: int, link: Link) -> None:
        loop = Loop(link)
        original = loop.accelerator.save_state
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hf_cocodc.run.outer_optimizer.hook_into_saving", lambda *given: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loop.begin()
        assert loop.accelerator.save_state == original
        loop.begin()

    simulate(body, regions=1)


def test_a_checkpoint_counts_for_one_outer_optimizer(saved: tuple[Path, list[Tensor]]) -> None:
    """The next one begins a new run, with the weights that the model has."""

    def body(region: int, link: Link) -> int:
        loop = Loop(link)
        loop.begin()
        loop.accelerator.load_state(of_step(saved[0], region, SAVED))
        loop.train()
        loop.begin(loaded=False)
        return loop.outer.inner_step

    assert simulate(body, regions=1) == [0]


def test_nobody_trains_on_after_a_load_that_has_failed_halfway(saved: tuple[Path, list[Tensor]]) -> None:
    """Accelerate has loaded the model, and the run's own part is of another method; a good load makes up for it."""

    def body(region: int, link: Link) -> None:
        loop, path = Loop(link), of_step(saved[0], region, SAVED)
        other = OuterConfig(method="co2", sync_interval=2)
        loop.outer = OuterOptimizer(loop.accelerator, loop.model, loop.optimizer, other, link=link)
        with pytest.raises(CheckpointError, match=r"outer\.method"):
            loop.accelerator.load_state(path)
        for call in (loop.outer.step, loop.outer.finish, partial(loop.outer.save, "nowhere")):
            with pytest.raises(
                CocodcError, match=r"a load of a checkpoint at step 0 failed halfway.*load_state"
            ):
                call()
        loop.outer.close()

    simulate(body, regions=1)


def test_a_load_that_is_refused_at_once_harms_nothing(
    saved: tuple[Path, list[Tensor]], tmp_path: Path
) -> None:
    """A damaged checkpoint is not loaded by Accelerate either."""

    def body(region: int, link: Link) -> None:
        loop, path = Loop(link), tmp_path / "damaged"
        shutil.copytree(of_step(saved[0], region, SAVED), path)
        (path / "model.safetensors").write_bytes(b"")
        loop.begin()
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            loop.accelerator.load_state(str(path))
        loop.train()

    simulate(body, regions=1)


def test_what_accelerate_alone_has_saved_begins_a_new_run(tmp_path: Path) -> None:
    def body(region: int, link: Link) -> int:
        loop = Loop(link)
        loop.accelerator.save_state(str(tmp_path / f"{region}"))
        loop.accelerator.load_state(str(tmp_path / f"{region}"))
        loop.begin(loaded=tmp_path / f"{region}")
        return loop.outer.inner_step

    assert simulate(body, regions=2) == [0, 0]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((SAVED, None), "region 0 begins from step 6, region 1 from step 0, without a checkpoint. Let every"),
        ((None, SAVED), "region 0 begins from step 0, without a checkpoint, region 1 from step 6. Let every"),
        ((3, SAVED), "region 0 begins from step 3, region 1 from step 6"),
    ],
)
def test_regions_that_have_loaded_different_steps_are_refused(
    steps: tuple[int | None, ...], message: str, saved: tuple[Path, list[Tensor]]
) -> None:
    def body(region: int, link: Link) -> None:
        loop, step = Loop(link), steps[region]
        path = None if step is None else of_step(saved[0], region, step)
        if path is not None:
            loop.accelerator.load_state(path)
        loop.begin(loaded=path)

    with pytest.raises(CheckpointError, match=message):
        simulate(body, regions=2)


REFUSED = {
    "a hash": (CheckpointError, "random_states_0.pkl has 6 bytes"),
    "another region's": (CheckpointError, "the checkpoint is region 0's, and this is region 1"),
    "no folder": (ValueError, "folder does not exist"),  # Accelerate's words, where it looks first
}


@pytest.mark.parametrize(
    ("when", "wrong"),
    [
        ("before", "a hash"),
        ("before", "another region's"),
        *(("after", wrong) for wrong in REFUSED),
    ],
)
def test_what_one_region_cannot_load_is_refused_in_all(
    when: str, wrong: str, saved: tuple[Path, list[Tensor]], tmp_path: Path
) -> None:
    """No region waits for one that has ended: each ends with an error of its own."""
    folder, said = shutil.copytree(saved[0], tmp_path / "run"), {}
    if wrong == "a hash":
        (Path(of_step(folder, 1, SAVED)) / "random_states_0.pkl").write_bytes(b"spoilt")

    def body(region: int, link: Link) -> None:
        loop = Loop(link)
        path = of_step(folder, 0 if wrong == "another region's" else region, SAVED)
        if wrong == "no folder" and region:
            path += "-none"
        try:
            ORDERS[when](loop, lambda step: loop.accelerator.load_state(path) or path)
        except Exception as error:
            said[region] = error
        else:
            raise AssertionError(f"region {region} goes on")

    simulate(body, regions=2)
    kind, words = REFUSED[wrong]
    if wrong == "no folder" and when == "after":
        kind, words = CheckpointError, "cannot be loaded: there is no such folder"
    assert isinstance(said[1], kind)
    assert words in str(said[1])
    assert isinstance(said[0], CheckpointError)
    assert str(said[0]).startswith("region 1 cannot go on from its checkpoint, so no region does. It says: ")
    assert str(said[0]).endswith(str(said[1]))


def begins_with(loop: Loop, what: str) -> None:
    """What comes before the outer optimizer."""
    if what == "steps":
        loop.accelerator.backward(loop.model(**next(iter(loop.loader))).loss)
        loop.optimizer.step()
    else:
        schedule = torch.optim.lr_scheduler.LinearLR(loop.optimizer.optimizer)
        loop.accelerator.prepare(schedule)
        schedule.last_epoch = 7  # as load_state leaves it


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("steps", "the inner optimizer has made steps"),
        ("a schedule", "a learning rate schedule has made 7 steps"),
    ],
)
def test_a_load_that_nobody_could_see_is_refused(what: str, said: str) -> None:
    """Nothing is patched: Accelerate keeps no trace of a load. A script says whether it was one, or a warm-up of its own."""

    def body(region: int, link: Link) -> int:
        loop = Loop(link)
        begins_with(loop, what)
        with pytest.raises(
            InputError, match=rf"{said} before OuterOptimizer.*loaded=folder\).*loaded=False\)"
        ):
            loop.begin()
        loop.begin(loaded=False)
        return loop.outer.inner_step

    assert simulate(body, regions=1) == [0]


def test_the_import_leaves_accelerate_as_it_is() -> None:
    script = """
        import sys
        from accelerate import Accelerator

        before = Accelerator.__init__, Accelerator.load_state, Accelerator.save_state, sys.excepthook
        import hf_cocodc.run.outer_optimizer, hf_cocodc.trainer.callback
        hf_cocodc.RunStopped("made")
        assert before == (Accelerator.__init__, Accelerator.load_state, Accelerator.save_state, sys.excepthook)
    """
    ended = subprocess.run(
        [sys.executable, "-c", dedent(script)], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
