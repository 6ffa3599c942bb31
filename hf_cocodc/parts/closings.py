"""How a run ends: which transfers land after the last inner step, and how local params take them in.

At the end some inner steps are in no transfer yet: the run's length is no multiple of the interval, or a merge keeps local
steps. A closing brings them into the global params. The engine does three things, fragment by fragment:

1. If the last transfer in flight carries steps that the global params lack, all transfers in flight land, in order, with the
   merge `early`.
2. The fragment is sent once more, if there are inner steps that no transfer carries.
3. All transfers in flight land, in order, with the merge `last`; or those that bring nothing new are dropped.

The model then takes the global params, or their mean over the regions if the outer optimizer lets regions differ.
"""

from typing import NamedTuple

from .merges import Merge, additive, replace


class Closing(NamedTuple):
    """How a run ends.

    Attributes:
        early: the merge of landings before the last send.
        last: the merge of landings after it.
        drops_taken: whether step 3 drops transfers of which this region's global params have everything already.
    """

    early: Merge
    last: Merge
    drops_taken: bool


def one_more_round(merge: Merge) -> Closing:
    """One more round carries the rest, and local params are replaced by its result: no inner step is lost.

    A merge that discards local steps is replaced by the additive one before the last send, which must still carry these steps.
    """
    early = merge if merge.keeps_local_steps else additive()
    return Closing(early, replace(), drops_taken=False)


def other_parts(merge: Merge) -> Closing:
    """Like `one_more_round`, for regions that have taken in their own part of a send one round before it lands.

    The landings at the end bring in the other regions' parts. A region that was alone in a transfer has no others: at most its
    own part of the send made at the end can be missing, and one more landing would be one more step of the outer momentum
    (Eager updates, 2502.12996).
    """
    return one_more_round(merge)._replace(drops_taken=True)
