"""The processes of a run: who they are, and where they listen."""

from typing import Annotated, NamedTuple

from msgspec import Meta

from ..validation import Count
from .keys import SHARE_BYTES

MOST_ADDRESSES, LONGEST_HOST = 16, 255
"""Of one process, as `settings` has them: it refuses what others would not take."""


class Member(NamedTuple):
    """A process of a region that takes part. No other process of this run has its `ticket`."""

    region: Count
    ticket: Count


class Whereabouts(NamedTuple):
    """The addresses at which a process is reached (none where regions meet in a storage), its `keys.Share` as all may know it,
    and the name of its mailbox, if it stands by there to serve as coordinator.
    """

    addresses: Annotated[
        tuple[
            tuple[
                Annotated[str, Meta(min_length=1, max_length=LONGEST_HOST)],
                Annotated[int, Meta(ge=1, le=65535)],
            ],
            ...,
        ],
        Meta(max_length=MOST_ADDRESSES),
    ]
    share: Annotated[bytes, Meta(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
    process: Annotated[str, Meta(max_length=LONGEST_HOST)] = ""
