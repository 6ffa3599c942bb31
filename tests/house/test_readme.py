"""README and documentation: Python runs as it stands there, and every command has the options that it is given."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc import script_parser
from hf_cocodc.cli.main import parse

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def block(mark: str) -> str:
    """The Python behind `<!-- mark -->`."""
    [found] = re.findall(rf"<!-- {mark} -->\n```python\n(.*?)```", TEXT, flags=re.DOTALL)
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
        (
            "--device cuda --rank 3 --outer_method dilocox --outer_rank 64 --region_count 2",
            Mine("cuda", 3),
            "dilocox",
            64,
        ),
        ("--run other", Mine(run="other"), "diloco", None),
        ("--outer-method streaming", Mine(), "streaming", None),
    ],
)
def test_flags_of_the_same_name_stand_beside_each_other(
    words: str, mine: Mine, method: str, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side gets its own, with and without the other side's."""
    monkeypatch.setattr(sys, "argv", ["my_script.py", *words.split()])
    found: dict[str, Any] = {"script_parser": script_parser, "Mine": Mine}
    exec(block("flags"), found)
    assert found["mine"] == mine
    assert (found["outer"].method, found["outer"].rank) == (method, rank)
    assert found["regions"].count == (2 if "--region_count" in words else None)


def commands() -> list[list[str]]:
    """The words of each line that calls hf-cocodc in a block of a page, without comments."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
    blocks = "".join(text for language, text in fenced if language in ("", "bash")).replace("\\\n", " ")
    lines = re.findall(r"^(?:\$ )?(hf-cocodc .*)$", blocks, flags=re.MULTILINE)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_every_command_that_is_shown_is_one() -> None:
    """Its options exist; and all commands are shown."""
    found = commands()
    for words in found:
        assert callable(parse(words).run), words
    names = {words[0] for words in found} | {" ".join(words[:2]) for words in found if words[0] == "bench"}
    assert names >= {
        "train",
        "simulate",
        "coordinator",
        "status",
        "leave",
        "recipe",
        "plan",
        "doctor",
        "report",
        "bench link",
    }


def test_one_run_goes_from_nothing_to_training() -> None:
    """Each command takes the file that an earlier one writes."""
    block = TEXT.partition("<!-- from nothing -->\n```bash\n")[2].partition("```")[0]
    lines = [parse(shlex.split(line, comments=True)[1:]) for line in block.splitlines()]
    _, new, link, plan, doctor, train = lines
    assert plan.recipe == new.file and plan.link == link.json
    assert str(plan.write) == doctor.recipe == train.recipe
    assert link.coordinator == doctor.coordinator == train.coordinator
