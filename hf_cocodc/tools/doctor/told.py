"""What the doctors of several regions tell each other at the coordinator."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...errors import InputError, MeetingError, short
from ...settings.regions import address_parts

_MAPPINGS = ("versions", "settings", "facts")
_TEXTS = ("host", "calls", "token", "data")
_LONGEST = 200
_MOST_REACHED = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """What a region's doctor tells the others.

    Attributes:
        host: name of its machine.
        calls: where it answers while it runs, each HOST:PORT, separated by a comma; empty if it does not.
        token: of this doctor.
        beats: grows while it runs.
        versions: of packages.
        settings: by their names in a recipe; equal in all regions.
        facts: of the data, by their names in a recipe; equal in all regions unless regions.may_differ has the name.
        data: what the data is, in words that are equal where it is.
        reached, missed: tokens of the doctors that it could call, and of those that it could not.
    """

    host: str
    calls: str
    token: str
    beats: int
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    data: str
    reached: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()

    @classmethod
    def read(cls, region: int, content: Any) -> "Told":
        """What the doctor of a region has told: every text can be shown on one line. Raises MeetingError if no doctor has."""
        names = {each.name for each in dataclasses.fields(cls)}
        if not isinstance(content, dict) or set(content) != names:
            raise _not_ours(region, content)
        kinds = {
            **dict.fromkeys(_TEXTS, str),
            **dict.fromkeys(_MAPPINGS, dict),
            "beats": int,
            "reached": list,
            "missed": list,
        }
        if not all(type(content[name]) is kind for name, kind in kinds.items()):
            raise _not_ours(region, content)
        if content["calls"]:
            try:
                places(content["calls"])
            except (InputError, ValueError):
                raise _not_ours(region, content["calls"]) from None
        return cls(
            **{name: short(content[name], _LONGEST) for name in _TEXTS},
            versions={short(name, 40): short(each, 40) for name, each in content["versions"].items()},
            settings=content["settings"],
            facts=content["facts"],
            beats=content["beats"],
            reached=tuple(map(str, content["reached"][:_MOST_REACHED])),
            missed=tuple(map(str, content["missed"][:_MOST_REACHED])),
        )


def places(calls: str) -> list[tuple[str, int]]:
    """Hosts and ports of `Told.calls`.

    Raises:
        InputError, ValueError: it is none.
    """
    found = []
    for each in calls.split(","):
        host, port = address_parts(each)
        if port is None:
            raise ValueError(f"{each!r} has no port")
        found.append((host, port))
    return found


def _not_ours(region: int, found: object) -> MeetingError:
    return MeetingError(
        f"what region {region} has told the coordinator is not what a doctor of this version tells ({short(found)}). Use the "
        "same version of hf-cocodc in every region."
    )
