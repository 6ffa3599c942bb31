"""The model card says what was trained, and how; what a user wrote stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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

    hub.draft(folder, "## x", create, "en", "mine")
    hub.draft(folder, "## x", create, model_name="mine")
    hub.draft(folder, "## x", create, "en", "region-3")  # TRL names the folder itself
    hub.draft(folder, "## x", create)
    hub.draft(folder, "## x", lambda tags=None: seen.append((tags,)), tags="t")
    assert seen == [("en", "mine"), (None, "mine"), ("en", "a-run"), (None, "a-run"), ("t",)]


@pytest.mark.parametrize("earlier", ["", hub.END + "\n"], ids=["no end", "ours"])
def test_only_our_section_is_replaced(earlier: str, tmp_path: Path) -> None:
    """What stands before and behind it stays; where a user has deleted the mark at the end, the section ends at a heading."""
    path = tmp_path / "README.md"
    before = f"---\nlicense: mit\n---\n# My model\n\nWords.\n\n{hub.HEADING}\n\nold figures\n{earlier}\n## Notes\n\nMine.\n"
    path.write_text(before, encoding="utf-8")
    for figures in ("new figures", "newer figures"):
        hub.write(tmp_path, f"{hub.HEADING}\n\n{figures}\n")
    text = path.read_text(encoding="utf-8")
    assert text.endswith(
        f"# My model\n\nWords.\n\n{hub.HEADING}\n\nnewer figures\n\n{hub.END}\n\n## Notes\n\nMine.\n"
    )
    assert ModelCard.load(path).data.to_dict() == {"license": "mit", "tags": ["hf-cocodc"]}


def test_what_a_user_wrote_behind_it_outlives_a_new_draft(tmp_path: Path) -> None:
    """Trainer writes its draft anew; the user's words behind our section stay."""
    folder = tmp_path / "a-run" / "region-0"
    trained(tmp_path)
    with (folder / "README.md").open("a", encoding="utf-8") as file:
        file.write("\nMine.\n")
    text = trained(tmp_path)
    assert text.count(hub.HEADING) == text.count("# a-run") == 1
    assert text.endswith(f"{hub.END}\n\nMine.\n")
