"""The method of a user's own in the guide is what it says: its files are taken from the text and run."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from hf_cocodc import OuterConfig, OuterOptimizer, simulate
from hf_cocodc.cli.main import main
from hf_cocodc.errors import CheckpointError, HandshakeError
from hf_cocodc.link.base import Link
from hf_cocodc.run.journal import read
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.training.preflight import check
from tests.processes.launching import flags, little_text
from tests.toys import Blocks

ROOT = Path(__file__).parents[2]
SHORT = ["training.max_steps=20", "training.eval_strategy=no", "training.eval_on_start=false"]


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the tutorial's files, where the process runs."""
    text = (ROOT / "docs" / "guides" / "own-method.md").read_text(encoding="utf-8")
    files = re.findall(r"<!-- (\S*signs\.\w+) -->\n```\w+\n(.*?)```", text, flags=re.DOTALL)
    assert [name for name, _ in files] == ["signs.py", "signs.yaml", "try_signs.py"]
    for name, content in files:
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("signs", None)


def train(region: int, link: Link, config: Any, steps: int = 9) -> Tensor:
    """A few steps on vectors, with gradients of the region's own."""
    model = Blocks([torch.linspace(-1, 1, 512).view(8, 64), torch.linspace(0, 1, 100)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    accelerator = Accelerator(cpu=True)
    with OuterOptimizer(accelerator, model, optimizer, config, max_steps=steps, link=link) as outer:
        for step in range(outer.inner_step, steps):
            for vector in model.vectors():
                goal = torch.linspace(1, -1, vector.numel()).view_as(vector) * (region + 1 + step % 2)
                vector.grad = vector.detach() - goal
            optimizer.step()
            outer.step()
    return torch.cat([vector.detach().flatten() for vector in model.vectors()])


def test_its_regions_agree(tutorial: Path) -> None:
    """Named, or given as a function: all regions end with the bits of one model, and both ways give the same bits."""
    named = OuterConfig(method="signs:ef_signs", sync_interval=3, options={"block": 8})
    from signs import ef_signs

    given = OuterConfig(method=ef_signs, sync_interval=3, options={"block": 8})
    found = [simulate(lambda r, link, c=config: train(r, link, c), regions=3) for config in (named, given)]
    for finals in found:
        assert all(torch.equal(final, found[0][0]) for final in finals)
    start = torch.cat([torch.linspace(-1, 1, 512), torch.linspace(0, 1, 100)])
    assert not torch.equal(found[0][0], start)


def test_its_coder_gives_what_its_bytes_say(tutorial: Path) -> None:
    """As many bytes as it says, signs kept, one magnitude a block."""
    from signs import Signs

    values = torch.randn(2 * 16 + 3, generator=torch.Generator().manual_seed(0))
    coder = Signs(16)
    payload = coder.encode(values)
    assert payload.numel() == 3 * (4 + 2)
    decoded = coder.decode(payload, 35)
    assert torch.equal(decoded.sign(), values.sign())
    for block, ours in zip(values.split(16), decoded.split(16), strict=True):
        torch.testing.assert_close(ours.abs(), (block.abs().sum() / 16).expand(len(block)))
    assert float((decoded - values)[:32].norm() / values[:32].norm()) < 0.7


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"options": {"block": 16}}, r"disagree on options\.block: region 0 has 8, region 1 has 16"),
        ({"method": "other:ef_signs"}, "disagree on outer.method: .*'signs:ef_signs'.*'other:ef_signs"),
    ],
)
def test_regions_that_differ_in_it_refuse(other: dict[str, Any], words: str, tutorial: Path) -> None:
    """In an option, or in the module that it comes from."""
    (tutorial / "other.py").write_text((tutorial / "signs.py").read_text(), encoding="utf-8")
    same: dict[str, Any] = {"method": "signs:ef_signs", "sync_interval": 3, "options": {"block": 8}}

    def body(region: int, link: Link) -> Tensor:
        return train(region, link, OuterConfig(**(same | other if region else same)))

    with pytest.raises(HandshakeError, match=words):
        simulate(body, regions=2)


def test_a_recipe_names_it(tutorial: Path) -> None:
    """The recipe of the tutorial composes, in a process that was not started there."""
    sys.path.remove(str(tutorial))
    check(Recipe.load("signs.yaml"))
    check(Recipe.load("quickstart/cocodc", ["outer.codec=signs:one_bit", "outer.error_feedback=true"]))


def test_a_checkpoint_names_it(tutorial: Path) -> None:
    """A run that goes on with another method is refused; with the same one it ends with the bits of a run never stopped."""
    (tutorial / "other.py").write_text((tutorial / "signs.py").read_text(), encoding="utf-8")

    def body(region: int, link: Link, name: str, saved: Path | None, steps: int) -> Tensor:
        config = OuterConfig(method=name, sync_interval=4, options={"block": 8})
        model = Blocks([torch.linspace(-1, 1, 512).view(8, 64)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        folder = tutorial / f"region-{region}"
        with OuterOptimizer(accelerator, model, optimizer, config, link=link, max_steps=9) as outer:
            if saved is not None:
                accelerator.load_state(str(folder))
            for step in range(outer.inner_step, steps):
                for vector in model.vectors():
                    vector.grad = vector.detach() - (region + 1 + step % 2)
                optimizer.step()
                outer.step()
                if saved is None and step == 5:
                    accelerator.save_state(str(folder))
        return torch.cat([vector.detach().flatten() for vector in model.vectors()])

    whole = simulate(lambda r, link: body(r, link, "signs:ef_signs", None, 9), regions=2)
    again = simulate(lambda r, link: body(r, link, "signs:ef_signs", tutorial, 9), regions=2)
    assert torch.equal(whole[1], again[1])
    with pytest.raises(
        CheckpointError, match="with outer.method=signs:ef_signs, this run has other:ef_signs"
    ):
        simulate(lambda r, link: body(r, link, "other:ef_signs", tutorial, 9), regions=2)


@pytest.mark.slow
def test_its_script_runs_as_it_stands(tutorial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python try_signs.py`: two regions end with the same model."""
    runpy.run_path("try_signs.py", run_name="__main__")
    assert "outer/loss" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_trains_its_recipe(tutorial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two regions as processes, started by the command: the module is found where the command runs."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tutorial / "cache"))
    assert main(["train", "signs.yaml", *flags([*SHORT, *little_text(tutorial / "text")])]) == 0
    folder = tutorial / "runs" / "signs"
    start, *_ = read(folder / "region-1" / "cocodc" / "journal.jsonl")
    assert (start["outer"]["method"], start["outer"]["options.block"]) == ("signs:ef_signs", 128)
    card = (folder / "region-0" / "README.md").read_text(encoding="utf-8")
    assert "Paper: [EF-SignSGD](https://arxiv.org/abs/1901.09847)" in card
