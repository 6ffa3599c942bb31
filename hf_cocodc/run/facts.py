"""What identifies the run of a checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from ..coordinator.validation import MOST
from ..links.base import Link

TAKEN_OVER = "joining"
"""Name of `Facts.taken_over` in the file."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What identifies the run of a checkpoint.

    Attributes:
        step: inner steps made.
        region: region that wrote it.
        num_regions: number of regions at that time.
        num_lanes: lanes of the region.
        settings: all settings of the method.
        finished: whether the run had finished.
        journal: bytes of the journal that belong to the run up to here; `journal_sha256` is their hash (`journal.Mark`).
        taken_over: whether it was copied from another region, and this region's own part is missing.
        stopping: whether all regions stopped here, at a step at which no checkpoint was due.
        model: `About.model` of the run; empty in checkpoints of older versions, as are the next.
        facts: `About.facts` of the run.
        members: the regions that took part then, by number; empty in checkpoints of older versions, where all did.
    """

    step: int
    region: int
    num_regions: int
    num_lanes: int
    settings: dict[str, Any]
    finished: bool
    journal: int
    taken_over: bool = False
    stopping: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    journal_sha256: str = ""
    members: Sequence[int] = ()

    @property
    def writers(self) -> Sequence[int]:
        """The regions that took part then."""
        return self.members or range(self.num_regions)

    @classmethod
    def of(cls, link: Link, **more: Any) -> "Facts":
        """The facts that a link knows, and more."""
        members = list(link.members)
        return cls(
            region=link.region, num_regions=len(members), members=members, num_lanes=link.num_lanes, **more
        )

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Facts":
        """Raises KeyError if a fact is missing that every version writes, ValueError if one is none."""
        named = {**content, "taken_over": content.get(TAKEN_OVER, False)}
        always = {each.name for each in fields(cls) if each.default is each.default_factory is MISSING}
        found = {each.name: named[each.name] for each in fields(cls) if each.name in named.keys() | always}
        for name, value in found.items():
            if not _IS[name](value):
                raise ValueError(f"{name}={str(value)[:80]} is no such fact of a run")
        return cls(**found)

    def to_json(self) -> dict[str, Any]:
        named = asdict(self)
        return {**{name: named[name] for name in named if name != "taken_over"}, TAKEN_OVER: self.taken_over}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


_IS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "region", "journal"), _is_count),
    **dict.fromkeys(("num_regions", "num_lanes"), lambda value: _is_count(value) and value > 0),
    **dict.fromkeys(("settings", "model", "facts"), _is_dict),
    **dict.fromkeys(("finished", "taken_over", "stopping"), _is_bool),
    "journal_sha256": lambda value: isinstance(value, str),
    "members": lambda value: isinstance(value, list | tuple) and all(map(_is_count, value)),
}
"""What holds for each fact."""
