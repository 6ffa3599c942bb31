"""The model card says what was trained, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import Trainer

from hf_cocodc import CoCoDCCallback, OuterConfig, simulate
from hf_cocodc.link.base import Link
from hf_cocodc.trainer import hub
from tests.trainer.test_trainer import make

COCODC = OuterConfig(
    method="cocodc",
    sync_interval=4,
    num_fragments=2,
    overlap_steps=1,
    sends_per_interval=4,
    compensation="additive",
)


def trained(folder: Path, config: OuterConfig = COCODC) -> str:
    """Region 0's card of a run of two regions."""

    def body(region: int, link: Link) -> Trainer:
        trainer = make(folder / "a-run", [CoCoDCCallback(config, link=link)], max_steps=9)
        trainer.train()
        trainer.create_model_card()
        return trainer

    simulate(body, regions=2)
    return (folder / "a-run" / "region-0" / "README.md").read_text(encoding="utf-8")


def test_the_card_is_titled_and_says_what_is_known(tmp_path: Path) -> None:
    """No empty link to a base model, no dataset called None, not the folder of a region; figures that were counted."""
    text = trained(tmp_path)
    assert "\n# a-run\n" in text
    assert "name: a-run\n" in text
    for wrong in ("[](", "None", "# region-0"):
        assert wrong not in text
    assert "trained from scratch on an unknown dataset." in text
    assert "| H (sync_interval) | 4 inner steps |" in text
    # a send after each of 9 steps, and at the end one more of the fragment whose turn it was not
    assert "| outer steps | 10, each of one of 2 fragments |" in text
    assert "| inner steps between two landings of a fragment | 1.8 on average |" in text


def test_what_the_caller_says_counts(tmp_path: Path) -> None:
    """A name and a dataset, by name or by position."""
    seen: list[tuple[Any, ...]] = []
    folder = tmp_path / "a-run" / "region-3"
    folder.mkdir(parents=True)

    def create(language: str | None = None, model_name: str | None = None) -> None:
        seen.append((language, model_name))

    hub.draft(folder, {}, create, "en", "mine")
    hub.draft(folder, {}, create, model_name="mine")
    hub.draft(folder, {}, create, "en", "region-3")  # TRL names the folder itself
    hub.draft(folder, {}, create)
    hub.draft(folder, {}, lambda tags=None: seen.append((tags,)), tags="t")
    assert seen == [("en", "mine"), (None, "mine"), ("en", "a-run"), (None, "a-run"), ("t",)]


def test_an_earlier_section_is_replaced(tmp_path: Path) -> None:
    """Nothing is said twice, and what stands before it stays, with its metadata."""
    path = tmp_path / "README.md"
    before = "---\nlicense: mit\n---\n# My model\n\nWords.\n"
    path.write_text(f"{before}\n{hub.HEADING}\n\nold figures\n", encoding="utf-8")
    said = {"others": "", "paper": ("A title", "1234.5678"), "regions_agree": True}
    for figure in ("new", "newer"):
        hub.write(tmp_path, {"rows": {"figure": figure}, **said})
    text = path.read_text(encoding="utf-8")
    assert text.count(hub.HEADING) == 1 and "# My model\n\nWords.\n\n## " in text
    assert text.endswith("| figure | newer |\n\nPaper: [A title](https://arxiv.org/abs/1234.5678).\n")
    assert ModelCard.load(path).data.to_dict() == {"license": "mit", "tags": ["hf-cocodc"]}


def test_a_checkpoint_without_a_draft_gets_a_card(tmp_path: Path) -> None:
    """Of our section alone."""
    hub.write(tmp_path, {"rows": {"method": "eager"}, "others": "a=1", "paper": None, "regions_agree": False})
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"---\ntags:\n- hf-cocodc\n---\n\n{hub.HEADING}\n")
    assert "until the run ends" in text and text.endswith("Other settings: a=1.\n")
