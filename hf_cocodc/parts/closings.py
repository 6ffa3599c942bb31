"""How a run ends: which transfers land after the last inner step, and how local params take them in.

At the end some inner steps are in no transfer yet: the run's length is no multiple of the interval, or a merge keeps local
steps. A closing brings them into the global params. The engine does three things, fragment by fragment:

1. If the last transfer in flight carries steps that the global params do not have, it lands all transfers in flight, in
   order, with the merge `early`.
2. It sends once more, if there are inner steps that no transfer carries.
3. It lands all transfers in flight, in order, with the merge `last`; or it drops those that bring nothing new.

The model then takes the global params, or their mean over the regions if the outer optimizer lets regions differ.
"""

from typing import NamedTuple

from .merges import Merge, additive, replace


class Closing(NamedTuple):
    """How a run ends.

    Attributes:
        early: the merge of transfers that land before the last send.
        last: the merge of the transfers that land after it.
        drops_taken: whether transfers are dropped in step 3 once the global params of this region have all that they bring.
    """

    early: Merge
    last: Merge
    drops_taken: bool


def one_more_round(merge: Merge) -> Closing:
    """One more round carries the rest, and local params are replaced by its result: no inner step is lost.

    A merge that discards local steps is not used before the last send, which must still carry these steps: the additive
    merge takes its place.
    """
    early = merge if merge.keeps_local_steps else additive()
    return Closing(early, replace(), drops_taken=False)


def other_parts(merge: Merge) -> Closing:
    """Like `one_more_round`, for regions that have taken in their own part of a send one round before it lands.

    The landings at the end bring in the other regions' parts. A region that was alone in a transfer has no others: all that
    can be missing is its own part of the send made at the end, and a landing more would be one more step of the outer momentum
    (Eager updates, 2502.12996).
    """
    return one_more_round(merge)._replace(drops_taken=True)
