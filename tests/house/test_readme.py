"""Python that the README shows runs as it stands there."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

from hf_cocodc import OuterConfig, RegionConfig

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def block(mark: str) -> str:
    """The Python behind `<!-- mark -->`."""
    [found] = re.findall(rf"<!-- {mark} -->\n```python\n(.*?)```", README, flags=re.DOTALL)
    return found


@dataclasses.dataclass
class Mine:
    """Settings of a user's own, of which ours have all names."""

    device: str = "cpu"
    rank: int = 0
    run: str = "mine"


@pytest.mark.parametrize(
    ("words", "mine", "method", "rank"),
    [
        ("--device cuda --rank 3 -- --method dilocox --rank 64 --count 2", Mine("cuda", 3), "dilocox", 64),
        ("--run other", Mine(run="other"), "diloco", None),
        ("-- --method streaming", Mine(), "streaming", None),
    ],
)
def test_flags_of_the_same_name_are_parsed_apart(
    words: str, mine: Mine, method: str, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side gets its own, with and without the other side's."""
    monkeypatch.setattr(sys, "argv", ["my_script.py", *words.split()])
    found: dict[str, Any] = {"Mine": Mine}
    exec(block("flags"), found)
    assert found["mine"] == mine
    assert (found["outer"].method, found["outer"].rank) == (method, rank)
    assert found["regions"].count == (2 if "--count" in words else None)


def test_together_they_are_refused() -> None:
    """As the README says: argparse does not take a name twice."""
    with pytest.raises(Exception, match="conflicting option string"):
        HfArgumentParser((Mine, OuterConfig, RegionConfig))
