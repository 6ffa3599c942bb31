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
            send is named by its inner step; 0 stands for a mean of zero.
    """

    early: Merge
    last: Merge
    landings: Callable[[Sequence[int], bool], Sequence[int]]


def one_more_round(merge: Merge) -> Closing:
    """One more round carries the rest, and local params are replaced by its result: no inner step is lost.

    A merge that discards local steps is not used before the last send, which must still carry these steps: the additive
    merge takes its place.

    Args:
        merge: the method's.

    >>> one_more_round(replace()).landings([30, 40], True)
    [30, 40]
    """
    early = merge if merge.keeps_local_steps else additive()
    return Closing(early, replace(), lambda in_flight, has_sent: list(in_flight))


def own_part(merge: Merge) -> Closing:
    """The last send lands one round early: with the mean of the send before, and this region's own part of the last one.

    The mean over the regions, which follows, brings in the other regions' parts (Eager updates, 2502.12996).

    Args:
        merge: the method's.

    >>> own_part(replace()).landings([30, 40], True), own_part(replace()).landings([40], True)
    ([30], [0])
    """

    def landings(in_flight: Sequence[int], has_sent: bool) -> Sequence[int]:
        if not has_sent:
            return []
        return [in_flight[0] if len(in_flight) > 1 else 0]

    return Closing(additive(), merge, landings)
