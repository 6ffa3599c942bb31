"""How a run ends: which transfers land after the last inner step, and how local params take them in.

At the end some inner steps are in no transfer yet: the run's length is no multiple of the interval, or a merge keeps local
steps. A closing brings them into the global params. The engine does three things, fragment by fragment:

1. If the last transfer in flight carries steps that the global params do not have, it lands all transfers in flight, in
   order, with the merge `early`.
2. It sends once more, if there are inner steps that no transfer carries.
3. It lands what `landings` names, with the merge `last`, and drops the other transfers.

The model then takes the global params, or their mean over the regions if the outer optimizer lets regions differ.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .merges import Merge, additive, replace


class Closing(NamedTuple):
    """How a run ends.

    Attributes:
        early: the merge of transfers that land before the last send.
        last: the merge of the transfers that land after it.
        landings: (sends in flight, oldest first; whether the last one was made in step 2) -> sends to land in step 3. A
            send is named by its inner step.
    """

    early: Merge
    last: Merge
    landings: Callable[[Sequence[int], bool], Sequence[int]]


def one_more_round(merge: Merge, num_regions: int) -> Closing:
    """One more round carries the rest, and local params are replaced by its result: no inner step is lost.

    A merge that discards local steps is not used before the last send, which must still carry these steps: the additive
    merge takes its place.

    Args:
        merge: the method's.
        num_regions: number of regions M.

    >>> one_more_round(replace(), 2).landings([30, 40], True)
    [30, 40]
    """
    early = merge if merge.keeps_local_steps else additive()
    return Closing(early, replace(), lambda in_flight, has_sent: list(in_flight))


def other_parts(merge: Merge, num_regions: int) -> Closing:
    """Like `one_more_round`, for regions that have taken in their own part of a send one round before it lands.

    The landings at the end bring in the other regions' parts. A single region has no others: all that is missing is its own
    part of the send made at the end, and a landing more would be one more step of the outer momentum (Eager updates,
    2502.12996).

    Args:
        merge: the method's.
        num_regions: number of regions M.

    >>> other_parts(replace(), 2).landings([40], False), other_parts(replace(), 1).landings([40], False)
    ([40], [])
    """
    closing = one_more_round(merge, num_regions)
    if num_regions > 1:
        return closing
    return closing._replace(landings=lambda in_flight, has_sent: list(in_flight[:has_sent]))
