"""The processes of a run: who they are, and where they listen."""

from typing import Any, NamedTuple

from .validation import Count


class Member(NamedTuple):
    """A process of a region that takes part. No other process of this run has its `ticket`."""

    region: Count
    ticket: Count


class Whereabouts(NamedTuple):
    """Where a process listens, and the token that the other end must say first there.

    `share` is this process's part of what the pair's keys come from. It is never said where anybody else might hear it.
    """

    addresses: tuple[tuple[str, int], ...]
    token: bytes
    share: bytes

    def to_plain(self) -> dict[str, Any]:
        return {
            "at": [list(each) for each in self.addresses],
            "token": self.token.hex(),
            "share": self.share.hex(),
        }
